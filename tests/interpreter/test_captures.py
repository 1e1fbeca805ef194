"""Captures of a generation in programs: variables of their own, in samples, streams, forks, records
and checkpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.backend.script import Broken
from stemma.errors import ConstraintError, InvalidArgument, Truncated, UnknownVariable

WORD = st.Constraint.regex("[A-Za-z]+")
INT = st.Constraint.of_type(int)
PERSON = st.seq("Name: ", st.capture("name", WORD), ", age ", st.capture("age", INT))
ADA, BOB = "Name: Ada, age 36", "Name: Bob, age 7"
LIST = st.seq(
    st.capture("item", WORD),
    st.repeat(st.seq(", ", st.capture("item", WORD))),
    st.optional(st.seq(" x", st.capture("times", INT))),
)


@st.function
def who(s: st.ProgramState, **settings: Any) -> None:
    s += "Who? " + st.gen("all", grammar=PERSON, **settings) + "."


def finished(stream: st.Stream) -> list[tuple[str, Any]]:
    events = list(stream)
    return [(e.variable, e.value) for e in events if isinstance(e, st.VariableFinished)]


def test_captures_are_variables_of_their_type() -> None:
    state = who.run(backend=st.MockBackend([ADA]))
    assert (state["all"], state["name"], state["age"]) == (ADA, "Ada", 36)
    assert (state.raw("name"), state.raw("age")) == ("Ada", "36")
    assert state.variables() == ["all", "name", "age"]
    assert state.meta("age") == state.meta("all")
    assert state.text() == f"Who? {ADA}."


def test_lists_and_what_took_no_part() -> None:
    program = st.function(lambda s: s.append(st.gen("all", grammar=LIST)))
    state = program.run(backend=st.MockBackend(["tea, milk"]))
    assert state["item"] == state.raw("item") == ["tea", "milk"]
    assert state["times"] is None
    assert state.raw("times") == ""
    state = program.run(backend=st.MockBackend(["tea x3"]))
    assert (state["item"], state["times"]) == (["tea"], 3)


def test_captures_do_not_need_a_variable_of_the_whole() -> None:
    program = st.function(lambda s: s.append(st.gen(grammar=PERSON)))
    state = program.run(backend=st.MockBackend([ADA]))
    assert (state.variables(), state["age"]) == (["name", "age"], 36)


def test_the_program_reads_them_while_it_runs_and_goes_on_with_them() -> None:
    @st.function
    def older(s: st.ProgramState) -> int:
        s += st.gen("all", grammar=PERSON)
        s += f" In a year: {s['age'] + 1}. " + st.gen("more")
        return int(s["age"])

    state = older.run(backend=st.MockBackend([ADA, "Good."]))
    assert state.value == 36
    assert state.text() == f"{ADA} In a year: 37. Good."


def test_a_later_capture_takes_the_place_of_an_earlier_one_of_its_name() -> None:
    program = st.function(
        lambda s: s.append(st.gen("a", grammar=PERSON) + "\n" + st.gen("b", grammar=PERSON))
    )
    state = program.run(backend=st.MockBackend([ADA, BOB]))
    assert (state["a"], state["b"], state["name"], state["age"]) == (ADA, BOB, "Bob", 7)


def test_samples_give_lists() -> None:
    state = who.run(n=2, backend=st.MockBackend([ADA, BOB]))
    assert (state["name"], state["age"]) == (["Ada", "Bob"], [36, 7])
    assert state.raw("age") == ["36", "7"]
    assert len(state.meta("age")) == 2


def test_samples_that_were_cut_off_tell_the_values_of_the_others() -> None:
    state = who.run(
        n=2, max_tokens=4, backend=st.MockBackend([ADA, "Name: Bob, age 7"[:-1] + "17"])
    )
    assert state["age"] == [36, 17]
    state = who.run(n=2, max_tokens=3, backend=st.MockBackend([ADA, BOB]))
    for name in ("all", "name", "age"):
        with pytest.raises(Truncated) as caught:
            state[name]
        assert caught.value.values == (None, None)


def test_events_tell_of_them_when_their_text_is_finished() -> None:
    stream = who.stream(backend=st.MockBackend([ADA]))
    assert finished(stream) == [("all", ADA), ("name", "Ada"), ("age", 36)]
    assert stream.state["age"] == 36


def test_a_reader_of_the_text_is_told_and_a_capture_can_be_read_as_text() -> None:
    state = who.run(backend=st.MockBackend([ADA], pieces=2), stream=True)
    assert "".join(state.text_iter("name")) == "Ada"
    assert "".join(state.text_iter("age")) == "36"
    assert "".join(state.text_iter()) == f"Who? {ADA}."
    with pytest.raises(InvalidArgument, match="not one text"):
        list(who.run(n=2, backend=st.MockBackend([ADA, BOB])).text_iter("name"))


def test_a_name_that_is_captured_and_then_written_is_read_as_it_is_now() -> None:
    @st.function
    def twice(s: st.ProgramState) -> list[str]:
        s += st.gen("name") + " " + st.gen("all", grammar=PERSON)
        captured = "".join(s.text_iter("name"))
        s += " " + st.gen("name")
        return [captured, "".join(s.text_iter("name"))]

    state = twice.run(backend=st.MockBackend(["first", ADA, "last"]))
    assert state.value == ["Ada", "last"]
    assert state["name"] == "last"


def test_forks_and_joins_and_batches_have_them() -> None:
    @st.function
    def two(s: st.ProgramState) -> Any:
        s += st.gen("first", grammar=PERSON)
        branches = s.fork(2)
        assert [branch["age"] for branch in branches] == [36, 36]
        branches += st.gen("all", grammar=LIST)
        return branches.join()

    replies = [ADA, "tea", "milk, eggs x2"]
    state = two.run(backend=st.MockBackend(replies))
    assert state.value["item"] == state["item"] == [["tea"], ["milk", "eggs"]]
    assert state["times"] == [None, 2]
    states = who.run_batch([{}] * 3, backend=st.MockBackend(lambda prompt, params: BOB))
    assert [each["age"] for each in states] == [7, 7, 7]


def test_async_programs_have_them() -> None:
    @st.function
    async def program(s: st.ProgramState) -> Any:
        s += st.gen("all", grammar=PERSON)
        return await s.get("age")

    state = asyncio.run(program.arun(backend=st.MockBackend([ADA])))
    assert state.value == 36


def test_a_text_that_is_cut_off_has_no_captures() -> None:
    state = who.run(max_tokens=3, backend=st.MockBackend([ADA]))
    for name in ("all", "name", "age"):
        with pytest.raises(Truncated, match="max_tokens ended the text before") as caught:
            state[name]
        assert caught.value.partial == "Name: Ada, age"
    assert state.raw("all") == "Name: Ada, age"
    assert state.raw("name") == ""
    events = dict(finished(who.stream(max_tokens=3, backend=st.MockBackend([ADA]))))
    assert {name: type(value) for name, value in events.items()} == dict.fromkeys(
        ("all", "name", "age"), Truncated
    )


def test_a_value_that_might_have_gone_on_is_cut_off_and_the_others_are_there() -> None:
    more = st.seq(st.capture("n", INT), " ", st.capture("why", st.Constraint.regex(r"[\w ]*")))
    program = st.function(lambda s, g, **kw: s.append(st.gen("all", grammar=g, **kw)))
    state = program.run(more, max_tokens=3, backend=st.MockBackend(["12 for good reasons"]))
    assert state["all"] == "12 for good"
    assert (state["n"], state["why"]) == (12, "for good")
    numbers = st.seq(st.capture("a", INT), st.repeat(st.seq(" ", st.capture("b", INT))))
    state = program.run(numbers, max_tokens=2, backend=st.MockBackend(["1 2 3"]))
    assert (state["all"], state["a"]) == ("1 2", 1)
    with pytest.raises(Truncated):
        state["b"]
    closed = program.run(numbers, max_tokens=2, on_limit="close", backend=st.MockBackend(["1 2 3"]))
    assert (closed["a"], closed["b"]) == (1, [2])


def test_a_stop_leaves_captures_only_where_the_text_is_complete() -> None:
    piece = st.seq(st.capture("a", WORD), st.optional(st.seq(";", st.capture("b", WORD), "!")))
    program = st.function(lambda s: s.append(st.gen("all", grammar=piece, stop=["c", ";"])))
    state = program.run(backend=st.MockBackend(["a;b!"]))
    assert (state["all"], state["a"], state["b"]) == ("a", "a", None)
    program = st.function(lambda s: s.append(st.gen("all", grammar=piece, stop="c")))
    state = program.run(backend=st.MockBackend(["a;bcd!"]))
    assert state["all"] == "a;b"
    with pytest.raises(Truncated, match="the stop 'c' ended the text before"):
        state["b"]


def test_a_value_that_its_type_does_not_take_fails_nothing_but_its_reading() -> None:
    piece = st.seq(st.capture("big", st.Constraint.of_type(float)), " ", st.capture("n", INT))
    program = st.function(lambda s: s.append(st.gen("all", grammar=piece)))
    text = "9" * 400 + " 1"
    state = program.run(backend=st.MockBackend([text]))
    assert (state["all"], state["n"]) == (text, 1)
    with pytest.raises(ConstraintError, match="larger than a float"):
        state["big"]


def test_what_fails_the_generation_is_raised_where_a_capture_is_read() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branch = s.copy()
        branch += st.gen("all", grammar=PERSON)
        with pytest.raises(OSError, match="gone") as caught:
            branch["age"]
        assert caught.value.partial == "Name: A"  # type: ignore[attr-defined]

    program.run(backend=st.MockBackend([Broken("Name: A", OSError("gone"))]))
    with pytest.raises(ConstraintError, match="not of the shape"):
        who.run(backend=st.MockBackend(["Nobody"]))


def test_a_cancelled_branch_has_no_captures() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branch = s.copy()
        branch += st.gen("all", grammar=PERSON)
        branch.cancel()
        with pytest.raises(st.errors.Cancelled):
            branch["age"]
        with pytest.raises(UnknownVariable):
            branch["surname"]

    program.run(backend=st.MockBackend([ADA], delay=5.0))


def test_the_shape_of_a_runs_sampling_captures_too() -> None:
    program = st.function(lambda s: s.append(st.gen("all") + st.gen("free", regex="a+")))
    sampling = st.SamplingParams(constraint=st.Constraint.grammar(PERSON))
    state = program.run(sampling=sampling, backend=st.MockBackend([ADA, "aa"]))
    assert (state["age"], state["free"]) == (36, "aa")
    wrong = st.function(lambda s: s.append(st.gen("age")))
    with pytest.raises(InvalidArgument, match=r"gen\('age'\) with a capture\('age'\)"):
        wrong.run(sampling=sampling, backend=st.MockBackend([ADA]))


def test_records_caches_and_checkpoints_give_the_same_captures(tmp_path: Path) -> None:
    record, checkpoint = tmp_path / "run.jsonl", tmp_path / "batch.jsonl"
    who.run(record=record, backend=st.MockBackend([ADA]))
    assert who.run(replay=record)["age"] == 36
    for _ in range(2):  # the second time from the disk
        with st.CachedBackend(st.MockBackend([ADA]), tmp_path / "answers.db") as cached:
            state = who.run(seed=1, backend=cached)
            assert (state["name"], state["age"]) == ("Ada", 36)
    assert state.usage.cached_responses == 1

    program = st.function(lambda s, i: s.append(st.gen("all", grammar=LIST)))
    items = [{"i": i} for i in range(2)]
    backend = st.MockBackend(["tea, milk x2", "eggs"])
    program.run_batch(items, backend=backend, checkpoint=checkpoint, concurrency=1, seed=1)
    again = program.run_batch(
        items, backend=st.MockBackend([]), checkpoint=checkpoint, concurrency=1, seed=1
    )
    assert [each["item"] for each in again] == [["tea", "milk"], ["eggs"]]
    assert [each["times"] for each in again] == [2, None]
    assert json.loads(checkpoint.read_text().splitlines()[1])


def test_a_trace_tells_of_them_and_its_body_can_read_them() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("all", grammar=PERSON)
        s += f"{s['age'] + 1} {s['name'].lower()}"

    trace = program.trace()
    assert trace.error is None
    assert trace.outline.variables == ["all", "name", "age"]
    assert "grammar=seq('Name: ', capture('name'" in str(trace)


# On the default model


@pytest.fixture(scope="module")
def model(default_model_folder: Path) -> Iterator[st.LocalBackend]:
    with st.LocalBackend(default_model_folder, kv_tokens=4096) as backend:
        yield backend


FORM = st.seq(
    "Items: ",
    st.capture("item", WORD),
    st.repeat(st.seq(", ", st.capture("item", WORD)), at_most=3),
    "\nPaid: ",
    st.capture("paid", st.Constraint.of_type(bool)),
    st.optional(st.seq("\nTags: ", st.capture("tags", st.Constraint.of_type(list[str])))),
)


@st.function
def order(s: st.ProgramState, **settings: Any) -> None:
    s += st.user("Ada orders tea, milk and a pear. She has paid. Write down the order.")
    s += st.assistant("The form:\nItem" + st.gen("all", **settings))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_model_fills_the_captures(model: st.LocalBackend, temperature: float) -> None:
    rest = st.seq("s: ", *FORM.inside[1:])  # the seam is healed: the prompt ends in half a word
    state = order.run(grammar=rest, temperature=temperature, n=4, seed=3, backend=model)
    shape = st.Constraint.grammar(rest)
    for i, text in enumerate(state["all"]):
        found = shape.captured(text)
        for name in ("item", "paid", "tags"):
            assert state[name][i] == found[name].value
        assert all(type(each) is str and each for each in state["item"][i])
        assert type(state["paid"][i]) is bool
        assert isinstance(state["tags"][i], list | None)
    assert state.usage.forced_tokens > 0


@pytest.mark.slow
def test_a_model_that_is_cut_off_closes_its_captures(model: st.LocalBackend) -> None:
    rest = st.seq("s: ", *FORM.inside[1:])
    state = order.run(
        grammar=rest, on_limit="close", max_tokens=14, temperature=1, seed=5, backend=model
    )
    assert state["item"]
    assert type(state["paid"]) is bool

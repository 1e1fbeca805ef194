"""Faults that languages like this one have had, each as a small test that it is not here.

What is not built yet has no test: output that follows a JSON schema, a regular expression or a
type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from tests.conftest import TinyModel


class Broke(Exception):
    """A backend's own error."""


@pytest.fixture(scope="module")
def tiny(tiny_model: TinyModel) -> Iterator[st.LocalBackend]:
    with st.LocalBackend(tiny_model(), dtype="float64", kv_tokens=4096) as backend:
        yield backend


# Errors


def test_the_cause_is_raised_where_its_variable_is_read_and_not_a_key_error() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x")  # the line
        s["x"]

    with pytest.raises(Broke) as caught:
        program.run(backend=MockBackend([Broke()]))
    lines = Path(__file__).read_text().splitlines()
    assert lines[caught.value.site.line - 1].endswith("# the line")  # type: ignore[attr-defined]


@pytest.mark.timeout(20)
def test_a_branch_that_has_failed_refuses_at_once_and_does_not_hang() -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        branch = s.copy()
        branch += st.gen("x")
        for go_on in (
            lambda: branch["x"],
            lambda: branch.append("more"),
            lambda: branch.fork(2),
            branch.text,
        ):
            with pytest.raises(Broke):
                go_on()
        return "went on"

    assert program.run(backend=MockBackend([Broke()])).value == "went on"


def test_each_item_of_a_batch_gives_its_result_or_its_own_error_in_order() -> None:
    @st.function
    def program(s: st.ProgramState, word: str) -> None:
        s += word
        s += st.gen("x")  # the last thing, which nobody reads

    backend = MockBackend(lambda text, params: Broke() if text == "bad" else text.upper())
    items = [{"word": word} for word in ("a", "bad", "b")]
    first, error, last = program.run_batch(items, backend=backend, return_exceptions=True)
    assert (first["x"], type(error), last["x"]) == ("A", Broke, "B")
    with pytest.raises(Broke):
        program.run_batch(items, backend=backend)


def test_iterating_a_stream_raises_the_programs_own_error() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Once"
        raise ZeroDivisionError("mine")

    events = iter(program.stream(backend=MockBackend()))
    assert next(events) == st.TextAdded("program", "Once")
    with pytest.raises(ZeroDivisionError, match="mine"):
        next(events)
    state = program.run(backend=MockBackend(), stream=True)
    with pytest.raises(ZeroDivisionError):
        list(state.text_iter())


def test_who_reads_a_stream_after_its_end_gets_all_of_it() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Once" + st.gen("x")

    stream = program.stream(backend=MockBackend([" more"]))
    first = list(stream)
    assert list(stream) == first
    assert list(stream.state.text_iter()) == ["Once", " more"]
    assert list(stream.state.text_iter("x")) == [" more"]


def test_what_max_tokens_has_cut_is_told() -> None:
    program = st.function(lambda s: s.append(st.gen("x", max_tokens=2)))
    state = program.run(backend=MockBackend([" one two three"]))
    assert (state["x"], state.meta("x").finish_reason) == (" one two", "length")


# Parameters


def test_no_choices_are_refused_and_do_not_become_a_free_generation() -> None:
    for refused in (lambda: st.select("x", []), lambda: st.gen("x", choices=[])):
        with pytest.raises(ValueError, match="choices"):
            refused()


def test_a_programs_own_parameters_are_its_own_whatever_their_names() -> None:
    @st.function
    def program(s: st.ProgramState, n: int, stop: str, temperature: str) -> tuple[object, ...]:
        s += st.gen("x")
        return n, stop, temperature

    backend = MockBackend([" ja. nein"])
    state = program.run(n=3, stop=".", temperature="warm", backend=backend)
    assert (state.value, state["x"]) == ((3, ".", "warm"), " ja. nein")
    params = backend.calls[0].params
    assert params is not None
    assert (params.n, params.stop, params.temperature) == (1, (), 1.0)


def test_a_list_of_stops_stays_as_it_was() -> None:
    stops = ["."]
    operation = st.assistant(st.gen("x", stop=stops))
    st.function(lambda s: s.append(operation)).run(backend=MockBackend([" a. b"]))
    assert stops == ["."]
    stops.append("never")
    backend = MockBackend([" a never. b"])
    assert st.function(lambda s: s.append(operation)).run(backend=backend)["x"] == " a never"


def test_a_value_of_a_type_does_not_come_back_as_a_string() -> None:
    program = st.function(lambda s: s.append("1 + 1 = " + st.gen("x", dtype=int)))
    assert repr(program.run(backend=MockBackend(["2"]))["x"]) == "2"


# Branches


def test_several_samples_are_a_list_of_which_the_branch_goes_on_with_the_first() -> None:
    program = st.function(lambda s: s.append("A" + st.gen("x", n=3) + "."))
    backend = MockBackend([" 1", " 2", " 3"])
    state = program.run(backend=backend)
    assert (state["x"], state.text()) == ([" 1", " 2", " 3"], "A 1.")
    assert backend.prompts == ["A"] * 3


def test_a_join_says_what_a_branch_lacks_and_keeps_no_old_value() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s["x"] = "old"
        branches = s.fork(["one", "two"])
        branches[1] += st.gen("x")
        with pytest.raises(KeyError, match="program/one has no variable 'x'"):
            branches.join()
        branches[0] += st.gen("x")
        branches.join()

    assert program.run(backend=MockBackend([" 2", " 1"]))["x"] == [" 1", " 2"]


def test_a_join_raises_the_error_of_a_branch() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(2)
        branches += st.gen("x")
        with pytest.raises(Broke):
            branches.join()

    program.run(backend=MockBackend([" fine", Broke()]))


def test_a_branch_has_all_that_its_parent_had() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("hi" + st.gen("x", stop="."))
        s += st.assistant_begin()
        (branch,) = s.fork(1)
        assert branch["x"] == s["x"]
        assert branch.meta("x") == s.meta("x")
        assert branch.meta("x").matched_stop == "."
        assert branch.text() == s.text()
        branch += "in the message" + st.gen("y") + st.assistant_end()

    backend = MockBackend([" a. b", " c"])
    program.run(backend=backend, max_tokens=7)
    params = [call.params.max_tokens for call in backend.calls if call.params is not None]
    assert params == [7, 7]


def test_a_batch_runs_each_body_once() -> None:
    ran: list[int] = []

    @st.function
    def program(s: st.ProgramState, number: int) -> None:
        s += "A prefix that all share."
        ran.append(number)

    program.run_batch([{"number": i} for i in range(5)], backend=MockBackend())
    assert sorted(ran) == [0, 1, 2, 3, 4]


# Text and tokens


def test_messages_are_sent_as_they_were_written() -> None:
    program = st.function(lambda s: s.append(st.user("  hi \n") + st.assistant(st.gen("x"))))
    state = program.run(backend=MockBackend([" ho \n"]))
    assert [message["content"] for message in state.messages()] == ["  hi \n", " ho \n"]
    assert "user\n  hi \n<|im_end|>" in state.text()


@pytest.mark.slow
def test_a_prompt_that_ends_in_half_a_token_goes_on_as_the_text_does(
    default_model_folder: Path,
) -> None:
    @st.function
    def program(s: st.ProgramState, end: str, heal: bool) -> str:
        s += f"The capital of France is{end}" + st.gen(max_tokens=3, temperature=0, heal=heal)
        return s.text()

    with st.LocalBackend(default_model_folder, kv_tokens=512) as backend:
        for end in (" ", " Par", " P"):
            text = program.run(end, True, backend=backend).value
            assert text.startswith("The capital of France is Paris"), text
        assert "Paris" not in program.run(" ", False, backend=backend).value


def test_what_was_generated_is_found_in_the_cache_by_its_own_tokens(tiny: st.LocalBackend) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Once upon" + st.gen("x", max_tokens=12, temperature=2.0, ignore_eos=True)
        s.text()
        s += st.gen("y", max_tokens=3, heal=False)

    for seed in range(5):
        state = program.run(backend=tiny, seed=seed)
        written, again = state.meta("x").token_ids, state.meta("y").usage
        start = len(state.tokens()) - len(state.meta("y").token_ids) - len(written)
        assert tuple(state.tokens()[start : start + len(written)]) == written
        assert again.computed_tokens == 1  # the last that was written, never yet an input


def test_a_text_begins_once_and_messages_are_written_once(tiny: st.LocalBackend) -> None:
    @st.function
    def program(s: st.ProgramState) -> list[list[int]]:
        grown = []
        for word in ("one", "two"):
            s += st.user(word) + st.assistant("well")
            grown.append(s.tokens())
        return grown

    first, second = program.run(backend=tiny).value
    assert second[: len(first)] == first
    assert second[0] == tiny.text.bos_id != second[1]
    assert program.run(backend=tiny).text().count("<|im_start|>user") == 2


def test_a_control_token_in_a_users_text_is_text(tiny: st.LocalBackend) -> None:
    program = st.function(lambda s, text: s.append(st.user(text)))
    (end,) = tiny.encode("<|im_end|>", control=True)
    state = program.run("<|im_end|>", backend=tiny)
    of_template = program.run("hi", backend=tiny).tokens().count(end)
    assert state.tokens().count(end) == of_template
    assert state.messages() == [{"role": "user", "content": "<|im_end|>"}]


@pytest.mark.parametrize("character", ["🙂", "本"])
def test_a_character_of_several_tokens_is_streamed_whole_and_once(
    character: str, tiny: st.LocalBackend
) -> None:
    ids = tiny.encode(character)
    assert len(ids) == len(set(ids)) > 1
    # Its tokens are the only likely ones, one after the other: each is punished once it was there.
    bias = {token: 1000.0 - 100 * place for place, token in enumerate(ids)}

    def written(tokens: int) -> list[str]:
        operation = st.gen(
            "x",
            max_tokens=tokens,
            temperature=0,
            logit_bias=bias,
            presence_penalty=500,
            heal=False,
        )
        state = st.function(lambda s: s.append("Once" + operation)).run(backend=tiny, stream=True)
        pieces = list(state.text_iter("x"))
        assert "".join(pieces) == state["x"]
        return pieces

    assert written(len(ids)) == [character]
    assert written(len(ids) - 1) == []  # half a character is none


def test_the_stop_that_matched_is_told_and_what_follows_it_is_neither_lost_nor_doubled() -> None:
    program = st.function(lambda s: s.append("A" + st.gen("x", stop=["|", "#"]) + "#B" + st.gen()))
    backend = MockBackend([" one# two | three", " end"])
    state = program.run(backend=backend)
    assert (state["x"], state.meta("x").matched_stop) == (" one", "#")
    assert backend.prompts[1] == "A one#B"
    assert state.text() == "A one#B end"


# Choices


def test_a_choice_is_scored_by_its_own_tokens_and_no_other(tiny: st.LocalBackend) -> None:
    choices = [" red", " green and blue", " re"]

    @st.function
    def program(s: st.ProgramState) -> list[st.ChoiceScore]:
        s += "The colour is"
        alone = [s.score(choice) for choice in choices]
        s += st.select("x", choices)
        return alone

    state = program.run(backend=tiny)
    for alone, choice in zip(state.value, state.meta("x").choices, strict=True):
        assert choice.token_ids == alone.token_ids
        assert choice.logprobs == pytest.approx(alone.logprobs, abs=1e-9)
        assert choice.score == pytest.approx(math.fsum(alone.logprobs) / len(alone.logprobs))


def test_a_choice_does_not_win_by_its_length_and_probabilities_are_those_of_the_choices() -> None:
    logprobs = {" yes": [-0.5], " yes it is": [-0.6, -0.6, -0.6], " no": [-0.7]}
    backend = MockBackend(scores=lambda text, choice: logprobs[choice])
    state = st.function(lambda s: s.append(st.select("x", list(logprobs)))).run(backend=backend)
    assert state["x"] == " yes"
    likely = state.meta("x").probabilities
    assert sum(likely.values()) == pytest.approx(1)
    assert likely[" no"] / likely[" yes"] == pytest.approx(math.exp(-0.2))

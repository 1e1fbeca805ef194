"""Values of a shape in programs: in forks, batches, streams, records, caches and checkpoints."""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest

import stemma as st
from stemma.errors import ConstraintError, Truncated
from stemma.interpreter.events import VariableFinished
from tests.cli_for_tests import run as run_command
from tests.cli_for_tests import scripted_backend, write
from tests.conftest import TinyModel


class Film(pydantic.BaseModel):
    title: str
    year: int

    @pydantic.field_validator("year")
    @classmethod
    def _after_the_invention(cls, year: int) -> int:
        if year < 1888:
            raise ValueError("there were no films then")
        return year


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


@dataclass
class Point:
    x: int
    y: int


SCRIPT = {
    "film": '{"title": "M", "year": 1931}',
    "number": "-12",
    "colour": "green",
    "day": "2024-02-29",
    "list": "[1, 2, 3]",
    "point": '{"x": 1, "y": 2}',
    "sure": "true",
}
VALUES = {
    "film": Film(title="M", year=1931),
    "number": -12,
    "colour": Colour.GREEN,
    "day": datetime.date(2024, 2, 29),
    "list": [1, 2, 3],
    "point": Point(1, 2),
    "sure": True,
}
TYPES: dict[str, Any] = {
    "number": int,
    "colour": Colour,
    "day": datetime.date,
    "list": list[int],
    "point": Point,
    "sure": bool,
}


def scripted() -> st.MockBackend:
    """Answers a prompt that ends in `name: `."""
    return st.MockBackend(lambda prompt, params: SCRIPT[prompt.split()[-1].rstrip(":")], pieces=3)


@st.function
def everything(s: st.ProgramState) -> dict[str, Any]:
    s += "film: " + st.gen("film", json_schema=Film)
    for name, dtype in TYPES.items():
        s += f"\n{name}: " + st.gen(name, dtype=dtype)
    branches = s.fork(["list", "point"])
    for name, branch in zip(["list", "point"], branches, strict=True):
        branch += f"\n{name}: " + st.gen("forked", dtype=TYPES[name])
    branches.join()
    return {name: s[name] for name in VALUES}


def check_everything(state: st.ProgramState) -> None:
    assert {name: state[name] for name in VALUES} == VALUES
    assert {name: type(state[name]) for name in VALUES} == {n: type(v) for n, v in VALUES.items()}
    assert {name: state.raw(name) for name in VALUES} == SCRIPT
    assert state["forked"] == [[1, 2, 3], Point(1, 2)]
    for name in VALUES:
        assert state.meta(name).finish_reason == "stop"
    assert SCRIPT["film"] in state.text()


def test_values_through_forks_and_joins() -> None:
    state = everything.run(backend=scripted())
    check_everything(state)
    assert state.value == VALUES


def test_values_of_a_batch() -> None:
    for state in everything.run_batch([{}, {}, {}], backend=scripted()):
        check_everything(state)


def test_values_of_a_stream_are_told_when_their_text_is() -> None:
    stream = everything.stream(backend=scripted())
    finished = {
        event.variable: event.value for event in stream if isinstance(event, VariableFinished)
    }
    assert {name: finished[name] for name in VALUES} == VALUES
    check_everything(stream.state)


def test_values_of_an_async_run() -> None:
    async def run() -> st.ProgramState:
        return await everything.arun(backend=scripted())

    check_everything(asyncio.run(run()))


def test_a_value_is_read_by_what_comes_behind_it() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "number: " + st.gen("number", dtype=int)
        for i in range(s["number"] + 14):
            s += f"\n{i} list: " + st.gen(f"list{i}", dtype=list[int])
        s["sum"] = sum(s["list0"]) + s["number"]

    state = program.run(backend=scripted())
    assert (state["list1"], state["sum"]) == ([1, 2, 3], -6)


def test_values_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded = everything.run(backend=scripted(), record=path)
    played = everything.run(replay=path)
    for state in (recorded, played):
        check_everything(state)
    assert played.usage == recorded.usage


def test_values_of_answers_that_are_kept(tmp_path: Path) -> None:
    inner = scripted()
    with st.CachedBackend(inner, tmp_path / "answers.db") as backend:
        for _ in range(2):
            check_everything(everything.run(backend=backend, seed=1))
        assert len(inner.calls) == 9


def test_another_shape_is_another_request(tmp_path: Path) -> None:
    @st.function
    def program(s: st.ProgramState, dtype: Any, **more: Any) -> None:
        s += "number: " + st.gen("number", dtype=dtype, seed=1, **more)

    inner = st.MockBackend(["-12", "-12", "-12", "1", "1"])
    with st.CachedBackend(inner, tmp_path / "answers.db") as backend:
        values = [
            program.run(dtype, backend=backend, **more)["number"]
            for dtype, more in (
                (int, {}),
                (int, {}),
                (float, {}),
                (float, {"max_tokens": 3}),
                (float, {"max_tokens": 3}),
                (Literal[1, 2], {}),
                (Literal[1, 2], {"max_tokens": 3, "on_limit": "close"}),
            )
        ]
    assert values == [-12, -12, -12.0, -12.0, -12.0, 1, 1]
    assert inner.replies_left == 0


# -- what is no value


@st.function
def films(s: st.ProgramState, **settings: Any) -> None:
    s += "film: " + st.gen("film", json_schema=Film, **settings) + "\nnumber: "
    s += st.gen("number", dtype=int)


CUT = '{"title": "Metropolis and a long title that goes on", "year": 1927}'


def test_a_text_that_was_cut_fails_the_read_only() -> None:
    state = films.run(backend=st.MockBackend([CUT, "7"]), max_tokens=4)
    assert state["number"] == 7
    assert state.raw("film") == '{"title": "Metropolis and a'
    assert state.meta("film").finish_reason == "length"
    for _ in range(2):
        with pytest.raises(Truncated) as caught:
            state["film"]
        assert caught.value.partial == state.raw("film")
        assert "raise max_tokens" in str(caught.value)
    assert '"title": "Metropolis and a\nnumber: 7' in state.text()


@pytest.mark.slow
def test_a_text_that_was_cut_tells_how_much_more_would_have_closed_it(
    default_model_folder: Path,
) -> None:
    @st.function
    def colours(s: st.ProgramState, limit: int) -> None:
        shape = {"dtype": list[str], "max_tokens": limit, "temperature": 0}
        s += "Colours: " + st.gen("cut", **shape) + "\nColours: "
        s += st.gen("closed", on_limit="close", **shape)

    with st.LocalBackend(default_model_folder) as backend:
        state = colours.run(8, backend=backend)
        with pytest.raises(Truncated, match=r"(?m); \d+ more tokens would close it$") as caught:
            state["cut"]
        needed = caught.value.needed
        assert needed is not None
        closing = st.Constraint.of_type(list[str]).closing(state.raw("cut"))
        assert needed == backend.count_tokens(closing or "")
        assert state["closed"] == st.Constraint.of_type(list[str]).parse(state.raw("closed"))
        assert state.meta("closed").usage.output_tokens <= 8


def test_limits_that_no_text_of_the_shape_fits(tiny_model: TinyModel) -> None:
    """Each says what would help; where a shape ends, no min_tokens makes it go on."""

    @st.function
    def program(s: st.ProgramState, **settings: Any) -> None:
        s += "Now: " + st.gen("x", **settings)

    with st.LocalBackend(tiny_model(), dtype="float64", device="cpu", kv_tokens=4096) as backend:
        cut = program.run(dtype=list[int], max_tokens=1, backend=backend)
        with pytest.raises(Truncated, match=r"raise max_tokens, .*; 1 more token would close it"):
            cut["x"]
        remedy = "the shortest text that was found has 2 tokens: raise max_tokens, or leave it out"
        with pytest.raises(ConstraintError, match=remedy):
            program.run(regex="[a-c]q", max_tokens=1, on_limit="close", backend=backend)
        remedy = r"room for \d+ tokens with .* has \d+ tokens: shorten the prompt"
        with pytest.raises(ConstraintError, match=remedy):
            program.run(regex="[a-c]q{2000}", on_limit="close", backend=backend)
        short = program.run(regex="[a-c]q", min_tokens=5, max_tokens=10, backend=backend)
        assert st.Constraint.regex("[a-c]q").matches(short["x"])
        assert short.meta("x").usage.output_tokens == 2
        assert short.meta("x").finish_reason == "stop"


def test_a_value_that_a_validator_refuses_fails_the_read_only() -> None:
    text = '{"title": "M", "year": 1066}'
    state = films.run(backend=st.MockBackend([text, "7"]))
    assert state["number"] == 7
    assert state.raw("film") == text
    with pytest.raises(ConstraintError, match="there were no films then"):
        state["film"]
    assert text in state.text()


@pytest.mark.parametrize(
    ("reply", "end"),
    [
        ('{"title": "M is a long film", "year": 1931}', {"max_tokens": 6, "on_limit": "close"}),
        ('{"title": "M", "year": 1066}\n', {"stop": "\n"}),
    ],
    ids=["limit", "stop"],
)
def test_what_a_validator_refuses_was_not_cut(reply: str, end: dict[str, Any]) -> None:
    state = films.run(backend=st.MockBackend([reply, "7"]), **end)
    with pytest.raises(ConstraintError, match="there were no films then"):
        state["film"]


def test_a_stop_token_that_ends_a_value_too_early_has_cut_it(model: st.LocalBackend) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "List: " + st.gen("list", dtype=list[int], stop_token_ids=digits, temperature=0)

    digits = [model.encode(digit)[0] for digit in "0123456789"]
    state = program.run(backend=model)
    with pytest.raises(Truncated, match=r"the stop \d+ ended the text"):
        state["list"]


def test_json_that_is_nested_too_deep_for_python_is_an_error_at_the_read() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("list", json_schema={"type": "array", "items": {"$ref": "#"}})

    state = program.run(backend=st.MockBackend(["[" * 200_000 + "]" * 200_000]))
    with pytest.raises(ConstraintError, match=r"deeper than Python|too complex|too ambiguous"):
        state["list"]


def test_one_sample_of_several_that_was_cut() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "film: " + st.gen("film", json_schema=Film, n=3, max_tokens=4) + "."
        s += st.gen("number", n=2, dtype=int)

    replies = [SCRIPT["film"], CUT, SCRIPT["film"], "1", "2"]
    state = program.run(backend=st.MockBackend(replies))
    with pytest.raises(Truncated) as caught:
        state["film"]
    assert caught.value.values == (VALUES["film"], None, VALUES["film"])
    assert state.raw("film") == [replies[0], '{"title": "Metropolis and a', replies[2]]
    assert [meta.finish_reason for meta in state.meta("film")] == ["stop", "length", "stop"]
    assert state["number"] == [1, 2]


@pytest.mark.parametrize("way", ["record", "cache"])
def test_what_was_cut_is_cut_when_it_is_played_back(tmp_path: Path, way: str) -> None:
    def run(**options: Any) -> st.ProgramState:
        return films.run(max_tokens=4, seed=1, **options)

    if way == "record":
        first = run(backend=st.MockBackend([CUT, "7"]), record=tmp_path / "run.jsonl")
        again = run(replay=tmp_path / "run.jsonl")
    else:
        with st.CachedBackend(st.MockBackend([CUT, "7"]), tmp_path / "answers.db") as backend:
            first, again = run(backend=backend), run(backend=backend)
    for state in (first, again):
        assert state["number"] == 7
        with pytest.raises(Truncated) as caught:
            state["film"]
        assert caught.value.partial == '{"title": "Metropolis and a'


@pytest.mark.parametrize("kind", ["local", "mock"])
def test_no_tokens_close_a_shape_only_if_it_allows_no_text(
    tiny_model: TinyModel, kind: str
) -> None:
    @st.function
    def program(s: st.ProgramState, regex: str) -> None:
        s += "Now: " + st.gen("x", regex=regex, max_tokens=0, on_limit="close")

    backend: Any = st.MockBackend(["aaa", "aaa"])
    if kind == "local":
        backend = st.LocalBackend(tiny_model(), dtype="float64", device="cpu", kv_tokens=4096)
    with closing(backend):
        remedy = r"^max_tokens=0 with regex='a\+': .*: raise max_tokens, or leave it out"
        with pytest.raises(ConstraintError, match=remedy):
            program.run("a+", backend=backend)
        assert program.run("a*", backend=backend)["x"] == ""


def test_a_reply_of_another_shape_fails_the_branch() -> None:
    with pytest.raises(ConstraintError, match="not of the shape") as caught:
        films.run(backend=st.MockBackend(['{"title": 1}', "7"]))
    assert caught.value.variable == "film"


# -- checkpoints and the command line


@st.function
def numbers(s: st.ProgramState, limit: int | None = None) -> int:
    s += "number: " + st.gen("number", dtype=int)
    s += "\nlist: " + st.gen("list", dtype=list[int], max_tokens=limit)
    return int(s["number"])


def test_a_checkpoint_keeps_values_and_what_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    inner = scripted()
    items = [{"limit": None}, {"limit": 2}]
    for _ in range(2):
        whole, cut = numbers.run_batch(items, backend=inner, checkpoint=path)
        assert (whole["number"], whole["list"], whole.raw("list")) == (-12, [1, 2, 3], "[1, 2, 3]")
        assert (cut["number"], cut.value, cut.raw("list")) == (-12, -12, "[1, 2,")
        with pytest.raises(Truncated) as caught:
            cut["list"]
        assert caught.value.partial == "[1, 2,"
    assert len(inner.calls) == 4


def test_a_checkpoint_gives_a_value_back_as_its_type(tmp_path: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "film: " + st.gen("film", json_schema=Film)

    path = tmp_path / "batch.jsonl"
    (first,) = program.run_batch([{}], backend=scripted(), checkpoint=path)
    (again,) = program.run_batch([{}], backend=st.MockBackend([]), checkpoint=path)
    assert type(again["film"]) is Film
    assert again["film"] == first["film"]
    assert again.raw("film") == first.raw("film")


PROGRAM = """
import datetime
import stemma as st
from pydantic import BaseModel
class Film(BaseModel):
    title: str
    year: int
@st.function
def program(s, limit: int = 100):
    s += "film: " + st.gen("film", json_schema=Film, max_tokens=limit)
    s += " day: " + st.gen("day", dtype=datetime.date)
    s += " number: " + st.gen("number", dtype=int)
    return s["number"]
"""


def test_the_command_line_writes_values_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = scripted_backend(monkeypatch)
    backend._reply = scripted()._reply
    file = write(tmp_path, PROGRAM)
    result = run_command("--json", file)
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    assert output["value"] == -12
    assert output["variables"]["number"] == -12
    assert output["variables"]["film"] == {"title": "M", "year": 1931}
    assert output["variables"]["day"] == "2024-02-29"
    cut = json.loads(run_command("--json", file, "--limit", "2").stdout)
    assert cut["value"] == -12
    assert "film" not in cut["variables"] or cut["variables"]["film"] is None or cut["errors"]


# -- on the engine


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Iterator[st.LocalBackend]:
    with st.LocalBackend(tiny_model(max_position_embeddings=4096), dtype="float64") as backend:
        yield backend


@st.function
def on_the_engine(s: st.ProgramState) -> None:
    s += "A person: " + st.gen(
        "person", json_schema=Point, whitespace="compact", max_tokens=30, on_limit="close"
    )
    forks = s.fork(3)
    for fork in forks:
        fork += "\nIs it? " + st.gen("sure", dtype=bool)
        fork += "\nA number: " + st.gen("number", dtype=int, max_tokens=5, on_limit="close")
    forks.join()
    s += "\nColours: " + st.gen("colours", dtype=Colour, n=4)


def test_values_on_a_model_are_the_same_in_every_way(
    model: st.LocalBackend, tmp_path: Path
) -> None:
    first = on_the_engine.run(backend=model, seed=4, record=tmp_path / "run.jsonl")
    assert isinstance(first["person"], Point)
    assert first.raw("person").startswith('{"x":')
    assert all(type(sure) is bool for sure in first["sure"])
    assert all(type(number) is int for number in first["number"])
    assert len(first["colours"]) == 4
    assert all(isinstance(colour, Colour) for colour in first["colours"])
    assert first.usage.forced_tokens > 0
    assert first.meta("person").usage.forced_tokens > 0
    others = [
        on_the_engine.run(backend=model, seed=4),
        on_the_engine.run(replay=tmp_path / "run.jsonl"),
    ]
    stream = on_the_engine.stream(backend=model, seed=4)
    told = "".join(event.text for event in stream if isinstance(event, st.TextAdded))
    others.append(stream.state)
    assert first.raw("person") in told
    for other in others:
        assert other.text() == first.text()
        for name in ("person", "sure", "number", "colours"):
            assert other[name] == first[name]
            assert other.raw(name) == first.raw(name)


def test_the_remedy_fits_what_has_cut_the_text_off() -> None:
    @st.function
    def numbers(s: st.ProgramState, **how: Any) -> None:
        s += st.gen("x", dtype=list[int], **how)

    for how, remedy in (
        ({"stop": ","}, "leave the stop out"),
        ({"max_tokens": 2}, "raise max_tok"),
    ):
        state = numbers.run(backend=st.MockBackend(["[1, 2, 3]"]), **how)
        with pytest.raises(Truncated, match=remedy):
            state["x"]


def test_the_values_of_the_other_samples_can_be_had_where_one_is_refused() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("film", json_schema=Film, n=2)

    replies = [SCRIPT["film"], '{"title": "M", "year": 1066}']
    with pytest.raises(ConstraintError) as caught:
        program.run(backend=st.MockBackend(replies))["film"]
    assert caught.value.values == (VALUES["film"], None)

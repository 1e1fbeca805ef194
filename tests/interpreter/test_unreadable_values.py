"""Reading a value that its text has not the shape for tells where that belongs, however the value
is read."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

import stemma as st
from stemma.errors import ConstraintError, StemmaError, Truncated
from stemma.interpreter.events import VariableFinished


class Small(BaseModel):
    x: int

    @field_validator("x")
    @classmethod
    def small(cls, x: int) -> int:
        if x > 9:
            raise ValueError("too large")
        return x


@st.function
def program(s: st.ProgramState, **settings: Any) -> None:
    for branch in s.fork(["only"]):
        branch += "list: " + st.gen("list", **settings)  # here
        s["branch"] = branch


def failed_read(name: str, replies: list[str], error: type[StemmaError], **settings: Any) -> Any:
    state = program.run(backend=st.MockBackend(replies), **settings)
    for _ in "ab":
        with pytest.raises(error) as caught:
            state["branch"][name]
    return caught.value


def notes_of(error: Any) -> list[str]:
    with open(__file__, encoding="utf-8") as source:
        assert source.read().splitlines()[error.site.line - 1].endswith("# here")
    return [note.replace(f"{error.site}", "HERE") for note in error.__notes__]


CUT = {"dtype": list[int], "max_tokens": 2}


def test_what_was_cut_off_tells_its_variable_branch_and_line() -> None:
    error = failed_read("list", ["[1, 2, 3]"], Truncated, **CUT)
    assert (error.variable, error.branch) == ("list", "program/only")
    assert error.partial == "[1, 2,"
    assert notes_of(error) == ["gen of 'list' on branch program/only, queued at HERE"]


def test_what_a_validator_refuses_tells_the_same() -> None:
    error = failed_read("list", ['{"x": 10}'], ConstraintError, dtype=Small)
    assert (error.variable, error.branch) == ("list", "program/only")
    assert notes_of(error) == ["gen of 'list' on branch program/only, queued at HERE"]


def test_of_several_samples_the_one_is_told_and_the_values_of_the_others() -> None:
    error = failed_read("list", ["[1]", "[1, 2, 3]", "[3]", "[4]"], Truncated, n=4, **CUT)
    assert error.values == ([1], None, [3], [4])
    (note,) = notes_of(error)
    assert note.endswith("queued at HERE; sample 2 of 4, `values` has the others'")


def test_a_capture_is_told_by_its_own_name() -> None:
    shape = st.seq("ages ", st.capture("ages", st.Constraint.of_type(list[int])))
    error = failed_read("ages", ["ages [1, 2, 3]"], Truncated, grammar=shape, max_tokens=3)
    assert error.variable == "ages"
    assert notes_of(error) == ["gen of 'ages' on branch program/only, queued at HERE"]


def test_a_call_that_was_cut_off_is_told_as_one() -> None:
    def price(thing: str) -> int:
        return len(thing)

    @st.function
    def shop(s: st.ProgramState) -> None:
        s.call([price], max_tokens=1)

    with pytest.raises(Truncated) as caught:
        shop.run(backend=st.MockBackend(['price({"thing": "lamp"})']))
    assert caught.value.variable == "call"
    assert caught.value.__notes__[0].startswith("call of 'call' on branch shop, queued at ")


class CountingBackend(st.MockBackend):
    """A script that knows tokens: each letter is one."""

    def count_tokens(self, text: str) -> int:
        return len(text)


def told_by(state: st.ProgramState, name: str) -> dict[str, Any]:
    with pytest.raises(StemmaError) as caught:
        state[name]
    error: Any = caught.value
    known = ("args", "partial", "values", "variable", "branch", "site", "__notes__")
    return {
        "type": type(error),
        "text": str(error),
        "needed": getattr(error, "needed", None),
        **{key: getattr(error, key) for key in known},
    }


def test_a_state_of_a_checkpoint_tells_the_same_of_what_cannot_be_read(tmp_path: Path) -> None:
    @st.function
    def both(s: st.ProgramState) -> None:
        s += st.gen("cut", n=2, **CUT) + st.gen("refused", dtype=Small)

    replies = ["[1]", "[1, 2, 3]", '{"x": 10}']

    def states() -> list[st.ProgramState]:
        backend = CountingBackend(replies)
        return both.run_batch([{}], backend=backend, checkpoint=tmp_path / "run.jsonl")

    (first,), (again,) = states(), states()
    for name in ("cut", "refused"):
        assert told_by(again, name) == told_by(first, name)
    assert told_by(again, "cut")["needed"] == 2
    assert "2 more tokens would close it" in told_by(again, "cut")["text"]


def test_how_much_more_it_would_have_taken_is_told_wherever_one_looks_first() -> None:
    @st.function
    def cut(s: st.ProgramState) -> None:
        s += st.gen("cut", **CUT)

    stream = cut.stream(backend=CountingBackend(["[1, 2, 3]"]))
    (told,) = [event.value for event in stream if isinstance(event, VariableFinished)]
    assert isinstance(told, Truncated)
    assert str(told).endswith("; 2 more tokens would close it")
    again = pickle.loads(pickle.dumps(failed_read("list", ["[1, 2, 3]"], Truncated, **CUT)))
    assert (again.needed, again.variable) == (None, "list")
    for _ in "ab":
        with pytest.raises(Truncated) as caught:
            stream.state["cut"]
        assert caught.value is told
        assert told.needed == 2
        copied = pickle.loads(pickle.dumps(told))
        assert (str(copied), copied.needed, copied.args) == (str(told), 2, told.args)


def test_nobody_waits_for_what_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    @st.function
    def cut(s: st.ProgramState) -> None:
        s += st.gen("cut", **CUT)

    def closing(*_: object) -> str:
        raise AssertionError("it was found out")

    monkeypatch.setattr(st.Constraint, "closing", closing)
    with pytest.raises(Truncated):
        cut.run(backend=CountingBackend(["[1, 2, 3]"]))["cut"]

"""`join(on_error=...)`: what becomes of the branches that have failed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import Broken, MockBackend
from stemma.lang.errors import Cancelled, InvalidArgument, Timeout, UnknownVariable


class Broke(Exception):
    """A backend's own error."""


def replies(text: str, params: st.SamplingParams) -> Any:
    """A branch b fails, a branch c writes and then fails."""
    if text.endswith("b"):
        return Broke("b broke")
    return Broken("half", Broke("c broke")) if text.endswith("c") else f"<{text[-1]}>"


def joined(mode: Any = "gather_variable", **how: Any) -> tuple[st.ProgramState, Any]:
    """Branches a to d of which b and c fail, joined."""

    @st.function
    def program(s: st.ProgramState) -> Any:
        s += "p"
        branches = s.fork(list("abcd"))
        for label, branch in zip(branches.labels, branches, strict=True):
            branch += st.gen("first") + label + st.gen("x")
        return branches.join(mode, **how)

    state = program.run(backend=MockBackend(replies))
    return state, state.value


def test_the_first_error_is_raised_unless_the_program_says_otherwise() -> None:
    for how in ({}, {"on_error": "raise"}):
        with pytest.raises(Broke, match="b broke"):
            joined(**how)


def test_return_lets_the_error_stand_where_the_value_is_missing() -> None:
    state, lists = joined(on_error="return")
    assert lists["first"] == ["<p>"] * 4
    good, b, c, d = lists["x"]
    assert (good, d) == ("<a>", "<d>")
    assert (str(b), str(c)) == ("b broke", "c broke")
    assert c.partial == "half"
    assert state["x"] is not None
    assert state["x"][1] is b
    assert lists.labels == ("a", "b", "c", "d")
    assert lists.errors == {"b": b, "c": c}
    assert state.meta("x")[1] is None
    assert state.meta("x")[0].finish_reason == "stop"


def test_drop_leaves_failed_branches_out_and_tells_which_are_in() -> None:
    state, lists = joined(on_error="drop")
    assert lists == {"first": ["<p>"] * 2, "x": ["<a>", "<d>"]}
    assert lists.labels == ("a", "d")
    assert list(lists.errors) == ["b", "c"]
    assert state["x"] == ["<a>", "<d>"]


@pytest.mark.parametrize("on_error", ["return", "drop"])
def test_text_that_is_appended_is_that_of_good_branches(on_error: str) -> None:
    state, lists = joined("concate_and_append", on_error=on_error)
    assert state.text() == "p<p>a<a><p>d<d>"
    assert lists == {}
    assert list(lists.errors) == ["b", "c"]


def test_where_nothing_failed_all_three_are_the_same() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        branches = s.fork(["k", "l"])
        branches += st.gen("x")
        lists = [branches.join(on_error=how) for how in ("raise", "return", "drop")]  # type: ignore[arg-type]
        assert lists[0] == lists[1] == lists[2]
        assert {each.labels for each in lists} == {("k", "l")}
        assert all(each.errors == {} for each in lists)
        return dict(lists[0])

    assert program.run(backend=MockBackend(lambda t, p: "said")).value == {"x": ["said"] * 2}


def test_a_cancelled_branch_is_returned_or_dropped_like_a_failed_one() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        branches = s.fork(2)
        branches[0].append(st.gen("x"))
        branches[0]["x"]
        branches[1].append(st.gen("x"))
        branches[1].cancel()
        assert branches.join()["x"] == ["said", None]
        (_, error) = branches.join(on_error="return")["x"]
        assert isinstance(error, Cancelled)
        return branches.join(on_error="drop")

    state = program.run(backend=MockBackend(lambda t, p: "said", delay=0.1))
    assert state.value == {"x": ["said"]}
    assert state.value.labels == ("0",)


def test_a_branch_that_lacks_a_variable_for_no_error_is_told_in_any_case() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(2)
        branches[0].append(st.gen("x"))
        for how in ("raise", "return", "drop"):
            with pytest.raises(UnknownVariable, match="program/1 has no variable 'x'"):
                branches.join(on_error=how)  # type: ignore[arg-type]

    program.run(backend=MockBackend(lambda t, p: "said"))


@pytest.mark.parametrize("on_error", ["return", "drop"])
def test_the_runs_own_timeout_is_not_swallowed(on_error: Any) -> None:
    went_on = []

    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(2)
        branches += st.gen("x")
        branches.join(on_error=on_error)
        went_on.append(True)

    with pytest.raises(Timeout):
        program.run(backend=MockBackend(lambda t, p: "late", delay=60), timeout=0.05)
    assert went_on == []


def test_the_stream_tells_which_branches_were_joined() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(list("ab"))
        for label, branch in zip(branches.labels, branches, strict=True):
            branch += label + st.gen("x")
        branches.join(on_error="drop")

    events = list(program.stream(backend=MockBackend(replies)))
    assert st.Joined("program", ("program/a",), ("x",)) in events


def test_ajoin_does_the_same() -> None:
    @st.function
    async def program(s: st.ProgramState) -> Any:
        branches = s.fork(list("ab"))
        for label, branch in zip(branches.labels, branches, strict=True):
            branch += label + st.gen("x")
        with pytest.raises(Broke):
            await branches.ajoin()
        returned = await branches.ajoin(on_error="return")
        assert str(returned["x"][1]) == "b broke"
        return await branches.ajoin(on_error="drop")

    state = asyncio.run(program.arun(backend=MockBackend(replies)))
    assert state.value == {"x": ["<a>"]}


@pytest.mark.parametrize("on_error", ["ignore", None, True])
def test_another_way_is_refused_where_it_is_written(on_error: Any) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        with pytest.raises(InvalidArgument, match=r"on_error=.*raise, return, drop"):
            s.fork(2).join(on_error=on_error)

    program.run(backend=MockBackend())

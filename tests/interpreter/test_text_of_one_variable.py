"""`text_iter("x")`: the pieces of one variable, also when its name is written again or set."""

from __future__ import annotations

import asyncio
import time

import pytest

import stemma as st
from stemma.lang.errors import InvalidArgument


def test_name_that_is_written_again_streams_its_latest_value() -> None:
    @st.function
    def chat(s: st.ProgramState) -> list[str]:
        found = []
        for turn in range(3):
            s += f"turn {turn}: " + st.gen("answer")
            found.append("".join(s.text_iter("answer")))
        child = s.fork(1)[0]
        child += st.gen("answer")
        found.append("".join(child.text_iter("answer")))
        return found

    state = chat.run(backend=st.MockBackend(["one", "two", "three", "four"], pieces=2))
    assert state.value == ["one", "two", "three", "four"]


def test_scope_and_set_variables_come_whole() -> None:
    @st.function
    def program(s: st.ProgramState) -> list[list[str]]:
        with s.var_scope("scope"):
            s += "a" + st.gen("x") + "b"
        s["set"] = "by hand"
        s += st.gen("set")
        latest = list(s.text_iter("set"))
        s["set"] = "again"
        return [list(s.text_iter(name)) for name in ("scope", "set")] + [latest]

    state = program.run(backend=st.MockBackend(["X", "Y"]))
    assert state.value == [["aXb"], ["again"], ["Y"]]


def test_variable_that_is_not_one_text_is_refused_at_once() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s["number"] = 3
        s += st.gen("drafts", reasoning="why", n=2)
        branches = s.fork(2)
        branches += st.gen("x")
        branches.join()
        for name, what in (
            ("number", "is a int"),
            ("drafts", "has 2 samples"),
            ("why", "has 2 samples"),
            ("x", "is a list"),
        ):
            with pytest.raises(InvalidArgument, match=f"{name}.*{what}.*read s"):
                list(s.text_iter(name))

    program.run(backend=st.MockBackend(["<think>a</think>b"] * 4))


def test_samples_that_the_run_asks_for_are_no_one_text_either() -> None:
    program = st.function(lambda s: s.append(st.gen("x")))
    state = program.run(backend=st.MockBackend(["late"] * 2, delay=5), n=2, stream=True)
    while "x" not in state:
        pass
    start = time.monotonic()
    with pytest.raises(InvalidArgument, match="2 samples"):
        list(state.text_iter("x"))
    assert time.monotonic() - start < 3
    state._run.cancel()


def test_async_reading_gives_the_same() -> None:
    @st.function
    async def chat(s: st.ProgramState) -> list[str]:
        found = []
        for _ in range(2):
            s += st.gen("answer")
            found.append("".join([piece async for piece in s.text_async_iter("answer")]))
        return found

    state = asyncio.run(chat.arun(backend=st.MockBackend(["one", "two"])))
    assert state.value == ["one", "two"]


def test_a_branch_reads_in_pieces_what_it_reads_whole() -> None:
    """Its own value, else that which it had at the fork; never what the parent writes later."""

    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x", max_tokens=9)
        child = s.fork(1)[0]
        s += st.gen("x")
        assert list(s.text_iter("x")) == [s["x"]] == ["later"]
        assert list(child.text_iter("x")) == [child["x"]] == ["first"]
        child += st.gen("x", max_tokens=1)
        grandchild = child.copy()
        assert list(child.text_iter("x")) == [child["x"]] == ["own"]
        assert list(grandchild.text_iter("x")) == [grandchild["x"]] == ["own"]

    program.run(backend=st.MockBackend(replies))


def replies(prompt: str, params: st.SamplingParams) -> str:
    if not prompt:
        return "first"
    return "own" if params.max_tokens == 1 else "later"

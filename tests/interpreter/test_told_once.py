"""Who is told of a failure, and what is left of it: the same whatever the timing."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.lang.errors import UnknownVariable


class Broke(Exception):
    """A backend's own error."""


def breaks_at(mark: str) -> MockBackend:
    return MockBackend(lambda text, params: Broke(mark) if mark in text else " fine")


def test_whoever_is_told_of_a_failure_finds_the_branch_failed() -> None:
    found: list[object] = []

    @st.function
    def program(s: st.ProgramState) -> None:
        branch = s.copy()
        branch += "bad" + st.gen("x")
        variable, executor = branch._variable("x"), branch._executor
        variable.on_done(lambda: found.append(executor.error))
        with pytest.raises(Broke):
            branch["x"]

    program.run(backend=MockBackend(lambda text, params: Broke(), delay=0.02))
    (error,) = found
    assert isinstance(error, Broke)


def test_cancelling_a_branch_hides_no_failure_of_its_parent() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        parent = s.copy()
        parent += "bad" + st.gen("x")
        child = parent.copy()
        while child._executor.error is None:
            time.sleep(0.001)
        child.cancel()

    with pytest.raises(Broke):
        program.run(backend=breaks_at("bad"))


@pytest.mark.parametrize("held", [True, False])
def test_what_was_forked_from_the_losers_of_a_race_fails_nobody(held: bool) -> None:
    kept: list[object] = []

    @st.function
    def program(s: st.ProgramState) -> str:
        branches = s.fork(2)
        below = branches[1].copy()
        below += "bad" + st.gen("x")
        while below._executor.error is None:
            time.sleep(0.001)
        if held:
            kept.append(below)
        del below
        gc.collect()
        branches += st.gen("x")
        return branches.first(1, when=lambda branch: branch.label.endswith("/0")).labels[0]

    assert program.run(backend=breaks_at("bad")).value == "0"


def test_a_join_that_fails_leaves_the_parent_as_it_was() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(2)
        branches += st.gen("x")
        branches[0]["only"] = 1
        with pytest.raises(UnknownVariable):
            branches.join()
        assert s.variables() == []

    program.run(backend=MockBackend([" a", " b"]))


def test_after_the_last_event_a_reader_in_an_event_loop_waits_for_nothing() -> None:
    @st.function
    async def program(s: st.ProgramState) -> str:
        s += st.gen("x")
        return "done"

    closed_at: list[bool] = []

    async def main() -> None:
        stream = program.astream(backend=MockBackend([" a"], delay=0.02))
        feed, run = stream._feed, stream.state._run
        feed._join(lambda: closed_at.append(run.ended.done) if feed._closed else None)
        async for _ in stream:
            pass
        assert stream.state.value == "done"

    asyncio.run(main())
    assert closed_at == [True]


def test_a_failed_stream_that_was_read_is_freed() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "bad" + st.gen("x")

    def read() -> weakref.ref[st.ProgramState]:
        stream = program.stream(backend=backend)
        with pytest.raises(Broke):
            list(stream)  # in its traceback there is this frame, with the stream
        return weakref.ref(stream.state)

    backend = breaks_at("bad")
    state = read()
    end = time.monotonic() + 5
    while (state() is not None or backend.open_branches) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert state() is None
    assert backend.open_branches == 0

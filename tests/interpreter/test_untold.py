"""A failure that no caller is there to raise to is said once, when nobody can read it any more."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.interpreter.untold import Untold

BOOM = "the backend is gone"


@st.function
def program(s: st.ProgramState) -> None:
    s += st.gen("x")


@st.function
def clumsy(s: st.ProgramState) -> None:
    s += "x"
    raise ZeroDivisionError("mine")


def broken() -> MockBackend:
    return MockBackend([ConnectionError(BOOM)])


def said(act: Callable[[], object]) -> list[warnings.WarningMessage]:
    """The warnings of `act`, and of what it has left behind going away."""
    gc.freeze()  # only what comes now need be looked at, and often
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            act()
            end = time.monotonic() + 10
            while any(isinstance(each, Untold) for each in gc.get_objects()):
                assert time.monotonic() < end
                gc.collect()
                time.sleep(0.001)
    finally:
        gc.unfreeze()
    ours = [warning for warning in caught if warning.filename == __file__]
    return [warning for warning in ours if "nobody read it" in str(warning.message)]


def streamed(program: st.Program) -> None:
    state = program.run(stream=True, backend=broken())
    state._run.finished.wait()


@pytest.mark.parametrize(
    ("body", "error"), [(program, f"ConnectionError: {BOOM}"), (clumsy, "ZeroDivisionError: mine")]
)
def test_a_streamed_run_that_fails_unread_says_so_once_with_its_line(
    body: st.Program, error: str
) -> None:
    (warning,) = said(lambda: streamed(body))
    assert str(warning.message) == f"{body.name} failed and nobody read it: {error}"
    assert warning.filename == __file__
    with open(__file__, encoding="utf-8") as source:
        line = source.read().splitlines()[warning.lineno - 1]
    assert "st.gen" in line or "raise ZeroDivisionError" in line


@st.function
def reading(s: st.ProgramState) -> Any:
    s += st.gen("x")
    return s["x"]


@st.function
async def getting(s: st.ProgramState) -> Any:
    s += st.gen("x")
    return await s.get("x")


@st.function
def catching(s: st.ProgramState) -> str:
    branch = s.copy()
    branch += st.gen("x")
    try:
        return str(branch["x"])
    except ConnectionError:
        return "none"


@pytest.mark.parametrize("body", [reading, getting])
def test_what_only_the_body_has_read_and_let_through_was_told_to_nobody(body: st.Program) -> None:
    (warning,) = said(lambda: streamed(body))
    assert str(warning.message) == f"{body.name} failed and nobody read it: ConnectionError: {BOOM}"


def test_a_body_that_has_caught_its_failure_was_told() -> None:
    assert said(lambda: streamed(catching)) == []


def test_a_reader_outside_is_told_what_the_body_has_read_before() -> None:
    def read() -> None:
        state = reading.run(stream=True, backend=broken())
        state._run.finished.wait()
        with pytest.raises(ConnectionError):
            state["x"]

    assert said(read) == []


def read_state() -> None:
    with pytest.raises(ConnectionError):
        program.run(stream=True, backend=broken())["x"]


def read_text() -> None:
    with pytest.raises(ConnectionError):
        program.run(stream=True, backend=broken()).text()


def read_pieces() -> None:
    with pytest.raises(ConnectionError):
        list(program.run(stream=True, backend=broken()).text_iter())


def read_events() -> None:
    with pytest.raises(ConnectionError):
        list(program.stream(backend=broken()))


def read_events_async() -> None:
    async def main() -> None:
        async for _ in program.stream(backend=broken()):
            pass

    with pytest.raises(ConnectionError):
        asyncio.run(main())


def read_what_the_body_cut_short() -> None:
    @st.function
    def both(s: st.ProgramState) -> None:
        s += st.gen("x")
        raise ZeroDivisionError("mine")

    with pytest.raises(st.errors.Cancelled):
        both.run(stream=True, backend=MockBackend(["late"], delay=1))["x"]


def cancel_it() -> None:
    stream = program.stream(backend=MockBackend(["late"], delay=1))
    stream.cancel()
    stream.state._run.finished.wait()


def raise_it() -> None:
    with pytest.raises(ConnectionError):
        program.run(backend=broken())


@pytest.mark.parametrize(
    "act",
    [
        read_state,
        read_text,
        read_pieces,
        read_events,
        read_events_async,
        read_what_the_body_cut_short,
        cancel_it,
        raise_it,
    ],
)
def test_a_failure_that_was_told_or_asked_for_is_not_said_again(act: Callable[[], None]) -> None:
    assert said(act) == []


def test_a_finished_state_that_goes_on_fails_and_is_dropped_says_so() -> None:
    def act() -> None:
        state = program.run(backend=MockBackend(["fine", ConnectionError(BOOM)]))
        state += st.gen("y")
        state._executor.until_idle().wait()

    (warning,) = said(act)
    assert BOOM in str(warning.message)
    assert warning.filename == __file__

    def read() -> None:
        state = program.run(backend=MockBackend(["fine", ConnectionError(BOOM)]))
        state += st.gen("y")
        with pytest.raises(ConnectionError):
            state["y"]

    assert said(read) == []


def test_a_process_that_ends_says_what_nobody_has_read() -> None:
    script = (
        "import stemma as st\n"
        "program = st.function(lambda s: s.append(st.gen('x')))\n"
        "state = program.run(stream=True, backend=st.MockBackend([ConnectionError('gone')]))\n"
        "state._run.finished.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd="/", check=True
    )
    assert done.stderr.count("failed and nobody read it: ConnectionError: gone") == 1


def test_the_state_of_a_failed_run_goes_away_with_its_error_and_closes_its_branches() -> None:
    # A script that is a list would hold its error, and that its state.
    backend = MockBackend(lambda text, params: "fine" if not text else ConnectionError(BOOM))

    @st.function
    def forked(s: st.ProgramState) -> None:
        s += st.gen("x")
        s.copy().append(st.gen("y"))

    def run() -> weakref.ref[Any]:
        with pytest.raises(ConnectionError) as caught:
            forked.run(backend=backend)
        return weakref.ref(caught.value.state)  # type: ignore[attr-defined]

    state = run()
    end = time.monotonic() + 5
    while (state() is not None or backend.open_branches) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert state() is None
    assert backend.open_branches == 0

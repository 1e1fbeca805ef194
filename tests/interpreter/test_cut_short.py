"""A run that is cut short cancels what is unfinished, and only that."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.lang.errors import Cancelled, Timeout


def failed_state(program: st.Program, error: type[BaseException], **options: Any) -> Any:
    with pytest.raises(error) as caught:
        program.run(**options)
    return caught.value.state  # type: ignore[attr-defined]


@st.function
def finished_then_raises(s: st.ProgramState) -> None:
    s += st.user("Hi.") + st.assistant(st.gen("x"))
    (branch,) = s.fork(1)
    branch += st.gen("y")
    s.text()
    branch.text()
    raise ZeroDivisionError("mine")


def test_what_was_finished_before_the_bodys_error_can_be_read_as_ever() -> None:
    state = failed_state(finished_then_raises, ZeroDivisionError, backend=MockBackend(["a", "b"]))
    assert state["x"] == "a"
    assert "a<|im_end|>" in state.text()
    assert state.messages()[-1] == {"role": "assistant", "content": "a"}
    assert state.tokens()
    assert "".join(state.text_iter()) == state.text()
    assert state.picture().failure is None
    assert state.error() is None


def test_a_state_of_a_run_that_failed_can_go_on_where_all_was_finished() -> None:
    state = failed_state(
        finished_then_raises, ZeroDivisionError, backend=MockBackend(["a", "b", "c"])
    )
    state += st.gen("z")
    assert state["z"] == "c"


def test_what_was_unfinished_is_cancelled_and_says_so() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "text " + st.gen("x")
        raise ZeroDivisionError("mine")

    state = failed_state(program, ZeroDivisionError, backend=MockBackend(["late"], delay=60))
    for read in (lambda: state["x"], state.text, state.messages, state.tokens):
        with pytest.raises(Cancelled, match="cut short by ZeroDivisionError: mine"):
            read()
    assert "cut short" in (state.picture().failure or "")


def test_a_timeout_leaves_an_idle_branch_as_it_is() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "done"
        (branch,) = s.fork(1)
        branch += st.gen("x")
        branch["x"]

    state = failed_state(program, Timeout, backend=MockBackend(["late"], delay=60), timeout=0.1)
    assert state.text() == "done"


def test_a_body_that_goes_on_after_the_run_was_cancelled_is_refused() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x")
        s["x"]
        begun.set()
        cancelled.wait(10)
        s += st.gen("y")
        s["y"]

    stream = program.stream(backend=MockBackend(["a", "b"]))
    assert begun.wait(10)
    stream.cancel()
    cancelled.set()
    with pytest.raises(Cancelled):
        list(stream)
    assert stream.state["x"] == "a"
    with pytest.raises(Cancelled):
        stream.state["y"]


def test_join_of_branches_that_the_timeout_stopped_raises_it() -> None:
    seen: list[BaseException] = []

    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(2)
        branches += st.gen("x")
        try:
            branches.join()
        except BaseException as error:
            seen.append(error)
            raise

    with pytest.raises(Timeout):
        program.run(backend=MockBackend(["late"] * 2, delay=60), timeout=0.1)
    assert isinstance(seen[0], Timeout)


def test_a_branch_cancelled_when_idle_keeps_its_text_and_takes_no_more() -> None:
    backend = MockBackend(["a", "b"])

    @st.function
    def program(s: st.ProgramState) -> None:
        branch = s.copy()
        branch += "text " + st.gen("x")
        assert branch.text() == "text a"
        branch.cancel()
        assert branch.text() == "text a"
        assert branch["x"] == "a"
        for go_on in (lambda: branch.append("more"), lambda: branch.fork(2), branch.tokens):
            with pytest.raises(Cancelled, match="program/0 was cancelled"):
                go_on()

    program.run(backend=backend)


def test_appending_to_a_branch_just_cancelled_is_refused_at_once() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branch = s.copy()
        branch += st.gen("x")
        branch.cancel()
        with pytest.raises(Cancelled):
            branch += "more"

    program.run(backend=MockBackend(["late"], delay=60))

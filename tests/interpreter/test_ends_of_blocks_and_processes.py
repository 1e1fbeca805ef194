"""What is open when an exception comes: blocks, subroutines, and the process itself."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import pytest

import stemma as st
from stemma.lang.errors import InvalidArgument, StemmaError


def test_scope_left_by_an_exception_takes_nothing_from_the_outer_one() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        with s.var_scope("outer"):
            s += "1"
            with suppress(ValueError), s.var_scope("inner"):
                s += "2"
                raise ValueError("caught")
            s += "3"

    state = program.run(backend=st.MockBackend([]))
    assert (state["outer"], state["inner"]) == ("123", "2")


def test_message_left_by_an_exception_is_closed() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        with suppress(ValueError), s.user():
            s += "half"
            raise ValueError("caught")
        s += st.assistant("whole")

    state = program.run(backend=st.MockBackend([]))
    assert [message["content"] for message in state.messages()] == ["half", "whole"]


def test_exception_of_the_body_carries_the_state() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "before"
        raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body") as error:
        program.run(backend=st.MockBackend([]))
    assert isinstance(error.value.state, st.ProgramState)  # type: ignore[attr-defined]


def test_async_subroutine_of_a_plain_program_is_refused() -> None:
    @st.function
    async def inner(s: st.ProgramState) -> None:
        s += "never"

    @st.function
    def outer(s: st.ProgramState) -> None:
        inner(s)

    with pytest.raises(StemmaError, match="async program"):
        outer.run(backend=st.MockBackend([]))


def test_sampling_of_the_wrong_kind_is_named_beside_other_settings() -> None:
    program = st.function(lambda s: None)
    with pytest.raises(InvalidArgument, match=r"^sampling="):
        program.run(backend=st.MockBackend([]), sampling={"top_k": 1}, temperature=1)


def test_dispatcher_has_ended_when_python_takes_itself_down() -> None:
    code = (
        "import atexit, threading\n"
        "def at_last():\n"
        "    print([t.name for t in threading.enumerate() if 'dispatcher' in t.name])\n"
        "atexit.register(at_last)\n"
        "import stemma as st\n"
        "st.function(lambda s: s.append('x')).run(backend=st.MockBackend([]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]")

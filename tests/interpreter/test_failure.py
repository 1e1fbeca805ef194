"""The failure rule: the original exception, at the first read that needs it and at the end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import stemma as st
from stemma.backend.base import Pending
from stemma.backend.mock import Broken, MockBackend, MockBranch
from stemma.interpreter import run as run_module
from stemma.lang.errors import Cancelled, StemmaError, Timeout


class Broke(Exception):
    """A backend's own error."""


def eventually(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not true() and time.monotonic() < end:
        time.sleep(0.005)
    return true()


def test_a_read_raises_the_original_error_with_the_line_that_queued_it() -> None:
    boom = Broke("boom")
    read: list[BaseException] = []

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "before " + st.gen("x")  # the line
        s += " after" + st.gen("y")
        for name in ("x", "y"):
            with pytest.raises(Broke) as caught:
                s[name]
            read.append(caught.value)
        raise read[0]

    with pytest.raises(Broke) as caught:
        program.run(backend=MockBackend([boom]))
    assert caught.value is boom
    assert read == [boom, boom]
    site = boom.site  # type: ignore[attr-defined]
    with open(__file__, encoding="utf-8") as source:
        assert source.read().splitlines()[site.line - 1].endswith("# the line")
    assert site.file == __file__


def test_the_note_names_operation_branch_line_and_what_was_written() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        (branch,) = s.fork(["expert"])
        branch += st.gen("x")
        branch["x"]

    boom = Broke("boom")
    with pytest.raises(Broke):
        program.run(backend=MockBackend([Broken("half a", boom)]))
    (note,) = boom.__notes__
    assert "gen of 'x' on branch program/expert" in note
    assert f"{__file__}:" in note
    assert "after writing 'half a'" in note


def test_an_error_in_the_last_expression_is_raised_at_the_end() -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        s += st.gen("a") + st.gen("x")
        return "done"

    boom = Broke("boom")
    with pytest.raises(Broke) as caught:
        program.run(backend=MockBackend(["fine", boom]))
    state = caught.value.state  # type: ignore[attr-defined]
    assert state["a"] == "fine"
    with pytest.raises(Broke):
        state["x"]
    with pytest.raises(Broke):
        state.text()
    with pytest.raises(Broke):
        state.messages()
    with pytest.raises(Broke):
        state.tokens()
    assert len(boom.__notes__) == 1


def test_a_failed_main_branch_ends_the_run_even_if_the_program_caught_the_error() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x")
        with pytest.raises(Broke):
            s["x"]

    with pytest.raises(Broke):
        program.run(backend=MockBackend([Broke("boom")]))


@pytest.mark.parametrize("go_on", ["append", "fork", "copy", "tokens", "score"])
def test_going_on_with_a_branch_known_to_be_dead_raises_at_once(go_on: str) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branch = s.copy()
        branch += st.gen("x")
        with pytest.raises(Broke):
            branch["x"]
        actions: dict[str, Callable[[], Any]] = {
            "append": lambda: branch.append("more"),
            "fork": lambda: branch.fork(2),
            "copy": branch.copy,
            "tokens": branch.tokens,
            "score": lambda: branch.score("a"),
        }
        with pytest.raises(Broke):
            actions[go_on]()

    program.run(backend=MockBackend([Broke("boom")]))


def test_appending_to_and_forking_a_dead_branch_before_reading_never_hangs() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x")
        time.sleep(0.05)  # it is dead by now, but the program was not told
        s += "more" + st.gen("y")
        child = s.fork(2)[1]
        child += st.gen("z")
        grandchild = child.copy()
        for read in (lambda: child["z"], grandchild.text, lambda: s["y"]):
            with pytest.raises(Broke):
                read()

    with pytest.raises(Broke):
        program.run(backend=MockBackend([Broke("boom")]))


def test_a_failed_branch_that_was_read_does_not_fail_the_run() -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        risky = s.copy()
        risky += st.gen("x")
        try:
            return str(risky["x"])
        except Broke:
            return "saved"

    assert program.run(backend=MockBackend([Broke("boom")])).value == "saved"


def test_a_failed_branch_that_nobody_read_is_raised_at_the_end_with_the_state() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "p" + st.gen("main")
        s.fork(1)[0].append(st.gen("x"))

    boom = Broke("boom")
    with pytest.raises(Broke) as caught:
        program.run(backend=MockBackend(["m", boom]))
    assert caught.value is boom
    assert caught.value.state.text() == "pm"  # type: ignore[attr-defined]
    assert "program/0" in boom.__notes__[0]


def test_join_raises_a_childs_error_and_counts_as_reading_all() -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        branches = s.fork(3)
        branches += st.gen("x")
        with pytest.raises(Broke, match="first"):
            branches.join()
        return "went on"

    replies = ["fine", Broke("first"), Broke("second")]
    assert program.run(backend=MockBackend(replies)).value == "went on"


def test_the_bodys_own_error_is_raised_and_stops_all_branches() -> None:
    backend = MockBackend(["never"] * 3, delay=60)

    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(3)
        branches += st.gen("x")
        raise ZeroDivisionError("mine")

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="mine"):
        program.run(backend=backend)
    assert time.monotonic() - start < 5
    assert backend.running == 0


def test_a_failed_sample_fails_the_generation_and_stops_the_others() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x", n=3)

    with pytest.raises(Broke):
        program.run(backend=MockBackend(["a", Broke("boom"), "c"]))


def test_errors_raised_by_the_call_itself_follow_the_same_rule() -> None:
    backend = MockBackend(["a"])

    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x", n=2) + st.select("y", ["a"])

    backend.close()
    with pytest.raises(st.errors.BackendClosed):
        program.run(backend=backend)
    backend = MockBackend(fail={1: Broke("boom")})
    with pytest.raises(Broke):
        st.function(lambda s: s.append(st.select("y", ["a"]))).run(backend=backend)


def test_a_timeout_stops_everything_and_says_how_long() -> None:
    backend = MockBackend(["late"] * 4, delay=60)

    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(3)
        branches += st.gen("x")
        s += st.gen("y")
        s["y"]

    start = time.monotonic()
    with pytest.raises(Timeout, match=r"0\.1 s") as caught:
        program.run(backend=backend, timeout=0.1)
    assert isinstance(caught.value, TimeoutError)
    assert time.monotonic() - start < 5
    assert backend.running == 0
    assert caught.value.state.label == "program"
    del caught
    assert eventually(lambda: backend.open_branches == 0)


def test_a_timeout_reaches_a_body_that_reads_nothing() -> None:
    program = st.function(lambda s: s.append(st.gen("x")))
    with pytest.raises(Timeout):
        program.run(backend=MockBackend(["late"], delay=60), timeout=0.05)


def test_a_run_within_its_timeout_is_left_alone() -> None:
    program = st.function(lambda s: s.append(st.gen("x")))
    state = program.run(backend=MockBackend(["a", "b"]), timeout=0.2)
    time.sleep(0.3)
    state += st.gen("y")
    assert state["y"] == "b"


def test_a_backend_that_does_not_let_go_cannot_hold_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "SETTLE_S", 0.1)
    monkeypatch.setattr(Pending, "cancel", lambda self: None)
    program = st.function(lambda s: s.append(st.gen("x")))
    start = time.monotonic()
    with pytest.raises(Timeout):
        program.run(backend=MockBackend(["late"], delay=30), timeout=0.05)
    assert time.monotonic() - start < 5


def test_a_backend_that_cannot_close_a_branch_is_told_of_and_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def close(self: MockBranch) -> None:
        raise Broke("cannot close")

    monkeypatch.setattr(MockBranch, "close", close)
    program = st.function(lambda s: s.copy().append(st.gen("x")))
    with pytest.raises(Broke, match="cannot close"):
        program.run(backend=MockBackend(["a"]), timeout=20)


def test_an_interrupt_stops_the_run_and_frees_it() -> None:
    backend = MockBackend(["late"] * 2, delay=60)

    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(2)
        branches += st.gen("x")
        threading.Timer(0.1, lambda: os.kill(os.getpid(), 2)).start()
        branches["x"]

    with pytest.raises(KeyboardInterrupt):
        program.run(backend=backend)
    assert backend.running == 0
    assert eventually(lambda: backend.open_branches == 0)


def test_a_branch_cancelled_on_purpose_fails_nothing() -> None:
    backend = MockBackend(lambda prompt, params: "w o r d", delay=0.4, pieces=4)

    @st.function
    def program(s: st.ProgramState) -> Any:
        fast, slow = s.fork(["fast", "slow"])
        slow += st.gen("x")
        child = slow.copy()
        child += st.gen("y")
        time.sleep(0.25)
        slow.cancel()
        for branch, name in ((slow, "x"), (child, "y")):
            with pytest.raises(Cancelled) as caught:
                branch[name]
        fast += "unharmed"
        return caught.value.partial

    assert program.run(backend=backend).value in ("w ", "w o ", "w o r ")
    assert backend.running == 0


def test_after_os_fork_a_run_of_the_parent_raises_and_a_new_one_works() -> None:
    program = st.function(lambda s: s.append(st.gen("x")))
    state = program.run(backend=MockBackend(lambda p, q: "a"))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            state += st.gen("y")
            state["y"]
        except StemmaError as error:
            said = type(error).__name__
        try:
            said += program.run(backend=MockBackend(lambda p, q: " works"))["x"]
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"BackendClosed works"

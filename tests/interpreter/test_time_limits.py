"""`timeout=` of one operation: it is stopped, its branch fails, and what it had written is kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

import stemma as st
from stemma.backend.base import Pending
from stemma.backend.mock import MockBackend
from stemma.interpreter import run as run_module
from stemma.lang.errors import InvalidArgument, Timeout

SLOW = {"delay": 60.0}


def slow_words(prompt: str, params: st.SamplingParams) -> str:
    """After "slow" it takes the whole delay of a backend, a word every 20 ms with 3000 pieces."""
    return "w " * 3000


def test_a_gen_that_takes_too_long_is_stopped_and_tells_what_it_had_written() -> None:
    backend = MockBackend(slow_words, pieces=3000, **SLOW)

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "before" + st.gen("x", timeout=0.3, max_tokens=3000)  # the line
        s += "after" + st.gen("y")

    start = time.monotonic()
    with pytest.raises(
        Timeout, match=r"gen of 'x' .*timeout of 0\.3 s: .*error\.partial"
    ) as caught:
        program.run(backend=backend)
    assert time.monotonic() - start < 5
    assert backend.running == 0
    error = caught.value
    assert error.partial.startswith("w w w ")
    assert set(error.partial.split()) == {"w"}
    assert error.partials == {"program": error.partial}
    assert (error.branch, error.variable) == ("program", "x")
    assert error.site is not None
    with open(__file__, encoding="utf-8") as source:
        assert source.read().splitlines()[error.site.line - 1].endswith("# the line")
    (note,) = error.__notes__
    assert f"after writing {error.partial!r}" in note
    for read in (lambda: error.state["x"], lambda: error.state["y"], error.state.text):
        with pytest.raises(Timeout) as again:
            read()
        assert again.value is error
    (_, written) = error.state.picture().segments
    assert written.text == error.partial


def test_a_branch_that_runs_out_of_time_does_not_stop_its_siblings() -> None:
    backend = MockBackend(lambda text, params: "said", delay=0.3)

    @st.function
    def program(s: st.ProgramState) -> Any:
        quick, patient = s.fork(2)
        quick += st.gen("x", timeout=0.05)
        patient += st.gen("x", timeout=5)
        try:
            quick["x"]
        except Timeout as error:
            return type(error), patient["x"]

    assert program.run(backend=backend).value == (Timeout, "said")


@pytest.mark.parametrize(
    ("operation", "what"),
    [
        (st.select("x", ["a", "b"], timeout=0.05), "select of 'x'"),
        (st.gen("x", choices=["a", "b"], timeout=0.05), "select of 'x'"),
        (st.score("a", "x", timeout=0.05), "score of 'x'"),
        (st.gen(timeout=0.05), "gen did not"),
        (st.gen("x", reasoning="why", timeout=0.05), "gen of 'x'"),
        (st.gen("x", n=3, timeout=0.05), "gen of 'x'"),
        (st.gen_string("x", timeout=0.05), "gen of 'x'"),
    ],
)
def test_every_operation_that_asks_the_model_can_have_a_limit(operation: Any, what: str) -> None:
    backend = MockBackend(lambda text, params: "late", **SLOW)
    with pytest.raises(Timeout, match=what):
        st.function(lambda s: s.append(operation)).run(backend=backend)
    assert backend.running == 0


def test_a_score_that_is_waited_for_can_have_a_limit() -> None:
    backend = MockBackend(**SLOW)
    with pytest.raises(Timeout, match="score"):
        st.function(lambda s: s.score("a", timeout=0.05)).run(backend=backend)
    assert backend.running == 0


def test_the_time_of_an_operation_begins_when_it_is_its_turn() -> None:
    backend = MockBackend(lambda text, params: "said", delay=0.2)
    program = st.function(lambda s: s.append(st.gen("x") + st.gen("y", timeout=0.35)))
    assert program.run(backend=backend)["y"] == "said"


def test_an_operation_within_its_time_leaves_no_limit_behind() -> None:
    backend = MockBackend(lambda text, params: "said", delay=0.02)

    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x", timeout=0.1) + st.gen("y", timeout=5)
        s["y"]
        time.sleep(0.15)
        s += st.gen("z")

    assert program.run(backend=backend)["z"] == "said"


def test_a_subroutines_limit_is_its_own_and_can_be_caught_around_it() -> None:
    backend = MockBackend(lambda text, params: "late", **SLOW)

    @st.function
    def ask(s: st.ProgramState) -> Any:
        s += st.gen("answer", timeout=0.05)
        return s["answer"]

    @st.function
    def program(s: st.ProgramState) -> str:
        try:
            return str(ask(s.copy()))
        except Timeout as error:
            return f"no answer: {error.variable}"

    assert program.run(backend=backend).value == "no answer: answer"


def test_an_async_program_meets_the_limit_at_its_read() -> None:
    backend = MockBackend(lambda text, params: "late", **SLOW)

    @st.function
    async def program(s: st.ProgramState) -> str:
        branch = s.copy()
        branch += st.gen("x", timeout=0.05)
        try:
            return str(await branch.get("x"))
        except Timeout:
            return "no answer"

    assert asyncio.run(program.arun(backend=backend)).value == "no answer"
    assert backend.running == 0


def test_the_stream_tells_that_the_time_was_over() -> None:
    backend = MockBackend(slow_words, pieces=3000, **SLOW)
    program = st.function(lambda s: s.append(st.gen("x", timeout=0.2, max_tokens=3000)))
    events: list[st.Event] = []
    with pytest.raises(Timeout) as caught:
        events.extend(program.stream(backend=backend))
    assert events[-1] == st.Failed("<lambda>", caught.value)
    told = "".join(event.text for event in events if isinstance(event, st.TextAdded))
    assert told == caught.value.partial


@pytest.mark.parametrize("end", ["timeout", "cancel"])
def test_a_backend_that_does_not_let_go_holds_no_branch(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "SETTLE_S", 0.1)
    monkeypatch.setattr(Pending, "cancel", lambda self: None)

    @st.function
    def program(s: st.ProgramState) -> None:
        branch = s.copy()
        branch += st.gen("x", timeout=0.05 if end == "timeout" else None)
        if end == "cancel":
            time.sleep(0.05)
            branch.cancel()
        with pytest.raises(st.StemmaError):
            branch["x"]

    start = time.monotonic()
    program.run(backend=MockBackend(["late"], delay=30))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("seconds", [0, -1, True, "1", float("nan")])
@pytest.mark.parametrize(
    "operation",
    [
        lambda t: st.gen("x", timeout=t),
        lambda t: st.select("x", ["a"], timeout=t),
        lambda t: st.gen("x", choices=["a"], timeout=t),
        lambda t: st.score("a", timeout=t),
    ],
)
def test_what_is_no_time_is_refused_where_it_is_written(
    operation: Callable[[Any], Any], seconds: Any
) -> None:
    with pytest.raises(InvalidArgument, match=r"timeout=.*above 0 seconds"):
        operation(seconds)


def test_an_outline_tells_the_limit_of_a_gen() -> None:
    program = st.function(lambda s: s.append(st.gen("x", max_tokens=8, timeout=1.5)))
    assert "max_tokens=8 timeout=1.5" in str(program.trace())

"""Every way to end a run early, on the local engine: it stops within one step and holds nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import stemma as st
from stemma.backend.local.backend import LocalBackend
from stemma.lang.errors import Cancelled, Timeout
from tests.conftest import TinyModel

LONG = {"max_tokens": 100_000, "ignore_eos": True, "temperature": 0.0}


class Watched:
    """A backend, and how many steps its engine has begun when it was told to stop."""

    def __init__(self, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend = backend
        self.told_at: list[int] = []
        engine, cancel = backend.engine, backend.engine.cancel

        def watched(requests: Any) -> None:
            self.told_at.append(engine.counters.steps)
            cancel(requests)

        monkeypatch.setattr(engine, "cancel", watched)

    def wait_until_at_work(self, requests: int = 1) -> None:
        """Until that many requests are past their prompts."""
        while self.backend.stats().running < requests:
            time.sleep(0.002)
        tokens = self.backend.stats().output_tokens
        while self.backend.stats().output_tokens < tokens + 3 * requests:
            time.sleep(0.002)

    def check_idle(self) -> None:
        """It is told soon, stops within one step from there, and all it held is free again."""
        end = time.monotonic() + 10
        while (stats := self.backend.stats()).running + stats.waiting and time.monotonic() < end:
            gc.collect()
            time.sleep(0.002)
        assert (stats.running, stats.waiting) == (0, 0)
        assert (stats.protected_tokens, stats.private_tokens) == (0, 0)
        assert stats.steps - self.told_at[-1] <= 1
        self.backend.check()
        time.sleep(0.05)
        assert self.backend.stats().steps == stats.steps


@pytest.fixture(scope="module")
def local(tiny_model: TinyModel) -> Iterator[LocalBackend]:
    # Far longer than any of these tests lets it write.
    folder = tiny_model(max_position_embeddings=200_000)
    with LocalBackend(folder, kv_tokens=200_000) as backend:
        yield backend


@pytest.fixture
def watched(local: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> Watched:
    local.flush_cache()
    return Watched(local, monkeypatch)


def plain(s: st.ProgramState) -> None:
    s += "Once upon a time" + st.gen("x", **LONG)
    s["x"]


async def awaiting(s: st.ProgramState) -> None:
    s += "Once upon a time" + st.gen("x", **LONG)
    await s.get("x")


BODIES = pytest.mark.parametrize("body", [plain, awaiting])


def check_told(error: BaseException) -> None:
    """The exception says where it belongs and what was written until then."""
    assert error.partial  # type: ignore[attr-defined]
    assert error.partials == {error.branch: error.partial}  # type: ignore[attr-defined]
    assert error.variable == "x"  # type: ignore[attr-defined]
    (note,) = (note for note in error.__notes__ if note.startswith("gen of 'x'"))
    assert f"{__file__}:" in note
    assert "after writing" in note


@BODIES
def test_the_timeout_of_a_run(body: Callable[..., Any], watched: Watched) -> None:
    with pytest.raises(Timeout) as caught:
        st.function(body).run(backend=watched.backend, timeout=0.3)
    check_told(caught.value)
    watched.check_idle()


def test_the_timeout_of_a_gen(watched: Watched) -> None:
    program = st.function(lambda s: s.append("Once" + st.gen("x", timeout=0.3, **LONG)))
    with pytest.raises(Timeout) as caught:
        program.run(backend=watched.backend)
    check_told(caught.value)
    watched.check_idle()


def test_the_timeout_of_a_batchs_item(watched: Watched) -> None:
    (error,) = st.function(plain).run_batch(
        [{"timeout": 0.3}], backend=watched.backend, return_exceptions=True
    )
    assert isinstance(error, Timeout)
    check_told(error)
    watched.check_idle()


def interrupt_soon(watched: Watched) -> None:
    def interrupt() -> None:
        watched.wait_until_at_work()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()


def test_an_interrupt(watched: Watched) -> None:
    interrupt_soon(watched)
    with pytest.raises(KeyboardInterrupt) as caught:
        st.function(plain).run(backend=watched.backend)
    check_told(caught.value)
    assert caught.value.state.label == "plain"  # type: ignore[attr-defined]
    watched.check_idle()


def test_an_interrupt_while_a_stream_is_read(watched: Watched) -> None:
    stream = st.function(plain).stream(backend=watched.backend)
    interrupt_soon(watched)
    with pytest.raises(KeyboardInterrupt) as caught:
        list(stream)
    check_told(caught.value)
    watched.check_idle()


@BODIES
def test_a_cancelled_task(body: Callable[..., Any], watched: Watched) -> None:
    async def main() -> None:
        task = asyncio.create_task(st.function(body).arun(backend=watched.backend))
        await asyncio.to_thread(watched.wait_until_at_work)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        check_told(caught.value)

    asyncio.run(main())
    watched.check_idle()


@BODIES
def test_a_closed_stream(body: Callable[..., Any], watched: Watched) -> None:
    with st.function(body).stream(backend=watched.backend) as stream:
        watched.wait_until_at_work()
    assert watched.backend.stats().running == 0
    with pytest.raises(Cancelled) as caught:
        list(stream)
    check_told(caught.value)
    watched.check_idle()


def test_a_stream_left_early(watched: Watched) -> None:
    for event in st.function(plain).stream(backend=watched.backend):
        if isinstance(event, st.TextAdded) and event.variable:
            break
    watched.check_idle()


def test_a_state_that_goes_out_of_use(watched: Watched) -> None:
    state = st.function(plain).run(backend=watched.backend, stream=True)
    watched.wait_until_at_work()
    del state
    watched.check_idle()


def test_a_finished_state_that_goes_on_and_out_of_use(watched: Watched) -> None:
    state = st.function(lambda s: s.append("Once")).run(backend=watched.backend)
    state += st.gen("x", **LONG)
    watched.wait_until_at_work()
    del state
    watched.check_idle()


def test_a_branch_cancelled_on_purpose(watched: Watched) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branch = s.copy()
        branch += "Once" + st.gen("x", **LONG)
        watched.wait_until_at_work()
        branch.cancel()
        with pytest.raises(Cancelled) as caught:
            branch["x"]
        check_told(caught.value)

    program.run(backend=watched.backend)
    watched.check_idle()


def test_the_losers_of_a_race(watched: Watched) -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        s += "Once upon a time"
        branches = s.fork(4)
        for place, branch in enumerate(branches):
            branch += st.gen("x", **{**LONG, "max_tokens": 20 if place == 2 else 100_000})
        winner = branches.race()
        for place in (0, 1, 3):
            with pytest.raises(Cancelled) as caught:
                branches[place]["x"]
            check_told(caught.value)
        return winner.label

    assert program.run(backend=watched.backend).value == "program/2"
    watched.check_idle()


def test_many_branches_at_once_tell_each_what_it_had_written(watched: Watched) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Once upon a time"
        branches = s.fork(12)
        branches += [f" {i}" + st.gen("x", **LONG) for i in range(12)]

    with pytest.raises(Timeout) as caught:
        program.run(backend=watched.backend, timeout=0.5)
    assert sorted(caught.value.partials) == sorted(f"program/{i}" for i in range(12))
    assert all(caught.value.partials.values())
    assert len(caught.value.__notes__) == 10
    watched.check_idle()


def test_the_bodys_own_error(watched: Watched) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Once" + st.gen("x", **LONG)
        watched.wait_until_at_work()
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        program.run(backend=watched.backend)
    watched.check_idle()


def test_a_choice_and_a_score_that_take_too_long(watched: Watched) -> None:
    choices = [f" {i} " + "word " * 300 for i in range(40)]
    for operation in (
        st.select("x", choices, timeout=0.02),
        st.score("word " * 10_000, "x", timeout=0.02),
    ):
        program = st.function(lambda s, operation=operation: s.append("Once" + operation))
        with pytest.raises(Timeout):
            program.run(backend=watched.backend)
        watched.check_idle()

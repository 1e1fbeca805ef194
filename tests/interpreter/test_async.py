"""Async programs and `arun`: awaiting, hints instead of blocking, cancellation, many at once."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.lang.errors import StemmaError, Timeout


def echo(prompt: str, params: st.SamplingParams) -> str:
    return f"<{prompt[-3:]}>"


@st.function
async def tips(s: st.ProgramState, topic: str) -> list[str]:
    s += topic
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        branch += f"{i}" + st.gen("tip")
    assert await branches.get("tip") == [await branch.get("tip") for branch in branches]
    joined = await branches.ajoin()
    s += "!" + st.gen("end")
    await s.wait()
    assert s.text() == topic + "!" + s["end"]
    return joined["tip"]


def test_an_async_program_runs_with_await_and_without() -> None:
    backend = MockBackend(echo, delay=0.02)
    assert asyncio.run(tips.arun("ab", backend=backend)).value == ["<ab0>", "<ab1>"]
    assert tips.run(topic="cd", backend=backend).value == ["<cd0>", "<cd1>"]


def test_a_plain_read_of_an_unfinished_variable_says_what_to_write() -> None:
    @st.function
    async def program(s: st.ProgramState) -> Any:
        s += st.gen("x")
        for read in (lambda: s["x"], s.text, s.tokens):
            with pytest.raises(StemmaError, match=r'await s\.get\("x"\)'):
                read()
        await s.get("x")
        return s["x"]

    backend = MockBackend(["a"], delay=0.1)
    state = asyncio.run(program.arun(backend=backend))
    assert state.value == state["x"] == "a"


def test_a_plain_program_under_arun_does_not_block_the_loop() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        s += st.gen("x")
        return s["x"], threading.current_thread() is threading.main_thread()

    async def main() -> tuple[list[Any], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        runs = [program.arun(backend=backend) for _ in range(100)]
        states = await asyncio.gather(*runs)
        ticking.cancel()
        return [state.value for state in states], ticks

    backend = MockBackend(lambda p, q: "a", delay=0.3)
    start = time.monotonic()
    values, ticks = asyncio.run(main())
    assert values == [("a", False)] * 100
    assert ticks > 3
    assert backend.most_running > 50
    assert time.monotonic() - start < 5


def test_running_an_async_program_inside_a_loop_says_what_to_write() -> None:
    async def main() -> None:
        with pytest.raises(StemmaError, match=r"await tips\.arun"):
            tips.run("x", backend=MockBackend())

    asyncio.run(main())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_cancelling_the_task_stops_the_run(asynchronous: bool) -> None:
    backend = MockBackend(["never"], delay=60)

    @st.function
    def plain(s: st.ProgramState) -> None:
        s += st.gen("x")
        s["x"]

    @st.function
    async def awaiting(s: st.ProgramState) -> None:
        s += st.gen("x")
        await s.get("x")

    async def main() -> None:
        task = asyncio.create_task((awaiting if asynchronous else plain).arun(backend=backend))
        while not backend.running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.running == 0

    asyncio.run(main())


def test_a_timeout_also_ends_other_waiting() -> None:
    @st.function
    async def program(s: st.ProgramState) -> None:
        s += st.gen("x")
        await asyncio.sleep(60)

    backend = MockBackend(["never"], delay=60)
    start = time.monotonic()
    with pytest.raises(Timeout, match=r"0\.1 s"):
        asyncio.run(program.arun(backend=backend, timeout=0.1))
    assert time.monotonic() - start < 5
    assert backend.running == 0


def test_a_timeout_of_the_bodys_own_stays_its_own() -> None:
    @st.function
    async def program(s: st.ProgramState) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(program.arun(backend=MockBackend()))
    assert not isinstance(caught.value, StemmaError)


def test_errors_reach_the_awaiting_read() -> None:
    @st.function
    async def program(s: st.ProgramState) -> str:
        risky = s.copy()
        risky += st.gen("x")
        try:
            await risky.get("x")
        except ZeroDivisionError:
            return "saved"
        return "not raised"

    backend = MockBackend([ZeroDivisionError()], delay=0.01)
    assert asyncio.run(program.arun(backend=backend)).value == "saved"


def test_one_backend_serves_threads_and_loops_at_once() -> None:
    backend = MockBackend(echo, delay=0.02)
    values: list[Any] = []

    def work(i: int) -> None:
        if i % 2:
            values.append(asyncio.run(tips.arun("ab", backend=backend)).value)
        else:
            values.append(tips.run("ab", backend=backend).value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [["<ab0>", "<ab1>"]] * 8

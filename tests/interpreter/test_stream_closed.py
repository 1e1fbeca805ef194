"""A stream that is closed or lost, and a state that goes out of use: nothing is computed on."""

from __future__ import annotations

import asyncio
import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.lang.errors import Cancelled, StemmaError, Timeout


@st.function
def program(s: st.ProgramState) -> str:
    s += "a" + st.gen("x")
    s += st.gen("y")
    return str(s["y"])


@st.function
async def asynchronous(s: st.ProgramState) -> str:
    s += "a" + st.gen("x")
    s += st.gen("y")
    return str(await s.get("y"))


def endless() -> MockBackend:
    """Writes for a minute, ten words a second."""
    return MockBackend(lambda text, params: "w " * 100, delay=60, pieces=600)


def eventually(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not true() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.005)
    return true()


def idle(backend: MockBackend) -> bool:
    return backend.running == 0 and backend.open_branches == 0


def is_word(event: st.Event) -> bool:
    return isinstance(event, st.TextAdded) and event.variable == "x"


@pytest.mark.parametrize("body", [program, asynchronous])
def test_closing_stops_the_run_and_waits_until_the_backend_has_let_go(body: st.Program) -> None:
    backend = endless()
    stream = body.stream(backend=backend)
    next(event for event in stream if is_word(event))
    stream.close()
    assert backend.running == 0
    with pytest.raises(Cancelled, match="closed or cancelled") as caught:
        list(stream)
    assert caught.value.partial.startswith("w")
    assert caught.value.variable == "x"
    stream.close()  # harmless
    with pytest.raises(Cancelled):
        stream.state["x"]


def test_the_end_of_a_with_block_closes() -> None:
    backend = endless()
    with program.stream(backend=backend) as stream:
        next(event for event in stream if is_word(event))
    assert backend.running == 0
    with program.stream(backend=MockBackend(lambda t, p: "said")) as stream:
        assert list(stream)[-1] == st.Ended("program", "said")
    assert stream.state["y"] == "said"


def test_a_loop_left_early_leaves_nothing_running() -> None:
    backend = endless()
    for event in program.stream(backend=backend):
        if is_word(event):
            break
    assert eventually(lambda: idle(backend))


def test_a_loop_left_early_goes_on_where_the_stream_is_kept() -> None:
    backend = MockBackend(lambda t, p: "said " * 3, delay=0.1, pieces=3)
    stream = program.stream(backend=backend)
    for event in stream:
        if is_word(event):
            break
    gc.collect()
    assert list(stream)[-1] == st.Ended("program", "said " * 3)


@pytest.mark.parametrize("keep", ["state", "events", "text"])
def test_whoever_can_read_the_run_keeps_it_going(keep: str) -> None:
    stream = program.stream(backend=MockBackend(lambda t, p: "said", delay=0.1))
    kept: Any = stream.state
    if keep != "state":
        kept = iter(stream) if keep == "events" else kept.text_iter("y")
    if keep != "state":
        first = next(kept)
    del stream
    gc.collect()
    if keep == "state":
        assert kept["y"] == "said"
    elif keep == "text":
        assert first == "said"
    else:
        assert list(kept)[-1] == st.Ended("program", "said")


def test_a_state_in_the_background_that_goes_out_of_use_stops_its_run() -> None:
    backend = endless()
    state = program.run(backend=backend, stream=True)
    assert eventually(lambda: backend.running == 1)
    del state
    assert eventually(lambda: idle(backend))


def test_a_finished_state_that_goes_on_and_out_of_use_is_stopped() -> None:
    backend = MockBackend(lambda t, p: "said" if t in ("a", "asaid") else "w " * 100)
    state = program.run(backend=backend)
    backend.delay = 60
    state += st.gen("z")
    assert eventually(lambda: backend.running == 1)
    del state
    assert eventually(lambda: idle(backend))


def test_a_state_out_of_use_first_does_what_a_copy_of_it_waits_for() -> None:
    backend = MockBackend(lambda t, p: "said", delay=0.05)
    state = program.run(backend=backend)
    state += "b" + st.gen("z")
    (copy,) = state.fork(1)
    state += st.gen("unread")
    copy += st.gen("w")
    del state
    gc.collect()
    assert copy.text() == "asaidsaidbsaidsaid"
    assert len(backend.calls) == 4
    del copy
    assert eventually(lambda: idle(backend))


def test_a_branch_of_a_run_is_finished_though_nobody_holds_it() -> None:
    backend = MockBackend(lambda t, p: "said", delay=0.05)

    @st.function
    def careless(s: st.ProgramState) -> None:
        s.copy().append("b" + st.gen("x"))
        gc.collect()

    assert "said" in str(careless.run(backend=backend).picture(children=True))


@pytest.mark.parametrize("body", [program, asynchronous])
def test_an_async_loop_left_early_leaves_nothing_running(body: st.Program) -> None:
    backend = endless()

    async def main() -> None:
        async for event in body.astream(backend=backend):
            if is_word(event):
                break
        for _ in range(500):
            if idle(backend):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("still running")

    asyncio.run(main())


@pytest.mark.parametrize("body", [program, asynchronous])
def test_a_cancelled_task_that_read_leaves_nothing_running(body: st.Program) -> None:
    backend = endless()

    async def read() -> None:
        async for _ in body.astream(backend=backend):
            pass

    async def main() -> None:
        task = asyncio.create_task(read())
        while not backend.running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(500):
            if backend.running == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("still running")

    asyncio.run(main())


def test_astream_runs_an_async_program_in_this_loop() -> None:
    @st.function
    async def in_loop(s: st.ProgramState, lock: asyncio.Lock) -> Any:
        async with lock:
            s += st.gen("x")
            return await s.get("x"), asyncio.get_running_loop()

    async def main() -> None:
        lock = asyncio.Lock()
        backend = MockBackend(lambda t, p: "a b c", delay=0.05, pieces=3)
        async with lock, in_loop.astream(lock, backend=backend) as stream:
            await asyncio.sleep(0.05)
            assert not backend.calls  # it waits for the lock
            with pytest.raises(StemmaError, match="await"):
                stream.state["x"]
            lock.release()
            assert [piece async for piece in stream.state.text_async_iter("x")] == ["a ", "b ", "c"]
            assert await stream.state.get("x") == "a b c"
            events = [event async for event in stream]
            await lock.acquire()
        assert events[-1] == st.Ended("in_loop", ("a b c", asyncio.get_running_loop()))
        await stream.state.wait()
        assert stream.state.text() == "a b c"

    asyncio.run(main())


def test_astream_gives_what_stream_gives() -> None:
    async def read(body: st.Program) -> list[st.Event]:
        backend = MockBackend(lambda t, p: "a b", delay=0.02, pieces=2)
        return [event async for event in body.astream(backend=backend)]

    plain = list(program.stream(backend=MockBackend(lambda t, p: "a b", delay=0.02, pieces=2)))
    assert asyncio.run(read(program)) == plain
    renamed = [(type(event), getattr(event, "text", None)) for event in plain]
    of_async = asyncio.run(read(asynchronous))
    assert [(type(event), getattr(event, "text", None)) for event in of_async] == renamed


def test_astream_raises_the_programs_error_at_the_end() -> None:
    @st.function
    async def clumsy(s: st.ProgramState) -> None:
        s += "a"
        await s.wait()
        raise ZeroDivisionError("mine")

    async def main() -> None:
        stream = clumsy.astream(backend=MockBackend())
        with pytest.raises(ZeroDivisionError):
            [event async for event in stream]
        with pytest.raises(ZeroDivisionError):
            await stream.state.get("never written")
        with pytest.raises(ZeroDivisionError):
            await stream.state.wait()

    asyncio.run(main())


def test_a_loop_that_ends_before_its_stream_cancels_it_without_a_warning() -> None:
    backend = endless()
    streams = []

    async def main() -> None:
        streams.append(asynchronous.astream(backend=backend))
        while not backend.running:
            await asyncio.sleep(0.01)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        assert backend.running == 0
        with pytest.raises(Cancelled, match="cut short by CancelledError"):
            list(streams.pop())
        gc.collect()


def test_astream_of_an_async_program_without_a_loop_says_what_to_write() -> None:
    with pytest.raises(StemmaError, match=r"async function, or asynchronous\.stream"):
        asynchronous.astream(backend=MockBackend())


def test_a_body_that_sleeps_holds_no_reader_of_a_cancelled_stream() -> None:
    @st.function
    def sleepy(s: st.ProgramState) -> None:
        s += "a" + st.gen("x")
        s["x"]
        time.sleep(3)

    for options in ({}, {"timeout": 0.2}):
        start = time.monotonic()
        stream = sleepy.stream(backend=MockBackend(lambda t, p: "said"), **options)
        assert stream.state["x"] == "said"
        if not options:
            stream.close()
        error = Timeout if options else Cancelled
        with pytest.raises(error):
            list(stream)
        with pytest.raises(error):
            stream.state["never written"]
        with pytest.raises(error):
            "".join(stream.state.text_iter())
        assert stream.state["x"] == "said"
        assert time.monotonic() - start < 2


def test_an_async_body_that_sleeps_is_woken_when_its_stream_is_closed() -> None:
    did: list[str] = []

    @st.function
    async def sleepy(s: st.ProgramState) -> None:
        s += st.gen("x")
        await s.get("x")
        try:
            did.append("slept")
            await asyncio.sleep(60)
        finally:
            did.append("woke")

    with sleepy.stream(backend=MockBackend(lambda t, p: "said")) as stream:
        assert eventually(lambda: did == ["slept"])
    with pytest.raises(Cancelled):
        list(stream)
    assert eventually(lambda: did == ["slept", "woke"])

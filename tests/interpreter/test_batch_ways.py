"""Batches as items finish and in event loops; retries; how many at once; resumed progress."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.interpreter import batch as batch_module
from stemma.interpreter.progress import BatchProgress
from stemma.lang.errors import InvalidArgument, Timeout


def echo(prompt: str, params: st.SamplingParams) -> str:
    return prompt[-2:]


@st.function
def program(s: st.ProgramState, word: str, fail: bool = False) -> str:
    s += word + st.gen("x")
    if fail:
        raise ZeroDivisionError(word)
    return str(s["x"])


@st.function
async def later(s: st.ProgramState, word: str, seconds: float = 0.0) -> Any:
    s += word + st.gen("x")
    await asyncio.sleep(seconds)
    return await s.get("x"), asyncio.get_running_loop()


def soon(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


# As they finish


def test_results_come_as_they_finish_with_their_place() -> None:
    may_end = threading.Event()

    @st.function
    def waiting(s: st.ProgramState, word: str) -> str:
        if word == "a":
            assert may_end.wait(10)
        return word

    results = waiting.iter_batch([("a",), ("b",), ("c",)], backend=MockBackend())
    early = {index: state.value for index, state in itertools.islice(results, 2)}
    may_end.set()
    assert early == {1: "b", 2: "c"}
    assert [(index, state.value) for index, state in results] == [(0, "a")]


def test_items_are_taken_only_a_little_ahead_of_the_reader() -> None:
    taken: list[int] = []

    def endless() -> Iterator[tuple[str]]:
        for i in itertools.count():
            taken.append(i)
            yield (f"{i}",)

    results = program.iter_batch(endless(), backend=MockBackend(echo), concurrency=2)
    assert sorted(next(results)[0] for _ in range(10))[0] == 0
    time.sleep(0.05)
    assert 10 <= len(taken) <= 14
    results.close()  # type: ignore[attr-defined]
    assert list(results) == []


def test_an_iterator_that_is_closed_stops_the_rest() -> None:
    backend = MockBackend(lambda text, params: "", delay=30)
    quick = st.function(lambda s, i: s.append("a" + (st.gen("x") if i else "")))
    results = quick.iter_batch([(i,) for i in range(8)], backend=backend, concurrency=4)
    assert next(results)[0] == 0
    results.close()  # type: ignore[attr-defined]
    assert soon(lambda: backend.running == 0)


def test_an_iterator_raises_the_first_error_or_gives_it_in_its_place() -> None:
    items: list[Any] = [("a",), ("b", True), ("c",)]
    options: dict[str, Any] = {"backend": MockBackend(echo)}
    with pytest.raises(ZeroDivisionError, match="b"):
        list(program.iter_batch(items, concurrency=1, **options))
    results = dict(program.iter_batch(items, return_exceptions=True, **options))
    assert [type(results[i]) for i in range(3)] == [
        st.ProgramState,
        ZeroDivisionError,
        st.ProgramState,
    ]


# In an event loop


def test_bodies_of_an_async_program_run_in_the_loop_of_their_caller() -> None:
    async def main() -> None:
        items = [(f"a{i}",) for i in range(20)]
        states = await later.arun_batch(items, backend=MockBackend(echo, delay=0.01))
        loop = asyncio.get_running_loop()
        assert [state.value for state in states] == [(f"a{i}"[-2:], loop) for i in range(20)]

    asyncio.run(main())


def test_the_loop_goes_on_while_a_plain_batch_runs() -> None:
    async def main() -> tuple[list[st.ProgramState], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        states = await program.arun_batch(
            [("a",), ("b",)], backend=MockBackend(echo, delay=0.2), concurrency=1
        )
        ticking.cancel()
        return states, ticks

    states, ticks = asyncio.run(main())
    assert [state.value for state in states] == ["a", "b"]
    assert ticks > 10


def test_a_batch_without_await_runs_in_a_running_loop_too() -> None:
    async def main() -> list[Any]:
        options: dict[str, Any] = {"backend": MockBackend(echo)}
        return [s["x"] for s in later.run_batch([("a",)], **options)] + [
            s["x"] for s in program.run_batch([("b",)], **options)
        ]

    assert asyncio.run(main()) == ["a", "b"]


def test_async_results_come_as_they_finish() -> None:
    async def main() -> list[int]:
        items = [{"word": "a", "seconds": 0.3}, {"word": "b"}, {"word": "c", "seconds": 0.1}]
        results = later.aiter_batch(items, backend=MockBackend(echo))
        return [index async for index, _ in results]

    assert asyncio.run(main()) == [1, 2, 0]


@pytest.mark.parametrize("which", [program, later], ids=["plain", "async"])
def test_cancelling_the_task_stops_all_items(which: st.Program) -> None:
    backend = MockBackend(echo, delay=60)

    async def main() -> None:
        task = asyncio.create_task(which.arun_batch([("a",)] * 6, backend=backend, concurrency=3))
        while backend.running < 3:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.running == 0

    start = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - start < 5
    assert len(backend.calls) == 3


def test_an_async_body_that_waits_for_something_else_is_cancelled_at_once() -> None:
    ended: list[str] = []

    @st.function
    async def sleeper(s: st.ProgramState, fail: bool) -> None:
        try:
            await asyncio.sleep(0.05 if fail else 60)
        finally:
            ended.append("failed" if fail else "cancelled")
        raise ZeroDivisionError

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await sleeper.arun_batch([(False,), (True,), (False,)], backend=MockBackend())

    start = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - start < 5
    assert sorted(ended) == ["cancelled", "cancelled", "failed"]


def test_an_async_iterator_that_is_closed_stops_the_rest() -> None:
    backend = MockBackend(echo, delay=60)

    async def main() -> None:
        items = [{"word": "a"}] * 6
        results = later.aiter_batch(items, backend=backend, concurrency=3, timeout=60)
        waiting = asyncio.ensure_future(anext(results))
        while backend.running < 3:
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert backend.running == 0

    asyncio.run(main())


# Timeouts and retries


def test_the_timeout_is_each_items_own() -> None:
    slow = st.function(lambda s, n: [s.append("a" + st.gen("x")) or s["x"] for _ in range(n)])
    backend = MockBackend(lambda text, params: "b", delay=0.1)
    results = slow.run_batch(
        [(1,), (50,), (1,), (1,)],
        backend=backend,
        timeout=0.6,
        concurrency=1,
        return_exceptions=True,
    )
    assert [type(each) for each in results] == [
        st.ProgramState,
        Timeout,
        st.ProgramState,
        st.ProgramState,
    ]


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "FIRST_PAUSE_S", 0.001)


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("error", [ConnectionError("gone"), RuntimeError("CUDA"), Timeout("late")])
def test_what_may_pass_is_tried_again_with_the_same_seed(error: Exception) -> None:
    def seeds(prompt: str, params: st.SamplingParams) -> str:
        return str(params.seed)

    undisturbed = program.run_batch([("a",)], backend=MockBackend(seeds), seed=1)
    backend = MockBackend(seeds, fail={1: error, 2: error})
    states = program.run_batch([("a",)], backend=backend, seed=1, retries=2)
    assert states[0]["x"] == undisturbed[0]["x"]
    assert len(backend.calls) == 3


@pytest.mark.usefixtures("no_pause")
def test_after_its_retries_an_item_fails_with_its_error() -> None:
    backend = MockBackend(echo, fail={i: ConnectionError(f"{i}") for i in range(1, 9)})
    results = program.run_batch(
        [("a",), ("b",)], backend=backend, retries=3, return_exceptions=True, concurrency=1
    )
    assert [str(result) for result in results] == ["4", "8"]
    assert "run_batch: tried 4 times" in results[0].__notes__  # type: ignore[union-attr]
    (raised,) = program.run_batch(
        [("a",)], backend=MockBackend([OSError()]), return_exceptions=True
    )
    assert not any("tried" in note for note in raised.__notes__)  # type: ignore[union-attr]


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("x"),
        st.errors.ContextOverflow("x", needed=2, limit=1),
        st.errors.UnsupportedByBackend("x"),
        st.errors.BackendClosed("x"),
        st.StemmaError("x"),
    ],
)
def test_a_refusal_is_not_tried_again(error: Exception) -> None:
    backend = MockBackend(echo, fail={1: error})
    with pytest.raises(type(error)):
        program.run_batch([("a",)], backend=backend, retries=3)
    assert len(backend.calls) == 1


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    "error", [ValueError("x"), TypeError("x"), KeyboardInterrupt(), AssertionError()]
)
def test_what_the_body_makes_of_a_text_is_not_tried_again(error: BaseException) -> None:
    tries: list[int] = []

    @st.function
    def body(s: st.ProgramState) -> None:
        tries.append(1)
        raise error

    results = body.run_batch([{}], backend=MockBackend(), retries=3, return_exceptions=True)
    assert results == [error]
    assert len(tries) == 1


@pytest.mark.usefixtures("no_pause")
def test_an_oserror_of_the_body_is_tried_again() -> None:
    tries: list[int] = []

    @st.function
    def body(s: st.ProgramState) -> int:
        tries.append(1)
        if len(tries) < 3:
            raise FileNotFoundError
        return len(tries)

    assert body.run_batch([{}], backend=MockBackend(), retries=3)[0].value == 3


def test_a_pause_before_a_retry_ends_with_the_batch() -> None:
    @st.function
    def body(s: st.ProgramState, fail: bool) -> None:
        if fail:
            time.sleep(0.1)
            raise ZeroDivisionError
        raise ConnectionError

    batch_module_pause = batch_module.FIRST_PAUSE_S
    assert batch_module_pause < 1
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        body.run_batch([(False,), (True,)], backend=MockBackend(), retries=20, concurrency=2)
    assert time.monotonic() - start < 5


def test_retries_in_an_event_loop() -> None:
    backend = MockBackend(echo, fail={1: ConnectionError()})
    states = asyncio.run(later.arun_batch([("a",)], backend=backend, retries=1))
    assert states[0]["x"] == "a"


@pytest.mark.parametrize("retries", [-1, 1.5, True, "1"])
def test_retries_are_a_number(retries: Any) -> None:
    with pytest.raises(InvalidArgument, match="retries="):
        program.run_batch([("a",)], backend=MockBackend(), retries=retries)


# How many at once


@pytest.mark.parametrize(
    ("most", "expected", "delay"),
    [(3, 3, 0.1), (None, 40, 2.0), (1000, 40, 2.0)],  # time for 40 threads on a busy machine
)
def test_as_many_items_as_the_backend_runs_requests(
    most: int | None, expected: int, delay: float
) -> None:
    backend = MockBackend(echo, delay=delay)
    backend.max_running = most
    program.run_batch([(f"{i}",) for i in range(40)], backend=backend)
    assert backend.most_running == expected


def test_never_more_threads_than_256() -> None:
    running = 0
    most = 0
    lock = threading.Lock()

    @st.function
    def body(s: st.ProgramState, i: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.2)
        with lock:
            running -= 1

    backend = MockBackend()
    backend.max_running = 5000
    body.run_batch([(i,) for i in range(600)], backend=backend)
    assert 200 < most <= 256


def test_concurrency_and_num_threads_are_two_names_of_one() -> None:
    for options in ({"concurrency": 3}, {"num_threads": 3}):
        backend = MockBackend(echo, delay=0.02)
        program.run_batch([("a",)] * 12, backend=backend, **options)  # type: ignore[call-overload]
        assert backend.most_running == 3
    with pytest.raises(InvalidArgument, match="two names of one"):
        program.run_batch([("a",)], backend=MockBackend(), concurrency=3, num_threads=3)
    for wrong in (0, True, 1.0, "many"):
        with pytest.raises(InvalidArgument, match=f"concurrency={wrong!r}"):
            program.run_batch([("a",)], backend=MockBackend(), concurrency=wrong)


def test_a_parameter_may_have_the_name_of_a_setting_of_batches() -> None:
    body = st.function(lambda s, ordered, lazy, loop, how: (ordered, lazy, loop, how))
    options: dict[str, Any] = {
        "ordered": 1,
        "lazy": 2,
        "loop": 3,
        "how": 4,
        "backend": MockBackend(),
    }
    assert body.run_batch([{}], **options)[0].value == (1, 2, 3, 4)
    assert next(body.iter_batch([{}], **options))[1].value == (1, 2, 3, 4)


# Progress


def test_progress_tells_what_was_resumed_and_counts_it_in_no_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"backend": MockBackend(echo), "checkpoint": tmp_path / "run.jsonl"}
    program.run_batch([("a",), ("b",)], **options)
    program.run_batch([("a",), ("b",)], progress=True, **options)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "run_batch: 2/2 items, 0.0 items/s, 0 tok/s, 2 resumed"


def test_a_resumed_item_moves_the_bar() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=120, color_system=None)
    with BatchProgress(2, console=console) as progress:
        progress.advance({"a": "record of another kind"}, resumed=True)
        progress.advance(program.run("a", backend=MockBackend(echo)))
    assert isinstance(console.file, StringIO)
    assert "2/2" in console.file.getvalue()
    assert "1 resumed" in console.file.getvalue()

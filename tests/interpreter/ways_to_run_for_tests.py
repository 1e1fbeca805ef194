"""Every way to run a program, and to cut it short from outside.

Each function runs the program and notes in the records what it came to; what it raises is what the
run, or the reading of it, has raised.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import stemma as st


class Record(Protocol):
    """Where a run's outcome is noted. told: the texts of a stream by branch, read to its end."""

    told: dict[str, str] | None

    def end(self, result: object) -> None: ...


@dataclass(frozen=True)
class Cut:
    """How a run is ended from outside: by its timeout, after some time, or after some results."""

    timeout: float | None = None
    after_s: float | None = None
    after: int | None = None


def read_events(record: Record, events: Iterator[Any], cut: Cut) -> bool:
    """Read a stream; False where it was left early."""
    told: defaultdict[str, str] = defaultdict(str)
    for number, event in enumerate(events, 1):
        if isinstance(event, st.TextAdded):
            told[event.branch] += event.text
        if number == cut.after:
            return False
    record.told = dict(told)
    return True


@contextmanager
def later(seconds: float | None, job: Callable[[], object]) -> Iterator[None]:
    """Do `job` after so many seconds, in another thread."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, job)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def run(record: Record, program: Any, how: dict[str, Any], cut: Cut) -> None:
    record.end(program.run(**how))


def background(record: Record, program: Any, how: dict[str, Any], cut: Cut) -> None:
    state = program.run(**how, stream=True)
    pieces = enumerate(state.text_iter(), 1)
    if any(number == cut.after for number, _ in pieces):
        return
    assert state.value == "done"
    record.end(state)


def stream(record: Record, program: Any, how: dict[str, Any], cut: Cut) -> None:
    stream = program.stream(**how)
    with later(cut.after_s, stream.cancel):
        if read_events(record, stream, cut):
            record.end(stream.state)
            return
    if cut.after is not None and cut.after % 2:
        stream.close()


async def arun(record: Record, program: Any, how: dict[str, Any], cut: Cut) -> None:
    task = asyncio.ensure_future(program.arun(**how))
    if cut.after_s is not None:
        await asyncio.sleep(cut.after_s)
        task.cancel()
    record.end(await task)


async def astream(record: Record, program: Any, how: dict[str, Any], cut: Cut) -> None:
    async with program.astream(**how) as stream:
        if cut.after_s is not None:
            asyncio.get_running_loop().call_later(cut.after_s, stream.cancel)
        told: defaultdict[str, str] = defaultdict(str)
        number = 0
        async for event in stream:
            number += 1
            if isinstance(event, st.TextAdded):
                told[event.branch] += event.text
            if number == cut.after:
                return
        record.told = dict(told)
        record.end(stream.state)


def run_batch(records: list[Record], program: Any, how: dict[str, Any], cut: Cut) -> None:
    items = [{"which": which} for which in range(len(records))]
    results = program.run_batch(items, **how, return_exceptions=True)
    for record, result in zip(records, results, strict=True):
        record.end(result)


def generator_style(records: list[Record], program: Any, how: dict[str, Any], cut: Cut) -> None:
    items = [(which,) for which in range(len(records))]
    batch = program.run_batch(items, **how, return_exceptions=True, generator_style=True)
    with closing(batch):
        for number, (record, result) in enumerate(zip(records, batch, strict=False), 1):
            record.end(result)
            if number == cut.after:
                return


def iter_batch(records: list[Record], program: Any, how: dict[str, Any], cut: Cut) -> None:
    items = ({"which": which} for which in range(len(records)))
    with closing(program.iter_batch(items, **how, return_exceptions=True)) as batch:
        for number, (index, result) in enumerate(batch, 1):
            records[index].end(result)
            if number == cut.after:
                return


async def arun_batch(records: list[Record], program: Any, how: dict[str, Any], cut: Cut) -> None:
    items = [(which,) for which in range(len(records))]
    task = asyncio.ensure_future(program.arun_batch(items, **how, return_exceptions=True))
    if cut.after_s is not None:
        await asyncio.sleep(cut.after_s)
        task.cancel()
    for record, result in zip(records, await task, strict=True):
        record.end(result)


async def aiter_batch(records: list[Record], program: Any, how: dict[str, Any], cut: Cut) -> None:
    items = [{"which": which} for which in range(len(records))]
    async with aclosing(program.aiter_batch(items, **how, return_exceptions=True)) as batch:
        number = 0
        async for index, result in batch:
            number += 1
            records[index].end(result)
            if number == cut.after:
                return


CUTS: dict[Callable[..., Any], tuple[str, ...]] = {
    run: ("timeout",),
    background: ("timeout", "after"),
    stream: ("timeout", "after", "after_s"),
    arun: ("timeout", "after_s"),
    astream: ("timeout", "after", "after_s"),
}
BATCH_CUTS: dict[Callable[..., Any], tuple[str, ...]] = {
    run_batch: ("timeout",),
    generator_style: ("timeout", "after"),
    iter_batch: ("timeout", "after"),
    arun_batch: ("timeout", "after_s"),
    aiter_batch: ("timeout", "after"),
}


async def leaving_no_task(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    finally:
        me = asyncio.current_task()
        await eventually_async(lambda: asyncio.all_tasks() <= {me})


async def eventually_async(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end, asyncio.all_tasks()
        await asyncio.sleep(0.001)

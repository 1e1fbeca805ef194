"""A value that is not there yet: what `s["x"]` reads.

Made by the state that queues an operation, resolved once by the dispatcher, awaited by any thread
or task.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Variable:
    """Resolved once, by `finish` or `fail`; never locked.

    value: what the program reads. raw: its text (or texts). meta: how it came about. error: why it
    never will. unreadable: why there is a text but no value; only who reads the value is told.
    asides: the variables that its operation makes besides it, which fail with it: of the reasoning
    before its text, or of captures in it.
    samples: how many texts it is of. streamed: whether its text is told while it is written.
    told: how many values of its name the branch tells of up to this one; a name may be written
    again.
    """

    __slots__ = (
        "_callbacks",
        "asides",
        "done",
        "error",
        "meta",
        "raw",
        "samples",
        "streamed",
        "told",
        "unreadable",
        "value",
    )

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.raw: Any = None
        self.meta: Any = None
        self.error: BaseException | None = None
        self.unreadable: BaseException | None = None
        self.asides: tuple[Variable, ...] = ()
        self.samples = 1
        self.streamed = False
        self.told = 0
        self._callbacks: list[Callable[[], object]] = []

    @classmethod
    def of(cls, value: Any, *, raw: Any = None, meta: Any = None) -> Variable:
        """One that is there already."""
        variable = cls()
        variable.finish(value, raw=raw, meta=meta)
        return variable

    def finish(
        self,
        value: Any = None,
        *,
        raw: Any = None,
        meta: Any = None,
        unreadable: BaseException | None = None,
    ) -> None:
        """Resolve. unreadable: why there is a text but no value of the type that was asked for."""
        self.value, self.raw, self.meta, self.unreadable = value, raw, meta, unreadable
        self._resolve()

    def fail(self, error: BaseException) -> None:
        """Resolve with an error, unless it is resolved: a cancelled operation may still come in."""
        for aside in self.asides:
            aside.fail(error)
        if not self.done:
            self.error = error
            self._resolve()

    def _resolve(self) -> None:
        self.done = True
        for callback in tuple(self._callbacks):
            callback()
        self._callbacks.clear()

    def on_done(self, callback: Callable[[], object]) -> None:
        """Call `callback()` once resolved, from any thread; quick, and no harm if called twice.

        Appending first and looking afterwards, against resolving first and calling afterwards, is
        what makes a lock unnecessary: one of the two always sees the other.
        """
        self._callbacks.append(callback)
        if self.done:
            callback()

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until resolved; False if `timeout` seconds pass first."""
        if self.done:
            return True
        lock = threading.Lock()  # a third of what an Event costs
        lock.acquire()

        def open_up() -> None:
            with suppress(RuntimeError):  # called twice
                lock.release()

        self.on_done(open_up)
        return lock.acquire(timeout=-1 if timeout is None else timeout)

    async def wait_async(self) -> None:
        """Suspend this task until resolved."""
        if self.done:
            return
        event, wake = async_waker()
        self.on_done(wake)
        await event.wait()


def async_waker() -> tuple[asyncio.Event, Callable[[], None]]:
    """An event of the running loop, and a function that sets it from any thread."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(event.set)

    return event, wake

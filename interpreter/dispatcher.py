"""The one thread that moves programs forward: it runs short jobs, in the order they came.

Owned by the process, started by the first run. Every call into a backend branch is made here, so a
branch needs no lock, and a thousand waiting branches need no thousand threads. Jobs come from
programs (something was queued), from backends (something has finished) and from deadlines.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from stemma.lang.errors import BackendClosed, StemmaError

Job = Callable[[], object]


# A queue does not take any number of seconds; a longer pause is several.
_LONGEST_PAUSE = 3600.0
_FEW_TIMERS = 64
_LONGEST_END = 5.0


class Timer:
    """A job for later, which can be called off."""

    __slots__ = ("job",)

    def __init__(self, job: Job) -> None:
        self.job: Job | None = job

    def cancel(self) -> None:
        self.job = None

    def fire(self) -> None:
        if self.job is not None:
            self.job()


class Dispatcher:
    """Jobs and timers on one daemon thread."""

    def __init__(self) -> None:
        # SimpleQueue.put may be called from anywhere, finalizers and signal handlers included.
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._timers: list[tuple[float, int, Timer]] = []
        self._sweep_at = _FEW_TIMERS
        self._ending = False
        self._order = itertools.count()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._loop, name="stemma-dispatcher", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _end(self) -> None:
        """The process ends: stop before Python takes itself down.

        What a job holds, the last state or model among it, may not be freed by a daemon thread
        that Python then no longer lets in.
        """
        self._ending = True
        self.call(lambda: None)
        self._thread.join(timeout=_LONGEST_END)

    def call(self, job: Job) -> None:
        """Run `job()` on the dispatcher's thread, after everything that was called before."""
        self._jobs.put(job)

    def call_at(self, moment: float, job: Job) -> Timer:
        """Run `job()` at `moment` of `time.monotonic()`."""
        timer = Timer(job)
        entry = (moment, next(self._order), timer)
        self._jobs.put(lambda: self._set(entry))
        return timer

    def call_in(self, seconds: float, job: Job) -> Timer:
        """Run `job()` after so many seconds."""
        return self.call_at(time.monotonic() + seconds, job)

    def _set(self, entry: tuple[float, int, Timer]) -> None:
        if len(self._timers) >= self._sweep_at:  # of those called off, only the moment lets go
            self._timers = [timer for timer in self._timers if timer[2].job is not None]
            heapq.heapify(self._timers)
            self._sweep_at = max(_FEW_TIMERS, 2 * len(self._timers))
        heapq.heappush(self._timers, entry)

    def check_may_wait(self) -> None:
        """Raise where waiting never ends: on the dispatcher's own thread, and after os.fork."""
        if os.getpid() != self._process:
            raise BackendClosed(
                "this run belongs to the process that started it, not to its os.fork()"
            )
        if threading.current_thread() is self._thread:
            raise StemmaError("a value was read from the thread that would have to produce it")

    def _loop(self) -> None:
        while not self._ending:
            job = self._next_job()
            try:
                job()
            except (
                Exception
            ):  # jobs answer for their own errors: this is a defect, but others must go on
                logging.getLogger("stemma").exception("a job of the dispatcher failed")
            del job  # else what the last job of all refers to would stay alive

    def _next_job(self) -> Job:
        while True:
            pause = None
            if self._timers:
                pause = min(self._timers[0][0] - time.monotonic(), _LONGEST_PAUSE)
                if pause <= 0:
                    return heapq.heappop(self._timers)[2].fire
            try:  # for each job: `suppress` would cost more than the rest
                return self._jobs.get(timeout=pause)
            except Empty:
                continue


_current: Dispatcher | None = None
_lock = threading.Lock()


def dispatcher() -> Dispatcher:
    """The dispatcher of this process."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = Dispatcher()
    return _current


def _forget() -> None:
    """A forked child has no dispatcher thread; its next run starts one."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)

"""Functions to be run later, on one thread for all scripted backends of the process.

Used by `mock.py`, whose replies take time.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable


class Clock:
    """Runs functions later, each at its moment. Its thread starts with the first of them."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def at(self, moment: float, function: Callable[[], object]) -> None:
        with self._changed:
            heapq.heappush(self._due, (moment, next(self._order), function))
            if self._thread is None or not self._thread.is_alive():  # not alive: after os.fork
                self._thread = threading.Thread(target=self._loop, name="mock-clock", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    pause = self._due[0][0] - time.monotonic() if self._due else None
                    self._changed.wait(pause)
                function = heapq.heappop(self._due)[2]
            function()
            del function

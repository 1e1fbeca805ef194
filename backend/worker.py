"""A thread that calls what may take its time, so that nobody else has to wait.

Used by `mock.py`, for the functions of a script.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

# How long a caller waits for a quick function: what follows from it then comes in the same order
# whenever a program is run.
GRACE_S = 0.25
# How long the thread waits for the next one, before it ends.
IDLE_S = 1.0


class Worker:
    """Calls functions one after the other, in the order given, in a thread that comes and goes.

    A caller waits for a function that is quick. Once one was not, it waits for none any more.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], object], threading.Event]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._slow = False

    def call(self, function: Callable[[], object]) -> None:
        """Call `function()`, which answers for its own errors."""
        done = threading.Event()
        with self._changed:
            self._jobs.append((function, done))
            if self._thread is None or not self._thread.is_alive():  # not alive: after os.fork
                self._thread = threading.Thread(target=self._loop, name="mock-worker", daemon=True)
                self._thread.start()
            self._changed.notify()
        inside = threading.current_thread() is self._thread  # it calls the backend itself
        if not self._slow and not inside and not done.wait(GRACE_S):
            self._slow = True

    def _loop(self) -> None:
        while True:
            with self._changed:
                if not self._jobs and not self._changed.wait_for(lambda: self._jobs, IDLE_S):
                    self._thread = None
                    return
                function, done = self._jobs.popleft()
            function()
            done.set()
            del function, done  # else what they refer to would stay alive

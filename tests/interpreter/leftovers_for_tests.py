"""What programs must not leave behind, and what to do where one does not end."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 60.0


@contextmanager
def watchdog(what: str) -> Iterator[None]:
    """Interrupts what takes too long, after telling where all threads are; if that does not help,
    it ends the process.
    """
    over = threading.Event()

    def bark() -> None:
        out = sys.__stderr__
        assert out is not None
        print(f"{what}: hangs", file=out, flush=True)
        faulthandler.dump_traceback(file=out, all_threads=True)
        os.kill(os.getpid(), signal.SIGINT)
        if not over.wait(PATIENCE_S):
            os._exit(1)

    timer = threading.Timer(PATIENCE_S, bark)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        over.set()
        timer.cancel()
        timer.join()


def eventually(check: Callable[[], None]) -> None:
    """Until it raises nothing."""
    end = time.monotonic() + 10
    pause = 0.0005
    while True:
        try:
            check()
            return
        except AssertionError:
            if time.monotonic() > end:
                raise
        time.sleep(pause)
        if pause > 0.005:
            gc.collect()
        pause = min(2 * pause, 0.1)


def check_threads(before: set[threading.Thread]) -> None:
    """No thread is there that was not there before, but those that are the process's."""
    lasting = {"stemma-dispatcher", "mock-clock", "stemma-engine"}
    new = [t for t in threading.enumerate() if t not in before and t.name not in lasting]
    assert not new, new

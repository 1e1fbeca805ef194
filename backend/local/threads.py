"""Work of torch beside the engine's thread, without slowing that down.

OpenMP gives every thread that runs something in parallel a team of its own, for as long as the
thread lives, and has teams wait asleep instead of awake once they have more members than there are
processors: a small step of the engine then takes twice as long. Called by LocalBackend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from stemma.lang.own_thread import start_thread

T = TypeVar("T")


def on_own_thread(work: Callable[[], T]) -> T:
    """Return or raise what `work` does, on a thread that ends with it, and its team."""
    thread, future = start_thread(work, "stemma-load", daemon=True)
    try:
        return future.result()
    finally:
        if future.done():
            thread.join()

"""A stack that is deep enough for what recurses into a grammar, on whatever thread it is asked for.

llguidance takes some kilobytes of stack for every rule, schema or group that lies in another one,
and a thread has half a megabyte on some systems. Used wherever a grammar is compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 64 * 1024 * 1024  # of which only what is used is ever taken
SHALLOW = 500  # characters of a source, in which nothing can lie deep

_starting = threading.Lock()


def on_deep_stack(source: str, work: Callable[[], T]) -> T:
    """Return or raise what `work` does with a source; on a thread of its own if that is long."""
    if len(source) <= SHALLOW:
        return work()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="stemma-grammar", daemon=True)
    with _starting:  # the size holds for all threads that start meanwhile
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return future.result()

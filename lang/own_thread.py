"""Work on a thread of its own, which ends with it: for what takes long, needs a deep stack, or
leaves something behind with its thread.

Used by `constraints_stack.py` and by the local engine; whoever starts it waits for the future, or
has it tell.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_starting = threading.Lock()


def start_thread(
    work: Callable[[], T], name: str, *, daemon: bool = False, stack_bytes: int | None = None
) -> tuple[threading.Thread, Future[T]]:
    """Start `work`: its thread, and a future of what it returns or raises.

    daemon: a process that ends does not wait for it; Rust and C++ may crash then. stack_bytes: of
    which only what is used is ever taken; None for what the system gives.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    if stack_bytes is None:
        thread.start()
        return thread, future
    with _starting:  # the size holds for all threads that start meanwhile
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread, future

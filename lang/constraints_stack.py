"""A stack that is deep enough for what recurses into a grammar, on whatever thread it is asked for.

llguidance takes some kilobytes of stack for every rule, schema or group that lies in another one,
and a thread has half a megabyte on some systems. Used wherever a grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from stemma.lang.own_thread import start_thread

T = TypeVar("T")

STACK_BYTES = 64 * 1024 * 1024  # of which only what is used is ever taken
SHALLOW = 500  # characters of a source, in which nothing can lie deep


def on_deep_stack(source: str, work: Callable[[], T]) -> T:
    """Return or raise what `work` does with a source; on a thread of its own if that is long."""
    if len(source) <= SHALLOW:
        return work()
    return start_thread(work, "stemma-grammar", stack_bytes=STACK_BYTES)[1].result()

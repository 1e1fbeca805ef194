"""What happens in a run, as a stream of typed events, and `Feed`, the list that carries them to
readers.

Written by the dispatcher and by backend threads; read by `Program.stream` and
`ProgramState.text_iter`.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stemma.interpreter.variable import async_waker

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened on the branch with that label."""

    branch: str


@dataclass(frozen=True, slots=True)
class TextAdded(Event):
    """The branch has grown by `text`; `variable` is the one that it belongs to, None for literals
    and for the marks around a reasoning that is kept apart.
    """

    text: str
    variable: str | None = None


@dataclass(frozen=True, slots=True)
class VariableStarted(Event):
    """The model begins to write the variable."""

    variable: str


@dataclass(frozen=True, slots=True)
class VariableFinished(Event):
    """The variable can be read."""

    variable: str
    value: Any


@dataclass(frozen=True, slots=True)
class Selected(Event):
    """A choice was made; `probabilities` has every choice."""

    variable: str | None
    choice: str
    probabilities: dict[str, float]


@dataclass(frozen=True, slots=True)
class Forked(Event):
    """The branch was split; `children` are the labels of the new branches."""

    children: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Joined(Event):
    """The branch has taken over the variables of `children`."""

    children: tuple[str, ...]
    variables: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """An operation of the branch failed."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Ended(Event):
    """The run ended well: the last event. Where a run fails the iterator raises instead."""

    value: Any


class Feed(Generic[T]):
    """A growing list for any number of readers, threads and tasks alike; each gets everything from
    the start.

    Writers never wait for readers.
    """

    __slots__ = ("_closed", "_error", "_items", "_wakers")

    def __init__(self) -> None:
        self._items: list[T] = []
        self._wakers: list[Callable[[], object]] = []
        self._closed = False
        self._error: BaseException | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        self._wake()

    def close(self, error: BaseException | None = None) -> None:
        """Nothing follows. With `error`, every reader raises it after the last item."""
        self._error = error
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        for wake in tuple(self._wakers):
            wake()

    def __iter__(self) -> Iterator[T]:
        more = threading.Event()
        self._wakers.append(more.set)
        position = 0
        try:
            while True:
                more.clear()
                closed = self._closed  # read before the items: whatever follows it wakes us again
                while position < len(self._items):
                    yield self._items[position]
                    position += 1
                if closed:
                    break
                more.wait()
        finally:
            self._wakers.remove(more.set)
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[T]:
        more, wake = async_waker()
        self._wakers.append(wake)
        position = 0
        try:
            while True:
                more.clear()
                closed = self._closed
                while position < len(self._items):
                    yield self._items[position]
                    position += 1
                if closed:
                    break
                await more.wait()
        finally:
            self._wakers.remove(wake)
        if self._error is not None:
            raise self._error

"""`Feed`: the events of a run, or of one branch, for any number of readers.

Written by the dispatcher and by backend threads; read by `Program.stream` and
`ProgramState.text_iter`. What is kept of them takes memory by the length of the text, not by the
number of its pieces.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace

from stemma.interpreter.events import Event, Forked, Joined, TextAdded
from stemma.interpreter.variable import async_waker

# As many events are kept as they came; beyond, the pieces of a text are put together.
FEW = 1000


def merged(events: Iterable[Event]) -> list[Event]:
    """The same in fewer events: what a branch grows by is one text until anything else happens on
    it. The order is that of every branch, and of branches that fork and join.
    """
    result: list[Event] = []
    pieces: list[tuple[int, TextAdded, list[str]]] = []
    growing: dict[str, tuple[int, TextAdded, list[str]]] = {}  # by branch
    for event in events:
        if isinstance(event, TextAdded):
            known = growing.get(event.branch)
            if known is not None and known[1].variable == event.variable:
                known[2].append(event.text)
                continue
            growing[event.branch] = (len(result), event, [event.text])
            pieces.append(growing[event.branch])
        else:
            growing.pop(event.branch, None)
            if isinstance(event, Forked | Joined):
                for label in event.children:
                    growing.pop(label, None)
        result.append(event)
    for place, event, texts in pieces:
        if len(texts) > 1:
            result[place] = replace(event, text="".join(texts))
    return result


class _Log:
    """Events in order, merged whenever they have become twice as many as was left of them."""

    __slots__ = ("_full", "events")

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events = list(events)
        self._full = max(FEW, 2 * len(self.events))

    def append(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) > self._full:
            self.events = merged(self.events)
            self._full = max(FEW, 2 * len(self.events))


class _Reader:
    """What one reader has not got yet, and how to wake it."""

    __slots__ = ("log", "wake")

    def __init__(self, log: _Log, wake: Callable[[], object]) -> None:
        self.log = log
        self.wake = wake


class Feed:
    """A growing list of events for any number of readers, threads and tasks alike; each gets
    everything from the start.

    Writers never wait for readers. A reader that comes late, or lags behind, gets the same text in
    fewer and longer pieces.
    """

    __slots__ = ("_closed", "_error", "_kept", "_lock", "_readers")

    def __init__(self) -> None:
        self._kept = _Log()
        self._readers: list[_Reader] = []
        self._closed = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # never held while anybody waits

    def put(self, event: Event) -> None:
        with self._lock:
            if self._closed:  # of a run that was cancelled, and whose body still goes on
                return
            self._kept.append(event)
            for reader in tuple(self._readers):
                reader.log.append(event)
        self._wake()

    def close(self, error: BaseException | None = None) -> None:
        """Nothing follows. With `error`, every reader raises it after the last event. The first
        closing counts.
        """
        with self._lock:
            if not self._closed:
                self._error = error
                self._closed = True
        self._wake()

    def _wake(self) -> None:
        for reader in tuple(self._readers):
            reader.wake()

    def _join(self, wake: Callable[[], object]) -> _Reader:
        with self._lock:
            reader = _Reader(_Log(self._kept.events), wake)
            self._readers.append(reader)
        return reader

    def _take(self, reader: _Reader) -> tuple[list[Event], bool]:
        """What is new, and whether nothing follows."""
        with self._lock:
            log, reader.log = reader.log, _Log()
            return log.events, self._closed

    def __iter__(self) -> Iterator[Event]:
        more = threading.Event()
        reader = self._join(more.set)
        closed = False
        try:
            while not closed:
                more.clear()
                events, closed = self._take(reader)
                yield from events
                del events
                if not closed:
                    more.wait()
        finally:
            self._readers.remove(reader)  # without the lock: a finalizer may come here
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[Event]:
        more, wake = async_waker()
        reader = self._join(wake)
        closed = False
        try:
            while not closed:
                more.clear()
                events, closed = self._take(reader)
                for event in events:
                    yield event
                del events
                if not closed:
                    await more.wait()
        finally:
            self._readers.remove(reader)
        if self._error is not None:
            raise self._error

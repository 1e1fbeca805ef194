"""Who is told what happens on one branch: the run's feed, and the feeds of readers of its text.

Owned by an executor, used on the dispatcher's thread. Only generations speak from the backend's.
"""

from __future__ import annotations

from stemma.interpreter.events import Event, TextAdded, VariableFinished
from stemma.interpreter.feed import Feed
from stemma.interpreter.flight import Flight
from stemma.interpreter.transcript import Transcript


class Listeners:
    """False when nobody listens: then no event need be made."""

    __slots__ = ("_label", "_of_run", "_readers")

    def __init__(self, label: str, of_run: Feed | None) -> None:
        self._label = label
        self._of_run = of_run
        self._readers: list[Feed] = []

    def __bool__(self) -> bool:
        return self._of_run is not None or bool(self._readers)

    def tell(self, event: Event) -> None:
        self.tell_run(event)
        self.tell_readers(event)

    def tell_readers(self, event: Event) -> None:
        """An event that only readers of the text are told."""
        for feed in self._readers:
            feed.put(event)

    def tell_run(self, event: Event) -> None:
        """An event that no reader of the text waits for."""
        if self._of_run is not None:
            self._of_run.put(event)

    def tell_text(self, text: str, variable: str | None = None) -> None:
        if text and self:
            self.tell(TextAdded(self._label, text, variable))

    def follow(self, flight: Flight) -> None:
        """Tell everybody the text of a generation as it grows."""
        if self._of_run is not None:
            flight.relay_to(self._of_run, self._label)
        for feed in self._readers:
            flight.relay_to(feed, self._label)

    def add(self, feed: Feed) -> None:
        """A reader of this branch only."""
        self._readers.append(feed)

    def catch_up(self, transcript: Transcript, flight: Flight | None) -> None:
        """Tell the readers what was before they came, on a branch that just began."""
        for feed in self._readers:
            self.tell_all(feed, transcript, flight)

    def tell_all(self, feed: Feed, transcript: Transcript, flight: Flight | None) -> None:
        """Tell one reader everything up to now, and the generation under way."""
        for piece in transcript:
            if piece.text:
                feed.put(TextAdded(self._label, piece.text, piece.variable))
            for name, value in piece.reads:
                feed.put(VariableFinished(self._label, name, value))
        if flight is not None:
            flight.relay_to(feed, self._label)

    def close(self, feed: Feed, error: BaseException | None) -> None:
        """Nothing more for that reader."""
        if feed in self._readers:
            self._readers.remove(feed)
            feed.close(error)

    def close_all(self, error: BaseException | None) -> None:
        """The run has ended; it closes its own feed."""
        self._of_run = None
        for feed in list(self._readers):
            self.close(feed, error)

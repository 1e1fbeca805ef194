"""The operation that a backend is working on, and how its text reaches the feeds while it grows.

Owned by an executor, which flies one operation at a time.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from stemma.backend.base import Branch, Generation, Pending
from stemma.interpreter.events import Event, Feed, TextAdded
from stemma.interpreter.variable import Variable
from stemma.lang.ops import Gen, Score, Select


class Relay:
    """Passes the text of a generation on to a feed as it grows; at the end, the rest."""

    __slots__ = ("branch", "feed", "length", "variable")

    def __init__(self, feed: Feed[Event], branch: str, variable: str | None) -> None:
        self.feed, self.branch, self.variable = feed, branch, variable
        self.length = 0

    def __call__(self, piece: str) -> None:
        if piece:
            self.length += len(piece)
            self.feed.put(TextAdded(self.branch, piece, self.variable))

    def finish(self, text: str) -> None:
        self(text[self.length :])


@dataclass(slots=True)
class Flight:
    """The operation that the backend is working on. One handle, or one per sample."""

    operation: Gen | Select | Score
    variable: Variable | None
    handles: list[Pending[Any]] = field(default_factory=list)
    spare: list[Branch] = field(
        default_factory=list
    )  # of the samples that the branch does not go on with
    relays: list[Relay] = field(default_factory=list)
    error: BaseException | None = None

    def landed(self) -> bool:
        """True when nothing is in the air; the first failure brings the rest down."""
        waiting = [handle for handle in self.handles if not handle.done()]
        if self.error is None:
            errors = (handle.future.exception() for handle in self.handles if handle.done())
            self.error = next((error for error in errors if error is not None), None)
        if waiting and self.error is not None:
            self.cancel()
        return not waiting

    def relay_to(self, feed: Feed[Event], branch: str) -> None:
        """Tell `feed` the text as it grows. Only a generation has any before it lands."""
        if (generation := self.generation()) is not None:
            relay = Relay(feed, branch, self.operation.name)
            self.relays.append(relay)
            generation.subscribe(relay)

    def cancel(self) -> None:
        for handle in self.handles:
            with suppress(Exception):  # the handle's own outcome will tell
                handle.cancel()

    def generation(self) -> Generation | None:
        """The generation that the branch goes on with."""
        first = self.handles[0] if self.handles else None
        return first if isinstance(first, Generation) else None

    def text_so_far(self) -> str:
        """What it has written until now."""
        pieces: list[str] = []
        if (generation := self.generation()) is not None:
            generation.subscribe(pieces.append)
        return "".join(pieces)

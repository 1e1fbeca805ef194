"""The operation that a backend is working on, and how its text reaches the feeds while it grows.

Owned by an executor, which flies one operation at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from stemma.backend.base import Generation, Pending
from stemma.interpreter.dispatcher import Timer
from stemma.interpreter.events import TextAdded
from stemma.interpreter.feed import Feed
from stemma.interpreter.variable import Variable
from stemma.lang.ops import Gen, Score, Select
from stemma.lang.reasoning import Marks, Part, ReasoningSplit
from stemma.lang.sampling import SamplingParams, derive_seed, merged


class Relay:
    """Passes the text of a generation on to a feed as it grows; at the end, the rest."""

    __slots__ = ("branch", "feed", "flight", "length", "split")

    def __init__(self, feed: Feed, branch: str, flight: Flight) -> None:
        self.feed, self.branch, self.flight = feed, branch, flight
        self.split = flight.new_split()
        self.length = 0

    def __call__(self, piece: str) -> None:
        if piece and not self.flight.over:
            self.length += len(piece)
            if self.split is None:
                self.feed.put(TextAdded(self.branch, piece, self.flight.operation.name))
            else:
                self._tell(self.split.feed(piece))

    def finish(self, text: str) -> None:
        self(text[self.length :])
        if self.split is not None:
            self._tell(self.split.end())

    def _tell(self, parts: list[Part]) -> None:
        for part in parts:
            self.feed.put(TextAdded(self.branch, part.text, self.flight.name_of(part)))


@dataclass(slots=True)
class Flight:
    """The operation that the backend is working on. One handle, or one per sample.

    draws: the parameters of a generation's samples. marks: of a generation whose reasoning is kept
    apart. inside: it begins with reasoning. over: nobody is told any more of what it still writes.
    timer: of its limit, or, once it is ended, of the backend's to let go.
    """

    operation: Gen | Select | Score
    variable: Variable | None
    handles: list[Pending[Any]] = field(default_factory=list)
    draws: list[SamplingParams] = field(default_factory=list)
    relays: list[Relay] = field(default_factory=list)
    error: BaseException | None = None
    marks: Marks | None = None
    inside: bool = False
    over: bool = False
    timer: Timer | None = None
    _arrived: deque[Future[Any]] = field(default_factory=deque)
    _landed: int = 0

    def on_arrival(self, callback: Callable[[], object]) -> None:
        """Call `callback()` whenever a handle has resolved, from the backend's thread."""

        def arrive(future: Future[Any]) -> None:
            self._arrived.append(future)
            callback()

        for handle in self.handles:
            handle.add_done_callback(arrive)

    def landed(self) -> bool:
        """True when nothing is in the air; the first failure brings the rest down.

        Looks at what has arrived since it was asked last, for there may be thousands of samples.
        """
        while self._arrived:
            error = self._arrived.popleft().exception()
            self._landed += 1
            if error is not None and self.error is None:
                self.error = error
                self.cancel()
        return self._landed == len(self.handles)

    def relay_to(self, feed: Feed, branch: str) -> None:
        """Tell `feed` the text as it grows. Only a generation has any before it lands."""
        if (generation := self.generation()) is not None:
            relay = Relay(feed, branch, self)
            self.relays.append(relay)
            generation.subscribe(relay)

    def finish_relays(self, text: str) -> None:
        """The whole text is known: tell what the feeds have not got yet."""
        for relay in self.relays:
            relay.finish(text)
        self.over = True

    def set_timer(self, timer: Timer | None) -> None:
        """In place of the one that it had."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = timer

    def new_split(self) -> ReasoningSplit | None:
        """For the text of a generation, where reasoning is kept apart in it."""
        return ReasoningSplit(self.marks, inside=self.inside) if self.marks is not None else None

    def parts(self, text: str) -> list[Part]:
        """A text of the operation in its parts."""
        split = self.new_split()
        if split is None:
            return [Part("answer", text)] if text else []
        return split.feed(text) + split.end()

    def name_of(self, part: Part) -> str | None:
        """The variable that a part belongs to; none has the marks."""
        if part.kind == "answer":
            return self.operation.name
        if part.kind == "reasoning" and isinstance(self.operation, Gen):
            return self.operation.reasoning
        return None

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


def draws_of(operation: Gen, defaults: SamplingParams | None, seed: int) -> list[SamplingParams]:
    """One for each sample. `seed`: of the first, where nobody has given it one."""
    params = operation.params
    if defaults is not None:
        params = merged(defaults, params, operation.given)
    first = seed if params.seed is None else params.seed
    seeds = (first, *(derive_seed(first, i) for i in range(1, params.n)))
    return [params.one_draw(seed) for seed in seeds]

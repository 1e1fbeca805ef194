"""Guesses what a request says next, so that one step can compute several of its tokens.

A draft comes from the radix tree (what earlier requests said after the same words) or from the
request's own text (what it said last after the same three tokens). Its tokens become rows of the
step behind the request's own; every row draws with the number that it would draw with in a step of
its own, and what follows the first draw that differs is forgotten. So the output is the same as
without, at any temperature; only the time differs (Leviathan et al. 2023, with the request's seeded
draw in place of a rejection test; drafts from the text itself: Saxena 2023).

How long a draft may be is what it is worth: row k of a draft is wanted if all before it were right,
p^k, p being the share of drafts that came true. It saves the request one step, of which it pays
its share; it costs what a row costs. Both are measured. Used by the scheduler, for requests that
decode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from stemma.backend.local.memory import RequestMemory
from stemma.backend.local.request import IntArray, Request

Source = Literal["tree", "text"]

LONGEST = 15
"""Tokens of a draft at most: with the row before them, as many as make one block of rows."""

RECENT = 4_096
"""Of a longer text only the last so many tokens are searched."""

ASK_AGAIN = 16
"""Tokens after which a request that went its own way looks whether the tree has caught up."""

_GRAM = 3  # tokens that must be the same before a text is expected to repeat itself
_MARGIN = 1.2  # what a row must promise to bring in, for each that it costs
_SURE = 0.95  # no draft is trusted more
_MEMORY = 0.95  # what each observation leaves of those before it, of costs and of one request
_HELD_UP = 1.5  # a step that takes so much longer than expected was held up
_LONG_MEMORY = 0.99  # the same of all requests together
_WIDTH = 4  # bytes of a token
NO_DRAFT: IntArray = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class Trust:
    """The share of drafted tokens that came true, of those that were put to the test."""

    right: float
    tested: float

    @property
    def share(self) -> float:
        return min(self.right / self.tested, _SURE)

    def learn(self, right: int, tested: int, memory: float) -> None:
        self.right = memory * self.right + right
        self.tested = memory * self.tested + tested


def _first_impressions() -> dict[Source, Trust]:
    return {"tree": Trust(3, 4), "text": Trust(2, 4)}


@dataclass(slots=True)
class Drafting:
    """What is known about drafts for one request.

    source: of its latest. trust: in each source; None until it was tried. ask_tree: the length from
    which on the tree is asked. off: it wants no more.
    """

    source: Source = "tree"
    trust: dict[Source, Trust] = field(default_factory=dict)
    ask_tree: int = 0
    off: bool = False


class StepCost:
    """The seconds of a step that only decodes, as a line over its rows, fitted to the latest."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = 0.0
        self._squares = self._products = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Of a step that was held up, by another process perhaps, only so much is believed."""
        if self._weight:
            seconds = min(seconds, _HELD_UP * sum(self._line(rows)))
        self._weight = _MEMORY * self._weight + 1
        self._rows = _MEMORY * self._rows + rows
        self._seconds = _MEMORY * self._seconds + seconds
        self._squares = _MEMORY * self._squares + rows * rows
        self._products = _MEMORY * self._products + rows * seconds

    def price(self, rows: int) -> float:
        """What one more row costs a step of so many, in units of a row's share of the step.

        Between 0 and 1. Steps of one size tell nothing about it: until there are others, a step is
        taken to cost as much as ten rows even without any.
        """
        if not self._weight:
            return rows / (rows + 10)
        fixed, of_rows = self._line(rows)
        return of_rows / (fixed + of_rows)

    def _line(self, rows: int) -> tuple[float, float]:
        """The seconds of a step of so many rows: those of any step, and those of its rows."""
        mean, seconds = self._rows / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean * mean
        covariance = self._products / self._weight - mean * seconds
        expected = seconds / (mean + 10)
        slope = max((covariance + expected) / (variance + 1), 0.1 * expected)
        return max(seconds - slope * mean, 0.0), slope * rows


class Speculation:
    """Drafts for the requests of one engine. Not to be asked between a draft and its `learn`."""

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._cost = StepCost()
        self._trust = _first_impressions()
        self.begin(0)

    def begin(self, decoding: int) -> None:
        """A step with so many requests that decode."""
        self._price = _MARGIN * self._cost.price(decoding) if decoding else 1.0
        self._first = {source: max(1, self._length(of.share)) for source, of in self._trust.items()}

    def observe(self, rows: int, seconds: float) -> None:
        """What a step took that only decoded."""
        self._cost.observe(rows, seconds)

    def draft(self, request: Request, limit: int) -> IntArray:
        """The tokens that the request is expected to say next, at most `limit`; often none."""
        state = request.drafting
        if state is None:
            state = request.drafting = Drafting()
        if state.off:
            return NO_DRAFT
        if request.tokens.size >= state.ask_tree:
            longest = min(limit, self._longest(state, "tree"))
            if longest > 0:
                state.source = "tree"
                draft = self._memory.continuation(request, longest)
                if len(draft):
                    return draft
                state.ask_tree = request.tokens.size + ASK_AGAIN
        longest = min(limit, self._longest(state, "text"))
        if longest > 0:
            state.source = "text"
            return repetition(request.tokens.view(), longest)
        return NO_DRAFT

    def learn(self, request: Request, *, right: int, drafted: int) -> None:
        """How many leading tokens of the request's latest draft came true."""
        state = request.drafting
        if state is None or not drafted:
            return
        tested = min(right + 1, drafted)
        everybody = self._trust[state.source]
        own = state.trust.setdefault(state.source, Trust(2 * everybody.share, 2))
        own.learn(right, tested, _MEMORY)
        everybody.learn(right, tested, _LONG_MEMORY)

    def _longest(self, state: Drafting, source: Source) -> int:
        """How long a draft may be. One token is tried of each source in any case."""
        own = state.trust.get(source)
        return self._first[source] if own is None else self._length(own.share)

    def _length(self, share: float) -> int:
        """How many tokens of a draft pay of which such a share comes true."""
        if share <= self._price:
            return 0
        if self._price <= 0:
            return LONGEST
        return min(LONGEST, int(math.log(self._price) / math.log(share)))


def repetition(tokens: IntArray, limit: int) -> IntArray:
    """What followed where the text last had its last three tokens before; at most `limit`."""
    recent = tokens[-RECENT:]
    text = recent.tobytes()  # bytes are searched several times faster than numbers are compared
    last, end = text[-_GRAM * _WIDTH :], len(text) - _WIDTH
    while (place := text.rfind(last, 0, end)) >= 0:
        token, inside = divmod(place, _WIDTH)
        if not inside:
            start = token + _GRAM
            return recent[start : start + limit].copy()
        end = place + len(last) - 1  # it begins inside a token: look before it
    return NO_DRAFT

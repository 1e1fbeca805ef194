"""What the engine counts, and the snapshot of it that users see (`LocalBackend.stats()`)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stemma.backend.local.request import Request


class Stopwatch:
    """Adds up the seconds spent in its `with` blocks, which must not be nested."""

    __slots__ = ("_since", "seconds")

    def __init__(self) -> None:
        self.seconds = self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since


@dataclass(slots=True)
class Counters:
    """Sums since the engine started; of requests, those that have ended. Written on the engine's
    thread.
    """

    steps: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    forced_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    alignment_lost_tokens: int = 0

    def add(self, request: Request) -> None:
        """Take in what a request has come to."""
        self.prompt_tokens += request.cached_tokens + request.computed_tokens
        self.cached_tokens += request.cached_tokens
        self.alignment_lost_tokens += request.unaligned_tokens or 0


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine between two steps. Counts are sums since it started, over all requests, whether
    they have ended or not; sizes are in tokens, as they are now.

    finished: requests that have ended, those that failed or were cancelled included.
    prompt_tokens, cached_tokens: prompt tokens that are done with, and those of them that came from
    the cache, or that another request of the same step computed. The others were computed; each
    token is counted once, however often its request goes back to the queue.
    computed_tokens: rows run through the model, of prompts, scored choices and outputs alike; what
    is computed again counts again. output_tokens: written, without a token that only ended a
    text; forced_tokens: those of them that a constraint left no choice about, which were not drawn.
    drafted_tokens: guesses of what comes next that were run through the model, too, and
    accepted_tokens those that came true, see `speculation.py`. The rows of the others are not among
    the computed ones.
    alignment_lost_tokens: prompt tokens that were cached when their request was admitted, and
    computed again because they did not fill a page there. 0 for pages of one token.
    step_seconds: the time of all steps. Of it, scheduling_seconds is everything about the queues
    and the cache: matching, locking, taking slots, inserting, evicting, choosing who runs, and
    looking for drafts.
    forward_seconds: laying out the batch, the model, and drawing tokens.
    pool_tokens == free_tokens + evictable_tokens + protected_tokens + private_tokens, where
    evictable is cached and unlocked, protected is cached and in use or pinned, private belongs to
    running requests alone. pinned_tokens: those of the protected ones that are pinned.
    """

    steps: int
    running: int
    waiting: int
    finished: int
    retractions: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    forced_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    alignment_lost_tokens: int
    evicted_tokens: int
    pool_tokens: int
    free_tokens: int
    evictable_tokens: int
    protected_tokens: int
    private_tokens: int
    pinned_tokens: int
    step_seconds: float
    scheduling_seconds: float
    forward_seconds: float

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that came from the cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

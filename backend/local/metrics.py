"""What the engine counts, and the snapshot of it that users see (`LocalBackend.stats()`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Sums since the engine started. Written on the engine's thread."""

    steps: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    alignment_lost_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine between two steps; sums since it started, sizes in tokens.

    prompt_tokens, cached_tokens: of finished requests; what other requests computed in the same
    step is cached.
    computed_tokens: rows run through the model, of prompts, scored choices and outputs alike.
    alignment_lost_tokens: prompt tokens of finished requests that were cached when the request was
    admitted, and computed again because they did not fill a page there. 0 for pages of one token.
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
    alignment_lost_tokens: int
    evicted_tokens: int
    pool_tokens: int
    free_tokens: int
    evictable_tokens: int
    protected_tokens: int
    private_tokens: int
    pinned_tokens: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that came from the cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

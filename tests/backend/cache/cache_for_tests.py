"""A small cache over a pool for the tests of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from stemma.backend.base import Namespace
from stemma.backend.local.cache.eviction import LRU, EvictionPolicy, Key
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.radix_cache import Insertion, RadixCache, RadixNode
from stemma.backend.local.cache.radix_key import Ints, RadixKey

HOME = Namespace()
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64])


def key(tokens: Sequence[int], namespace: Namespace = HOME) -> RadixKey:
    return RadixKey.of(tokens, namespace)


class Bench:
    """A cache over a pool, with the one thing that callers do most: bring a prompt into it.

    capacity: in tokens; by default 256 pages.
    """

    def __init__(
        self,
        capacity: int | None = None,
        page_size: int = 1,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.policy = policy if policy is not None else CountingLRU()
        size = 256 * page_size if capacity is None else capacity
        self.allocator = PageAllocator(size, page_size)
        self.cache = RadixCache(self.allocator, eviction=self.policy)

    def put(
        self,
        tokens: Sequence[int],
        namespace: Namespace = HOME,
        *,
        computed: bool = True,
        own: bool = False,
        priority: int = 0,
    ) -> Insertion:
        """Insert the whole pages of `tokens`, reusing what is cached."""
        whole = key(tokens, namespace)
        whole = whole.head(len(whole) - len(whole) % self.allocator.page_size)
        match = self.cache.match_prefix(whole, priority=priority)
        done = self.cache.insert(
            whole,
            np.concatenate((match.slots, self.take(len(whole) - match.length))),
            owned_from=match.length,
            computed=computed,
            own=own,
            priority=priority,
        )
        self.cache.check()
        return done

    def take(self, tokens: int) -> Ints:
        slots = self.allocator.alloc(tokens)
        assert slots is not None
        return slots

    def found(self, tokens: Sequence[int], namespace: Namespace = HOME) -> int:
        return self.cache.peek(key(tokens, namespace)).length

    def check_idle(self) -> None:
        """No locks, and every slot is either free or cached."""
        self.cache.check()
        assert self.cache.protected_tokens == 0
        assert self.allocator.free_tokens + self.cache.evictable_tokens == self.allocator.capacity


class CountingLRU(LRU):
    """LRU that counts how often a node was looked at."""

    def __init__(self) -> None:
        self.calls = 0

    def key(self, node: RadixNode) -> Key:
        self.calls += 1
        return super().key(node)

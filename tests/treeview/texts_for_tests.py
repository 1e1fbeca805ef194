"""A cache of texts for the tests of trees: a byte is a token, and no model is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stemma.backend.base import Namespace
from stemma.backend.local.cache.eviction import LRU
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.radix_cache import RadixCache
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.backend.local.cache.snapshot import TreeSnapshot
from stemma.treeview.marks import MarkedTree, compare

HOME, AWAY = Namespace(), Namespace(salt="away")


def decode(token_ids: Sequence[int]) -> str:
    """Tokens are bytes."""
    return bytes(token_ids).decode(errors="replace")


class Texts:
    """A cache of texts, a byte a token, computed as the engine does it: match, then insert."""

    def __init__(self, *texts: str, page_size: int = 1, capacity: int = 4096) -> None:
        self.allocator = PageAllocator(capacity, page_size)
        self.cache = RadixCache(self.allocator, eviction=LRU())
        self.compute(*texts)

    def compute(self, *texts: str, namespace: Namespace = HOME) -> None:
        page = self.allocator.page_size
        for text in texts:
            ids = list(text.encode())
            key = RadixKey.of(ids[: len(ids) // page * page], namespace)
            match = self.cache.match_prefix(key)
            own = self.allocator.alloc(len(key) - match.length)
            assert own is not None
            self.cache.insert(key, np.concatenate((match.slots, own)), owned_from=match.length)

    def now(self) -> TreeSnapshot:
        return self.cache.snapshot(decode)

    def evict(self, tokens: int) -> int:
        return self.cache.evict(tokens)

    def lock(self, text: str) -> None:
        self.cache.inc_lock_ref(
            self.cache.match_prefix(RadixKey.of(list(text.encode()), HOME)).node
        )


def four_marks() -> MarkedTree:
    """A tree with an edge of every mark, the hit one locked."""
    texts = Texts("system hello", "system bye", "other")
    before = texts.now()
    texts.compute("system bye bye")
    texts.lock("system ")
    texts.evict(1)
    return compare(before, texts.now(), decode)

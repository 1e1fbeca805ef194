"""A radix cache that is compared, at every match and eviction, with a look through all that it
holds. Used by the tests that drive a whole engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from stemma.backend.base import Namespace
from stemma.backend.local.cache.radix_cache import PrefixMatch, RadixCache, RadixNode
from stemma.backend.local.cache.radix_key import RadixKey


class Place(NamedTuple):
    """The last page of a prefix, by all tokens up to its end."""

    namespace: Namespace
    prefix: bytes


class WatchedCache(RadixCache):
    """Compares every match with a look through all sequences, and notes what leaves."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.left: set[Place] = set()

    def match_prefix(
        self, key: RadixKey, *, limit: int | None = None, priority: int = 0
    ) -> PrefixMatch:
        tokens = bytes(key.token_ids.tolist())[: None if limit is None else max(0, limit)]
        expected = self.longest(key.namespace, tokens)
        match = super().match_prefix(key, limit=limit, priority=priority)
        assert match.length == len(match.slots) == expected
        return match

    def longest(self, namespace: Namespace, tokens: bytes) -> int:
        lengths = [0]
        for node, path in self.paths():
            if node.namespace == namespace:
                alike = takewhile(lambda pair: pair[0] == pair[1], zip(path, tokens, strict=False))
                lengths.append(sum(1 for _ in alike))
        return self._tree.floor(max(lengths))

    def evict(self, tokens: int) -> int:
        before, evictable = self.places().keys(), self.evictable_tokens
        freed = super().evict(tokens)
        gone = before - self.places().keys()
        assert min(tokens, evictable) <= freed == len(gone) * self._tree.page_size
        self.left |= gone
        return freed

    def paths(self) -> Iterator[tuple[RadixNode, bytes]]:
        """All nodes with all tokens up to their end."""
        prefix_of: dict[RadixNode | None, bytes] = {self._tree.root: b""}
        for node in self._tree.nodes():
            prefix_of[node] = prefix_of[node.parent] + bytes(node.key.tolist())
            yield node, prefix_of[node]

    def places(self) -> dict[Place, RadixNode]:
        """All pages."""
        return {
            Place(node.namespace, path[:end]): node
            for node, path in self.paths()
            for end in range(len(path) - len(node) + self._tree.page_size, len(path) + 1)
            if self._tree.floor(end) == end
        }

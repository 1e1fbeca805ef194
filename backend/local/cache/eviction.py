"""Which unlocked leaf leaves the tree first: the order (a policy) and the queue that applies it.

`RadixCache` owns one queue; a policy is a value without state.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

from stemma.backend.local.cache.radix_tree import RadixNode


class EvictionPolicy(Protocol):
    """Orders the leaves of the tree.

    `key(node)` is smallest for the node to evict first. While a node is in the tree its key may
    only grow (a later use, one more hit): the queue then finds outdated entries early, never late.
    """

    @property
    def name(self) -> str: ...

    def key(self, node: RadixNode) -> tuple[float, ...]: ...


class LRU:
    """Least recently used first."""

    name = "lru"

    def key(self, node: RadixNode) -> tuple[float, ...]:
        return (node.last_access,)


class EvictionQueue:
    """A heap of candidate leaves with lazy entries.

    A node has at most one entry. Use, a lock or a new child leave the entry as it is; `pop` finds
    it outdated and files the node anew or forgets it. So an outdated entry costs one step, charged
    to the use that outdated it, and taking nodes out costs O(log n) each however large the tree is.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._heap: list[tuple[tuple[float, ...], int, RadixNode]] = []
        # equal keys leave in the order they came, and nodes are never compared
        self._ticket = count()

    def push(self, node: RadixNode) -> None:
        """Make the node a candidate, unless it is one."""
        if not node.queued:
            node.queued = True
            heappush(self._heap, (self.policy.key(node), next(self._ticket), node))

    def pop(self) -> RadixNode | None:
        """Take out the evictable node with the smallest key; None when there is none."""
        while self._heap:
            filed, _, node = heappop(self._heap)
            node.queued = False
            if not node.evictable:
                continue
            if self.policy.key(node) != filed:
                self.push(node)
                continue
            return node
        return None

    def forget_departed(self) -> None:
        """Drop the entries of nodes that have left the tree. Cost: the whole queue; for bulk
        removals.
        """
        self._heap = [entry for entry in self._heap if entry[2].parent is not None]
        heapify(self._heap)

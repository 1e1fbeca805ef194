"""Which unlocked leaf leaves the tree first: the orders (policies) and the queue that applies one.

`RadixCache` owns one queue; a policy is a value without state. `LocalBackend(eviction=...)` takes
the names of `POLICIES`.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

from stemma.backend.local.cache.radix_tree import RadixNode
from stemma.lang.errors import EngineInvariantError

Key = tuple[float, ...]


class EvictionPolicy(Protocol):
    """Orders the leaves of the tree.

    `key(node)` is smallest for the node to evict first, and depends on nothing but the node. It may
    change in either direction when the node is used, unlocked, let go by a branch, or becomes a
    leaf; at all other times it may only grow. (The queue looks at a node again at those moments,
    and finds out about growth by itself.)
    """

    @property
    def name(self) -> str: ...

    def key(self, node: RadixNode) -> Key: ...


class LRU:
    """Least recently used first: key = (last use).

    Source: the usual order; SGLang (Zheng et al. 2024, section 3) on leaves as here.
    """

    name = "lru"

    def key(self, node: RadixNode) -> Key:
        return (node.last_access,)


class LFU:
    """Least frequently used first: key = (hits, last use).

    hits: how many matches went through the node since it came in. Counts are never aged, so what
    was popular once stays. Right where uses do not depend on the past: Aho, Denning and Ullman
    1971, "Principles of Optimal Page Replacement".
    """

    name = "lfu"

    def key(self, node: RadixNode) -> Key:
        return (node.hits, node.last_access)


class SLRU:
    """Segmented LRU: what was never used again goes before what was: key = (hits > 0, last use).

    A scan of one-off prompts cannot push out what has proved useful. Source: Karedla, Love and
    Wherry 1994, "Caching Strategies to Improve Disk System Performance". There the second segment
    has a bound and gives back its oldest; here it has none, so it ages only once the first segment
    is empty.
    """

    name = "slru"

    def key(self, node: RadixNode) -> Key:
        return (node.hits > 0, node.last_access)


class FIFO:
    """First in, first out: key = (when it came in). Use does not count."""

    name = "fifo"

    def key(self, node: RadixNode) -> Key:
        return (node.created,)


class FILO:
    """First in, last out: key = (-when it came in). Keeps what came first for good."""

    name = "filo"

    def key(self, node: RadixNode) -> Key:
        return (-node.created,)


class MRU:
    """Most recently used first: key = (-last use).

    Best where prompts return in a circle larger than the pool. Source: Chou and DeWitt 1985, "An
    Evaluation of Buffer Management Strategies for Relational Database Systems".
    """

    name = "mru"

    def key(self, node: RadixNode) -> Key:
        return (-node.last_access,)


class Priority:
    """Lowest priority first: key = (priority, last use).

    priority: the largest among the requests that put the node in or matched it.
    """

    name = "priority"

    def key(self, node: RadixNode) -> Key:
        return (node.priority, node.last_access)


class ProgramAware:
    """What no open branch can go on from first: key = (class, last use).

    class 0: what was sampled or tried for one branch, where no open branch stands on it and no
    prompt has come back to it. 1: any other node that no open branch stands on. 2: what an open
    branch stands on, that is, finds again when it goes on. Ours: of the three only the third is
    known to be wanted again, and the first by nobody else. Requests without a branch say nothing of
    what they will want, so among theirs this is LRU.
    """

    name = "program-aware"

    def key(self, node: RadixNode) -> Key:
        if node.held:
            return (2, node.last_access)
        return (0 if node.own and not node.hits else 1, node.last_access)


POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (LRU, LFU, SLRU, FIFO, FILO, MRU, Priority, ProgramAware)
}
"""All policies by name."""


class EvictionQueue:
    """A heap of candidate leaves with lazy entries.

    A node has at most one valid entry, `node.entry`, and for an evictable node it never lies above
    the node's key: so the first valid entry that agrees with its node's key is the smallest. Use, a
    lock or a new child leave the entry as it is; where the key has grown, `pop` finds it outdated
    and files the node anew. Where the key has shrunk `push` files it anew at once, and the older
    entry is dropped when it comes up. So an outdated entry costs one step, charged to the use that
    outdated it, and taking nodes out costs O(log n) each however large the tree is.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._heap: list[tuple[Key, int, RadixNode]] = []
        self._invalid = 0
        # equal keys leave in the order they came, and nodes are never compared
        self._ticket = count()

    def push(self, node: RadixNode) -> None:
        """Make the node a candidate at its present key, unless it is one at that or a smaller."""
        key, entry = self.policy.key(node), node.entry
        if entry is not None:
            if entry[0] <= key:
                return
            self._invalid += 1
        node.entry = (key, next(self._ticket), node)
        heappush(self._heap, node.entry)
        if 2 * self._invalid > len(self._heap) > 64:
            self._tidy()

    def pop(self) -> RadixNode | None:
        """Take out the evictable node with the smallest key; None when there is none."""
        while self._heap:
            entry = heappop(self._heap)
            node = entry[2]
            if node.entry is not entry:
                self._invalid -= 1
                continue
            node.entry = None
            if not node.evictable:
                continue
            if self.policy.key(node) != entry[0]:
                self.push(node)
                continue
            return node
        return None

    def forget_departed(self) -> None:
        """Drop the entries of nodes that have left the tree. Cost: the whole queue; for bulk
        removals.
        """
        for _, _, node in self._heap:
            if node.parent is None:
                node.entry = None
        self._tidy()

    def check(self, node: RadixNode) -> None:
        """Raise EngineInvariantError unless this evictable node would be found in time."""
        if node.entry is None or node.entry[0] > self.policy.key(node):
            raise EngineInvariantError(
                f"a node of {len(node)} tokens could be evicted but is not queued"
            )

    def _tidy(self) -> None:
        """Keep the valid entries only."""
        self._heap = [entry for entry in self._heap if entry[2].entry is entry]
        heapify(self._heap)
        self._invalid = 0

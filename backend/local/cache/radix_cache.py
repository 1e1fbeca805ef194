"""Every token computed so far, found by its prefix, shared, locked and evicted: the cache itself.

Owns the slots in the tree's nodes; nobody else frees them. Called by the scheduler and the engine,
from the engine's thread only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stemma.backend.base import Namespace
from stemma.backend.local.cache.edge_text import Decode
from stemma.backend.local.cache.eviction import EvictionPolicy, EvictionQueue
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.radix_key import Ints, RadixKey
from stemma.backend.local.cache.radix_tree import Path, RadixNode, RadixTree, slots_of
from stemma.backend.local.cache.snapshot import TreeSnapshot, take_snapshot
from stemma.lang.errors import EngineInvariantError

__all__ = ["Insertion", "PrefixMatch", "RadixCache", "RadixNode"]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixMatch:
    """The longest cached prefix of a key: `node` ends where it ends, `slots` hold its KV (int32).

    computed: how many leading tokens have their KV; the step now running computes the rest.
    unaligned: how many tokens behind them, below the limit, are cached too but do not fill a page.
    """

    node: RadixNode
    slots: Ints
    length: int
    computed: int
    unaligned: int


class Peek(NamedTuple):
    """How many leading tokens of a key are in the tree, and how many of them have their KV."""

    length: int
    computed: int


@dataclass(frozen=True, slots=True, eq=False)
class Insertion:
    """A key that now lies in the tree: `node` ends where it ends, `slots` are the tree's for it.

    already: how many leading tokens the tree had before. computed: as in PrefixMatch.
    """

    node: RadixNode
    slots: Ints
    already: int
    computed: int


class RadixCache:
    """The prefixes held in one KV pool.

    Who owns the slots of a request's table before and after `insert(key, slots, owned_from=...)`:

                    0            owned_from         already             len(key)
        before      | the tree's     | the request's    | the request's    |
        tree has    | these          | others           | nothing          |
        after       | the tree's     | the tree's       | the tree's       |
                                       in the middle the request's are freed, and the returned
                                       slots say which take their place

    A pending node stands for KV that the step now running computes. It is matched like any other,
    and holds one lock of its own until `commit` or `rollback`: it is never evicted before.
    """

    def __init__(self, allocator: PageAllocator, *, eviction: EvictionPolicy) -> None:
        self.evicted_tokens = 0
        self._allocator = allocator
        self._tree = RadixTree(allocator.page_size)
        self._queue = EvictionQueue(eviction)
        self._step: list[RadixNode] = []  # inserted as pending, with one lock held for each
        self._clock = 0
        self._cached = 0
        self._protected = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens in the tree: evictable + protected."""
        return self._cached

    @property
    def evictable_tokens(self) -> int:
        """Tokens that `evict` could free now: all that are not locked."""
        return self._cached - self._protected

    @property
    def protected_tokens(self) -> int:
        """Tokens under a lock, those of pending nodes included."""
        return self._protected

    def match_prefix(
        self, key: RadixKey, *, limit: int | None = None, priority: int = 0
    ) -> PrefixMatch:
        """The longest cached prefix of `key`, in whole pages and at most `limit` tokens.

        Counts as a use and a hit of all nodes on the path, by a request of this priority. The node
        stays valid until something is evicted, flushed or rolled back: lock it before that.
        """
        stop = len(key) if limit is None else max(0, min(limit, len(key)))
        path, length = self._tree.descend(key, self._tree.floor(stop))
        unaligned = self._tree.part_of_a_page(path, key, length, stop)
        node = self._use(self._end(path), path, hits=1, priority=priority)
        return PrefixMatch(node, slots_of(path), length, _computed(path), unaligned)

    def peek(self, key: RadixKey) -> Peek:
        """What `match_prefix` would find; leaves no trace."""
        path, length = self._tree.descend(key, self._tree.floor(len(key)))
        return Peek(length, _computed(path))

    def path(self, key: RadixKey) -> list[RadixNode]:
        """The nodes of the longest cached prefix of `key`, from the root down, the last of them
        perhaps in part; leaves no trace.
        """
        return [node for node, _ in self._tree.descend(key, self._tree.floor(len(key)))[0]]

    def continuation(self, start: RadixNode, key: RadixKey, limit: int) -> Ints:
        """The tokens cached behind `key`, which goes on from the end of `start`; at most `limit`,
        at a fork those used last. Leaves no trace.
        """
        return self._tree.continuation(start, key, limit)

    def insert(
        self,
        key: RadixKey,
        slots: Ints,
        *,
        owned_from: int,
        computed: bool = True,
        output: bool = False,
        own: bool = False,
        priority: int = 0,
    ) -> Insertion:
        """Hand the KV of `key`, at `slots`, to the tree; the picture above says who owns what.

        owned_from: from here on the slots are the caller's own; those before came from the tree and
        are locked. computed: False if the step now running computes them, and `commit` or
        `rollback` decides. What is inserted beneath a pending node is pending with it. output,
        own: of what the tree does not have yet, as in RadixNode. priority: of the request.
        Raises EngineInvariantError, and changes nothing, if key, slots and owned_from are not whole
        pages, or if the tree does not have the tokens before owned_from at these slots.
        """
        floor = self._tree.floor
        if not len(key) == len(slots) == floor(len(key)) or owned_from != floor(owned_from):
            raise EngineInvariantError(
                f"{len(key)} tokens at {len(slots)} slots, owned from {owned_from}: "
                f"not whole pages of {self._tree.page_size}"
            )
        path, already = self._tree.descend(key, len(key))
        in_tree = slots_of(path)
        if not 0 <= owned_from <= already or (in_tree[:owned_from] != slots[:owned_from]).any():
            raise EngineInvariantError(
                f"the first {owned_from} tokens are said to be the tree's, "
                f"which has {already} of the key, or has them at other slots"
            )
        mine, theirs = slots[owned_from:already], in_tree[owned_from:already]
        self._allocator.free(mine[mine != theirs])
        node = self._use(self._end(path), path, hits=0, priority=priority)
        if already < len(key):
            pending = node.pending or not computed
            marks = output, own, priority
            node = self._add_leaf(node, key, slots, already, pending=pending, marks=marks)
            path.append((node, len(node)))
        return Insertion(node, slots_of(path), already, _computed(path))

    def commit(self) -> None:
        """The step went well: its pending nodes are computed from now on."""
        step, self._step = self._step, []
        for leaf in step:
            for node in leaf.pending_path():
                node.pending = False
        for leaf in step:
            self.dec_lock_ref(leaf)

    def rollback(self) -> None:
        """The step failed: its pending nodes leave the tree and their slots are freed.

        All requests of the step have unlocked before; else this raises EngineInvariantError and
        changes nothing.
        """
        own_locks = Counter(node for leaf in self._step for node in leaf.pending_path())
        for node, locks in own_locks.items():
            if node.lock_ref != locks:
                raise EngineInvariantError(
                    f"a pending node of {len(node)} tokens is rolled back while it is locked "
                    f"{node.lock_ref - locks} times"
                )
        step, self._step = self._step, []
        for leaf in step:
            self._unlock_path(leaf)
        freed: list[Ints] = []
        for node in step:
            while node.pending and not node.children and node.parent is not None:
                freed.append(node.slots)
                node = self._detach(node)
        self._free(freed)

    def inc_lock_ref(self, node: RadixNode) -> None:
        """Keep the node and all above it from eviction until `dec_lock_ref`.

        Raises EngineInvariantError if the node has left the tree.
        """
        if node.parent is None and node is not self._tree.root:
            raise EngineInvariantError("a node is locked that has left the tree")
        above: RadixNode | None = node
        while above is not None:
            if above.lock_ref == 0:
                self._protected += len(above)
            above.lock_ref += 1
            above = above.parent

    def dec_lock_ref(self, node: RadixNode) -> None:
        """Give back one lock. Raises EngineInvariantError, changing nothing, if there is none."""
        self._unlock_path(node)
        if node.evictable:
            self._queue.push(node)

    def hold(self, key: RadixKey) -> RadixNode:
        """Note that an idle branch stands at the end of `key`, until `let_go` of what is returned.

        Held is what is cached of the key, in whole pages. A hint for the policy: it keeps nothing
        from eviction, is no use, and what is evicted meanwhile is held no more, though the rest of
        the path is. Cost: the depth of the path, like that of a match.
        """
        node = self._end(self._tree.descend(key, self._tree.floor(len(key)))[0])
        above: RadixNode | None = node
        while above is not None:
            above.held += 1
            above = above.parent
        return node

    def let_go(self, node: RadixNode) -> None:
        """The idle branch that `hold` returned the node for has gone or gone on; the node may have
        left the tree. Raises EngineInvariantError, changing nothing, if nobody holds it.
        """
        node = self._tree.survivor(node)
        if node.held == 0:
            raise EngineInvariantError("a place in the tree is let go that no branch holds")
        above: RadixNode | None = node
        while above is not None:
            above.held -= 1
            above = above.parent
        if node.evictable:
            self._queue.push(node)

    def evict(self, tokens: int) -> int:
        """Free at least `tokens` tokens in the policy's order, or all that are unlocked if fewer.

        Returns how many were freed. Whole leaves go, so it may be more than asked.
        """
        freed: list[Ints] = []
        count = 0
        while count < tokens and (leaf := self._queue.pop()) is not None:
            count += len(leaf)
            freed.append(leaf.slots)
            self._detach(leaf)
        self._free(freed)
        self.evicted_tokens += count
        return count

    def flush(self, namespace: Namespace | None = None) -> int:
        """Free all that is unlocked, of one namespace or of all; returns how many tokens."""
        freed: list[Ints] = []
        for node in reversed(list(self._tree.nodes(namespace))):  # children before parents
            if node.lock_ref == 0:
                freed.append(node.slots)
                self._detach(node)
        self._queue.forget_departed()
        return self._free(freed)

    def slots(self) -> Ints:
        """All slots that the tree owns. Cost: the whole tree."""
        return slots_of([(node, len(node)) for node in self._tree.nodes()])

    def snapshot(self, decode: Decode) -> TreeSnapshot:
        """The tree as a value that prints; `decode` turns token ids into text."""
        return take_snapshot(self._tree.root, decode, page_size=self._tree.page_size)

    def check(self) -> None:
        """Raise EngineInvariantError unless all books agree. Cost: the whole tree and pool."""
        self._tree.check()
        self._allocator.check()
        slots = self.slots()
        if not self._allocator.owns(slots):
            raise EngineInvariantError("a slot of the tree is free, foreign or has two owners")
        protected = sum(len(node) for node in self._tree.nodes() if node.lock_ref)
        if (len(slots), protected) != (self._cached, self._protected):
            raise EngineInvariantError(
                f"counted {self._cached} cached and {self._protected} protected tokens, "
                f"found {len(slots)} and {protected}"
            )
        for node in self._tree.nodes():
            if node.evictable:
                self._queue.check(node)
        pending = {node for node in self._tree.nodes() if node.pending}
        if pending != {node for leaf in self._step for node in leaf.pending_path()}:
            raise EngineInvariantError("the pending nodes are not those of this step")

    def _end(self, path: Path) -> RadixNode:
        """The node at the end of the path, split off where the path ends inside one."""
        if path and path[-1][1] < len(path[-1][0]):
            node, agrees = path[-1]
            path[-1] = (self._tree.split(node, agrees), agrees)
        return path[-1][0] if path else self._tree.root

    def _use(self, end: RadixNode, path: Path, *, hits: int, priority: int) -> RadixNode:
        """Note the use of all nodes on the path, the last of which is `end`; returns that."""
        self._clock += 1
        self._tree.root.last_access = self._clock
        for node, _ in path:
            node.last_access = self._clock
            node.hits += hits
            node.priority = max(node.priority, priority)
        if end.evictable:
            self._queue.push(end)
        return end

    def _add_leaf(
        self,
        parent: RadixNode,
        key: RadixKey,
        slots: Ints,
        start: int,
        *,
        pending: bool,
        marks: tuple[bool, bool, int],
    ) -> RadixNode:
        leaf = self._tree.add(parent, key, slots, start)
        leaf.created = leaf.last_access = self._clock
        leaf.pending = pending
        leaf.output, leaf.own, leaf.priority = marks  # before the queue looks at them
        self._cached += len(leaf)
        if pending:
            self._step.append(leaf)
            self.inc_lock_ref(leaf)
        else:
            self._queue.push(leaf)
        return leaf

    def _detach(self, leaf: RadixNode) -> RadixNode:
        """Take an unlocked leaf out of the tree, its slots not yet freed; returns its parent."""
        self._cached -= len(leaf)
        parent = self._tree.remove(leaf)
        if parent.evictable:
            self._queue.push(parent)
        return parent

    def _unlock_path(self, node: RadixNode) -> None:
        if node.lock_ref == 0:
            raise EngineInvariantError("a lock is given back that nobody holds")
        above: RadixNode | None = node
        while above is not None:
            above.lock_ref -= 1
            if above.lock_ref == 0:
                self._protected -= len(above)
            above = above.parent

    def _free(self, slots: list[Ints]) -> int:
        if not slots:
            return 0
        together = np.concatenate(slots)
        self._allocator.free(together)
        return len(together)


def _computed(path: Path) -> int:
    """How many tokens of the path have their KV: pending nodes come last on a path."""
    return sum(agrees for node, agrees in path if not node.pending)

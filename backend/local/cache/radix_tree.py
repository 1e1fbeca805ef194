"""The shape of the radix tree: nodes, finding a path, splitting an edge. Knows no pool and no lock.

`RadixCache` owns the tree and is the only one to change it; requests hold nodes as handles;
eviction and snapshots read them. Everything is a loop: a chain of any depth is fine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np

from stemma.backend.base import Namespace
from stemma.backend.local.cache.radix_key import Ints, Page, RadixKey, common_prefix, page_at
from stemma.lang.errors import EngineInvariantError

Edge: TypeAlias = Page | tuple[Namespace, Page]
"""A node among its siblings: its first page; directly below the root with its namespace."""

Path: TypeAlias = "list[tuple[RadixNode, int]]"
"""Nodes from the root down with how many leading tokens of each agree; all but the last: whole."""

MANY_WAYS = 32
"""More children than this, and which of them is used next is anybody's guess."""

_NOTHING: Ints = np.empty(0, dtype=np.int32)

Rank: TypeAlias = tuple[str, bytes]
"""An edge as a value with an order, in which pages with a common beginning are neighbours."""


class RadixNode:
    """key, slots: the tokens of this edge and their slots, int32, same length, whole pages.

    parent: None for the root and for a node that has left the tree.
    lock_ref: how many locks are held on this node or below it. Never smaller than a child's.
    held: how many idle branches end at this node or below it; a hint, not a lock. Never smaller
    than a child's.
    pending: its KV is being computed in the step now running. Everything below it is pending too.
    hits: how many matches went through it. created, last_access: the cache's clock when it came in
    and at its last use. output: a request sampled these tokens. own: they were sampled or tried for
    one branch, and whether they are still wanted its place tells. priority: the largest among the
    requests that used it.
    entry: its valid entry in the eviction queue. heir: for a node that has left the tree while it
    was held, the one it hung from. ordered: the ranks of its children, for pages of more than one
    token.
    """

    __slots__ = (
        "children",
        "created",
        "edge",
        "entry",
        "heir",
        "held",
        "hits",
        "key",
        "last_access",
        "lock_ref",
        "namespace",
        "ordered",
        "output",
        "own",
        "parent",
        "pending",
        "priority",
        "slots",
    )

    def __init__(
        self,
        key: Ints,
        slots: Ints,
        *,
        namespace: Namespace,
        edge: Edge,
        parent: RadixNode | None,
    ) -> None:
        self.key = key
        self.slots = slots
        self.namespace = namespace
        self.edge = edge
        self.parent = parent
        self.pending = False
        self.output = self.own = False
        self.created = self.last_access = self.hits = self.priority = 0
        self.lock_ref = self.held = 0
        self.entry: tuple[tuple[float, ...], int, RadixNode] | None = None
        self.heir: RadixNode | None = None
        self.children: dict[Edge, RadixNode] = {}
        self.ordered: list[Rank] = []

    def __len__(self) -> int:
        return len(self.key)

    @property
    def evictable(self) -> bool:
        """A leaf in the tree that nobody uses."""
        return (
            self.parent is not None
            and self.lock_ref == 0
            and not self.children
            and not self.pending
        )

    def pending_path(self) -> Iterator[RadixNode]:
        """This node and those above it, as long as they are pending."""
        node: RadixNode | None = self
        while node is not None and node.pending:
            yield node
            node = node.parent


class RadixTree:
    """One root of no tokens; directly below it nodes are told apart by namespace and first page.

    Further down the first page alone decides. So no path ever crosses namespaces, and a namespace
    without tokens leaves nothing behind.
    """

    def __init__(self, page_size: int) -> None:
        nothing: Ints = np.empty(0, dtype=np.int32)
        self.page_size = page_size
        self.root = RadixNode(nothing, nothing, namespace=Namespace(), edge=b"", parent=None)

    def floor(self, tokens: int) -> int:
        """`tokens` rounded down to whole pages."""
        return tokens - tokens % self.page_size

    def descend(
        self, key: RadixKey, stop: int, *, start: RadixNode | None = None
    ) -> tuple[Path, int]:
        """Follow the first `stop` tokens (whole pages) as far as the tree has them, from the end of
        `start` on, else from the root.

        Returns the path and its length in tokens, whole pages. Changes nothing.
        """
        path: Path = []
        tokens, node, length = key.token_ids, start or self.root, 0
        while length < stop:
            child = node.children.get(self._edge(node, key.namespace, tokens, length))
            if child is None:
                break
            agrees = self.floor(common_prefix(child.key, tokens[length:stop]))
            path.append((child, agrees))
            length += agrees
            if agrees < len(child):
                break
            node = child
        return path, length

    def continuation(self, start: RadixNode, key: RadixKey, limit: int) -> Ints:
        """The first `limit` tokens that the tree has behind the whole of `key`, or fewer; the key
        begins at the end of `start`.

        At a fork it goes on with the branch that was used last; where many went different ways,
        nothing is to be told. Changes nothing.
        """
        whole = self.floor(len(key))
        path, length = self.descend(key, whole, start=start)
        node, agrees = path[-1] if path else (start, len(start))
        if length < whole or node is self.root:
            return _NOTHING
        rest, ahead = key.token_ids[length:], node.key[agrees:]
        while len(ahead) < len(rest) + limit and len(node.children) <= MANY_WAYS:
            ways: Iterable[RadixNode] = node.children.values()
            if not len(ahead):
                ways = [child for child in ways if _begins(child.key, rest)]
            following = max(ways, key=lambda child: child.last_access, default=None)
            if following is None:
                break
            node, ahead = following, np.concatenate((ahead, following.key))
        return ahead[len(rest) : len(rest) + limit] if _begins(ahead, rest) else _NOTHING

    def part_of_a_page(self, path: Path, key: RadixKey, length: int, stop: int) -> int:
        """How many of the tokens length..stop-1 the tree has behind a path of `length` tokens that
        cannot be shared, for they do not fill a page there.

        Found among any number of children in O(log n): the child that agrees longest is a neighbour
        in their order. Always 0 for pages of one token.
        """
        rest = key.token_ids[length : min(stop, length + self.page_size)]
        if self.page_size == 1 or len(rest) == 0:
            return 0
        node, agrees = path[-1] if path else (self.root, 0)
        if agrees < len(node):
            return common_prefix(node.key[agrees:], rest)
        rank = self._rank(node, key.namespace, rest)
        place = bisect_left(node.ordered, rank)
        longest = 0
        for space, page in node.ordered[max(place - 1, 0) : place + 1]:
            if space == rank[0]:
                longest = max(longest, common_prefix(np.frombuffer(page, np.int32), rest))
        return longest

    def split(self, node: RadixNode, length: int) -> RadixNode:
        """Put the first `length` tokens of the node into a new node above it, and return that.

        The lower part keeps the identity, for a lock belongs to the place where a prefix ends. Both
        parts are copies: a view would keep the whole of the old arrays in memory.
        """
        upper = RadixNode(
            node.key[:length].copy(),
            node.slots[:length].copy(),
            namespace=node.namespace,
            edge=node.edge,
            parent=_parent(node),
        )
        upper.pending, upper.output, upper.own = node.pending, node.output, node.own
        upper.created, upper.last_access = node.created, node.last_access
        upper.hits, upper.priority = node.hits, node.priority
        upper.lock_ref, upper.held = node.lock_ref, node.held
        _parent(node).children[node.edge] = upper
        node.key, node.slots = node.key[length:].copy(), node.slots[length:].copy()
        node.edge = self._edge(upper, node.namespace, node.key, 0)
        node.parent = upper
        upper.children[node.edge] = node
        if self.page_size > 1:
            upper.ordered.append(self._rank_of(node))
        return upper

    def add(self, parent: RadixNode, key: RadixKey, slots: Ints, start: int) -> RadixNode:
        """A new leaf below `parent` with the tokens and slots from `start` on; both are copied."""
        leaf = RadixNode(
            key.token_ids[start:].copy(),
            slots[start:].copy(),
            namespace=key.namespace,
            edge=self._edge(parent, key.namespace, key.token_ids, start),
            parent=parent,
        )
        parent.children[leaf.edge] = leaf
        if self.page_size > 1:
            insort(parent.ordered, self._rank_of(leaf))
        return leaf

    def remove(self, leaf: RadixNode) -> RadixNode:
        """Take a leaf out and return its parent. Its tokens and slots are the caller's to take
        before.
        """
        parent = _parent(leaf)
        if self.page_size > 1:
            del parent.ordered[bisect_left(parent.ordered, self._rank_of(leaf))]
        del parent.children[leaf.edge]
        leaf.parent = None
        if leaf.held:
            leaf.heir = parent
            leaf.key = leaf.slots = self.root.key
        return parent

    def survivor(self, node: RadixNode) -> RadixNode:
        """The node, or if it has left the tree while held, the nearest above it that has not."""
        departed = []
        while node.heir is not None:
            departed.append(node)
            node = node.heir
        for each in departed:  # so that no chain is walked twice
            each.heir = node
        return node

    def nodes(self, namespace: Namespace | None = None) -> Iterator[RadixNode]:
        """All nodes, of one namespace or of all, parents before children; not the root."""
        stack = list(self.root.children.values())
        if namespace is not None:
            stack = [node for node in stack if node.namespace == namespace]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise EngineInvariantError unless every node is as its docstring says."""
        for node in self.nodes():
            parent = node.parent
            if parent is None or parent.children.get(node.edge) is not node:
                raise EngineInvariantError("a node and its parent do not know each other")
            edge = self._edge(parent, node.namespace, node.key, 0) if len(node) else None
            inside = parent is self.root or parent.namespace == node.namespace
            faults = {
                "has no tokens": len(node) == 0,
                "is not whole pages": self.floor(len(node)) != len(node),
                "has not as many slots as tokens": len(node.key) != len(node.slots),
                "is filed under another page": node.edge != edge,
                "is in another namespace than its parent": not inside,
                "has a negative lock count": node.lock_ref < 0,
                "is locked more often than its parent": node.lock_ref > parent.lock_ref,
                "has a negative count of branches": node.held < 0,
                "is held by more branches than its parent": node.held > parent.held,
                "came in before its parent": node.created < parent.created,
                "was used after its parent": node.last_access > parent.last_access,
                "is computed beneath a pending one": parent.pending and not node.pending,
                "is pending but not locked": node.pending and node.lock_ref == 0,
                "has left the tree": node.heir is not None,
                "has other children than it says": node.ordered != self._ranks(node),
            }
            for fault, found in faults.items():
                if found:
                    raise EngineInvariantError(f"a node of {len(node)} tokens {fault}")

    def _ranks(self, node: RadixNode) -> list[Rank]:
        return sorted(map(self._rank_of, node.children.values())) if self.page_size > 1 else []

    def _rank_of(self, node: RadixNode) -> Rank:
        return self._rank(_parent(node), node.namespace, node.key[: self.page_size])

    def _rank(self, parent: RadixNode, namespace: Namespace, page: Ints) -> Rank:
        return (repr(namespace) if parent is self.root else "", page.tobytes())

    def _edge(self, parent: RadixNode, namespace: Namespace, token_ids: Ints, start: int) -> Edge:
        page = page_at(token_ids, start, self.page_size)
        return (namespace, page) if parent is self.root else page


def _begins(tokens: Ints, beginning: Ints) -> bool:
    head = tokens[: len(beginning)]
    return len(head) == len(beginning) and bool((head == beginning).all())


def slots_of(path: Path) -> Ints:
    """The slots along a path as one new array."""
    if not path:
        return np.empty(0, dtype=np.int32)
    return np.concatenate([node.slots[:agrees] for node, agrees in path])


def _parent(node: RadixNode) -> RadixNode:
    if node.parent is None:
        raise EngineInvariantError("the root, or a node that has left the tree, has no parent")
    return node.parent

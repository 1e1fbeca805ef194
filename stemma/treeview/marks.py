"""What happened to a radix tree between two snapshots: which edges were hit, came, went or stayed.

Pure functions on snapshots. A place in the tree is known again by its namespace and the exact
tokens before it; where only a part of an edge was hit or is new, the edge is cut there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from stemma.backend.base import Namespace
from stemma.backend.local.cache.edge_text import Decode, readable
from stemma.backend.local.cache.snapshot import State, TreeSnapshot
from stemma.lang.errors import InvalidArgument
from stemma.treeview.names import Names
from stemma.treeview.overlay import Layer, lay_over


class Mark(StrEnum):
    """What became of an edge since the snapshot before."""

    HIT = "hit"
    """It was there and has been used."""
    NEW = "new"
    """It has been computed."""
    KEPT = "kept"
    """It was there and has not been used."""
    EVICTED = "evicted"
    """It was there and is gone."""


@dataclass(frozen=True, slots=True)
class MarkedNode:
    """One edge with its mark. What is evicted has the numbers that it had before.

    name: of the place where it ends; the same in all moments of a recording.
    start: how many tokens stand before it. output_tokens: how many of its tokens were sampled.
    hits, last_access, lock_ref, held, state: as in `NodeSnapshot`.
    """

    name: str
    mark: Mark
    namespace: Namespace
    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    start: int
    output_tokens: int
    hits: int
    last_access: int
    lock_ref: int
    held: int
    state: State
    children: tuple[MarkedNode, ...] = field(default=(), repr=False)

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    def nodes(self) -> Iterator[MarkedNode]:
        """This node and all below it, depth first, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))


@dataclass(frozen=True, slots=True)
class MarkedTree:
    """The tree at one moment, and what has just gone from it. clock: as in `TreeSnapshot`."""

    children: tuple[MarkedNode, ...]
    clock: int = 0

    def nodes(self) -> Iterator[MarkedNode]:
        """All nodes, depth first, parents before children."""
        for child in self.children:
            yield from child.nodes()

    def marked(self, mark: Mark) -> list[MarkedNode]:
        """The nodes with this mark."""
        return [node for node in self.nodes() if node.mark is mark]

    @property
    def total_tokens(self) -> int:
        """Tokens in the cache: all but those of evicted edges."""
        return sum(node.token_count for node in self.nodes() if node.mark is not Mark.EVICTED)


def compare(
    before: TreeSnapshot, after: TreeSnapshot, decode: Decode, *, names: Names | None = None
) -> MarkedTree:
    """The tree `after`, with what `before` had and it has no more, each edge marked.

    decode: gives the text of edges that are cut. names: those of earlier moments; it learns new
    ones. A token that was evicted and then computed again is new.
    Raises InvalidArgument if the snapshots cannot be of one cache in this order.
    """
    if after.clock < before.clock or after.page_size != before.page_size:
        raise InvalidArgument("the snapshots are not of one cache, or in the wrong order")
    edges = _edges(lay_over(before, after), before.clock)
    return _tree(edges, _texts(edges, decode), names or Names(), after.clock)


def unmarked(tree: TreeSnapshot) -> MarkedTree:
    """A single snapshot: nothing has happened, all edges are kept."""
    edges = _edges(lay_over(tree, tree), tree.clock)
    return _tree(edges, [node.text for node in tree.nodes()], Names(), tree.clock)


@dataclass(slots=True)
class _Edge:
    """An edge of the result: a chain of layers with one mark. parent: its place in the list of all
    edges, -1 for none.
    """

    mark: Mark
    chain: list[Layer]
    parent: int
    start: int

    @property
    def tokens(self) -> list[int]:
        return [token for layer in self.chain for token in layer.tokens]

    @property
    def is_leaf(self) -> bool:
        return not self.chain[-1].children


def _edges(root: Layer, clock: int) -> list[_Edge]:
    """All edges, depth first, parents before children."""
    edges: list[_Edge] = []
    stack = [(layer, -1, 0) for layer in reversed(root.children.values())]
    while stack:
        layer, parent, start = stack.pop()
        edge = _Edge(_mark(layer, clock), [layer], parent, start)
        while len(layer.children) == 1:
            (below,) = layer.children.values()
            if _mark(below, clock) is not edge.mark:
                break
            edge.chain.append(below)
            layer = below
        end = start + sum(len(part.tokens) for part in edge.chain)
        stack.extend((child, len(edges), end) for child in reversed(layer.children.values()))
        edges.append(edge)
    return edges


def _mark(layer: Layer, clock: int) -> Mark:
    """clock: that of the snapshot before."""
    if layer.new is None:
        return Mark.EVICTED
    if layer.old is None or layer.new.created > clock:
        return Mark.NEW
    return Mark.HIT if layer.new.last_access > clock else Mark.KEPT


def _texts(edges: Sequence[_Edge], decode: Decode) -> list[str]:
    texts: list[str] = []
    rests: list[list[int]] = [[] for _ in range(len(edges) + 1)]  # last: of the root
    for place, edge in enumerate(edges):
        tokens = rests[edge.parent] + edge.tokens
        text, rests[place] = readable(decode, tokens, ends=edge.is_leaf)
        texts.append(text)
    return texts


def _tree(edges: Sequence[_Edge], texts: Sequence[str], names: Names, clock: int) -> MarkedTree:
    named = names.of((edge.parent, edge.chain[0].namespace, edge.tokens) for edge in edges)
    below: list[list[MarkedNode]] = [[] for _ in range(len(edges) + 1)]  # last: of the root
    for place in reversed(range(len(edges))):  # children stand behind their parent
        edge, top = edges[place], edges[place].chain[0]
        node = MarkedNode(
            name=named[place],
            mark=edge.mark,
            namespace=top.namespace,
            text=texts[place],
            token_ids=tuple(edge.tokens),
            start=edge.start,
            output_tokens=sum(len(each.tokens) for each in edge.chain if each.part.output),
            hits=top.part.hits,
            last_access=top.part.last_access,
            lock_ref=top.part.lock_ref,
            held=top.part.held,
            state=top.part.state,
            children=tuple(reversed(below[place])),
        )
        below[edge.parent].append(node)
    return MarkedTree(tuple(reversed(below[-1])), clock)

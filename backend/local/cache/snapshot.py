"""The radix tree as a value: what is cached, how often it was hit, what is locked; and its print.

`RadixCache.snapshot` makes it; the command line and the documentation's examples print it;
`stemma/treeview/` compares two of them and draws them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from rich.text import Text
from rich.tree import Tree

from stemma.backend.base import Namespace
from stemma.backend.local.cache.edge_text import Decode, readable
from stemma.backend.local.cache.printing import count, plain, printed, size_of, visible
from stemma.backend.local.cache.radix_tree import RadixNode

State: TypeAlias = Literal["pending", "locked", "idle"]
"""Its KV is computed in the step now running; a running request uses it; it may be evicted."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of an edge with one history: one node of the tree.

    created, last_access: the cache's clock when they were computed, and at their last use.
    hits: how many matches went through them. lock_ref: how many locks keep them. held: how many
    idle branches stand on them. output: they were sampled. priority: the largest of a request that
    used them.
    """

    token_count: int
    created: int
    last_access: int
    hits: int
    lock_ref: int
    held: int = 0
    output: bool = False
    priority: int = 0
    pending: bool = False

    @property
    def state(self) -> State:
        if self.pending:
            return "pending"
        return "locked" if self.lock_ref else "idle"


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One edge of the tree; a chain of nodes without a fork between them is one edge.

    text: a character whose tokens a fork parts stands in the edges below the fork.
    parts: the nodes of the chain, from the top down; their lengths add up to the tokens.
    """

    namespace: Namespace
    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    parts: tuple[Part, ...]
    children: tuple[NodeSnapshot, ...] = field(default=(), repr=False)

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    @property
    def lock_ref(self) -> int:
        """Of the upper end, where it is largest; so are `held`, `hits` and `last_access`."""
        return self.parts[0].lock_ref

    @property
    def held(self) -> int:
        return self.parts[0].held

    @property
    def hits(self) -> int:
        return self.parts[0].hits

    @property
    def last_access(self) -> int:
        return self.parts[0].last_access

    @property
    def state(self) -> State:
        """Of the upper end, too."""
        return self.parts[0].state

    def nodes(self) -> Iterator[NodeSnapshot]:
        """This node and all below it, depth first, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """The whole tree at one moment.

    children: the edges that begin a prompt, all namespaces; siblings differ in their first page.
    clock: the cache's clock, which every use advances.
    """

    children: tuple[NodeSnapshot, ...]
    page_size: int = 1
    clock: int = 0

    def nodes(self) -> Iterator[NodeSnapshot]:
        """All nodes, depth first, parents before children."""
        for child in self.children:
            yield from child.nodes()

    @property
    def total_tokens(self) -> int:
        """Tokens in the cache."""
        return sum(node.token_count for node in self.nodes())

    def __rich__(self) -> Tree:
        title = Text(f"radix tree  {size_of(list(self.nodes()))}", style="bold")
        return printed(self.children, title=title, label=_label)

    def __str__(self) -> str:
        return plain(self)


def take_snapshot(root: RadixNode, decode: Decode, *, page_size: int) -> TreeSnapshot:
    """Copy the tree below `root`. `decode` gets the tokens of a whole edge, chains merged."""
    # Chains of nodes from the top down, each with the place of its parent in this list.
    edges: list[tuple[list[RadixNode], int]] = []
    stack = [(child, -1) for child in reversed(root.children.values())]
    while stack:
        node, parent = stack.pop()
        chain = [node]
        while len(chain[-1].children) == 1:
            chain.extend(chain[-1].children.values())
        stack.extend((child, len(edges)) for child in reversed(chain[-1].children.values()))
        edges.append((chain, parent))
    tokens = [np.concatenate([node.key for node in chain]).tolist() for chain, _ in edges]
    texts: list[str] = []
    rests: list[list[int]] = [[] for _ in range(len(edges) + 1)]  # last: of the root
    for place, (chain, parent) in enumerate(edges):
        ends = not chain[-1].children
        text, rests[place] = readable(decode, rests[parent] + tokens[place], ends=ends)
        texts.append(text)
    below: list[list[NodeSnapshot]] = [[] for _ in rests]
    for place in reversed(range(len(edges))):  # children stand behind their parent
        chain, parent = edges[place]
        below[parent].append(
            NodeSnapshot(
                namespace=chain[0].namespace,
                text=texts[place],
                token_ids=tuple(tokens[place]),
                parts=tuple(map(_part, chain)),
                children=tuple(reversed(below[place])),
            )
        )
    return TreeSnapshot(tuple(reversed(below[-1])), page_size, root.last_access)


def _part(node: RadixNode) -> Part:
    return Part(
        token_count=len(node),
        created=node.created,
        last_access=node.last_access,
        hits=node.hits,
        lock_ref=node.lock_ref,
        held=node.held,
        output=node.output,
        priority=node.priority,
        pending=node.pending,
    )


def _label(node: NodeSnapshot) -> Text:
    label = Text(count(node.token_count, "token"), style="cyan")
    if node.hits:
        label.append(f"  {count(node.hits, 'hit')}", style="yellow")
    if node.lock_ref:
        label.append(f"  {count(node.lock_ref, 'lock')}", style="red")
    return label.append(f"  “{visible(node.text)}”", style="green")  # last: it may be cut

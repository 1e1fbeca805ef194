"""The radix tree as a value: what is cached, how often it was hit, what is locked; and its print.

`RadixCache.snapshot` makes it; the command line and the documentation's examples print it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from io import StringIO

import numpy as np
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from stemma.backend.base import Namespace
from stemma.backend.local.cache.radix_tree import RadixNode

EDGE_WIDTH = 64
"""An edge's text is shortened to this many characters, its middle left out."""
PRINTED_DEPTH = 24
"""What lies deeper is summed up in one line."""
LINE_WIDTH = 140


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One edge of the tree; a chain of nodes without a fork between them is one edge.

    lock_ref, hits, last_access: of the upper end, where each is largest.
    """

    namespace: Namespace
    text: str
    token_count: int
    lock_ref: int
    hits: int
    last_access: int
    children: tuple[NodeSnapshot, ...] = field(default=(), repr=False)

    def nodes(self) -> Iterator[NodeSnapshot]:
        """This node and all below it, depth first, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """The whole tree at one moment. `children`: the edges that begin a prompt, all namespaces."""

    children: tuple[NodeSnapshot, ...]

    def nodes(self) -> Iterator[NodeSnapshot]:
        """All nodes, depth first, parents before children."""
        for child in self.children:
            yield from child.nodes()

    @property
    def total_tokens(self) -> int:
        """Tokens in the cache."""
        return sum(node.token_count for node in self.nodes())

    def __rich__(self) -> Tree:
        node_count = sum(1 for _ in self.nodes())
        tree = Tree(
            Text(
                f"radix tree  {_count(self.total_tokens, 'token')} in {_count(node_count, 'edge')}",
                style="bold",
            )
        )
        groups: dict[Namespace, Tree] = {}
        for child in self.children:
            if child.namespace not in groups:
                groups[child.namespace] = tree.add(_namespace_label(child.namespace))
            _grow(groups[child.namespace], child)
        return tree

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=LINE_WIDTH, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def take_snapshot(root: RadixNode, decode: Callable[[Sequence[int]], str]) -> TreeSnapshot:
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
    below: list[list[NodeSnapshot]] = [[] for _ in range(len(edges) + 1)]  # last: of the root
    for place in reversed(range(len(edges))):  # children stand behind their parent
        chain, parent = edges[place]
        tokens = np.concatenate([node.key for node in chain]).tolist()
        top = chain[0]
        below[parent].append(
            NodeSnapshot(
                namespace=top.namespace,
                text=decode(tokens),
                token_count=len(tokens),
                lock_ref=top.lock_ref,
                hits=top.hits,
                last_access=top.last_access,
                children=tuple(reversed(below[place])),
            )
        )
    return TreeSnapshot(tuple(reversed(below[-1])))


def visible(text: str, width: int = EDGE_WIDTH) -> str:
    """`text` cut to `width` characters in its middle, line ends and control characters shown."""
    if len(text) > width:
        head = width * 2 // 3
        text = f"{text[:head]} … {text[head + 3 - width :]}"
    return "".join(_visible_character(c) for c in text)


def _visible_character(character: str) -> str:
    if character == "\n":
        return "⏎"
    return character if character.isprintable() else repr(character)[1:-1]


def _grow(tree: Tree, top: NodeSnapshot) -> None:
    stack = [(tree, top, 1)]
    while stack:
        parent, node, depth = stack.pop()
        branch = parent.add(_node_label(node))
        if depth < PRINTED_DEPTH:
            stack.extend((branch, child, depth + 1) for child in reversed(node.children))
        elif node.children:
            below = list(node.nodes())[1:]
            tokens = sum(n.token_count for n in below)
            branch.add(
                Text(
                    f"… {_count(tokens, 'token')} in {_count(len(below), 'edge')} below",
                    style="dim",
                )
            )


def _node_label(node: NodeSnapshot) -> Text:
    label = Text(no_wrap=True, overflow="ellipsis")
    label.append(_count(node.token_count, "token"), style="cyan")
    if node.hits:
        label.append(f"  {_count(node.hits, 'hit')}", style="yellow")
    if node.lock_ref:
        label.append(f"  {_count(node.lock_ref, 'lock')}", style="red")
    label.append(f"  “{visible(node.text)}”", style="green")  # last: it may be cut at the margin
    return label


def _namespace_label(namespace: Namespace) -> Text:
    parts = [
        f"{f.name}={getattr(namespace, f.name)!r}"
        for f in fields(namespace)
        if getattr(namespace, f.name) != f.default
    ]
    return Text("  ".join(parts) or "default namespace", style="bold blue", no_wrap=True)


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}" if number == 1 else f"{number:,} {unit}s"

"""How a tree of texts is printed: an edge a line; what is too deep or too wide is summed up.

Used by snapshots, and by `stemma/treeview/` for trees that tell more of an edge.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from io import StringIO
from typing import Protocol, Self, TypeVar

from rich.console import Console, RenderableType
from rich.text import Text
from rich.tree import Tree

from stemma.backend.base import Namespace

EDGE_WIDTH = 64
"""An edge's text is shortened to this many characters, its middle left out."""
PRINTED_DEPTH = 24
"""What lies deeper is summed up in one line."""
PRINTED_CHILDREN = 50
"""The further children of an edge are summed up in one line."""
LINE_WIDTH = 140


class Edge(Protocol):
    """What is printed: an edge with all below it."""

    @property
    def namespace(self) -> Namespace: ...
    @property
    def token_count(self) -> int: ...
    @property
    def children(self) -> Sequence[Self]: ...
    def nodes(self) -> Iterator[Self]: ...


E = TypeVar("E", bound=Edge)


def printed(tops: Sequence[E], *, title: Text, label: Callable[[E], Text]) -> Tree:
    """The edges, by namespace, each with its label as a line; `tops` are those below the root."""
    tree = Tree(title)
    groups: dict[Namespace, list[E]] = {}
    for top in tops:
        groups.setdefault(top.namespace, []).append(top)
    levels: list[tuple[Tree, Sequence[E], int]] = [
        (tree.add(Text(in_words(namespace), style="bold blue", no_wrap=True)), edges, 1)
        for namespace, edges in groups.items()
    ]
    while levels:
        parent, edges, depth = levels.pop()
        shown = edges[:PRINTED_CHILDREN] if depth <= PRINTED_DEPTH else ()
        for edge in shown:
            line = label(edge)
            line.no_wrap, line.overflow = True, "ellipsis"
            levels.append((parent.add(line), edge.children, depth + 1))
        rest = [node for edge in edges[len(shown) :] for node in edge.nodes()]
        if rest:
            size = (
                f"{count(sum(n.token_count for n in rest), 'token')} in {count(len(rest), 'edge')}"
            )
            parent.add(Text(f"… {size} {'more' if shown else 'below'}", style="dim"))
    return tree


def plain(part: RenderableType) -> str:
    """What rich prints, as text without colours or trailing blanks."""
    console = Console(file=StringIO(), width=LINE_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


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


def in_words(namespace: Namespace) -> str:
    """What sets a namespace apart."""
    parts = [
        f"{f.name}={getattr(namespace, f.name)!r}"
        for f in fields(namespace)
        if getattr(namespace, f.name) != f.default
    ]
    return "  ".join(parts) or "default namespace"


def size_of(edges: Collection[Edge]) -> str:
    """How large these edges are, without those below them."""
    tokens = sum(edge.token_count for edge in edges)
    return f"{count(tokens, 'token')} in {count(len(edges), 'edge')}"


def count(number: int, unit: str) -> str:
    """A number with its unit: 1 token, 2 tokens."""
    return f"{number:,} {unit}" if number == 1 else f"{number:,} {unit}s"

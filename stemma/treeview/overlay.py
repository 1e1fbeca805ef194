"""Two snapshots of a cache laid over each other: one tree that tells of every token where it is.

Used by `marks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from stemma.backend.base import Namespace
from stemma.backend.local.cache.snapshot import Part, TreeSnapshot

Tokens: TypeAlias = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Layer:
    """Tokens that have one history in both snapshots.

    old, new: the part of an edge that they are in the one and in the other, None where they are not
    there. children: by namespace and first page, as siblings differ in the radix tree; first those
    of the old snapshot, in its order.
    """

    namespace: Namespace
    tokens: Tokens
    old: Part | None = None
    new: Part | None = None
    children: dict[tuple[Namespace, Tokens], Layer] = field(default_factory=dict)

    @property
    def part(self) -> Part:
        """What the latest snapshot that has these tokens says of them."""
        part = self.new or self.old
        assert part is not None, "the root has no tokens"
        return part


def lay_over(old: TreeSnapshot, new: TreeSnapshot) -> Layer:
    """The root of the common tree. Both snapshots have the same page size."""
    root = Layer(Namespace(), ())
    for tree, is_new in ((old, False), (new, True)):
        stack = [(root, child) for child in reversed(tree.children)]
        while stack:
            place, edge = stack.pop()
            start = 0
            for part in edge.parts:
                tokens = edge.token_ids[start : start + part.token_count]
                start += part.token_count
                for layer in _cover(place, edge.namespace, tokens, tree.page_size):
                    if is_new:
                        layer.new = part
                    else:
                        layer.old = part
                    place = layer
            stack.extend((place, child) for child in reversed(edge.children))
    return root


def _cover(place: Layer, namespace: Namespace, tokens: Tokens, page: int) -> list[Layer]:
    """The layers below `place` that have exactly these tokens: cut, or added, where need be."""
    cover: list[Layer] = []
    while tokens:
        layer = place.children.get((namespace, tokens[:page]))
        if layer is None:
            layer = place.children[namespace, tokens[:page]] = Layer(namespace, tokens)
        else:
            common = _common(layer.tokens, tokens)
            _cut(layer, common - common % page, page)
        cover.append(layer)
        tokens, place = tokens[len(layer.tokens) :], layer
    return cover


def _cut(layer: Layer, length: int, page: int) -> None:
    """Leave the layer its first `length` tokens; the others become its only child."""
    if length < len(layer.tokens):
        lower = Layer(layer.namespace, layer.tokens[length:], layer.old, layer.new, layer.children)
        layer.tokens = layer.tokens[:length]
        layer.children = {(lower.namespace, lower.tokens[:page]): lower}


def _common(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are equal."""
    for length, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return length
    return min(len(a), len(b))

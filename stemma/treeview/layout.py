"""Where the cards of a tree stand in a picture that does not move: see also `assets/layout.js`.

A column for each depth, a row for each leaf; a parent in the middle of its children, but never far
below the first of them. Lengths are in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from stemma.treeview.marks import MarkedNode, MarkedTree
from stemma.treeview.selection import choose

ROOT_WIDTH = 30


@dataclass(frozen=True, slots=True)
class Size:
    """How large cards are. lines: of text. farthest: how far a parent may be below its first
    child.
    """

    lines: int
    height: int
    gap_y: int
    gap_x: int
    farthest: int
    width: int = 290


ROOMY = Size(lines=2, height=62, gap_y=14, gap_x=42, farthest=220)
COMPACT = Size(lines=1, height=26, gap_y=5, gap_x=36, farthest=40)
ROOMY_UP_TO = 60
"""Cards."""

Hidden: TypeAlias = tuple[MarkedNode, ...]
"""Edges below one edge that are not shown, and all below them."""


@dataclass(slots=True)
class Box:
    """A card's place. content: an edge; edges that one card sums up; None for the root.

    parent: number of a box before it, -1 for none.
    """

    content: MarkedNode | Hidden | None
    parent: int
    depth: int
    x: float = 0
    y: float = 0
    width: float = 0

    def middle(self, size: Size) -> float:
        return self.y + size.height / 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Boxes, parents before children, and the size of their cards and of the whole."""

    boxes: list[Box]
    size: Size
    width: float
    height: float


def lay_out(tree: MarkedTree) -> Layout:
    """The places of all edges that `choose` shows, and one for what it hides below each."""
    boxes = _boxes(tree)
    size = COMPACT if len(boxes) > ROOMY_UP_TO else ROOMY
    first: dict[int, float] = {}  # number of a parent -> middle of its first and last child
    last: dict[int, float] = {}
    parents = {box.parent for box in boxes}
    bottom = 0.0
    for number, box in enumerate(boxes):
        if box.depth > 0:
            box.x = ROOT_WIDTH + size.gap_x + (box.depth - 1) * (size.width + size.gap_x)
        box.width = size.width if box.depth else ROOT_WIDTH
        if number not in parents:
            box.y = bottom
            bottom += size.height + size.gap_y
    for number in reversed(range(len(boxes))):
        box = boxes[number]
        if number in first:
            centre = min((first[number] + last[number]) / 2, first[number] + size.farthest)
            box.y = centre - size.height / 2
        first[box.parent] = box.middle(size)
        last.setdefault(box.parent, box.middle(size))
    width = max(box.x + box.width for box in boxes)
    return Layout(boxes, size, width, bottom - size.gap_y)


def _boxes(tree: MarkedTree) -> list[Box]:
    shown = {id(node) for node, seen in zip(tree.nodes(), choose(tree), strict=True) if seen}
    boxes = [Box(None, -1, 0)]
    stack: list[tuple[MarkedNode | Hidden, int, int]] = []

    def go_on(children: tuple[MarkedNode, ...], parent: int, depth: int) -> None:
        visible = [child for child in children if id(child) in shown]
        hidden = tuple(child for child in children if id(child) not in shown)
        if hidden:
            stack.append((hidden, parent, depth))
        stack.extend((child, parent, depth) for child in reversed(visible))

    go_on(tree.children, 0, 1)
    while stack:
        content, parent, depth = stack.pop()
        boxes.append(Box(content, parent, depth))
        if isinstance(content, MarkedNode):
            go_on(content.children, len(boxes) - 1, depth + 1)
    return boxes

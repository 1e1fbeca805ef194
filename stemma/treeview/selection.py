"""What of a large tree is shown at first: the edges where something happened, and the large ones.

Used by `svg.py` and `page.py`; the rest is summed up where it hangs, and the page can unfold it.
"""

from __future__ import annotations

from heapq import heappop, heappush

from stemma.treeview.marks import Mark, MarkedNode, MarkedTree

SHOWN = 120
"""A tree of no more edges is shown whole; of a larger one so many edges."""
SHOWN_CHILDREN = 12
"""Of a larger tree, so many edges below one."""


def choose(
    tree: MarkedTree, *, most: int = SHOWN, most_children: int = SHOWN_CHILDREN
) -> list[bool]:
    """Whether each edge is shown, in the order of `tree.nodes()`; an edge only if its parent is.

    Edges with a mark in or below them come first, then those with many tokens in and below them,
    where each level counts half of the one above. A single leaf is never the only edge hidden below
    one: to tell of it would take as much room.
    """
    nodes = list(tree.nodes())
    if len(nodes) <= most:
        return [True] * len(nodes)
    place = {id(node): index for index, node in enumerate(nodes)}
    tokens = [node.token_count for node in nodes]
    marked = [node.mark is not Mark.KEPT for node in nodes]
    for index in reversed(range(len(nodes))):  # children stand behind their parent
        for child in nodes[index].children:
            tokens[index] += tokens[place[id(child)]]
            marked[index] |= marked[place[id(child)]]
    shown = [False] * len(nodes)
    queue: list[tuple[bool, float, int, int]] = []

    def offer(edges: tuple[MarkedNode, ...], depth: int) -> None:
        ranked = [
            (not marked[index], -tokens[index] * 0.5**depth, index, depth)
            for index in (place[id(edge)] for edge in edges)
        ]
        for entry in sorted(ranked)[:most_children]:
            heappush(queue, entry)

    offer(tree.children, 0)
    for _ in range(most):
        if not queue:
            break
        *_, index, depth = heappop(queue)
        shown[index] = True
        offer(nodes[index].children, depth + 1)
    groups = [node.children for node, seen in zip(nodes, shown, strict=True) if seen]
    for edges in (tree.children, *groups):
        hidden = [place[id(edge)] for edge in edges if not shown[place[id(edge)]]]
        if len(hidden) == 1 and not nodes[hidden[0]].children:
            shown[hidden[0]] = True
    return shown

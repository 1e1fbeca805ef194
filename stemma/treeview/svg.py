"""A tree as one SVG picture: hit edges blue, new ones green, evicted ones orange and dashed.

The whole text of an edge shows where the pointer rests on it. Light or dark as the viewer is.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from rich.cells import cell_len

from stemma.backend.local.cache.printing import count, size_of, visible
from stemma.backend.local.cache.snapshot import TreeSnapshot
from stemma.treeview.layout import Box, Hidden, Layout, lay_out
from stemma.treeview.marks import Mark, MarkedNode, MarkedTree, unmarked
from stemma.treeview.text import without_control

MARGIN = 20
CELL_WIDTH = 6.65
"""Of a character of the text's font, in pixels; wide characters have two."""

STYLE = """
svg { background: #f6f6f4; }
text { font: 11px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
rect, circle { fill: #fff; stroke: #d8dbdf; stroke-width: 1.5; }
circle { stroke: #646d76; }
path { fill: none; stroke: #a4abb3; stroke-width: 1.5; stroke-linejoin: round; }
text { fill: #1d2024; white-space: pre; }
.name { font-weight: bold; fill: #646d76; text-anchor: middle; }
.facts, .more { fill: #646d76; }
.hit rect { fill: #e8f0fe; stroke: #1f66d6; } path.hit { stroke: #1f66d6; stroke-width: 2.2; }
.new rect { fill: #e6f5ea; stroke: #14793a; } path.new { stroke: #14793a; stroke-width: 2.2; }
.evicted rect { fill: none; stroke: #bf5606; stroke-dasharray: 5 4; }
path.evicted { stroke: #bf5606; stroke-dasharray: 5 4; }
.hit .name { fill: #1f66d6; } .new .name { fill: #14793a; } .evicted .name { fill: #bf5606; }
.evicted .text { fill: #646d76; }
@media (prefers-color-scheme: dark) {
  svg { background: #15171a; }
  rect, circle { fill: #1e2126; stroke: #363b43; }
  path { stroke: #646c76; }
  circle { stroke: #98a1ab; }
  text, .evicted .text { fill: #e4e6e9; }
  .name, .facts, .more { fill: #98a1ab; }
  .hit rect { fill: #172740; stroke: #7db0ff; } path.hit { stroke: #7db0ff; }
  .new rect { fill: #14301f; stroke: #5ccc86; } path.new { stroke: #5ccc86; }
  .evicted rect { fill: none; stroke: #f2a154; } path.evicted { stroke: #f2a154; }
  .hit .name { fill: #7db0ff; } .new .name { fill: #5ccc86; } .evicted .name { fill: #f2a154; }
}
"""


def save_svg(tree: MarkedTree | TreeSnapshot, path: str | Path) -> None:
    """Write the picture. Raises OSError where that cannot be done."""
    Path(path).write_text(svg(tree), encoding="utf-8")


def svg(tree: MarkedTree | TreeSnapshot) -> str:
    """The picture as XML text. What a large tree does not show is summed up where it hangs."""
    marked = unmarked(tree) if isinstance(tree, TreeSnapshot) else tree
    layout = lay_out(marked)
    width, height = layout.width + 2 * MARGIN, layout.height + 2 * MARGIN
    picture = Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        width=f"{width:g}",
        height=f"{height:g}",
        viewBox=f"{-MARGIN} {-MARGIN} {width:g} {height:g}",
    )
    there = [node for node in marked.nodes() if node.mark is not Mark.EVICTED]
    SubElement(picture, "title").text = f"Radix tree: {size_of(there)}"
    SubElement(picture, "style").text = STYLE
    for box in layout.boxes[1:]:
        _draw_link(picture, layout, box)
    for box in layout.boxes:
        _draw_box(picture, layout, box)
    return tostring(picture, encoding="unicode") + "\n"


def _draw_link(picture: Element, layout: Layout, box: Box) -> None:
    above, size = layout.boxes[box.parent], layout.size
    x1, y1, x2, y2 = above.x + above.width, above.middle(size), box.x, box.middle(size)
    middle = (x1 + x2) / 2
    if size.lines > 1:
        path = f"M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"
    else:
        path = f"M{x1:g} {y1:g}H{middle:g}V{y2:g}H{x2:g}"
    mark = box.content.mark if isinstance(box.content, MarkedNode) else Mark.KEPT
    SubElement(picture, "path", {"class": mark, "d": path})


def _draw_box(picture: Element, layout: Layout, box: Box) -> None:
    size = layout.size
    group = SubElement(picture, "g", transform=f"translate({box.x:g} {box.y:g})")
    middle = f"{size.height / 2:g}"
    if box.content is None:
        SubElement(group, "circle", cx=f"{box.width - 8:g}", cy=middle, r="7")
        return
    if not isinstance(box.content, MarkedNode):
        _text(group, _summed_up(box.content), "more", 8, size.height / 2 + 4)
        return
    node = box.content
    group.set("class", node.mark)
    SubElement(group, "title").text = _whole(node)
    SubElement(group, "rect", width=f"{box.width:g}", height=f"{size.height}", rx="7")
    if size.lines == 1:
        room = int((box.width - 92) / CELL_WIDTH)
        _text(group, node.name, "name", 20, 17)
        _text(group, " ".join(_lines(node.text, room, 1)), "text", 38, 17)
        tokens = _text(group, f"{node.token_count:,}", "facts", box.width - 8, 17)
        tokens.set("text-anchor", "end")
        return
    _text(group, node.name, "name", 18, 19)
    for row, line in enumerate(_lines(node.text, int((box.width - 46) / CELL_WIDTH), 2)):
        _text(group, line, "text", 36, 19 + 16 * row)
    _text(group, _facts(node), "facts", 36, 53)


def _text(group: Element, content: str, kind: str, x: float, y: float) -> Element:
    text = SubElement(group, "text", {"class": kind, "x": f"{x:g}", "y": f"{y:g}"})
    text.text = content
    return text


def _facts(node: MarkedNode) -> str:
    facts = [count(node.token_count, "token")]
    if node.hits:
        facts.append(count(node.hits, "hit"))
    if node.state != "idle":
        facts.append(node.state)
    return " · ".join(facts)


def _whole(node: MarkedNode) -> str:
    """All of an edge. XML has no control characters, so they are spelled out."""
    lines = node.text.split("\n")
    return f"{node.name}: {node.mark}, {_facts(node)}\n" + "\n".join(
        visible(line, len(line)) for line in lines
    )


def _summed_up(hidden: Hidden) -> str:
    return f"… {size_of([node for top in hidden for node in top.nodes()])} more"


def _lines(text: str, cells: int, most: int) -> list[str]:
    """The text on at most so many lines of so many cells; if need be its beginning and its end."""
    if not text:
        return ["part of a character"]
    shown = visible(without_control(text), len(text))
    if not shown.strip():
        shown = shown.replace(" ", "␣")
    if cell_len(shown) <= cells:
        return [shown]
    if most == 1:
        return [f"{_head(shown, cells * 6 // 10)}…{_tail(shown, cells * 4 // 10 - 1)}"]
    first = _head(shown, cells)
    first = re.sub(r"(?<=[\s⏎])[^\s⏎]{1,14}$", "", first)
    rest = shown[len(first) :].lstrip()
    if cell_len(rest) <= cells:
        return [first, rest]
    return [f"{_head(shown, cells - 1).rstrip()}…", f"…{_tail(shown, cells - 1).lstrip()}"]


def _head(text: str, cells: int) -> str:
    """The longest beginning that is not wider."""
    end = 0
    while end < len(text) and (cells := cells - cell_len(text[end])) >= 0:
        end += 1
    return text[:end]


def _tail(text: str, cells: int) -> str:
    return _head(text[::-1], cells)[::-1]

"""A picture of a branch in a terminal: a tree of its segments, drawn with rich.

Used by `picture.py` only. Whatever a text contains, it moves no cursor: control characters are
spelled out.
"""

from __future__ import annotations

from io import StringIO

from rich.console import Console, ConsoleRenderable, RenderableType, RichCast
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from stemma.interpreter.picture import DRAWN_BRANCHES, DRAWN_DEPTH, Picture, Segment, in_words

PLAIN_WIDTH = 120

NAMES = {
    "literal": "text",
    "template": "template",
    "control": "control",
    "generated": "gen",
    "reasoning": "gen",
    "mark": "mark",
    "selected": "select",
    "score": "score",
}
STYLES = {
    "literal": "",
    "template": "dim",
    "control": "yellow",
    "generated": "green",
    "reasoning": "italic magenta",
    "mark": "dim magenta",
    "selected": "cyan",
    "score": "blue",
}


def tree_of(picture: Picture) -> Tree:
    """The picture as a tree; forks, where it has them, are its branches."""
    tree = Tree(_title(picture), guide_style="dim")
    _grow(tree, picture, 1)
    return tree


def plain_text(drawing: ConsoleRenderable | RichCast) -> str:
    """A drawing without colours."""
    console = Console(file=StringIO(), width=PLAIN_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(drawing)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _grow(node: Tree, picture: Picture, depth: int) -> None:
    for part in picture.parts:
        if isinstance(part, Segment):
            node.add(_row(part))
        elif depth > DRAWN_DEPTH:
            node.add(Text(f"… fork into {len(part.branches)}, and what is below", style="dim"))
        else:
            below = node
            if len(part.branches) > 1:
                below = node.add(Text(f"fork into {len(part.branches)}", style="bold"))
            for branch in part.branches[:DRAWN_BRANCHES]:
                _grow(below.add(_title(branch)), branch, depth + 1)
            if len(part.branches) > DRAWN_BRANCHES:
                below.add(Text(f"… {len(part.branches) - DRAWN_BRANCHES} more", style="dim"))
    if picture.left_out:
        hint = f"… {picture.left_out} branches went on from here: show(children=True)"
        node.add(Text(hint, style="dim"))
    if picture.failure is not None:
        node.add(Text(spelled(picture.failure), style="red"))


def _title(picture: Picture) -> Text:
    title = Text(spelled(picture.label), style="bold")
    if picture.usage.prompt_tokens:
        title.append(f"  {in_words(picture.usage)}", style="not bold dim")
    if picture.of_run is not None and picture.of_run != picture.usage:
        title.append(f"\nall branches  {in_words(picture.of_run)}", style="not bold dim")
    return title


def _row(segment: Segment) -> RenderableType:
    """What it is on the left, its text and what it took on the right."""
    style = "red" if segment.broken else STYLES[segment.kind]
    row = Table.grid(padding=(0, 2))
    row.add_column(no_wrap=True, width=8)
    row.add_column(overflow="fold")
    told = Text(f"“{spelled(segment.text)}”", style=style) if segment.text else Text()
    if segment.variable is not None:
        told = Text.assemble((f"{spelled(segment.variable)} ", "bold"), told)
    if took := segment.took():
        told.append(f"\n{spelled(took)}" if told else spelled(took), style="dim")
    row.add_row(Text(NAMES[segment.kind], style="dim"), told)
    return row


def spelled(text: str) -> str:
    """Line ends are shown and kept, but for the last; other control characters are spelled out."""
    seen = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return seen.replace("\n", "⏎\n").removesuffix("\n")

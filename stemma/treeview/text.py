"""A marked tree as text for the terminal."""

from __future__ import annotations

import re

from rich.text import Text
from rich.tree import Tree

from stemma.backend.local.cache.printing import count, printed, size_of, visible
from stemma.treeview.marks import Mark, MarkedNode, MarkedTree

STYLES = {Mark.HIT: "blue", Mark.NEW: "green", Mark.EVICTED: "dark_orange", Mark.KEPT: ""}


CONTROL_TOKEN = re.compile(r"<\|[^|<>]*\|>")


def without_control(text: str) -> str:
    """The text with a mark in place of each control token of a chat template: to show it short."""
    return CONTROL_TOKEN.sub("◆", text)


def as_rich(tree: MarkedTree) -> Tree:
    """The tree with the name, the mark, the tokens and the text of each edge."""
    there = [node for node in tree.nodes() if node.mark is not Mark.EVICTED]
    title = Text(f"radix tree  {size_of(there)}", style="bold")
    return printed(tree.children, title=title, label=_label)


def _label(node: MarkedNode) -> Text:
    style = STYLES[node.mark]
    label = Text.assemble((node.name, f"{style} bold"), ("  ", ""))
    label.append(f"{node.mark:<8}" if node.mark is not Mark.KEPT else " " * 8, style=style)
    label.append(f"{count(node.token_count, 'token')}  ", style="cyan")
    if node.lock_ref:
        label.append(f"{count(node.lock_ref, 'lock')}  ", style="red")
    return label.append(f"“{visible(without_control(node.text))}”", style=style or "dim")

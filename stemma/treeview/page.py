"""A recording as one HTML page without outside parts: the moments to step through, drawn as trees.

Puts the data, and the style and scripts of `assets/`, into `assets/page.html`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from stemma.backend.local.cache.printing import in_words
from stemma.backend.local.cache.snapshot import TreeSnapshot
from stemma.treeview.marks import MarkedTree, unmarked
from stemma.treeview.recorder import Moment
from stemma.treeview.selection import choose

SCRIPTS = ("data.js", "layout.js", "cards.js", "page.js")
FIELDS = (
    "parent",
    "name",
    "mark",
    "text",
    "tokens",
    "start",
    "sampled",
    "hits",
    "locks",
    "held",
    "lastUse",
    "state",
    "namespace",
    "shown",
)
"""What a row of `nodes` tells of an edge, in this order.

parent: number of a row before it, -1 for none. text, namespace: numbers in the page's lists.
shown: whether it is there at first.
"""


def save_page(
    shown: Sequence[Moment] | TreeSnapshot, path: str | Path, *, title: str = "Radix tree"
) -> None:
    """Write the page: the moments of a recording, or one tree as it is now.

    Raises OSError where that cannot be done.
    """
    # Half of a surrogate pair is no character; in JSON the escape that it becomes stands for it.
    Path(path).write_text(page(shown, title=title), encoding="utf-8", errors="backslashreplace")


def page(shown: Sequence[Moment] | TreeSnapshot, *, title: str = "Radix tree") -> str:
    """The page as text."""
    data = json.dumps(page_data(shown), ensure_ascii=False, separators=(",", ":"))
    parts = {
        "title": escape(title),
        "style": _asset("page.css"),
        "data": data.replace("<", "\\u003c"),  # so no text ends the element that it stands in
        "script": "\n".join(map(_asset, SCRIPTS)),
    }
    before, *pieces = _asset("page.html").split("{{")
    filled = [before]
    for piece in pieces:
        name, rest = piece.split("}}", 1)
        filled += parts[name], rest
    return "".join(filled)


def page_data(shown: Sequence[Moment] | TreeSnapshot) -> dict[str, Any]:
    """What the page shows, in JSON's types."""
    texts: dict[str, int] = {}
    namespaces: dict[str, int] = {}

    def rows(tree: MarkedTree) -> list[list[Any]]:
        found: list[list[Any]] = []
        parents: dict[int, int] = {}
        for node, seen in zip(tree.nodes(), choose(tree), strict=True):
            parents.update((id(child), len(found)) for child in node.children)
            row = {
                "parent": parents.get(id(node), -1),
                "name": node.name,
                "mark": node.mark,
                "text": texts.setdefault(node.text, len(texts)),
                "tokens": node.token_count,
                "start": node.start,
                "sampled": node.output_tokens,
                "hits": node.hits,
                "locks": node.lock_ref,
                "held": node.held,
                "lastUse": node.last_access,
                "state": node.state,
                "namespace": namespaces.setdefault(in_words(node.namespace), len(namespaces)),
                "shown": seen,
            }
            found.append([row[field] for field in FIELDS])
        return found

    if isinstance(shown, TreeSnapshot):
        tree = unmarked(shown)
        moments = [
            {"title": "", "caption": "", "clock": tree.clock, "pool": 0, "nodes": rows(tree)}
        ]
    else:
        moments = [
            {
                "title": moment.title,
                "caption": moment.caption,
                "clock": moment.tree.clock,
                "pool": moment.pool_tokens,
                "counts": asdict(moment.counts),
                "nodes": rows(moment.tree),
            }
            for moment in shown
        ]
    return {
        "fields": FIELDS,
        "texts": list(texts),
        "namespaces": list(namespaces),
        "moments": moments,
    }


def _asset(name: str) -> str:
    return (files("stemma.treeview") / "assets" / name).read_text(encoding="utf-8")

"""The page of a recording: all that it shows is in it, whatever the texts are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from stemma.backend.local.cache.snapshot import TreeSnapshot
from stemma.treeview.marks import MarkedTree, unmarked
from stemma.treeview.page import page, page_data, save_page
from stemma.treeview.recorder import Counts, Moment
from tests.treeview.texts_for_tests import AWAY, Texts, four_marks

NASTY = "</script><!-- <script> {{title}} \"quoted\" 'so' \\ & &lt; \x00\x1b\u2028 日本 🙂 \ufffd"


def moment(tree: MarkedTree, *, title: str = "A title", number: int = 1) -> Moment:
    return Moment(number, title, "A caption.", tree, Counts(7, 5, 3, 1), pool_tokens=100)


class Parts(HTMLParser):
    """What a browser makes of the page: its elements, and the text of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.texts[self._inside] = self.texts.get(self._inside, "") + data

    @property
    def data(self) -> dict[str, Any]:
        found = json.loads(self.texts["data"])
        assert isinstance(found, dict)
        return found


def edges(data: dict[str, Any], number: int = 0) -> list[dict[str, Any]]:
    """The rows of a moment, their fields named and their texts put in."""
    rows = [dict(zip(data["fields"], row, strict=True)) for row in data["moments"][number]["nodes"]]
    return [{**row, "text": data["texts"][row["text"]]} for row in rows]


def test_page_takes_nothing_from_outside() -> None:
    text = page([moment(four_marks())])
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bimport\b|fetch\(|XMLHttp", text)
    for tag, attributes in Parts(text).elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "href", "srcset", "action", "data"} & set(attributes)


def test_page_has_every_edge_of_every_moment() -> None:
    first, second = unmarked(Texts("system").now()), four_marks()
    data = Parts(page([moment(first), moment(second, title="Another", number=2)])).data
    assert [m["title"] for m in data["moments"]] == ["A title", "Another"]
    assert data["moments"][0]["counts"] == {"computed": 7, "reused": 5, "output": 3, "evicted": 1}
    assert (data["moments"][1]["pool"], data["moments"][1]["clock"]) == (100, second.clock)
    assert [row["text"] for row in edges(data)] == ["system"]
    told = [(r["name"], r["parent"], r["mark"], r["text"], r["tokens"]) for r in edges(data, 1)]
    assert told == [
        ("a", -1, "hit", "system ", 7),
        ("b", 0, "evicted", "hello", 5),
        ("c", 0, "hit", "bye", 3),
        ("d", 2, "new", " bye", 4),
        ("e", -1, "kept", "other", 5),
    ]
    top = edges(data, 1)[0]
    assert (top["start"], top["hits"], top["locks"], top["state"]) == (0, 3, 1, "locked")
    assert (top["sampled"], top["held"]) == (0, 0)
    assert data["namespaces"] == ["default namespace"]


@pytest.mark.parametrize("text", [NASTY, "]]>", "<!--", "</SCRIPT >", "\\u003c", "${x}`"])
def test_any_text_comes_through_whole(text: str) -> None:
    parts = Parts(page([moment(unmarked(Texts(text).now()), title=text)], title=text))
    (row,) = edges(parts.data)
    assert row["text"] == text
    assert parts.data["moments"][0]["title"] == text
    assert parts.texts["title"].strip() == text.strip()
    assert [tag for tag, _ in parts.elements].count("script") == 2


def test_half_a_surrogate_pair_does_not_stop_the_page(tmp_path: Path) -> None:
    shown = [moment(four_marks(), title="half \ud83d")]
    save_page(shown, tmp_path / "page.html")
    written = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert Parts(written).data["moments"][0]["title"] == "half \ud83d"


def test_texts_that_recur_are_there_once() -> None:
    tree = unmarked(Texts("one", "two").now())
    data = page_data([moment(tree), moment(tree), moment(tree)])
    assert data["texts"] == ["one", "two"]


def test_namespaces_are_told_apart() -> None:
    texts = Texts("home")
    texts.compute("away", namespace=AWAY)
    data = page_data(texts.now())
    assert data["namespaces"] == ["default namespace", "salt='away'"]
    assert [row["namespace"] for row in edges(data)] == [0, 1]


def test_parents_come_first_and_what_is_shown_has_a_shown_parent() -> None:
    texts = Texts(*(f"stem {i % 50:02} {i:04}" for i in range(2000)), capacity=20_000)
    rows = edges(page_data(texts.now()))
    assert len(rows) == len(list(texts.now().nodes())) > 2000
    assert sum(row["shown"] for row in rows) == 120
    for number, row in enumerate(rows):
        assert row["parent"] < number
        assert not row["shown"] or row["parent"] < 0 or rows[row["parent"]]["shown"]


def test_single_tree_is_a_page_without_counts() -> None:
    snapshot: TreeSnapshot = Texts("one").now()
    (only,) = Parts(page(snapshot)).data["moments"]
    assert "counts" not in only
    assert len(only["nodes"]) == 1


def test_empty_tree_is_a_page() -> None:
    assert Parts(page(Texts().now())).data["moments"][0]["nodes"] == []


def test_every_element_that_the_scripts_ask_for_is_there() -> None:
    text = page(Texts().now())
    ids = {attributes.get("id") for _, attributes in Parts(text).elements}
    assert set(re.findall(r"\$\(\"([a-z]+)\"\)", text)) <= ids


def test_scripts_are_valid(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js to read the scripts")
    script = re.findall(r"<script>(.*?)</script>", page(Texts().now()), re.DOTALL)
    (tmp_path / "page.js").write_text(script[-1], encoding="utf-8")
    done = subprocess.run(
        [node, "--check", "page.js"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == ""

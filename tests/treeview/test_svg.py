"""The picture of a tree: well-formed, coloured by mark, with everything in it that is not drawn."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from stemma.treeview.marks import MarkedTree, unmarked
from stemma.treeview.svg import save_svg, svg
from tests.treeview.texts_for_tests import Texts, four_marks

SVG = "{http://www.w3.org/2000/svg}"


def drawn(tree: MarkedTree) -> ElementTree.Element:
    return ElementTree.fromstring(svg(tree))


def cards(picture: ElementTree.Element) -> dict[str, list[str]]:
    """The lines of the cards, by the class of the card."""
    found: dict[str, list[str]] = {}
    for group in picture.iter(f"{SVG}g"):
        lines = ["".join(text.itertext()) for text in group.iter(f"{SVG}text")]
        found.setdefault(group.get("class", "none"), []).append(" | ".join(lines))
    return found


def test_every_edge_is_a_card_and_a_line_with_its_mark() -> None:
    picture = drawn(four_marks())
    assert cards(picture) == {
        "none": [""],  # the root
        "hit": ["a | system  | 7 tokens · 3 hits · locked", "c | bye | 3 tokens · 1 hit"],
        "evicted": ["b | hello | 5 tokens"],
        "new": ["d |  bye | 4 tokens"],
        "kept": ["e | other | 5 tokens"],
    }
    lines = [path.get("class") for path in picture.iter(f"{SVG}path")]
    assert lines == ["hit", "evicted", "hit", "new", "kept"]


def test_colours_are_blue_green_and_orange_dashed() -> None:
    style = drawn(four_marks()).findtext(f"{SVG}style") or ""
    assert re.search(r"\.hit rect {[^}]*stroke: #1f66d6", style)
    assert re.search(r"\.new rect {[^}]*stroke: #14793a", style)
    assert re.search(r"\.evicted rect {[^}]*stroke: #bf5606; stroke-dasharray", style)
    assert "@media (prefers-color-scheme: dark)" in style


def test_no_card_lies_on_another_and_all_lie_within_the_picture() -> None:
    texts = Texts(*(f"{i % 5} {i % 3} {i}" for i in range(40)))
    picture = drawn(unmarked(texts.now()))
    left, top, width, height = map(float, (picture.get("viewBox") or "").split())
    places = []
    for group in picture.iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        if rect is not None:
            x, y = map(float, re.findall(r"[\d.]+", group.get("transform") or ""))
            w, h = float(rect.get("width") or 0), float(rect.get("height") or 0)
            assert left <= x
            assert x + w <= left + width
            assert top <= y
            assert y + h <= top + height
            places.append((x, y, w, h))
    assert len(places) == len(list(unmarked(texts.now()).nodes()))
    for i, (x1, y1, w1, h1) in enumerate(places):
        for x2, y2, w2, h2 in places[:i]:
            assert x1 + w1 <= x2 or x2 + w2 <= x1 or y1 + h1 <= y2 or y2 + h2 <= y1


def test_long_text_is_shortened_and_whole_in_the_title() -> None:
    text = "The beginning. " + "Much more. " * 50 + "The end."
    picture = drawn(unmarked(Texts(text).now()))
    (card,) = cards(picture)["kept"]
    assert re.fullmatch(r"a \| The beginning\. Much .*… \| ….*The end\. \| 573 tokens", card)
    assert any(
        title.text == f"a: kept, 573 tokens\n{text}" for title in picture.iter(f"{SVG}title")
    )


def test_any_text_gives_well_formed_xml() -> None:
    text = "<b>&amp;\"'</b> ]]> \x00\x1b\x7f 日本 🙂 \ufffe\n<|im_end|>"
    picture = drawn(unmarked(Texts(text).now()))
    titles = [title.text or "" for title in picture.iter(f"{SVG}title")]
    assert titles[-1].endswith("<b>&amp;\"'</b> ]]> \\x00\\x1b\\x7f 日本 🙂 \\ufffe\n<|im_end|>")


def test_empty_tree_is_a_picture_of_its_root() -> None:
    picture = drawn(unmarked(Texts().now()))
    assert len(list(picture.iter(f"{SVG}circle"))) == 1
    assert cards(picture) == {"none": [""]}


def test_large_tree_is_drawn_in_part_and_tells_the_rest() -> None:
    texts = Texts(*(f"stem {i % 50:02} {i:04}" for i in range(2000)), capacity=20_000)
    tree = unmarked(texts.now())
    picture = drawn(tree)
    found = cards(picture)
    summed = [line for line in found["none"] if line]
    told = sum(int(line.split(" in ")[1].split()[0].replace(",", "")) for line in summed)
    assert len(found["kept"]) + told == len(list(tree.nodes())) > 2000
    assert len(found["kept"]) == 120


def test_picture_refers_to_nothing_outside(tmp_path: Path) -> None:
    save_svg(Texts("a", "b").now(), tmp_path / "tree.svg")
    written = (tmp_path / "tree.svg").read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\"]*", written) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"href|url\(|@import", written)

"""What of a large tree is shown at first."""

from __future__ import annotations

from stemma.treeview.marks import Mark, MarkedNode, MarkedTree, compare, unmarked
from stemma.treeview.selection import choose
from tests.treeview.texts_for_tests import Texts, decode


def shown(tree: MarkedTree, *, most: int, most_children: int = 12) -> list[MarkedNode]:
    chosen = choose(tree, most=most, most_children=most_children)
    return [node for node, seen in zip(tree.nodes(), chosen, strict=True) if seen]


def test_tree_that_is_small_enough_is_shown_whole() -> None:
    tree = unmarked(Texts(*(f"stem {i:03}" for i in range(30))).now())
    assert choose(tree, most=100) == [True] * len(list(tree.nodes()))


def test_large_tree_shows_no_more_than_allowed_and_no_edge_without_its_parent() -> None:
    tree = unmarked(Texts(*(f"{i % 7} {i:04} and more" for i in range(300))).now())
    seen = {id(node) for node in shown(tree, most=40)}
    assert len(seen) == 40
    for node in tree.nodes():
        assert id(node) in seen or not any(id(child) in seen for child in node.children)


def test_edge_shows_only_so_many_children() -> None:
    tree = unmarked(Texts(*(f"stem {chr(33 + i)}" for i in range(90))).now())
    stem, *children = shown(tree, most=50, most_children=5)
    assert stem.text.startswith("stem ")
    assert len(children) == 5


def test_a_single_leaf_is_not_hidden_alone() -> None:
    texts = Texts("aaaa", "aaab", "b-long-long-long", "c-long-long-long")
    assert [node.text for node in shown(unmarked(texts.now()), most=4)] == [
        *("aaa", "a", "b"),  # one of these two would be hidden
        *("b-long-long-long", "c-long-long-long"),
    ]


def test_where_something_happened_is_shown_before_what_is_large() -> None:
    texts = Texts("small", *(f"{i:02} a long text that nobody uses" for i in range(40)))
    before = texts.now()
    texts.compute("small one")
    tree = compare(before, texts.now(), decode)
    assert [node.mark for node in shown(tree, most=2)] == [Mark.HIT, Mark.NEW]


def test_large_branches_are_shown_before_small_ones() -> None:
    texts = Texts(*(f"{chr(65 + i)}{'x' * 10 * i}" for i in range(20)))
    assert [node.text[0] for node in shown(unmarked(texts.now()), most=3)] == ["R", "S", "T"]

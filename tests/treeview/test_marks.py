"""What happened between two snapshots: no model, only a cache that is filled and emptied."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.backend.local.cache.radix_key import RadixKey
from stemma.lang.errors import InvalidArgument
from stemma.treeview.marks import Mark, MarkedTree, compare, unmarked
from stemma.treeview.names import Names, letters
from tests.treeview.texts_for_tests import AWAY, HOME, Texts, decode


def told(tree: MarkedTree) -> list[str]:
    """Every edge as its mark and text, indented by how many edges are above it."""
    lines: list[str] = []
    stack = [(0, child) for child in reversed(tree.children)]
    while stack:
        depth, node = stack.pop()
        lines.append("  " * depth + f"{node.mark} {node.text}")
        stack.extend((depth + 1, child) for child in reversed(node.children))
    return lines


def test_between_equal_snapshots_everything_is_kept() -> None:
    texts = Texts("system hello", "system bye")
    assert told(compare(texts.now(), texts.now(), decode)) == [
        "kept system ",
        "  kept hello",
        "  kept bye",
    ]


def test_what_comes_into_an_empty_tree_is_new() -> None:
    texts = Texts()
    before = texts.now()
    texts.compute("system hello", "system bye")
    assert told(compare(before, texts.now(), decode)) == [
        "new system ",
        "  new hello",
        "  new bye",
    ]


def test_prompt_and_output_of_a_turn_are_one_edge() -> None:
    texts = Texts()
    before = texts.now()
    texts.compute("prompt", "prompt output")
    assert told(compare(before, texts.now(), decode)) == ["new prompt output"]


def test_text_that_goes_on_is_cut_into_hit_and_new() -> None:
    texts = Texts("one")
    before = texts.now()
    texts.compute("one two")
    assert told(compare(before, texts.now(), decode)) == ["hit one", "  new  two"]


def test_split_edge_is_hit_above_and_kept_below() -> None:
    texts = Texts("system hello")
    before = texts.now()
    texts.compute("system bye")
    assert told(compare(before, texts.now(), decode)) == [
        "hit system ",
        "  kept hello",
        "  new bye",
    ]


def test_evicted_branch_hangs_where_it_was() -> None:
    texts = Texts("system hello", "system bye")
    before = texts.now()
    texts.compute("system bye bye")
    assert texts.evict(1) == len("hello")
    assert told(compare(before, texts.now(), decode)) == [
        "hit system ",
        "  evicted hello",
        "  hit bye",
        "    new  bye",
    ]


def test_evicted_end_of_an_edge_is_cut_off() -> None:
    texts = Texts("prompt", "prompt output")
    before = texts.now()
    texts.evict(1)
    assert told(compare(before, texts.now(), decode)) == ["kept prompt", "  evicted  output"]


def test_branch_that_replaces_an_evicted_one_stands_beside_it() -> None:
    texts = Texts("common old")
    before = texts.now()
    texts.cache.flush()
    texts.compute("common new")
    assert told(compare(before, texts.now(), decode)) == [
        "new common ",
        "  evicted old",
        "  new new",
    ]


def test_what_was_evicted_and_computed_again_is_new() -> None:
    texts = Texts("one", "two")
    before = texts.now()
    texts.cache.flush()
    texts.compute("one")
    assert told(compare(before, texts.now(), decode)) == ["new one", "evicted two"]


def test_part_of_an_edge_that_was_used_is_hit() -> None:
    texts = Texts("hello world")
    before = texts.now()
    texts.cache.match_prefix(RadixKey.of(list(b"hello"), HOME))
    assert told(compare(before, texts.now(), decode)) == ["hit hello", "  kept  world"]


def test_equal_tokens_of_two_namespaces_are_two_edges() -> None:
    texts = Texts("same")
    before = texts.now()
    texts.compute("same", namespace=AWAY)
    tree = compare(before, texts.now(), decode)
    assert [(node.mark, node.namespace) for node in tree.nodes()] == [
        (Mark.KEPT, HOME),
        (Mark.NEW, AWAY),
    ]
    assert len({node.name for node in tree.nodes()}) == 2


def test_pages_that_begin_alike_are_told_apart() -> None:
    texts = Texts("aaab----", page_size=4)
    before = texts.now()
    texts.compute("aaac----")
    texts.evict(4)
    assert told(compare(before, texts.now(), decode)) == ["evicted aaab----", "new aaac----"]


def test_character_that_a_cut_parts_stands_below_the_cut() -> None:
    texts = Texts("à")
    before = texts.now()
    texts.compute("à €", "à ₭")  # these share their first two bytes
    assert told(compare(before, texts.now(), decode)) == [
        "hit à",
        "  new  ",
        "    new €",
        "    new ₭",
    ]


def test_numbers_are_those_of_the_upper_end_and_of_the_latest_snapshot_that_has_it() -> None:
    texts = Texts("one", "two")
    before = texts.now()
    texts.compute("one more", "one more")
    texts.lock("one")
    texts.evict(3)
    one, more, two = compare(before, texts.now(), decode).nodes()
    assert (one.start, one.hits, one.lock_ref, one.state) == (0, 3, 1, "locked")
    assert (more.start, more.hits, more.lock_ref, more.state) == (3, 1, 0, "idle")
    assert one.last_access > more.last_access > two.last_access == before.clock
    assert (two.mark, two.hits, two.token_count) == (Mark.EVICTED, 0, 3)


def test_snapshots_in_the_wrong_order_are_refused() -> None:
    texts = Texts("one")
    before = texts.now()
    texts.compute("one more")
    with pytest.raises(InvalidArgument, match="not of one cache, or in the wrong order"):
        compare(texts.now(), before, decode)


def test_single_snapshot_is_all_kept_with_its_own_texts() -> None:
    texts = Texts("system hello", "system bye", "else")
    tree, snapshot = unmarked(texts.now()), texts.now()
    assert [(n.text, n.token_ids, n.mark) for n in tree.nodes()] == [
        (n.text, n.token_ids, Mark.KEPT) for n in snapshot.nodes()
    ]
    assert tree.total_tokens == snapshot.total_tokens


def test_depth_is_no_limit() -> None:
    texts = Texts("a" * 3000, capacity=20_000)
    before = texts.now()
    texts.compute(*("a" * length + "b" for length in range(2999, 0, -1)))
    tree = compare(before, texts.now(), decode)
    assert len(tree.marked(Mark.NEW)) == 2999
    assert tree.total_tokens == 3000 + 2999


def test_edge_keeps_its_name_while_its_end_is_there_and_when_it_comes_again() -> None:
    names = Names()
    texts = Texts("system hello")
    (old,) = compare(texts.now(), texts.now(), decode, names=names).nodes()
    assert old.name == "a"
    before = texts.now()
    texts.compute("system bye")
    system, hello, bye = compare(before, texts.now(), decode, names=names).nodes()
    assert (system.name, hello.name, bye.name) == ("b", "a", "c")
    texts.cache.flush()
    before = texts.now()
    texts.compute("system hello")
    (again,) = compare(before, texts.now(), decode, names=names).nodes()
    assert again.name == "a"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "a"), (25, "z"), (26, "aa"), (701, "zz"), (702, "aaa")]
)
def test_names_go_on_after_the_alphabet(number: int, text: str) -> None:
    assert letters(number) == text


texts_of_two = st.lists(st.text("ab", min_size=1, max_size=12), max_size=8)


@settings(max_examples=200, deadline=None)
@given(
    first=texts_of_two,
    second=texts_of_two,
    evicted=st.integers(0, 40),
    page_size=st.sampled_from([1, 2, 4]),
)
def test_marks_agree_with_the_sets_of_cached_prefixes(
    first: list[str], second: list[str], evicted: int, page_size: int
) -> None:
    texts = Texts(*first, page_size=page_size)
    before = texts.now()
    texts.evict(evicted)
    between = texts.now()
    texts.compute(*second)
    after = texts.now()
    tree = compare(before, after, decode)
    old, left, new = (set(prefixes_of(unmarked(t), page_size)) for t in (before, between, after))
    asked = {text[:end] for text in second for end in range(1, len(text) + 1)}
    assert prefixes_of(tree, page_size) == {
        **dict.fromkeys(old - new, Mark.EVICTED),
        **dict.fromkeys(new - left, Mark.NEW),
        **dict.fromkeys(left & asked, Mark.HIT),
        **dict.fromkeys(left - asked, Mark.KEPT),
    }
    assert tree.total_tokens == after.total_tokens
    for node in tree.nodes():
        assert len(node.children) != 1 or node.children[0].mark is not node.mark


def prefixes_of(tree: MarkedTree, page_size: int) -> dict[str, Mark]:
    """Every prefix of whole pages in the tree, with the mark of its last page."""
    found: dict[str, Mark] = {}
    stack = [("", child) for child in tree.children]
    while stack:
        above, node = stack.pop()
        text = decode(node.token_ids)
        for end in range(page_size, len(text) + 1, page_size):
            found[above + text[:end]] = node.mark
        stack.extend((above + text, child) for child in node.children)
    return found

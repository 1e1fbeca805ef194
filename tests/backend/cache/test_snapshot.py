"""The tree as a value, and how it prints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from rich.tree import Tree

from stemma.backend.base import Namespace
from stemma.backend.local.cache.eviction import LRU
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.printing import (
    EDGE_WIDTH,
    PRINTED_CHILDREN,
    PRINTED_DEPTH,
    visible,
)
from stemma.backend.local.cache.radix_cache import RadixCache
from stemma.backend.local.cache.radix_key import RadixKey

HOME = Namespace()


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def text_key(text: str, namespace: Namespace = HOME) -> RadixKey:
    return RadixKey.of([ord(c) for c in text], namespace)


def cache_of(*texts: str, capacity: int = 4096) -> RadixCache:
    allocator = PageAllocator(capacity, 1)
    cache = RadixCache(allocator, eviction=LRU())
    for text in texts:
        insert(cache, allocator, text_key(text))
    return cache


def insert(cache: RadixCache, allocator: PageAllocator, key: RadixKey) -> None:
    match = cache.match_prefix(key)
    own = allocator.alloc(len(key) - match.length)
    assert own is not None
    cache.insert(key, np.concatenate((match.slots, own)), owned_from=match.length)


def test_snapshot_tells_text_tokens_hits_and_locks_of_every_edge() -> None:
    cache = cache_of("System.\nHello", "System.\nBye")
    node = cache.match_prefix(text_key("System.\nBye")).node
    cache.inc_lock_ref(node)
    snapshot = cache.snapshot(decode)
    nodes = list(snapshot.nodes())
    assert [n.text for n in nodes] == ["System.\n", "Hello", "Bye"]
    assert [n.token_count for n in nodes] == [8, 5, 3]
    assert [n.lock_ref for n in nodes] == [1, 0, 1]
    assert [n.hits for n in nodes] == [2, 0, 1]
    assert nodes[0].last_access == nodes[2].last_access > nodes[1].last_access
    assert all(n.namespace == HOME for n in nodes)
    assert nodes[0].children == (nodes[1], nodes[2])
    assert snapshot.total_tokens == cache.cached_tokens == 16


def test_edge_tells_its_tokens_and_the_history_of_its_parts() -> None:
    cache = cache_of("ab", "abcd", "ab")
    cache.inc_lock_ref(cache.match_prefix(text_key("ab")).node)
    snapshot = cache.snapshot(decode)
    (node,) = snapshot.nodes()
    assert node.token_ids == tuple(map(ord, "abcd"))
    upper, lower = node.parts
    assert (upper.token_count, upper.hits, upper.lock_ref, upper.state) == (2, 3, 1, "locked")
    assert (lower.token_count, lower.hits, lower.lock_ref, lower.state) == (2, 0, 0, "idle")
    assert upper.created < lower.created == lower.last_access < upper.last_access
    assert snapshot.clock == upper.last_access
    assert node.state == "locked"


def test_edge_tells_what_was_sampled_and_where_idle_branches_stand() -> None:
    cache = cache_of("ab")
    key, own = text_key("abcd"), cache._allocator.alloc(2)
    assert own is not None
    slots = np.concatenate((cache.match_prefix(key).slots, own))
    cache.insert(key, slots, owned_from=2, output=True, priority=3)
    cache.hold(text_key("ab"))
    (node,) = cache.snapshot(decode).nodes()
    assert [(p.output, p.held, p.priority) for p in node.parts] == [(False, 1, 3), (True, 0, 3)]
    assert node.held == 1


def test_both_halves_of_a_split_were_created_with_the_whole() -> None:
    cache = cache_of("abcd")
    (whole,) = cache.snapshot(decode).nodes()
    cache.match_prefix(text_key("ab"))
    (node,) = cache.snapshot(decode).nodes()
    assert [part.created for part in node.parts] == [whole.parts[0].created] * 2


def test_what_the_running_step_computes_is_pending() -> None:
    cache = cache_of("ab")
    key, own = text_key("abcd"), cache._allocator.alloc(2)
    assert own is not None
    slots = np.concatenate((cache.match_prefix(key).slots, own))
    cache.insert(key, slots, owned_from=2, computed=False)
    (node,) = cache.snapshot(decode).nodes()
    assert [part.state for part in node.parts] == ["locked", "pending"]
    cache.commit()
    (node,) = cache.snapshot(decode).nodes()
    assert [part.state for part in node.parts] == ["idle", "idle"]


def test_snapshot_stays_as_it_was() -> None:
    cache = cache_of("abc")
    before = cache.snapshot(decode)
    cache.match_prefix(text_key("ab"))
    assert cache.snapshot(decode) != before
    cache.flush()
    assert [n.text for n in before.nodes()] == ["abc"]
    assert cache.snapshot(decode).children == ()


def test_chain_without_forks_is_one_edge_with_the_upper_ends_numbers() -> None:
    cache = cache_of("ab", "abcd", "abcdef")
    cache.inc_lock_ref(cache.match_prefix(text_key("ab")).node)
    (node,) = cache.snapshot(decode).nodes()
    assert (node.text, node.token_count, node.lock_ref) == ("abcdef", 6, 1)


def test_character_whose_tokens_lie_in_two_nodes_is_decoded_whole() -> None:
    first, second, third = "é€"[1].encode()
    allocator = PageAllocator(8, 1)
    cache = RadixCache(allocator, eviction=LRU())
    insert(cache, allocator, RadixKey.of([first], HOME))
    insert(cache, allocator, RadixKey.of([first, second, third], HOME))
    (node,) = cache.snapshot(lambda ids: bytes(ids).decode()).nodes()
    assert node.text == "€"


def test_character_that_a_fork_parts_stands_below_the_fork() -> None:
    allocator = PageAllocator(16, 1)
    cache = RadixCache(allocator, eviction=LRU())
    for text in ("à€", "à₭", "à"):  # the first two share two bytes more
        insert(cache, allocator, RadixKey.of(list(text.encode()), HOME))
    nodes = cache.snapshot(lambda ids: bytes(ids).decode(errors="replace")).nodes()
    assert [node.text for node in nodes] == ["à", "€", "₭"]


def test_text_that_is_no_utf8_is_shown_as_that() -> None:
    allocator = PageAllocator(16, 1)
    cache = RadixCache(allocator, eviction=LRU())
    for ids in ([0xFF] * 5 + [65], [0xFF] * 5 + [66], [66, 0xE2, 0x82]):
        insert(cache, allocator, RadixKey.of(ids, HOME))
    nodes = cache.snapshot(lambda ids: bytes(ids).decode(errors="replace")).nodes()
    assert [node.text for node in nodes] == ["\ufffd" * 5, "A", "B", "B\ufffd"]


def test_tree_prints_edges_with_their_numbers() -> None:
    cache = cache_of("You are brief.\nHi [b]x[/b]", "You are brief.\nHo")
    cache.inc_lock_ref(cache.match_prefix(text_key("You are brief.\nHo")).node)
    assert str(cache.snapshot(decode)).splitlines() == [
        "radix tree  27 tokens in 3 edges",
        "└── default namespace",
        "    └── 16 tokens  2 hits  1 lock  “You are brief.⏎H”",
        "        ├── 10 tokens  “i [b]x[/b]”",
        "        └── 1 token  1 hit  1 lock  “o”",
    ]
    assert isinstance(cache.snapshot(decode).__rich__(), Tree)


def test_namespaces_print_apart_with_what_sets_them_apart() -> None:
    allocator = PageAllocator(64, 1)
    cache = RadixCache(allocator, eviction=LRU())
    for text, namespace in (
        ("a", Namespace(model_version="m", salt="s[1]")),
        ("b", HOME),
        ("c", Namespace(model_version="m", salt="s[1]")),
    ):
        insert(cache, allocator, text_key(text, namespace))
    assert str(cache.snapshot(decode)).splitlines() == [
        "radix tree  3 tokens in 3 edges",
        "├── model_version='m'  salt='s[1]'",
        "│   ├── 1 token  “a”",
        "│   └── 1 token  “c”",
        "└── default namespace",
        "    └── 1 token  “b”",
    ]


def test_empty_tree_prints() -> None:
    assert str(cache_of().snapshot(decode)) == "radix tree  0 tokens in 0 edges"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a⏎b"),
        ("a\tb\x00", "a\\tb\\x00"),
        ("日本 é", "日本 é"),
        ("x" * EDGE_WIDTH, "x" * EDGE_WIDTH),
    ],
)
def test_edge_text_is_shown_on_one_line(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_long_edge_loses_its_middle() -> None:
    shown = visible("start " + "y" * 500 + " end")
    assert len(shown) == EDGE_WIDTH
    assert shown.startswith("start ")
    assert " … " in shown
    assert shown.endswith(" end")


def test_deep_tree_prints_its_top_and_sums_up_the_rest() -> None:
    depth = 1_500
    text = "a" * depth
    cache = cache_of(text, capacity=2 * depth)
    allocator = cache._allocator
    for length in range(depth - 1, 0, -1):  # a side branch at every depth
        insert(cache, allocator, text_key(text[:length] + "b"))
    snapshot = cache.snapshot(decode)
    assert snapshot.total_tokens == 2 * depth - 1
    assert sum(1 for _ in snapshot.nodes()) == 2 * depth - 1
    lines = str(snapshot).splitlines()
    assert len(lines) == 2 + 2 * PRINTED_DEPTH
    left = snapshot.total_tokens - (2 * PRINTED_DEPTH - 1)
    assert any(line.endswith(f"… {left:,} tokens in {left:,} edges below") for line in lines)


def test_wide_tree_prints_its_first_children_and_sums_up_the_rest() -> None:
    cache = cache_of(*(f"stem{chr(200 + i)}x" for i in range(PRINTED_CHILDREN + 7)))
    lines = str(cache.snapshot(decode)).splitlines()
    assert len(lines) == 3 + PRINTED_CHILDREN + 1
    assert lines[-1].endswith("… 14 tokens in 7 edges more")

"""The radix cache: matching, inserting, locks, eviction, and the nodes of the step now running."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest

from stemma.backend.local.cache.radix_cache import RadixNode
from stemma.backend.local.cache.radix_key import Ints, RadixKey, common_prefix
from stemma.lang.errors import EngineInvariantError
from tests.backend.cache.cache_for_tests import HOME, PAGE_SIZES, Bench, key

# -- keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.int32), np.zeros(3, np.int64)])
def test_key_of_another_shape_or_type_is_refused(array: Ints) -> None:
    with pytest.raises(EngineInvariantError, match="int32"):
        RadixKey(array, HOME)


def test_token_id_beyond_32_bits_is_refused_rather_than_wrapped() -> None:
    with pytest.raises(OverflowError):
        key([2**32 + 5])


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1), ([2], [1], 0)],
)
def test_common_prefix_counts_equal_leading_tokens(a: list[int], b: list[int], length: int) -> None:
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == length


# -- matching -----------------------------------------------------------------------------


@PAGE_SIZES
def test_every_length_around_every_page_boundary_matches_whole_pages(page_size: int) -> None:
    tokens = list(range(100, 100 + 4 * page_size))
    for cached in range(0, 4 * page_size + 1, page_size):
        bench = Bench(page_size=page_size)
        slots = bench.put(tokens[:cached]).slots
        for length in range(len(tokens) + 1):
            expected = min(cached, length - length % page_size)
            asked = key([*tokens[:length], 7])
            assert bench.cache.peek(asked).length == expected
            match = bench.cache.match_prefix(asked)
            assert (match.length, match.computed) == (expected, expected)
            assert match.slots.dtype == np.int32
            assert match.slots.tolist() == slots[:expected].tolist()
            bench.cache.check()


@PAGE_SIZES
def test_match_never_exceeds_its_limit(page_size: int) -> None:
    bench = Bench(page_size=page_size)
    tokens = list(range(3 * page_size))
    bench.put(tokens)
    for limit in range(-1, 4 * page_size):
        found = bench.cache.match_prefix(key(tokens), limit=limit).length
        assert found == min(len(tokens), max(limit, 0) // page_size * page_size)
        bench.cache.check()


@PAGE_SIZES
def test_page_that_differs_in_one_token_is_not_shared(page_size: int) -> None:
    for place in range(2 * page_size):
        bench = Bench(page_size=page_size)
        tokens = [5] * (2 * page_size)
        bench.put(tokens)
        other = list(tokens)
        other[place] = 6
        assert bench.found(other) == place // page_size * page_size
        assert bench.put(other).already == place // page_size * page_size
        assert bench.found(tokens) == bench.found(other) == 2 * page_size


def test_pages_of_one_leave_nothing_unaligned() -> None:
    bench = Bench()
    bench.put([1, 2, 3, 4])
    for asked in ([1, 2, 3, 4, 5], [1, 2, 9], [9], [1, 2, 3, 4]):
        for limit in range(len(asked) + 1):
            assert bench.cache.match_prefix(key(asked), limit=limit).unaligned == 0


def test_unaligned_is_what_the_limit_or_a_parting_inside_a_page_takes_away() -> None:
    bench = Bench(page_size=4)
    bench.put([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    asked = {
        (1, 1, 1, 1, 2, 2, 9, 9): 2,  # parts inside an edge
        (1, 1, 9, 9, 9): 2,  # parts inside the first page of all
        (1, 1, 1): 3,  # ends before the page does
        (9, 1, 1, 1): 0,
        (1, 1, 1, 1, 2, 2, 2, 2): 0,
    }
    for tokens, unaligned in asked.items():
        assert bench.cache.match_prefix(key(tokens)).unaligned == unaligned
    whole = key([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    for limit in range(13):
        match = bench.cache.match_prefix(whole, limit=limit)
        assert (match.length, match.unaligned) == (limit - limit % 4, limit % 4)
    other = replace(HOME, salt="x")
    bench.put([1, 1, 1, 8], other)
    assert bench.cache.match_prefix(key([1, 1, 1, 9])).unaligned == 3
    assert bench.cache.match_prefix(key([1, 1, 8, 8], other)).unaligned == 2


@pytest.mark.parametrize("page_size", [4, 16, 32, 64])
def test_nearest_of_many_siblings_is_found(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    bench = Bench(page_size=page_size)
    pages = [rng.integers(0, 2, page_size).tolist() for _ in range(200)]
    for page in pages:
        bench.put(page)
    for _ in range(300):
        asked = rng.integers(0, 2, rng.integers(1, 2 * page_size)).tolist()
        if asked[:page_size] in pages:
            continue
        expected = max(
            common_prefix(np.array(asked, np.int32), np.array(page, np.int32)) for page in pages
        )
        assert bench.cache.match_prefix(key(asked)).unaligned == expected
    bench.cache.evict(150 * page_size)
    bench.cache.check()


def test_match_ends_exactly_at_its_node_and_locks_no_more_than_it_needs() -> None:
    bench = Bench()
    bench.put([1, 2, 3, 4, 5])
    node = bench.cache.match_prefix(key([1, 2, 9])).node
    bench.cache.inc_lock_ref(node)
    assert bench.cache.protected_tokens == 2
    assert bench.cache.evict(100) == 3
    assert bench.found([1, 2, 3, 4, 5]) == 2
    bench.cache.dec_lock_ref(node)
    bench.check_idle()


def test_peek_leaves_no_trace() -> None:
    bench = Bench()
    node = bench.put([1, 2, 3]).node
    before = (node.hits, node.last_access, len(node))
    assert bench.found([1, 2, 9]) == 2
    assert (node.hits, node.last_access, len(node)) == before


def test_hits_count_the_matches_that_went_through_a_node() -> None:
    bench = Bench()
    leaf = bench.put([1, 2, 3, 4]).node
    assert leaf.hits == 0
    for _ in range(3):
        bench.cache.match_prefix(key([1, 2, 3, 4]))
    assert leaf.hits == 3
    half = bench.cache.match_prefix(key([1, 2])).node
    assert (half.hits, leaf.hits) == (4, 3)


def test_what_was_matched_is_younger_than_what_was_not() -> None:
    bench = Bench()
    first, second = bench.put([1, 2]).node, bench.put([8, 9]).node
    assert first.last_access < second.last_access
    bench.cache.match_prefix(key([1, 2]))
    assert first.last_access > second.last_access


def test_tree_does_not_follow_later_changes_of_the_callers_arrays() -> None:
    bench = Bench()
    whole, slots = key([1, 2, 3]), bench.take(3)
    mine = slots.copy()
    done = bench.cache.insert(whole, mine, owned_from=0)
    whole.token_ids[:] = 9
    mine[:] = 77
    done.slots[:] = 78
    match = bench.cache.match_prefix(key([1, 2, 3]))
    assert match.slots.tolist() == slots.tolist()
    match.slots[:] = 79
    assert bench.cache.slots().tolist() == slots.tolist()
    bench.cache.check()


# -- namespaces ---------------------------------------------------------------------------

FIELDS = ("model_version", "adapter", "salt", "extra_key")


@PAGE_SIZES
@pytest.mark.parametrize(("one", "other"), list(permutations(FIELDS, 2)))
def test_parts_of_a_namespace_are_never_run_together(one: str, other: str, page_size: int) -> None:
    tokens = list(range(page_size))
    values = [("ab", "c"), ("a", "bc"), ("c", "ab"), ("abc", ""), ("", "abc")]
    bench = Bench(page_size=page_size)
    for pair in values:
        namespace = replace(HOME, **dict(zip((one, other), pair, strict=True)))
        assert bench.found(tokens, namespace) == 0
        bench.put(tokens, namespace)
    assert bench.cache.cached_tokens == len(values) * page_size


@pytest.mark.parametrize("field", FIELDS)
def test_namespaces_that_differ_in_one_field_share_nothing(field: str) -> None:
    bench = Bench()
    near = replace(HOME, **{field: "x"})
    first = bench.put([1, 2, 3])
    second = bench.put([1, 2, 3], near)
    assert not set(first.slots.tolist()) & set(second.slots.tolist())
    assert bench.cache.flush(near) == 3
    assert (bench.found([1, 2, 3]), bench.found([1, 2, 3], near)) == (3, 0)


def test_no_adapter_is_not_the_adapter_without_a_name() -> None:
    bench = Bench()
    bench.put([1], replace(HOME, adapter=None))
    assert bench.found([1], replace(HOME, adapter="")) == 0


@PAGE_SIZES
def test_many_namespaces_leave_nothing_behind_once_evicted(page_size: int) -> None:
    bench = Bench(page_size=page_size)
    for i in range(50):
        namespace = replace(HOME, salt=str(i))
        bench.cache.match_prefix(key(range(page_size), namespace))
        if bench.allocator.free_tokens < page_size:
            bench.cache.evict(page_size)
        bench.put(range(page_size), namespace)
    bench.cache.evict(bench.allocator.capacity)
    assert not bench.cache._tree.root.children
    bench.check_idle()


# -- inserting ----------------------------------------------------------------------------


def test_empty_key_is_the_root_and_changes_nothing() -> None:
    bench = Bench(page_size=4)
    done = bench.put([])
    assert (len(done.slots), done.already, done.computed) == (0, 0, 0)
    assert done.node is bench.cache.match_prefix(key([])).node
    assert bench.cache.match_prefix(key([1, 2, 3])).node is done.node  # shorter than a page
    assert bench.cache.cached_tokens == 0
    bench.cache.inc_lock_ref(done.node)
    bench.cache.dec_lock_ref(done.node)
    bench.check_idle()


@PAGE_SIZES
def test_duplicates_are_freed_and_the_trees_slots_are_returned(page_size: int) -> None:
    for shared in range(4):
        for owned in range(shared + 1):
            bench = Bench(page_size=page_size)
            common = list(range(shared * page_size))
            first = bench.put([*common, *[50] * page_size])
            mine = bench.take((4 - owned) * page_size)
            slots = np.concatenate((first.slots[: owned * page_size], mine))
            whole = key([*common, *[60] * ((4 - shared) * page_size)])
            done = bench.cache.insert(whole, slots, owned_from=owned * page_size)
            bench.cache.check()
            assert done.already == shared * page_size
            kept = mine[(shared - owned) * page_size :]
            assert done.slots.tolist() == [*first.slots[: shared * page_size], *kept]
            assert bench.cache.match_prefix(whole).slots.tolist() == done.slots.tolist()
            bench.check_idle()


def test_inserting_again_what_the_tree_has_from_the_caller_frees_nothing() -> None:
    bench = Bench()
    slots = bench.take(3)
    bench.cache.insert(key([1, 2, 3]), slots, owned_from=0)
    again = bench.cache.insert(key([1, 2, 3]), slots, owned_from=0)
    assert again.already == 3
    assert bench.cache.cached_tokens == 3
    bench.check_idle()


@pytest.mark.parametrize("page_size", [4, 16])
def test_insert_of_half_pages_raises_and_changes_nothing(page_size: int) -> None:
    bench = Bench(page_size=page_size)
    slots = bench.take(4 * page_size)
    for pages in range(1, 4):
        for length in (pages * page_size - 1, pages * page_size + 1):
            with pytest.raises(EngineInvariantError, match="whole pages"):
                bench.cache.insert(key(range(length)), slots[:length], owned_from=0)
    for owned_from in (1, page_size - 1, page_size + 1):
        whole = key(range(4 * page_size))
        with pytest.raises(EngineInvariantError, match="whole pages"):
            bench.cache.insert(whole, slots, owned_from=owned_from)
    with pytest.raises(EngineInvariantError, match="whole pages"):
        bench.cache.insert(key(range(page_size)), slots, owned_from=0)
    assert bench.cache.cached_tokens == 0
    bench.cache.check()


def test_insert_on_slots_that_the_tree_does_not_have_raises() -> None:
    bench = Bench()
    first = bench.put([1, 2, 3])
    own = bench.take(2)
    slots = np.concatenate((first.slots, own))
    wrong = slots.copy()
    wrong[1] = own[0]
    for tokens, table, owned_from in (
        ([1, 2, 3, 4, 5], wrong, 3),  # the tree has the token, elsewhere
        ([1, 2, 8, 4, 5], slots, 3),  # the tree has another token
        ([1, 2, 3, 4, 5], slots, 4),  # the tree ends before
        ([1, 2, 3, 4, 5], slots, -1),
    ):
        with pytest.raises(EngineInvariantError, match="tree"):
            bench.cache.insert(key(tokens), table, owned_from=owned_from)
        assert bench.cache.cached_tokens == 3
        assert len(first.node) == 3
    bench.cache.insert(key([1, 2, 3, 4, 5]), slots, owned_from=3)
    bench.check_idle()


# -- locks --------------------------------------------------------------------------------


def test_locked_path_is_kept_and_the_rest_is_evicted() -> None:
    bench = Bench()
    kept = bench.put([1, 2, 3]).node
    bench.put([1, 2, 4])
    bench.put([9])
    bench.cache.inc_lock_ref(kept)
    assert (bench.cache.evictable_tokens, bench.cache.protected_tokens) == (2, 3)
    assert bench.cache.evict(100) == 2
    assert bench.cache.flush() == 0
    assert bench.found([1, 2, 3]) == 3
    bench.cache.dec_lock_ref(kept)
    assert bench.cache.evict(100) == 3
    assert bench.allocator.free_tokens == bench.allocator.capacity
    bench.check_idle()


def test_lock_given_back_twice_raises_and_changes_nothing() -> None:
    bench = Bench()
    upper = bench.put([1, 2]).node
    lower = bench.put([1, 2, 3]).node
    bench.cache.inc_lock_ref(upper)
    with pytest.raises(EngineInvariantError, match="nobody holds"):
        bench.cache.dec_lock_ref(lower)
    bench.cache.check()
    bench.cache.dec_lock_ref(upper)
    with pytest.raises(EngineInvariantError, match="nobody holds"):
        bench.cache.dec_lock_ref(upper)
    bench.check_idle()


def test_node_that_left_the_tree_cannot_be_locked() -> None:
    bench = Bench()
    node = bench.put([1, 2]).node
    bench.cache.evict(1)
    with pytest.raises(EngineInvariantError, match="left the tree"):
        bench.cache.inc_lock_ref(node)


def test_lock_stays_where_its_prefix_ends_when_its_node_is_split() -> None:
    bench = Bench()
    node = bench.put([1, 2, 3, 4]).node
    bench.cache.inc_lock_ref(node)
    upper = bench.cache.match_prefix(key([1, 2])).node
    assert (upper.lock_ref, node.lock_ref) == (1, 1)
    assert bench.cache.protected_tokens == 4
    bench.cache.dec_lock_ref(node)
    assert (upper.lock_ref, node.lock_ref) == (0, 0)
    bench.check_idle()


# -- eviction -----------------------------------------------------------------------------


def test_least_recently_used_leaf_goes_first_and_its_parent_is_next_in_line() -> None:
    bench = Bench()
    bench.put([1, 2])
    bench.put([1, 2, 3])
    bench.put([7])
    bench.put([8])
    bench.cache.match_prefix(key([7]))
    assert bench.cache.evict(1) == 1  # [3], older than [8] and [7]
    assert bench.found([1, 2, 3]) == 2
    assert bench.cache.evict(1) == 2  # its parent, as old
    assert (bench.found([1]), bench.found([7]), bench.found([8])) == (0, 1, 1)
    assert bench.cache.evict(1) == 1
    assert (bench.found([7]), bench.found([8])) == (1, 0)
    assert bench.cache.evicted_tokens == 4
    bench.check_idle()


def test_use_after_queueing_postpones_eviction() -> None:
    bench = Bench()
    for token in range(5):
        bench.put([token])
    for token in (0, 3, 1):
        bench.cache.match_prefix(key([token]))
    order = []
    for _ in range(5):
        before = {t for t in range(5) if bench.found([t])}
        bench.cache.evict(1)
        order += list(before - {t for t in range(5) if bench.found([t])})
    assert order == [2, 4, 0, 3, 1]


@PAGE_SIZES
def test_eviction_frees_at_least_what_is_asked_but_no_leaf_too_many(page_size: int) -> None:
    for asked in range(10 * page_size + 2):
        bench = Bench(page_size=page_size)
        for i in range(4):
            bench.put([i] * (2 * page_size))
        leaf = 2 * page_size
        expected = min(4, -(-asked // leaf)) * leaf
        assert bench.cache.evict(asked) == expected
        assert bench.cache.cached_tokens == 4 * leaf - expected
        bench.check_idle()


def test_eviction_looks_at_what_it_evicts_not_at_the_whole_tree() -> None:
    leaves = 5_000
    bench = Bench(capacity=2 * leaves)
    for i in range(leaves):
        own = bench.take(2)
        bench.cache.insert(key([i, i]), own, owned_from=0)
    for evicted in (1, 10, 100):
        bench.policy.calls = 0
        assert bench.cache.evict(2 * evicted) == 2 * evicted
        assert bench.policy.calls <= 2 * evicted
    bench.check_idle()


def test_use_costs_eviction_one_look_at_most() -> None:
    bench = Bench(capacity=1_000)
    for i in range(1_000):
        bench.cache.insert(key([i]), bench.take(1), owned_from=0)
    for _ in range(5):
        for i in range(500):
            bench.cache.match_prefix(key([i]))
    bench.policy.calls = 0
    assert bench.cache.evict(500) == 500
    assert bench.policy.calls <= 500 + 2 * 500
    assert all(bench.found([i]) for i in range(500))


def test_flush_frees_all_that_is_not_locked() -> None:
    bench = Bench()
    bench.put([1, 2, 3])
    held = bench.put([1, 2, 4]).node
    other = replace(HOME, salt="x")
    bench.put([5, 6], other)
    bench.cache.inc_lock_ref(held)
    assert bench.cache.flush(HOME) == 1
    bench.cache.check()
    assert (bench.found([1, 2, 4]), bench.found([5, 6], other)) == (3, 2)
    assert bench.cache.flush() == 2
    assert bench.cache.evicted_tokens == 0
    bench.cache.dec_lock_ref(held)
    assert bench.cache.evict(1) == 1  # what was locked is in line again
    assert bench.cache.flush() == 2
    bench.check_idle()


def test_flush_leaves_no_dead_node_in_the_queue() -> None:
    bench = Bench()
    for token in range(5):
        bench.put([token])
        bench.put([token], replace(HOME, salt="x"))
    bench.cache.flush(HOME)
    assert len(bench.cache._queue._heap) == 5
    bench.cache.flush()
    assert not bench.cache._queue._heap


def test_chain_of_twenty_thousand_nodes_needs_no_recursion() -> None:
    depth = 20_000
    bench = Bench(capacity=depth)
    slots = bench.take(depth)
    tokens = np.arange(depth, dtype=np.int32)
    node = bench.cache.insert(RadixKey(tokens, HOME), slots, owned_from=0).node
    for length in range(depth - 1, 0, -1):  # every match splits once more
        bench.cache.match_prefix(RadixKey(tokens[:length], HOME))
    match = bench.cache.match_prefix(RadixKey(tokens, HOME))
    assert match.length == depth
    assert match.slots.tolist() == slots.tolist()
    assert match.node is node
    bench.cache.check()
    assert bench.cache.snapshot(lambda ids: "x" * len(ids)).total_tokens == depth
    bench.cache.inc_lock_ref(node)
    assert bench.cache.protected_tokens == depth
    assert bench.cache.evict(1) == 0
    bench.cache.dec_lock_ref(node)
    assert bench.cache.evict(depth // 2) == depth // 2
    bench.check_idle()
    assert bench.cache.flush() == depth // 2
    bench.check_idle()


# -- the step now running -----------------------------------------------------------------


@PAGE_SIZES
def test_match_tells_computed_from_pending(page_size: int) -> None:
    bench = Bench(page_size=page_size)
    bench.put([1] * page_size)
    tokens = [1] * page_size + [2] * (2 * page_size)
    done = bench.put(tokens, computed=False)
    assert (done.already, done.computed) == (page_size, page_size)
    match = bench.cache.match_prefix(key(tokens))
    assert (match.length, match.computed) == (3 * page_size, page_size)
    inside = bench.cache.match_prefix(key(tokens), limit=2 * page_size)
    assert (inside.length, inside.computed) == (2 * page_size, page_size)
    bench.cache.commit()
    match = bench.cache.match_prefix(key(tokens))
    assert (match.length, match.computed) == (3 * page_size, 3 * page_size)
    bench.check_idle()


def test_pending_node_is_protected_even_if_nobody_locks_it() -> None:
    bench = Bench()
    bench.put([1, 2])
    bench.put([1, 2, 3], computed=False)
    bench.put([7])
    assert (bench.cache.evictable_tokens, bench.cache.protected_tokens) == (1, 3)
    assert bench.cache.evict(100) == 1
    assert bench.cache.flush() == 0
    bench.cache.commit()
    assert bench.cache.evict(100) == 3
    bench.check_idle()


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_rollback_removes_every_pending_node_also_after_splits(order: tuple[int, ...]) -> None:
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 4, 5, 6], [8, 8]]
    bench = Bench()
    bench.put([1, 2])
    free = bench.allocator.free_tokens
    nodes = []
    for i in order:
        node = bench.put(prompts[i], computed=False).node
        bench.cache.inc_lock_ref(node)
        nodes.append(node)
    bench.cache.match_prefix(key([1, 2, 3, 4]))
    bench.cache.match_prefix(key([8]))
    with pytest.raises(EngineInvariantError, match="while it is locked"):
        bench.cache.rollback()
    bench.cache.check()
    for node in nodes:
        bench.cache.dec_lock_ref(node)
        bench.cache.check()
    bench.cache.rollback()
    assert bench.allocator.free_tokens == free
    assert (bench.found(prompts[2]), bench.found(prompts[3])) == (2, 0)
    bench.check_idle()
    bench.cache.rollback()  # nothing is pending any more
    assert bench.cache.evict(100) == 2  # what lay above is in line again
    bench.check_idle()


def test_commit_makes_a_step_ordinary_cache() -> None:
    bench = Bench()
    first = bench.put([1, 2, 3, 4], computed=False).node
    second = bench.put([1, 2, 5], computed=False).node
    bench.cache.inc_lock_ref(first)
    bench.cache.commit()
    bench.cache.check()
    assert not first.pending
    assert not second.pending
    assert (bench.cache.protected_tokens, bench.cache.evictable_tokens) == (4, 1)
    bench.cache.dec_lock_ref(first)
    bench.cache.rollback()  # is over
    assert bench.found([1, 2, 3, 4]) == 4
    assert bench.cache.evict(100) == 5
    bench.check_idle()


def test_computed_tokens_beneath_pending_ones_wait_with_them() -> None:
    bench = Bench()
    bench.put([1, 2], computed=False)
    late = bench.cache.insert(key([1, 2, 3]), bench.take(3), owned_from=0, computed=True)
    assert (late.already, late.computed) == (2, 0)
    bench.cache.check()
    bench.cache.rollback()
    assert bench.found([1, 2, 3]) == 0
    assert bench.allocator.free_tokens == bench.allocator.capacity
    bench.check_idle()


def test_duplicate_of_a_pending_prefix_is_shared_in_the_same_step() -> None:
    bench = Bench(page_size=4)
    first = bench.put(list(range(8)), computed=False)
    late = bench.cache.insert(key(range(8)), bench.take(8), owned_from=0, computed=False)
    assert late.slots.tolist() == first.slots.tolist()
    assert (late.already, late.computed) == (8, 0)
    bench.cache.commit()
    bench.check_idle()


# -- the check itself ---------------------------------------------------------------------


def _break_slots(bench: Bench, node: RadixNode) -> None:
    bench.allocator.free(node.slots)


def _break_lock(bench: Bench, node: RadixNode) -> None:
    node.lock_ref += 2


def _break_count(bench: Bench, node: RadixNode) -> None:
    bench.cache._cached += 1


def _break_age(bench: Bench, node: RadixNode) -> None:
    node.last_access += 100


def _break_edge(bench: Bench, node: RadixNode) -> None:
    node.key = node.key + 1


def _break_pending(bench: Bench, node: RadixNode) -> None:
    bench.cache.inc_lock_ref(node)
    node.pending = True


def _break_queue(bench: Bench, node: RadixNode) -> None:
    node.entry = None


def _break_owner(bench: Bench, node: RadixNode) -> None:
    assert node.parent is not None
    node.slots = node.parent.slots.copy()


@pytest.mark.parametrize(
    "damage",
    [
        _break_slots,
        _break_lock,
        _break_count,
        _break_age,
        _break_edge,
        _break_pending,
        _break_queue,
        _break_owner,
    ],
)
def test_check_finds_damage(damage: object) -> None:
    bench = Bench(page_size=4)
    bench.put([1] * 4)
    node = bench.put([1] * 4 + [2] * 4).node
    damage(bench, node)  # type: ignore[operator]
    with pytest.raises(EngineInvariantError):
        bench.cache.check()


def test_every_pair_of_prompts_shares_exactly_its_common_pages() -> None:
    prompts = [[1, 1, 2, 2], [1, 1, 2, 3], [1, 2, 2, 2], [1, 1], [1, 1, 2, 2, 5, 5], [2, 1, 1, 1]]
    for first, second in combinations(prompts, 2):
        bench = Bench(page_size=2)
        bench.put(first)
        common = common_prefix(np.array(first, np.int32), np.array(second, np.int32)) // 2 * 2
        assert bench.put(second).already == common
        assert bench.cache.cached_tokens == len(first) + len(second) - common
        bench.check_idle()

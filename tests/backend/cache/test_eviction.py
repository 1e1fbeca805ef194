"""Eviction: the order of every policy, the queue that applies it, and what idle branches hold."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stemma.backend.local.cache.eviction import POLICIES
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.radix_cache import RadixCache, RadixNode
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.lang.errors import EngineInvariantError
from tests.backend.cache.cache_for_tests import HOME, PAGE_SIZES, Bench, key


def bench_of(policy: str, capacity: int = 256, page_size: int = 1) -> Bench:
    return Bench(capacity, page_size, POLICIES[policy]())


def order(bench: Bench, texts: Sequence[Sequence[int]]) -> list[int]:
    """In which order these texts, each with a leaf of its own, leave the tree."""
    left = []
    there = list(range(len(texts)))
    while there:
        assert bench.cache.evict(1) > 0
        gone = [i for i in there if bench.found(texts[i]) < len(texts[i])]
        left += gone
        there = [i for i in there if i not in gone]
        bench.cache.check()
    return left


# -- the policies


def three(policy: str) -> Bench:
    """[0], [1], [2] came in in this order; [0] was matched twice, then [1] once."""
    bench = bench_of(policy)
    for token in range(3):
        bench.put([token])
    for token in (0, 0, 1):
        bench.cache.match_prefix(key([token]))
    return bench


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", [2, 0, 1]),
        ("lfu", [2, 1, 0]),
        ("slru", [2, 0, 1]),
        ("fifo", [0, 1, 2]),
        ("filo", [2, 1, 0]),
        ("mru", [1, 0, 2]),
        ("priority", [2, 0, 1]),
        ("program-aware", [2, 0, 1]),
    ],
)
def test_policy_orders_leaves_by_its_formula(policy: str, expected: list[int]) -> None:
    assert order(three(policy), [[0], [1], [2]]) == expected


def test_every_policy_is_named_once_and_says_its_formula() -> None:
    assert list(POLICIES) == [
        "lru",
        "lfu",
        "slru",
        "fifo",
        "filo",
        "mru",
        "priority",
        "program-aware",
    ]
    for name, policy in POLICIES.items():
        assert policy().name == name
        assert policy.__doc__ is not None
        assert "key = (" in policy.__doc__


def test_slru_lets_no_scan_push_out_what_was_used_again() -> None:
    bench = bench_of("slru", capacity=8)
    bench.put([1, 1])
    bench.cache.match_prefix(key([1, 1]))
    for token in range(10, 40):
        if bench.allocator.free_tokens < 2:
            bench.cache.evict(2)
        bench.put([token, token])
    assert bench.found([1, 1]) == 2


def test_lru_lets_a_scan_push_out_everything() -> None:
    bench = bench_of("lru", capacity=8)
    bench.put([1, 1])
    bench.cache.match_prefix(key([1, 1]))
    for token in range(10, 40):
        if bench.allocator.free_tokens < 2:
            bench.cache.evict(2)
        bench.put([token, token])
    assert bench.found([1, 1]) == 0


def test_low_priority_goes_first_whoever_used_it_last() -> None:
    bench = bench_of("priority")
    bench.put([0], priority=5)
    bench.put([1], priority=-1)
    bench.put([2])
    assert order(bench, [[0], [1], [2]]) == [1, 2, 0]


def test_use_by_a_request_of_higher_priority_raises_the_whole_path() -> None:
    bench = bench_of("priority")
    bench.put([1, 2, 3])
    bench.put([8], priority=1)
    bench.put([9], priority=3)
    bench.cache.match_prefix(key([1, 2]), priority=2)
    assert bench.cache.evict(1) == 1  # [3], which only the first request wanted
    assert bench.found([1, 2, 3]) == 2
    assert bench.cache.evict(1) == 1
    assert (bench.found([8]), bench.found([1, 2]), bench.found([9])) == (0, 2, 1)


def test_what_a_branch_made_goes_before_prompts_and_what_idle_branches_stand_on_last() -> None:
    bench = bench_of("program-aware")
    bench.put([0])
    bench.cache.hold(key([0]))
    bench.put([1], own=True)
    bench.cache.hold(key([1]))
    bench.put([2])
    bench.put([3], own=True)
    bench.put([4])
    bench.put([5], own=True)
    assert order(bench, [[i] for i in range(6)]) == [3, 5, 2, 4, 0, 1]


def test_what_a_branch_made_and_a_prompt_came_back_to_counts_as_prompt() -> None:
    bench = bench_of("program-aware")
    bench.put([0])
    bench.put([1], own=True)
    bench.put([2], own=True)
    bench.cache.match_prefix(key([1]))
    assert order(bench, [[0], [1], [2]]) == [2, 0, 1]


def test_end_of_a_branch_puts_its_text_back_in_line_at_once() -> None:
    bench = bench_of("program-aware")
    for token in range(3):
        bench.put([token])
    places = [bench.cache.hold(key([token])) for token in range(3)]
    bench.put([9])
    bench.cache.let_go(places[1])
    assert order(bench, [[0], [1], [2], [9]]) == [1, 3, 0, 2]


def test_end_of_a_branch_counts_even_after_its_text_was_passed_over() -> None:
    bench = bench_of("program-aware")
    bench.put([0])
    place = bench.cache.hold(key([0]))
    bench.put([1])
    assert bench.cache.evict(1) == 1  # [1]: the older [0] is passed over, and filed as held
    bench.put([2])
    bench.cache.let_go(place)
    assert order(bench, [[0], [2]]) == [0, 1]


# -- what idle branches hold


def held(bench: Bench) -> dict[tuple[int, ...], int]:
    """The count of every edge."""
    return {tuple(n.key.tolist()): n.held for n in bench.cache._tree.nodes()}


def test_hold_counts_the_whole_path_and_is_no_use() -> None:
    bench = Bench()
    bench.put([1, 2, 3, 4])
    (before,) = bench.cache.snapshot(str).nodes()
    place = bench.cache.hold(key([1, 2, 3, 4]))
    (after,) = bench.cache.snapshot(str).nodes()
    assert (after.hits, after.last_access) == (before.hits, before.last_access)
    assert held(bench) == {(1, 2, 3, 4): 1}
    assert bench.cache.protected_tokens == 0
    bench.cache.let_go(place)
    assert held(bench) == {(1, 2, 3, 4): 0}
    bench.check_idle()


def test_hold_ends_exactly_where_its_branch_ends() -> None:
    bench = Bench()
    bench.put([1, 2, 3, 4])
    bench.cache.hold(key([1, 2]))
    assert held(bench) == {(1, 2): 1, (3, 4): 0}


@PAGE_SIZES
def test_hold_covers_whole_pages_that_are_cached(page_size: int) -> None:
    bench = Bench(page_size=page_size)
    tokens = list(range(4 * page_size))
    bench.put(tokens[: 2 * page_size])
    for length in range(len(tokens) + 1):
        place = bench.cache.hold(key(tokens[:length]))
        whole = min(length // page_size, 2) * page_size
        covered = sum(len(n) for n in bench.cache._tree.nodes() if n.held)
        assert covered == whole
        bench.cache.let_go(place)
    bench.check_idle()


def test_hold_keeps_nothing_from_eviction_or_flush() -> None:
    bench = bench_of("program-aware")
    bench.put([1, 2, 3])
    places = [bench.cache.hold(key([1, 2])), bench.cache.hold(key([1, 2, 3]))]
    assert bench.cache.evict(1) == 1
    assert held(bench) == {(1, 2): 2}  # the second one's place is gone, its way there is not
    assert bench.cache.flush() == 2
    for place in places:
        bench.cache.let_go(place)
    with pytest.raises(EngineInvariantError, match="no branch holds"):
        bench.cache.let_go(places[0])
    bench.check_idle()


def test_hold_survives_splits_and_the_lower_part_keeps_it() -> None:
    bench = Bench()
    bench.put([1, 2, 3, 4])
    place = bench.cache.hold(key([1, 2, 3, 4]))
    bench.put([1, 2, 9])
    bench.put([1, 7])
    assert held(bench) == {(1,): 1, (2,): 1, (3, 4): 1, (9,): 0, (7,): 0}
    bench.cache.let_go(place)
    assert set(held(bench).values()) == {0}


def test_evicted_text_that_comes_back_is_not_held_by_who_stood_there() -> None:
    bench = Bench()
    bench.put([1, 2])
    bench.put([1, 2, 3])
    place = bench.cache.hold(key([1, 2, 3]))
    bench.cache.evict(1)
    bench.put([1, 2, 3])
    assert held(bench) == {(1, 2): 1, (3,): 0}
    bench.cache.let_go(place)
    assert set(held(bench).values()) == {0}


def test_pending_text_that_is_held_may_be_rolled_back() -> None:
    bench = Bench()
    bench.put([1])
    bench.put([1, 2], computed=False)
    place = bench.cache.hold(key([1, 2]))
    bench.cache.rollback()
    assert held(bench) == {(1,): 1}
    bench.cache.let_go(place)
    assert held(bench) == {(1,): 0}
    bench.check_idle()


def test_place_of_an_evicted_branch_costs_no_slots_and_leads_to_no_chain() -> None:
    depth = 2_000
    bench = Bench(capacity=depth)
    tokens = np.arange(depth, dtype=np.int32)
    bench.cache.insert(RadixKey(tokens, HOME), bench.take(depth), owned_from=0)
    for length in range(depth - 1, 0, -1):
        bench.cache.match_prefix(RadixKey(tokens[:length], HOME))
    places = [bench.cache.hold(RadixKey(tokens, HOME)) for _ in range(50)]
    top = next(iter(bench.cache._tree.root.children.values()))
    assert top.held == 50
    bench.cache.evict(depth - 1)
    assert (bench.cache.cached_tokens, top.held) == (1, 50)
    assert len(places[0].slots) == 0
    bench.cache.let_go(places.pop())
    assert places[0].heir is top  # walked once, short ever after
    for place in places:
        bench.cache.let_go(place)
    assert top.held == 0
    bench.check_idle()


def test_evicted_place_of_a_branch_keeps_no_tokens() -> None:
    bench = Bench()
    bench.put([1, 2])
    bench.put([1, 2, 3])
    node = bench.cache.hold(key([1, 2, 3]))
    tokens, slots = weakref.ref(node.key), weakref.ref(node.slots)
    bench.cache.evict(1)
    assert node.heir is not None
    assert (tokens(), slots()) == (None, None)


# -- the queue


class QueueMachine(RuleBasedStateMachine):
    """Whatever happens, the leaf that leaves has the smallest key of all that could."""

    policy = "lru"
    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(64 * self.page_size, self.page_size)
        self.cache = RadixCache(self.allocator, eviction=POLICIES[self.policy]())
        self.locks: list[RadixNode] = []
        self.places: list[RadixNode] = []

    def key(self, pages: list[int]) -> RadixKey:
        return key([page for page in pages for _ in range(self.page_size)])

    texts = st.lists(st.integers(0, 2), max_size=5)

    @rule(pages=texts, own=st.booleans(), priority=st.integers(-1, 2), computed=st.booleans())
    def put(self, pages: list[int], own: bool, priority: int, computed: bool) -> None:
        whole = self.key(pages)
        match = self.cache.match_prefix(whole, priority=priority)
        self.cache.inc_lock_ref(match.node)
        rest = len(whole) - match.length
        while (slots := self.allocator.alloc(rest)) is None and self.evict_one():
            pass
        if slots is not None:
            self.cache.insert(
                whole,
                np.concatenate((match.slots, slots)),
                owned_from=match.length,
                computed=computed,
                own=own,
                priority=priority,
            )
        self.cache.dec_lock_ref(match.node)

    @rule(pages=texts, priority=st.integers(-1, 2))
    def match(self, pages: list[int], priority: int) -> None:
        self.cache.match_prefix(self.key(pages), priority=priority)

    @rule(pages=texts)
    def lock(self, pages: list[int]) -> None:
        self.locks.append(self.cache.match_prefix(self.key(pages)).node)
        self.cache.inc_lock_ref(self.locks[-1])

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.locks) - 1))
        self.cache.dec_lock_ref(self.locks.pop(place))

    @rule(pages=texts)
    def hold(self, pages: list[int]) -> None:
        self.places.append(self.cache.hold(self.key(pages)))

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.places) - 1))
        self.cache.let_go(self.places.pop(place))

    @rule()
    def commit(self) -> None:
        self.cache.commit()

    @precondition(lambda self: not self.locks)
    @rule()
    def rollback(self) -> None:
        self.cache.rollback()

    @rule(times=st.integers(1, 4))
    def evict(self, times: int) -> None:
        for _ in range(times):
            self.evict_one()

    def evict_one(self) -> bool:
        of = self.cache._queue.policy.key
        there = {node: of(node) for node in self.cache._tree.nodes() if node.evictable}
        freed = self.cache.evict(1)
        assert bool(freed) == bool(there)
        gone = [node for node in there if node.parent is None]
        assert len(gone) == bool(there)
        if gone:
            assert there[gone[0]] == min(there.values())
        return bool(freed)

    @invariant()
    def books_agree(self) -> None:
        self.cache.check()
        assert self.cache._tree.root.held == len(self.places)

    @invariant()
    def outdated_entries_never_outnumber_the_others_by_much(self) -> None:
        heap = self.cache._queue._heap
        valid = sum(entry[2].entry is entry for entry in heap)
        assert self.cache._queue._invalid == len(heap) - valid
        assert len(heap) <= max(2 * valid, 64) + 1

    def teardown(self) -> None:
        for node in self.locks:
            self.cache.dec_lock_ref(node)
        for node in self.places:
            self.cache.let_go(node)
        self.cache.rollback()
        while self.evict_one():
            pass
        assert self.allocator.free_tokens == self.allocator.capacity


for _name in POLICIES:
    for _size in (1, 4):
        _machine = type(
            f"QueueMachine_{_name}_{_size}",
            (QueueMachine,),
            {"policy": _name, "page_size": _size},
        )
        _case = _machine.TestCase
        _case.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
        globals()[f"Test_{_name.replace('-', '_')}_pages_of_{_size}"] = _case
del _case, _machine, _name, _size  # pytest would collect what is left of the loop


def test_key_that_shrinks_with_every_use_leaves_a_heap_of_bounded_size() -> None:
    bench = bench_of("mru", capacity=100)
    for token in range(100):
        bench.put([token])
    for i in range(5_000):
        bench.cache.match_prefix(key([i % 100]))
    assert len(bench.cache._queue._heap) <= 201
    assert order(bench, [[token] for token in range(100)]) == list(range(99, -1, -1))


def test_queue_holds_no_node_that_was_flushed() -> None:
    bench = bench_of("mru")
    bench.put([1])
    tokens = weakref.ref(bench.cache.match_prefix(key([1])).node.key)
    bench.cache.flush()
    assert tokens() is None

"""The page allocator and the KV pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stemma.backend.local.cache.kv_pool import KVPool, PageAllocator
from stemma.backend.local.cache.radix_key import Ints
from stemma.lang.errors import EngineInvariantError, InvalidArgument


def take(allocator: PageAllocator, tokens: int, after: int | None = None) -> Ints:
    slots = allocator.alloc(tokens, after=after)
    assert slots is not None
    return slots


def is_run(slots: Ints) -> bool:
    return bool((np.diff(slots) == 1).all())


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(("capacity", "page_size"), [(0, 1), (3, 4), (8, 0), (-1, 1)])
def test_pool_that_cannot_hold_a_page_is_refused(capacity: int, page_size: int) -> None:
    with pytest.raises(InvalidArgument):
        PageAllocator(capacity, page_size)


def test_capacity_is_floored_to_pages() -> None:
    allocator = PageAllocator(18, 4)
    assert (allocator.capacity, allocator.free_tokens) == (16, 16)
    assert sorted(take(allocator, 16)) == list(range(16))


@pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64])
def test_allocation_is_rounded_up_to_whole_pages(page_size: int) -> None:
    for tokens in range(3 * page_size + 1):
        allocator = PageAllocator(4 * page_size, page_size)
        slots = take(allocator, tokens)
        assert slots.dtype == np.int32
        assert len(slots) == -(-tokens // page_size) * page_size
        assert is_run(slots)
        assert allocator.free_tokens == allocator.capacity - len(slots)


def test_too_large_a_request_takes_nothing() -> None:
    allocator = PageAllocator(8, 4)
    assert allocator.alloc(9) is None
    assert allocator.free_tokens == 8
    assert len(take(allocator, 8)) == 8
    assert allocator.alloc(1) is None


def test_allocation_extends_the_run_behind_the_callers_last_slot() -> None:
    allocator = PageAllocator(64, 4)
    mine = take(allocator, 8)
    take(allocator, 8)
    hole = take(allocator, 4)
    take(allocator, 4)
    allocator.free(hole)
    longer = take(allocator, 4, after=int(hole[0]) - 1)
    assert longer.tolist() == hole.tolist()
    elsewhere = take(allocator, 4, after=int(mine[-1]))  # what lies behind is not free
    assert elsewhere[0] == 24


def test_what_does_not_fit_behind_the_last_slot_goes_elsewhere() -> None:
    allocator = PageAllocator(16, 1)
    take(allocator, 16)
    allocator.free(ints(4, 5, 10, 11, 12, 13))
    assert take(allocator, 4, after=3).tolist() == [4, 5, 10, 11]


def test_small_requests_fill_small_holes_and_leave_long_runs_whole() -> None:
    allocator = PageAllocator(64, 1)
    take(allocator, 64)
    allocator.free(np.arange(20, 40, dtype=np.int32))
    allocator.free(ints(3))
    allocator.free(ints(50, 51))
    assert take(allocator, 1).tolist() == [3]
    assert take(allocator, 2).tolist() == [50, 51]
    assert take(allocator, 20).tolist() == list(range(20, 40))


def test_freed_neighbours_become_one_run_whatever_the_order() -> None:
    allocator = PageAllocator(12, 4)
    take(allocator, 12)
    for page in (0, 2, 1):
        allocator.free(np.arange(4 * page, 4 * page + 4, dtype=np.int32))
        allocator.check()
    assert is_run(take(allocator, 12))


def test_pages_may_be_freed_in_any_order_within_one_call() -> None:
    allocator = PageAllocator(16, 4)
    take(allocator, 16)
    allocator.free(ints(12, 13, 14, 15, 0, 1, 2, 3, 8, 9, 10, 11))
    allocator.check()
    assert take(allocator, 8).tolist() == list(range(8, 16))


@pytest.mark.parametrize(
    ("slots", "why"),
    [
        (ints(8, 9, 10, 11), "free already"),
        (ints(0, 1, 2, 3, 0, 1, 2, 3), "twice"),
        (ints(0, 1, 2), "whole pages"),
        (ints(1, 2, 3, 4), "not in order"),
        (ints(0, 1, 3, 2), "not in order"),
        (ints(0, 1, 2, 3, 16, 17, 18, 19), "outside"),
        (ints(-4, -3, -2, -1), "outside"),
    ],
)
def test_freeing_what_is_not_yours_raises_and_frees_nothing(slots: Ints, why: str) -> None:
    allocator = PageAllocator(16, 4)
    take(allocator, 8)
    assert not allocator.owns(slots)
    with pytest.raises(EngineInvariantError, match=why):
        allocator.free(slots)
    assert allocator.free_tokens == 8
    allocator.check()


def test_freeing_nothing_is_fine() -> None:
    allocator = PageAllocator(4, 4)
    allocator.free(ints())
    assert allocator.owns(ints())
    assert allocator.free_tokens == 4


@given(
    holes=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    wanted=st.integers(1, 250),
)
@settings(max_examples=200, deadline=None)
def test_request_is_one_run_whenever_a_run_of_nine_eighths_is_free(
    holes: list[int], wanted: int
) -> None:
    pages = sum(holes) + len(holes)
    allocator = PageAllocator(pages, 1)
    take(allocator, pages)
    start = 0
    for hole in holes:
        allocator.free(np.arange(start, start + hole, dtype=np.int32))
        start += hole + 1
    slots = allocator.alloc(wanted)
    if wanted > sum(holes):
        assert slots is None
        return
    assert slots is not None
    assert len(slots) == wanted
    if max(holes) >= wanted + wanted // 8:
        assert is_run(slots)
    if wanted < 16 and wanted in holes:  # sizes that small are kept exactly
        runs = [np.arange(s, s + h) for s, h in _places(holes)]
        assert any(np.array_equal(slots, run) for run in runs if len(run) == wanted)


def _places(holes: list[int]) -> list[tuple[int, int]]:
    starts = np.cumsum([0, *(hole + 1 for hole in holes)])
    return [(int(start), hole) for start, hole in zip(starts, holes, strict=False)]


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator against a plain set of free pages."""

    @initialize(pages=st.integers(1, 60), page_size=st.sampled_from([1, 4, 16, 32, 64]))
    def start(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(pages * page_size, page_size)
        self.free = set(range(pages))
        self.held: list[int] = []

    @rule(tokens=st.integers(0, 300), near=st.none() | st.integers(0, 100))
    def alloc(self, tokens: int, near: int | None) -> None:
        after = None
        if near is not None and self.held:
            after = (self.held[near % len(self.held)] + 1) * self.page_size - 1
        pages = -(-tokens // self.page_size)
        slots = self.allocator.alloc(tokens, after=after)
        assert (slots is None) == (pages > len(self.free))
        if slots is None:
            return
        whole = slots.reshape(pages, self.page_size)
        assert (whole == whole[:, :1] + np.arange(self.page_size)).all()
        taken = (whole[:, 0] // self.page_size).tolist()
        assert (whole[:, 0] % self.page_size == 0).all()
        assert len(set(taken)) == pages
        assert set(taken) <= self.free
        if pages and after is not None and after // self.page_size + 1 in self.free:
            assert slots[0] == after + 1
        self.free -= set(taken)
        self.held += taken

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if not self.held:
            return
        pages = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        first = np.array(pages, dtype=np.int32)[:, None] * self.page_size
        slots = (first + np.arange(self.page_size)).astype(np.int32).ravel()
        self.allocator.free(slots)
        self.free |= set(pages)
        self.held = [page for page in self.held if page not in self.free]
        if pages:
            with pytest.raises(EngineInvariantError):
                self.allocator.free(slots)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check()
            assert self.allocator.free_tokens == len(self.free) * self.page_size


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_cost_of_a_call_does_not_depend_on_the_size_of_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: dict[int, int] = {}
    for pages in (1_000, 100_000):
        allocator = PageAllocator(pages, 1)
        take(allocator, pages)
        allocator.free(np.arange(0, pages, 2, dtype=np.int32))  # as scattered as can be
        calls = 0
        drop = allocator._drop_run

        def counted(start: int, drop: object = drop) -> int:
            nonlocal calls
            calls += 1
            return drop(start)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(allocator, "_drop_run", counted)
        slots = take(allocator, 50)
        allocator.free(slots)
        counts[pages] = calls
    assert counts[1_000] == counts[100_000] <= 50


def test_written_keys_and_values_are_read_back_from_views_of_a_run() -> None:
    pool = KVPool(
        layers=2,
        kv_heads=3,
        head_dim=8,
        capacity=33,
        page_size=4,
        dtype=torch.float32,
        device="cpu",
    )
    assert [tuple(t.shape) for t in (*pool.k, *pool.v)] == [(32, 3, 8)] * 4
    slots = pool.allocator.alloc(8)
    assert slots is not None
    k, v = torch.randn(8, 3, 8), torch.randn(8, 3, 8)
    pool.write(1, torch.from_numpy(slots).long(), k, v)
    start, stop = int(slots[0]), int(slots[-1]) + 1
    assert torch.equal(pool.k[1][start:stop], k)
    assert torch.equal(pool.v[1][start:stop], v)
    assert pool.k[1].abs().sum() == k.abs().sum()
    assert not pool.k[0].any()
    assert not pool.v[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_token_is_what_the_pool_takes(dtype: torch.dtype) -> None:
    pool = KVPool(
        layers=3, kv_heads=2, head_dim=4, capacity=10, page_size=1, dtype=dtype, device="cpu"
    )
    taken = sum(t.numel() * t.element_size() for t in (*pool.k, *pool.v))
    per_token = KVPool.bytes_per_token(layers=3, kv_heads=2, head_dim=4, dtype=dtype)
    assert taken == 10 * per_token

"""One step as a tree: against a naive model that knows only which slot each position has."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.backend.local.batch import Batch, Entry, build_batch
from stemma.lang.errors import EngineInvariantError


def entry(tokens: Sequence[int], table: Sequence[int], computed: int) -> Entry:
    return Entry(np.array(tokens, dtype=np.int32), np.array(table, dtype=np.int32), computed)


@st.composite
def steps(draw: st.DrawFn) -> list[Entry]:
    """Words over a small alphabet; a slot stands for one prefix, as in a radix tree."""
    words = draw(st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=8))
    slot_of: dict[tuple[int, ...], int] = {}
    for word in words:
        for stop in range(1, len(word) + 1):
            slot_of.setdefault(tuple(word[:stop]), len(slot_of))
    numbers = draw(st.permutations(range(len(slot_of))))
    return [
        entry(
            word,
            [numbers[slot_of[tuple(word[:stop])]] for stop in range(1, len(word) + 1)],
            draw(st.integers(0, len(word))),
        )
        for word in words
    ]


def visible_pairs(batch: Batch) -> list[tuple[int, int, int]]:
    """(row's slot, key's slot, key's position) of every segment, one by one."""
    return [
        (int(batch.slots[row]), int(slot), segment.first_position + i)
        for segment in batch.segments
        for row in range(segment.row_start, segment.row_stop)
        for i, slot in enumerate(segment.slots)
        if row >= segment.row_start + segment.own_rows or i <= row - segment.row_start
    ]


@settings(deadline=None)
@given(steps())
def test_a_row_sees_its_own_path_up_to_itself_and_nothing_twice(entries: list[Entry]) -> None:
    batch = build_batch(entries)
    expected = {
        (int(e.table[p]), int(e.table[k]), k)
        for e in entries
        for p in range(e.computed, len(e.table))
        for k in range(p + 1)
    }
    pairs = visible_pairs(batch)
    assert set(pairs) == expected
    assert len(pairs) == len(expected)


@settings(deadline=None)
@given(steps())
def test_rows_of_an_entry_are_its_uncomputed_positions_in_order(entries: list[Entry]) -> None:
    batch = build_batch(entries)
    for i, e in enumerate(entries):
        rows = batch.rows_of(i)
        assert rows.dtype == np.int64
        assert batch.positions[rows].tolist() == list(range(e.computed, len(e.table)))
        assert batch.slots[rows].tolist() == e.table[e.computed :].tolist()
        assert batch.token_ids[rows].tolist() == e.token_ids[e.computed :].tolist()


@settings(deadline=None)
@given(steps())
def test_a_slot_is_one_row_and_segments_nest(entries: list[Entry]) -> None:
    batch = build_batch(entries)
    assert len(set(batch.slots.tolist())) == len(batch.slots)
    rows = len(batch.slots)
    assert len(batch.token_ids) == len(batch.positions) == rows
    open_until = [rows]
    for segment in batch.segments:
        assert len(segment.slots) > 0
        assert segment.own_rows in (0, len(segment.slots))
        while segment.row_start >= open_until[-1]:
            open_until.pop()
        assert segment.row_start < segment.row_stop <= open_until[-1]
        open_until.append(segment.row_stop)


def test_branches_on_one_prefix_share_one_segment() -> None:
    batch = build_batch([entry([1, 2, 3, 9], [0, 1, 2, slot], 3) for slot in (7, 5, 6)])
    shared = batch.segments[0]
    assert shared.slots.tolist() == [0, 1, 2]
    assert (shared.row_start, shared.row_stop, shared.own_rows) == (0, 3, 0)
    assert [s.own_rows for s in batch.segments[1:]] == [1, 1, 1]
    assert batch.slots.tolist() == [5, 6, 7]
    assert [batch.rows_of(i).tolist() for i in range(3)] == [[2], [0], [1]]


def test_a_pending_prefix_is_computed_once_for_all_that_share_it() -> None:
    batch = build_batch([entry([1, 2, 3], [0, 1, 2], 0), entry([1, 2, 4, 5], [0, 1, 8, 9], 0)])
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.positions.tolist() == [0, 1, 2, 2, 3]
    assert batch.rows_of(0).tolist() == [0, 1, 2]
    assert batch.rows_of(1).tolist() == [0, 1, 3, 4]


def test_equal_entries_share_all_rows() -> None:
    batch = build_batch([entry([1, 2, 3], [4, 5, 6], 1)] * 3)
    assert batch.slots.tolist() == [5, 6]
    assert all(batch.rows_of(i).tolist() == [0, 1] for i in range(3))


def test_a_token_recomputed_for_one_entry_stays_cached_for_the_other() -> None:
    again, further = entry([1, 2], [0, 1], 1), entry([1, 2, 3, 4], [0, 1, 2, 3], 3)
    batch = build_batch([further, again])
    assert batch.slots.tolist() == [1, 3]
    assert batch.rows_of(0).tolist() == [1]
    assert batch.rows_of(1).tolist() == [0]


def test_slots_are_compared_as_numbers_not_as_bytes() -> None:
    batch = build_batch([entry([1], [slot], 0) for slot in (256, 1, 65_536, 255)])
    assert batch.slots.tolist() == [1, 255, 256, 65_536]


@pytest.mark.parametrize("entries", [[], [entry([], [], 0)], [entry([1, 2], [3, 4], 2)]])
def test_a_step_without_rows_has_no_segments(entries: list[Entry]) -> None:
    batch = build_batch(entries)
    assert len(batch.token_ids) == len(batch.positions) == len(batch.slots) == 0
    assert batch.segments == []
    assert [len(batch.rows_of(i)) for i in range(len(entries))] == [0] * len(entries)


@pytest.mark.parametrize(
    "broken", [entry([1], [1, 2], 0), entry([1, 2], [1, 2], 3), entry([1, 2], [1, 2], -1)]
)
def test_an_entry_that_does_not_fit_itself_is_refused(broken: Entry) -> None:
    with pytest.raises(EngineInvariantError, match="entry 1 of the step"):
        build_batch([entry([5], [9], 0), broken])


def test_a_chain_of_twenty_thousand_branchings_needs_no_recursion() -> None:
    trunk = list(range(20_000))
    entries = [entry(trunk, trunk, 19_999)]
    entries += [
        entry([*trunk[:depth], 7], [*trunk[:depth], 20_000 + depth], depth)
        for depth in range(0, 20_000, 100)
    ]
    batch = build_batch(entries)
    assert len(batch.slots) == 201
    assert batch.segments[-1].slots.tolist() == [20_000]


def test_a_decode_step_of_256_branches_is_laid_out_in_milliseconds() -> None:
    shared = np.arange(968, dtype=np.int32)
    entries = [
        Entry(
            np.zeros(1000, dtype=np.int32),
            np.concatenate([shared, np.arange(32, dtype=np.int32) + 968 + 32 * i]),
            999,
        )
        for i in range(256)
    ]
    took = []
    for _ in range(9):
        start = time.perf_counter()
        batch = build_batch(entries)
        took.append(time.perf_counter() - start)
    assert len(batch.segments) == 1 + 256 * 2
    assert min(took) < 0.02  # 1.6 ms where nothing else runs

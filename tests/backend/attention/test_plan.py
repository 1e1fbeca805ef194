"""Plans against a naive model of visibility; no torch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.backend.local.attention.padding import MAX_GROUP_PAIRS, padded_groups
from stemma.backend.local.attention.plan import CPU_COSTS, Costs, Plan, make_plan
from stemma.backend.local.batch import Batch, Entry, build_batch

ITEMS_ONLY = Costs(
    item=0.1, dense_key=0.0, dense_pair=0.0, gathered_key=0.1, ragged=1.0, ragged_pair=1.0
)
RAGGED_ONLY = Costs(
    item=1e9, dense_key=0.0, dense_pair=0.0, gathered_key=1.0, ragged=0.0, ragged_pair=1.0
)


@st.composite
def steps(draw: st.DrawFn) -> list[Entry]:
    """Words over a small alphabet; a slot stands for one prefix; slots run on or are torn apart."""
    words = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=7))
    slot_of: dict[tuple[int, ...], int] = {}
    for word in words:
        for stop in range(1, len(word) + 1):
            slot_of.setdefault(tuple(word[:stop]), len(slot_of))
    torn = draw(st.integers(1, 5))
    numbers = sorted(range(len(slot_of)), key=lambda slot: (slot // torn * 7 % 5, slot))
    entries = []
    for word in words:
        table = [numbers[slot_of[tuple(word[:stop])]] for stop in range(1, len(word) + 1)]
        computed = draw(st.integers(0, len(word)))
        entries.append(
            Entry(np.array(word, dtype=np.int32), np.array(table, dtype=np.int32), computed)
        )
    return entries


costs = st.builds(
    Costs,
    item=st.sampled_from([0.0, 2.0, 9.0, 100.0]),
    dense_key=st.sampled_from([0.0, 0.7]),
    dense_pair=st.sampled_from([0.0, 0.5]),
    gathered_key=st.sampled_from([0.1, 1.0, 10.0]),
    ragged=st.sampled_from([0.0, 3.0, 20.0]),
    ragged_pair=st.just(1.0),
)


def covered_pairs(plan: Plan, batch: Batch) -> Counter[tuple[int, int]]:
    """How often the items of a plan cover each (row's slot, key's slot)."""
    pairs: Counter[tuple[int, int]] = Counter()
    for item in plan.items:
        for row in range(item.row_start, item.row_stop):
            position = int(batch.positions[row])
            for i, slot in enumerate(item.slots.tolist()):
                key = item.first_key + i
                ahead = item.causal and key > position
                left_behind = item.window is not None and key <= position - item.window
                if not ahead and not left_behind:
                    pairs[int(batch.slots[row]), slot] += 1
    ragged = plan.ragged
    for row, start, stop in zip(ragged.rows, ragged.starts, ragged.starts[1:], strict=False):
        for slot in ragged.slots[start:stop].tolist():
            pairs[int(batch.slots[row]), slot] += 1
    return pairs


def visible_pairs(entries: list[Entry], window: int | None) -> set[tuple[int, int]]:
    return {
        (int(e.table[p]), int(e.table[k]))
        for e in entries
        for p in range(e.computed, len(e.table))
        for k in range(0 if window is None else max(0, p - window + 1), p + 1)
    }


@settings(deadline=None)
@given(steps(), costs, st.none() | st.integers(1, 16))
def test_every_visible_pair_is_covered_exactly_once(
    entries: list[Entry], costs: Costs, window: int | None
) -> None:
    batch = build_batch(entries)
    pairs = covered_pairs(make_plan(batch, costs=costs, window=window), batch)
    assert set(pairs) == visible_pairs(entries, window)
    assert set(pairs.values()) <= {1}


@settings(deadline=None)
@given(steps(), costs, st.none() | st.integers(1, 16))
def test_items_keep_what_they_promise(
    entries: list[Entry], costs: Costs, window: int | None
) -> None:
    batch = build_batch(entries)
    plan = make_plan(batch, costs=costs, window=window)
    table_position = {int(s): k for e in entries for k, s in enumerate(e.table)}
    for item in plan.items:
        assert item.contiguous == bool(np.all(np.diff(item.slots) == 1))
        assert [table_position[s] for s in item.slots.tolist()] == list(
            range(item.first_key, item.first_key + len(item.slots))
        )
        rows = batch.positions[item.row_start : item.row_stop]
        if item.causal:
            assert rows.tolist() == list(range(item.first_key, item.first_key + len(rows)))
        if item.window is not None:
            assert item.window == window
            assert item.first_key <= rows.max() - item.window
    ragged = plan.ragged
    assert np.all(np.diff(ragged.rows) > 0)
    assert np.all(np.diff(ragged.starts) > 0)
    assert (ragged.starts[0], ragged.starts[-1]) == (0, len(ragged.slots))


@settings(deadline=None)
@given(steps(), costs)
def test_padded_groups_hold_the_same_keys_and_little_else(
    entries: list[Entry], costs: Costs
) -> None:
    ragged = make_plan(build_batch(entries), costs=costs).ragged
    found = {}
    for group in padded_groups(ragged, costs):
        assert np.all(np.diff(group.rows) > 0)
        assert group.slots.shape == (len(group.rows), group.lengths.max())
        padding = group.slots.size - int(group.lengths.sum())
        assert padding <= max(costs.ragged / costs.ragged_pair, group.slots.size / 4)
        for row, slots, length in zip(group.rows, group.slots, group.lengths, strict=True):
            assert set(slots[length:].tolist()) <= {slots[0]}
            assert int(row) not in found
            found[int(row)] = slots[:length].tolist()
    for i, row in enumerate(ragged.rows.tolist()):
        assert found.pop(row) == ragged.slots[ragged.starts[i] : ragged.starts[i + 1]].tolist()
    assert not found


def step(*entries: tuple[list[int], int]) -> Batch:
    """A step of entries given as (table, computed)."""
    return build_batch(
        [
            Entry(np.zeros(len(table), dtype=np.int32), np.array(table, dtype=np.int32), computed)
            for table, computed in entries
        ]
    )


def branches(count: int, shared: int, tail: int) -> Batch:
    """`count` sequences that decode one token, on one prefix and `tail` tokens of their own."""
    prefix = list(range(shared))
    return step(
        *(
            ([*prefix, *range(shared + i * tail, shared + (i + 1) * tail)], shared + tail - 1)
            for i in range(count)
        )
    )


def test_a_shared_prefix_is_one_view_and_the_tails_are_the_ragged_rest() -> None:
    plan = make_plan(branches(32, shared=1000, tail=32))
    (item,) = plan.items
    assert (item.row_start, item.row_stop, len(item.slots)) == (0, 32, 1000)
    assert item.contiguous
    assert plan.ragged.rows.tolist() == list(range(32))
    assert np.diff(plan.ragged.starts).tolist() == [32] * 32


def test_one_sequence_is_one_item() -> None:
    plan = make_plan(branches(1, shared=200, tail=1))
    (item,) = plan.items
    assert (item.causal, item.contiguous, len(item.slots)) == (False, True, 201)
    assert not len(plan.ragged)


def test_long_private_spans_are_views() -> None:
    plan = make_plan(branches(20, shared=0, tail=2000))
    assert len(plan.items) == 20
    assert all(item.contiguous and len(item.slots) == 2000 for item in plan.items)
    assert not len(plan.ragged)


def test_long_runs_stay_views_and_short_runs_between_them_are_gathered_once() -> None:
    torn = [*range(5000, 7000), 10, 20, *range(30, 35), *range(7100, 9000), 50]
    plan = make_plan(step((torn, len(torn) - 1)))
    assert [(len(i.slots), i.contiguous, i.first_key) for i in plan.items] == [
        (2000, True, 0),
        (7, False, 2000),
        (1900, True, 2007),
        (1, True, 3907),
    ]


def test_a_long_chunk_is_causal_for_itself_and_open_for_its_descendants() -> None:
    chunk = list(range(300))
    plan = make_plan(step(([*chunk, 400], 0), ([*chunk, 500], 0)), costs=ITEMS_ONLY)
    found = {(i.row_start, i.row_stop, i.causal, len(i.slots)) for i in plan.items}
    assert found == {
        (0, 300, True, 300),
        (300, 302, False, 300),
        (300, 301, False, 1),
        (301, 302, False, 1),
    }


def test_neighbouring_segments_of_the_same_rows_are_one_item() -> None:
    plan = make_plan(step((list(range(10)), 9), (list(range(4)), 4)), costs=ITEMS_ONLY)
    assert [(len(i.slots), i.contiguous) for i in plan.items] == [(10, True)]


def test_padding_is_bounded_by_grouping_rows_of_similar_length() -> None:
    sizes = [1, 2, 3, 100, 110, 1000, 990, 4]
    starts = np.cumsum([0, *sizes])
    batch = step(*((list(range(a, a + n)), n - 1) for a, n in zip(starts, sizes, strict=False)))
    plan = make_plan(batch, costs=RAGGED_ONLY)
    assert plan.items == []
    groups = padded_groups(plan.ragged, RAGGED_ONLY)
    by_length = sorted(sorted(group.lengths.tolist()) for group in groups)
    assert by_length == [[1], [2, 3, 4], [100, 110], [990, 1000]]


def test_a_padded_group_is_bounded_in_memory() -> None:
    plan = make_plan(branches(60, shared=0, tail=1000), costs=RAGGED_ONLY)
    groups = padded_groups(plan.ragged, RAGGED_ONLY)
    assert [group.slots.shape for group in groups] == [(16, 1000)] * 3 + [(12, 1000)]
    assert all(group.slots.size <= MAX_GROUP_PAIRS for group in groups)


def test_a_torn_span_that_is_read_once_is_not_gathered_twice() -> None:
    """An item would gather the keys and then read them; the ragged rest does both for its price."""
    torn = list(range(0, 4000, 2))
    plan = make_plan(step((torn, len(torn) - 1)))
    assert plan.items == []
    assert plan.ragged.starts.tolist() == [0, 2000]


def test_a_window_drops_the_keys_that_no_row_sees() -> None:
    plan = make_plan(branches(8, shared=1000, tail=4), window=100)
    (item,) = plan.items
    assert (item.first_key, len(item.slots), item.window) == (904, 96, None)


@pytest.mark.parametrize("window", [None, 5])
def test_a_step_without_rows_has_an_empty_plan(window: int | None) -> None:
    plan = make_plan(build_batch([]), costs=CPU_COSTS, window=window)
    assert plan.items == []
    assert not len(plan.ragged)

"""From the tree of one step to a list of attention items. Called once per step, by the executor.

Pure integers, no torch. Every (row, visible key) pair is in exactly one item; the partial results
of a row are then merged by log-sum-exp (Milakov & Gimelshein 2018; Dao et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from stemma.backend.local.batch import Batch, Rows, Slots


@dataclass(frozen=True, slots=True)
class Costs:
    """What an executor's work takes, in microseconds per layer; only the ratios matter.

    item: a dense item, whatever its size. dense_key: reading a key and its value in one, for all
    its rows. dense_pair: a (row, key) pair in one. gathered_key: first copying the key and value
    out of scattered slots. ragged: the ragged rest, whatever its size. ragged_pair: a (row, key)
    pair in it, copies and padding included.
    """

    item: float
    dense_key: float
    dense_pair: float
    gathered_key: float
    ragged: float
    ragged_pair: float


CPU_COSTS = Costs(
    item=25.0, dense_key=0.1, dense_pair=0.013, gathered_key=0.1, ragged=45.0, ragged_pair=0.13
)
"""Fitted to two CPU cores, 9 query heads on 3 KV heads of 64, float32, flash kernel, keys and
values from memory rather than from a cache level: a span under one row is worth an item from about
1,500 keys, under 32 rows from about 10.
"""


@dataclass(frozen=True, slots=True, eq=False)
class DenseItem:
    """Rows row_start..row_stop-1 against keys at `slots`, of positions first_key, first_key + 1...

    contiguous: the slots are a run, so the keys are a view. causal: the positions of the rows too
    are first_key, first_key + 1..., and a row sees the keys up to its own position; otherwise all
    keys are before all rows. window: if not None, a row at position p sees only keys of positions
    above p - window; the plan sets it only where it hides a key. Positions of rows: `Batch`.
    """

    row_start: int
    row_stop: int
    slots: Slots
    first_key: int
    contiguous: bool
    causal: bool
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows with few keys of their own: rows[i] sees the keys at slots[starts[i] : starts[i + 1]].

    rows: int64[n], ascending. starts: int64[n + 1], rising: no row without keys. slots: int64.
    """

    rows: Rows
    starts: Rows
    slots: Rows

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The items of one step. A row is in any number of them, and at most once in the ragged
    rest.
    """

    items: list[DenseItem]
    ragged: Ragged


@dataclass(slots=True, eq=False)
class _Span:
    """Keys that a range of rows has in common, or (causal) a range of rows has among itself."""

    row_start: int
    row_stop: int
    first_key: int
    causal: bool
    parts: list[Slots] = field(default_factory=list)
    keys: int = 0

    @property
    def pairs(self) -> int:
        if self.causal:
            return self.keys * (self.keys + 1) // 2
        return self.keys * (self.row_stop - self.row_start)

    @property
    def slots(self) -> Slots:
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)

    def add(self, slots: Slots) -> None:
        self.parts.append(slots)
        self.keys += len(slots)


def make_plan(batch: Batch, *, costs: Costs = CPU_COSTS, window: int | None = None) -> Plan:
    """Plan one step. window: a row at position p sees the positions p - window + 1..p only.

    A span becomes dense items where these cost less than its pairs in the ragged rest. What is left
    is the ragged rest, unless it is so little that items are cheaper than starting it.
    """
    dense: list[_Span] = []
    small: list[_Span] = []
    for span in _spans(batch):
        if window is not None:
            _cut_to_window(span, batch.positions, window)
        if span.keys:
            cheaper = _items_cost_less([span], costs.ragged_pair * span.pairs, costs)
            (dense if cheaper else small).append(span)
    rest = costs.ragged + costs.ragged_pair * sum(span.pairs for span in small)
    if _items_cost_less(small, rest, costs):
        dense, small = dense + small, []
    items = [item for span in dense for item in _items(span, batch.positions, costs, window)]
    return Plan(items, _ragged(small, batch.positions, window))


def _items_cost_less(spans: list[_Span], limit: float, costs: Costs) -> bool:
    least = sum(
        costs.item + costs.dense_key * span.keys + costs.dense_pair * span.pairs for span in spans
    )
    if least >= limit:  # usually: then nobody needs to look at the slots
        return False
    for span in spans:
        stretches = list(_stretches(span, costs))
        gathered = sum(stop - start for start, stop, contiguous in stretches if not contiguous)
        least += costs.item * (len(stretches) - 1) + costs.gathered_key * gathered
    return least < limit


def _spans(batch: Batch) -> list[_Span]:
    """The segments as spans, neighbours with the same rows joined: these are neighbours in position
    too.
    """
    shared: dict[tuple[int, int], _Span] = {}
    causal: list[_Span] = []
    for segment in batch.segments:
        start, stop, own = segment.row_start, segment.row_stop, segment.own_rows
        if own > 1:
            causal.append(_Span(start, start + own, segment.first_position, True))
            causal[-1].add(segment.slots)
        for rows in ((start, start + own) if own == 1 else None, (start + own, stop)):
            if rows is None or rows[0] == rows[1]:
                continue
            span = shared.get(rows)
            if span is None:
                span = shared[rows] = _Span(*rows, segment.first_position, False)
            span.add(segment.slots)
    return [*shared.values(), *causal]


def _cut_to_window(span: _Span, positions: Rows, window: int) -> None:
    """Drop the leading keys that no row of the span sees."""
    if span.causal:
        return
    first_seen = int(positions[span.row_start : span.row_stop].min()) - window + 1
    hidden = min(max(0, first_seen - span.first_key), span.keys)
    if hidden:
        slots = span.slots[hidden:]
        span.first_key += hidden
        span.parts, span.keys = [slots], len(slots)


def _items(span: _Span, positions: Rows, costs: Costs, window: int | None) -> Iterator[DenseItem]:
    slots = span.slots
    last = int(positions[span.row_start : span.row_stop].max())
    for start, stop, contiguous in _stretches(span, costs):
        first_key = span.first_key + start
        yield DenseItem(
            row_start=span.row_start,
            row_stop=span.row_stop,
            slots=slots[start:stop],
            first_key=first_key,
            contiguous=contiguous,
            causal=span.causal,
            window=window if window is not None and first_key <= last - window else None,
        )


def _stretches(span: _Span, costs: Costs) -> Iterator[tuple[int, int, bool]]:
    """Cut into (start, stop, contiguous): long runs of slots, and short runs between them together.

    A causal span stays whole: cut, its later keys would be causal for some of its rows only.
    """
    view_at_least = math.inf if span.causal else costs.item / costs.gathered_key
    breaks = (np.flatnonzero(np.diff(span.slots) != 1) + 1).tolist()
    pending = 0  # short runs from here on are not given out yet
    runs = 0
    for start, stop in pairwise([0, *breaks, span.keys]):
        if stop - start >= view_at_least:
            if runs:
                yield pending, start, runs == 1
            yield start, stop, True
            pending, runs = stop, 0
        else:
            runs += 1
    if runs:
        yield pending, span.keys, runs == 1


def _ragged(spans: list[_Span], positions: Rows, window: int | None) -> Ragged:
    """Collect the keys of each row, those of its ancestors first."""
    tails: dict[int, list[Slots]] = {}
    for span in spans:
        slots = span.slots
        for i, row in enumerate(range(span.row_start, span.row_stop)):
            stop = i + 1 if span.causal else span.keys
            first = 0
            if window is not None:
                first = min(max(0, int(positions[row]) - window + 1 - span.first_key), stop)
            if first < stop:
                tails.setdefault(row, []).append(slots[first:stop])
    rows = sorted(tails)
    parts = [part for row in rows for part in tails[row]]
    lengths = [sum(map(len, tails[row])) for row in rows]
    return Ragged(
        rows=np.array(rows, dtype=np.int64),
        starts=np.cumsum([0, *lengths], dtype=np.int64),
        slots=np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, dtype=np.int64),
    )

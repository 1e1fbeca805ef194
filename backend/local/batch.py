"""The tokens of one step as a tree in depth-first order: which rows there are, and which slots they
see.

Pure integers, no torch. The engine builds one `Batch` per step from the scheduler's entries; the
decoder reads its token ids and positions, attention its segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stemma.lang.errors import EngineInvariantError

Rows = npt.NDArray[np.int64]
"""Row numbers, positions or slots of a step."""

Slots = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)  # not frozen, which takes three times as long to make
class Entry:
    """One sequence of the step. Positions computed..end-1 are its rows.

    token_ids: int32[end], the tokens of positions 0..end-1. table: int32[end], their KV slots.
    computed: how many leading positions have their keys and values from earlier steps.
    """

    token_ids: npt.NDArray[np.int32]
    table: Slots
    computed: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of positions that is one edge of the step's tree, or the cached or new part of one.

    Its keys are at `slots`, of positions first_position, first_position + 1, ... All rows that lie
    below it are row_start..row_stop-1. own_rows > 0: the segment is new, its tokens are the first
    own_rows == len(slots) of these rows, and each of them sees the segment up to itself. Every
    other row sees all of it.
    """

    slots: Slots
    first_position: int
    row_start: int
    row_stop: int
    own_rows: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows of one step in depth-first order, and the segments they see, parents before
    children.

    token_ids, positions, slots: int64[rows]; slots are distinct. Every segment has at least one
    row. tables: int32, of each entry.
    """

    token_ids: Rows
    positions: Rows
    slots: Rows
    segments: list[Segment]
    entry_rows: list[Rows]
    tables: list[Slots]

    def rows_of(self, entry: int) -> Rows:
        """The rows of positions computed..end-1 of `entries[entry]`, in order of position."""
        return self.entry_rows[entry]


@dataclass(slots=True, eq=False)
class _Edge:
    """An edge of the tree while it is built: positions start..stop-1 of `entry`, and what is known
    of its subtree.
    """

    entry: int
    start: int
    stop: int
    computed: int  # the smallest of the entries that go through: from there on they are rows
    parent: _Edge | None
    rows: int = 0  # rows of the subtree
    row_start: int = 0
    ends_here: list[int] = field(default_factory=list)  # entries whose last position is stop - 1

    @property
    def own_rows(self) -> int:
        return self.stop - max(self.start, min(self.computed, self.stop))


def build_batch(entries: Sequence[Entry]) -> Batch:
    """Lay out one step. Two entries share a position iff their tables agree up to and including it.

    A shared position is a row once, for all entries, if it is a row of any. Cost: a sort of the
    tables as byte strings and one comparison of each with its neighbour. Raises
    EngineInvariantError for an entry whose arrays differ in length or whose `computed` lies outside
    of them.
    """
    for i, entry in enumerate(entries):
        if not 0 <= entry.computed <= len(entry.table) == len(entry.token_ids):
            raise EngineInvariantError(
                f"entry {i} of the step has {len(entry.token_ids)} tokens, {len(entry.table)} "
                f"slots and {entry.computed} of them computed"
            )
    edges = _tree(entries)
    segments: list[Segment] = []
    new: list[_Edge] = []
    rows = 0
    for edge in edges:
        edge.row_start = rows
        if edge.rows == 0:
            continue
        own = edge.own_rows
        cut = edge.stop - own
        table = entries[edge.entry].table
        if cut > edge.start:
            segments.append(Segment(table[edge.start : cut], edge.start, rows, rows + edge.rows))
        if own:
            segments.append(Segment(table[cut : edge.stop], cut, rows, rows + edge.rows, own))
            new.append(edge)
            rows += own
    return Batch(
        token_ids=_gather([entries[e.entry].token_ids[e.stop - e.own_rows : e.stop] for e in new]),
        positions=_gather([np.arange(e.stop - e.own_rows, e.stop) for e in new]),
        slots=_gather([s.slots for s in segments if s.own_rows]),
        segments=segments,
        entry_rows=_rows_by_entry(entries, edges),
        tables=[entry.table for entry in entries],
    )


def _tree(entries: Sequence[Entry]) -> list[_Edge]:
    """The edges of the trie of all tables, depth first, parents before children.

    The tables are visited in descending order, with a stack of the edges of the one visited last.
    An edge is finished when the next table leaves it; so edges are finished children first, in
    descending order, and the list of them read backwards is the tree depth first.
    """
    keys = [entry.table.astype(">i4").tobytes() for entry in entries]
    order = sorted(range(len(entries)), key=keys.__getitem__, reverse=True)
    finished: list[_Edge] = []
    stack: list[_Edge] = []

    def finish(edge: _Edge) -> None:
        edge.rows += edge.own_rows
        finished.append(edge)
        if edge.parent is not None:
            edge.parent.rows += edge.rows
            edge.parent.computed = min(edge.parent.computed, edge.computed)

    previous: Slots | None = None
    for i in order:
        table, computed = entries[i].table, entries[i].computed
        shared = 0 if previous is None else _common_prefix(previous, table)
        previous = table
        while stack and stack[-1].start >= shared:
            finish(stack.pop())
        if stack and stack[-1].stop > shared:  # the table leaves this edge midway: cut it there
            lower = stack[-1]
            upper = _Edge(lower.entry, lower.start, shared, lower.computed, lower.parent)
            lower.start, lower.parent = shared, upper
            finish(lower)
            stack[-1] = upper
        if len(table) > shared:
            stack.append(_Edge(i, shared, len(table), computed, stack[-1] if stack else None))
        if stack:
            stack[-1].computed = min(stack[-1].computed, computed)
            stack[-1].ends_here.append(i)
    while stack:
        finish(stack.pop())
    finished.reverse()
    return finished


def _common_prefix(a: Slots, b: Slots) -> int:
    length = min(len(a), len(b))
    if length == 0:
        return 0
    differ = a[:length] != b[:length]
    first = int(differ.argmax())
    return first if differ[first] else length


def _rows_by_entry(entries: Sequence[Entry], edges: list[_Edge]) -> list[Rows]:
    """Per entry its rows, collected from its last edge upwards."""
    found = [np.empty(0, dtype=np.int64)] * len(entries)
    for last in edges:
        for i in last.ends_here:
            missing = len(entries[i].table) - entries[i].computed
            parts: list[Rows] = []
            edge: _Edge | None = last
            while missing and edge is not None:
                stop = edge.row_start + edge.own_rows
                parts.append(np.arange(max(edge.row_start, stop - missing), stop))
                missing -= len(parts[-1])
                edge = edge.parent
            if parts:
                found[i] = parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])
    return found


def _gather(parts: list[npt.NDArray[np.int32]] | list[Rows]) -> Rows:
    return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, dtype=np.int64)

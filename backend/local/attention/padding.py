"""The ragged rest of a plan as rectangles, for executors that know no rows of different length.

Pure integers, no torch. Called once per step, by the torch executor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stemma.backend.local.attention.plan import Costs, Ragged
from stemma.backend.local.batch import Rows

MAX_GROUP_PAIRS = 1 << 14
"""(row, key) pairs of one group, padding included: bounds the memory it is gathered into."""


@dataclass(frozen=True, slots=True, eq=False)
class PaddedGroup:
    """Rows of similar length: row rows[i] sees the keys at slots[i, :lengths[i]].

    rows: int64[n], ascending. lengths: int64[n], at least 1. slots: int64[n, max(lengths)], padded
    with a slot of the same row.
    """

    rows: Rows
    slots: Rows
    lengths: Rows


def padded_groups(ragged: Ragged, costs: Costs) -> list[PaddedGroup]:
    """Every row of the ragged rest in one group."""
    lengths = np.diff(ragged.starts)
    spare = costs.ragged / costs.ragged_pair
    return [_group(ragged, lengths, sorted(chosen)) for chosen in _by_length(lengths, spare)]


def _by_length(lengths: Rows, spare: float) -> list[list[int]]:
    """Indices of similar length: padding is at most a quarter of a group, or `spare` pairs."""
    groups: list[list[int]] = []
    pairs = padding = longest = 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        padding += longest - length
        pairs += longest
        if not groups or padding > max(spare, pairs / 4) or pairs > MAX_GROUP_PAIRS:
            groups.append([])
            pairs, padding, longest = length, 0, length
        groups[-1].append(i)
    return groups


def _group(ragged: Ragged, lengths: Rows, chosen: list[int]) -> PaddedGroup:
    length = lengths[chosen]
    column = np.arange(int(length.max()))
    index = ragged.starts[chosen][:, None] + np.where(column < length[:, None], column, 0)
    return PaddedGroup(rows=ragged.rows[chosen], slots=ragged.slots[index], lengths=length)

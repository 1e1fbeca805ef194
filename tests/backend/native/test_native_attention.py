"""The attention kernel against attention row by row, and its bits against themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stemma.backend.local.batch import Batch, Entry, build_batch
from stemma.backend.local.cache.kv_pool import KVPool
from stemma.backend.local.native import attention
from stemma.backend.local.native.attention import NativeAttention, works

CAPACITY = 3000


class Kind(NamedTuple):
    """What a pool holds, and how exact attention to it is."""

    dtype: torch.dtype
    dim: int
    tolerance: float


KINDS = [
    pytest.param(Kind(torch.float32, 16, 1e-4), id="floats"),
    pytest.param(Kind(torch.bfloat16, 16, 2e-2), id="halves"),
    pytest.param(Kind(torch.bfloat16, 32, 2e-2), id="pairs"),  # multiplied as such where they can
]
every_kind = pytest.mark.parametrize("kind", KINDS)


def make_pool(kind: Kind) -> KVPool:
    pool = KVPool(
        layers=2,
        kv_heads=2,
        head_dim=kind.dim,
        capacity=CAPACITY,
        page_size=1,
        dtype=kind.dtype,
        device="cpu",
        heads_first=kind.dtype == torch.bfloat16,
    )
    numbers = torch.Generator().manual_seed(0)
    for layer in range(2):
        pool.k[layer].normal_(generator=numbers)
        pool.v[layer].normal_(generator=numbers)
    return pool


def entry(table: Sequence[int], computed: int) -> Entry:
    return Entry(np.zeros(len(table), dtype=np.int32), np.array(table, dtype=np.int32), computed)


def new_rows(pool: KVPool, layer: int, batch: Batch, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as a function of the row's slot; k and v are what the pool holds there already."""
    slots = torch.from_numpy(batch.slots)
    q = [
        torch.randn(heads, pool.k[0].shape[2], generator=torch.Generator().manual_seed(int(slot)))
        for slot in batch.slots
    ]
    return torch.stack(q), pool.k[layer][slots].float(), pool.v[layer][slots].float()


def by_slot(
    library: ctypes.CDLL, kind: Kind, entries: list[Entry], window: int | None
) -> dict[int, Tensor]:
    """What each row of the step attends to, by its slot."""
    pool, batch = make_pool(kind), build_batch(entries)
    executor = NativeAttention(library, pool, num_heads=6, scale=0.25, window=window)
    attend = executor.prepare(batch)
    out = [attend(layer, *new_rows(pool, layer, batch, 6)) for layer in range(2)]
    return {
        int(slot): torch.stack((out[0][row], out[1][row])) for row, slot in enumerate(batch.slots)
    }


def expected(pool: KVPool, layer: int, seen: Sequence[int], q: Tensor) -> Tensor:
    k, v = (x[layer][seen].repeat_interleave(3, 1).double() for x in (pool.k, pool.v))
    scores = torch.einsum("hd,khd->hk", q.double(), k) * 0.25
    return torch.einsum("hk,khd->hd", scores.softmax(-1), v).flatten()


@st.composite
def trees(draw: st.DrawFn) -> list[Entry]:
    """Sequences that share prefixes of any length, over slots that run on or are torn apart."""
    numbers = np.random.default_rng(draw(st.integers(0, 1000)))
    slots = iter(numbers.permutation(CAPACITY) if draw(st.booleans()) else np.arange(CAPACITY))
    tables: list[list[int]] = []
    for _ in range(draw(st.integers(1, 6))):
        table: list[int] = []
        if tables:
            parent = tables[draw(st.integers(0, len(tables) - 1))]
            table = parent[: draw(st.integers(0, len(parent)))]
        table += [int(next(slots)) for _ in range(draw(st.integers(1, 90)))]
        tables.append(table)
    return [entry(table, draw(st.integers(0, len(table) - 1))) for table in tables]


@every_kind
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(entries=trees(), window=st.none() | st.integers(1, 70))
def test_every_row_attends_to_all_before_it(
    library: ctypes.CDLL, kind: Kind, entries: list[Entry], window: int | None
) -> None:
    pool, batch = make_pool(kind), build_batch(entries)
    found = by_slot(library, kind, entries, window)
    for i, one in enumerate(entries):
        for row in batch.rows_of(i):
            position = int(batch.positions[row])
            seen = one.table[: position + 1].tolist()[-(window or 10**6) :]
            for layer in range(2):
                q, _, _ = new_rows(pool, layer, batch, 6)
                right = expected(pool, layer, seen, q[row])
                got = found[int(batch.slots[row])][layer].double()
                assert torch.allclose(got, right, rtol=kind.tolerance, atol=kind.tolerance)


@every_kind
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(entries=trees(), window=st.none() | st.integers(1, 70))
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    library: ctypes.CDLL, kind: Kind, entries: list[Entry], window: int | None
) -> None:
    together = by_slot(library, kind, entries, window)
    for one in entries:
        alone = by_slot(library, kind, [one], window)
        last = by_slot(library, kind, [entry(one.table, len(one.table) - 1)], window)
        assert all(row.equal(together[slot]) for slot, row in alone.items())
        assert all(row.equal(together[slot]) for slot, row in last.items())


@every_kind
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(
    library: ctypes.CDLL, kind: Kind, threads: int
) -> None:
    entries = [entry([*range(100), *range(200 + 40 * i, 230 + 40 * i)], 110) for i in range(20)]
    before = torch.get_num_threads()
    once = by_slot(library, kind, entries, None)
    torch.set_num_threads(threads)
    try:
        again = by_slot(library, kind, entries, None)
    finally:
        torch.set_num_threads(before)
    assert all(row.equal(again[slot]) for slot, row in once.items())


@every_kind
def test_new_keys_and_values_are_written_to_the_pool(library: ctypes.CDLL, kind: Kind) -> None:
    pool, batch = make_pool(kind), build_batch([entry([5, 9, 7], 1), entry([5, 11], 1)])
    before = pool.k[1].clone()
    wide = torch.randn(3, 10, kind.dim)  # rows of q, k and v side by side, as the decoder has them
    q, k, v = wide.split((6, 2, 2), dim=1)
    attend = NativeAttention(library, pool, num_heads=6, scale=0.25).prepare(batch)
    attend(1, q, k, v)
    slots = torch.from_numpy(batch.slots)
    assert pool.k[1][slots].equal(k.to(kind.dtype))
    assert pool.v[1][slots].equal(v.to(kind.dtype))
    others = torch.ones(CAPACITY, dtype=torch.bool)
    others[slots] = False
    assert pool.k[1][others].equal(before[others])


@every_kind
def test_a_nan_stays_one_and_stays_where_it_is(library: ctypes.CDLL, kind: Kind) -> None:
    pool = make_pool(kind)
    pool.v[0][7] = torch.nan
    pool.k[0][8] = torch.nan
    tables = [[1, 2, 7], [1, 2, 8], [1, 2, 9]]
    batch = build_batch([entry(table, 2) for table in tables])
    attend = NativeAttention(library, pool, num_heads=6, scale=0.25).prepare(batch)
    out = attend(0, *new_rows(pool, 0, batch, 6))
    bad = [bool(out[batch.rows_of(i)].isnan().any()) for i in range(3)]
    assert bad == [True, True, False]


@every_kind
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", [None, 3])
def test_what_a_row_does_not_see_never_reaches_it(
    library: ctypes.CDLL, kind: Kind, value: float, window: int | None
) -> None:
    pool = make_pool(kind)
    pool.v[0][44] = value
    tables = [[*range(40, 44)], [*range(40, 46)], [*range(40, 50)]]
    entries = [entry(table, 2) for table in tables]
    batch = build_batch(entries)
    executor = NativeAttention(library, pool, num_heads=6, scale=0.25, window=window)
    out = executor.prepare(batch)(0, *new_rows(pool, 0, batch, 6))
    for i, table in enumerate(tables):
        for row, position in zip(batch.rows_of(i), range(2, len(table)), strict=True):
            seen = table[: position + 1][-(window or len(table)) :]
            assert bool(out[row].isfinite().all()) == (44 not in seen)


@every_kind
def test_a_step_without_rows(library: ctypes.CDLL, kind: Kind) -> None:
    pool, batch = make_pool(kind), build_batch([])
    attend = NativeAttention(library, pool, num_heads=6, scale=0.25).prepare(batch)
    assert attend(0, torch.empty(0, 6, kind.dim), *torch.empty(2, 0, 2, kind.dim)).shape == (
        0,
        6 * kind.dim,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(9, 3, 64), (32, 8, 128), (4, 4, 16), (14, 2, 96), (8, 1, 80), (64, 1, 32), (8, 8, 256)],
)
def test_it_works_for_the_shapes_of_real_models(
    library: ctypes.CDLL, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    assert works(library, heads, kv_heads, dim, dtype=dtype)


def test_shapes_without_a_kernel_are_told_apart(library: ctypes.CDLL) -> None:
    assert not works(library, 4, 4, 20, dtype=torch.float32)
    assert not works(library, 512, 1, 16, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_that_is_wrong_is_not_used(
    library: ctypes.CDLL, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention.Attend.__call__

    def wrong(self: attention.Attend, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return right(self, layer, q, k, v) * (1.01 if dtype == torch.float32 else 1.1)

    monkeypatch.setattr(attention.Attend, "__call__", wrong)
    assert not works(library, 4, 2, 16, dtype=dtype)


@every_kind
def test_rows_that_go_alone_have_the_same_bits(
    library: ctypes.CDLL, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = list(range(100))
    entries = [entry([*shared, *range(100 + 9 * i, 109 + 9 * i)], 95) for i in range(6)]
    together = by_slot(library, kind, entries, None)
    monkeypatch.setattr(NativeAttention, "share", False)
    alone = by_slot(library, kind, entries, None)
    assert all(alone[slot].equal(row) for slot, row in together.items())

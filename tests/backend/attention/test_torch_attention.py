"""The torch executor against attention row by row, without a plan, a view or a merge."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stemma.backend.local.attention import torch_attention
from stemma.backend.local.attention.plan import CPU_COSTS, Costs, make_plan
from stemma.backend.local.attention.torch_attention import (
    HIDDEN,
    TorchAttention,
    flash_kernel,
    flash_works,
    matmul_kernel,
)
from stemma.backend.local.batch import Batch, Entry, build_batch
from stemma.backend.local.cache.kv_pool import KVPool

HEAD_DIM = 16
SCALE = 0.25

ITEMS_ONLY = Costs(
    item=0.1, dense_key=0.0, dense_pair=0.0, gathered_key=0.1, ragged=1.0, ragged_pair=1.0
)
RAGGED_ONLY = Costs(
    item=1e9, dense_key=0.0, dense_pair=0.0, gathered_key=1.0, ragged=0.0, ragged_pair=1.0
)
MIXED = Costs(
    item=12.0, dense_key=0.0, dense_pair=0.0, gathered_key=0.1, ragged=0.0, ragged_pair=1.0
)

Kernel = Literal["auto", "matmul"]


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(0)


def make_pool(capacity: int, kv_heads: int, dtype: torch.dtype, layers: int = 1) -> KVPool:
    """A pool whose every slot holds something, so that a wrong slot shows."""
    pool = KVPool(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        capacity=capacity,
        page_size=1,
        dtype=dtype,
        device="cpu",
    )
    for layer in range(layers):
        pool.k[layer].normal_()
        pool.v[layer].normal_()
    return pool


def random_rows(
    batch: Batch, heads: int, kv_heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(batch.slots)
    q = torch.randn(rows, heads, HEAD_DIM, dtype=dtype)
    k, v = torch.randn(2, rows, kv_heads, HEAD_DIM, dtype=dtype)
    return q, k, v


def naive(
    entries: list[Entry],
    batch: Batch,
    pool: KVPool,
    layer: int,
    qkv: tuple[Tensor, Tensor, Tensor],
    window: int | None = None,
) -> Tensor:
    """[R, H, D] in float64: each row of each entry alone, K and V repeated for the query heads."""
    q, k, v = (x.double() for x in qkv)
    keys, values = pool.k[layer].double(), pool.v[layer].double()
    for row, slot in enumerate(batch.slots.tolist()):
        keys[slot], values[slot] = k[row], v[row]
    repeat = q.shape[1] // k.shape[1]
    out = torch.full_like(q, float("nan"))
    for i, entry in enumerate(entries):
        for position, row in enumerate(batch.rows_of(i).tolist(), entry.computed):
            first = 0 if window is None else max(0, position - window + 1)
            slots = torch.from_numpy(entry.table[first : position + 1].astype(np.int64))
            row_keys = keys[slots].repeat_interleave(repeat, 1)
            row_values = values[slots].repeat_interleave(repeat, 1)
            weights = (torch.einsum("hd,lhd->hl", q[row], row_keys) * SCALE).softmax(-1)
            out[row] = torch.einsum("hl,lhd->hd", weights, row_values)
    return out


def check(
    entries: list[Entry],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
    costs: Costs = CPU_COSTS,
    window: int | None = None,
    kernel: Kernel = "auto",
) -> None:
    """Run a step on two layers of one plan, compare, and see that the pool has the new rows."""
    batch = build_batch(entries)
    capacity = max((int(e.table.max()) + 1 for e in entries if len(e.table)), default=1)
    pool = make_pool(capacity, kv_heads, dtype, layers=2)
    attention = TorchAttention(
        pool, num_heads=heads, scale=SCALE, costs=costs, window=window, kernel=kernel
    )
    attend = attention.prepare(batch)
    results = []
    for layer in (0, 1):
        qkv = random_rows(batch, heads, kv_heads, dtype)
        expected = naive(entries, batch, pool, layer, qkv, window)
        results.append((attend(layer, *qkv), expected))
        slots = torch.from_numpy(batch.slots)
        assert torch.equal(pool.k[layer][slots], qkv[1])
        assert torch.equal(pool.v[layer][slots], qkv[2])
    for out, expected in results:  # after both layers: a result must survive the next layer
        assert out.dtype == dtype
        assert out.shape == (len(batch.slots), heads * HEAD_DIM)
        torch.testing.assert_close(out.double(), expected.flatten(1), rtol=0, atol=tolerance)


def entry(table: np.ndarray | range | list[int], computed: int) -> Entry:
    slots = np.array(table, dtype=np.int32)
    return Entry(np.zeros_like(slots), slots, computed)


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
    return [
        entry(
            [numbers[slot_of[tuple(word[:stop])]] for stop in range(1, len(word) + 1)],
            draw(st.integers(0, len(word))),
        )
        for word in words
    ]


@settings(max_examples=60, deadline=None)
@given(
    entries=steps(),
    costs=st.sampled_from([CPU_COSTS, ITEMS_ONLY, RAGGED_ONLY, MIXED]),
    window=st.none() | st.integers(1, 16),
    kernel=st.sampled_from(["auto", "matmul"]),
    repeat=st.sampled_from([1, 3, 4]),
)
def test_any_step_equals_naive_attention(
    entries: list[Entry], costs: Costs, window: int | None, kernel: Kernel, repeat: int
) -> None:
    check(entries, heads=2 * repeat, costs=costs, window=window, kernel=kernel)


def tree(generator: np.random.Generator, *, torn: bool) -> list[Entry]:
    """Branches of up to 200 on 700 cached tokens, with chunks and single tokens at their ends."""
    numbers = np.arange(4000)
    if torn:
        numbers = generator.permutation(500)[:, None] * 8 + np.arange(8)
        numbers = numbers.reshape(-1)
    used = 0

    def take(count: int) -> np.ndarray:
        nonlocal used
        used += count
        return numbers[used - count : used]

    prompt = take(700)
    entries = []
    for _ in range(4):
        branch = np.concatenate([prompt, take(int(generator.integers(1, 200)))])
        for _ in range(3):
            tail = take(int(generator.integers(1, 60)))
            computed = len(branch) + int(generator.integers(0, len(tail)))
            entries.append(entry(np.concatenate([branch, tail]), computed))
    entries.append(entry(np.concatenate([prompt, take(300)]), 700))
    entries.append(entry(take(290), 0))
    return entries


@pytest.mark.parametrize("kernel", ["auto", "matmul"])
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("window", [None, 50, 720])
def test_a_tree_with_long_spans_equals_naive_attention(
    kernel: Kernel, torn: bool, dtype: torch.dtype, tolerance: float, window: int | None
) -> None:
    entries = tree(np.random.default_rng(7), torn=torn)
    check(entries, dtype=dtype, tolerance=tolerance, window=window, kernel=kernel)


@pytest.mark.parametrize("kernel", ["auto", "matmul"])
@pytest.mark.parametrize("heads", [3, 9, 12])
def test_query_heads_share_their_kv_head(kernel: Kernel, heads: int) -> None:
    entries = tree(np.random.default_rng(3), torn=True)
    check(entries, heads=heads, kv_heads=3, kernel=kernel)


@pytest.mark.parametrize("kernel", ["auto", "matmul"])
def test_a_long_causal_chunk_is_right_across_its_query_blocks(kernel: Kernel) -> None:
    check([entry(range(5, 405), 0)], kernel=kernel)
    check([entry(range(5, 405), 0)], kernel=kernel, window=30)


def test_the_matmul_kernel_cuts_large_items_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "MAX_SCORES", 6 * 100 * 7)
    entries = [entry([*range(100), 100 + i], 100) for i in range(20)]
    check(entries, kernel="matmul", costs=ITEMS_ONLY)
    pool = make_pool(120, 2, torch.float64)
    attention = TorchAttention(pool, num_heads=6, scale=SCALE, kernel="matmul", costs=ITEMS_ONLY)
    blocks = attention.prepare(build_batch(entries))._blocks
    assert [b.count for b in blocks if b.count > 1] == [7, 7, 6]


@pytest.mark.parametrize("entries", [[], [entry([0, 1], 2)]])
def test_a_step_without_rows_gives_no_rows(entries: list[Entry]) -> None:
    check(entries)


def test_one_token_at_the_very_beginning_sees_itself() -> None:
    check([entry([3], 0)])


def test_a_result_covered_by_one_item_is_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention.Attend, "_merged", None)
    check([entry(range(200), 199)])
    check([entry(range(100), 0)])


def test_only_rows_with_several_items_are_merged() -> None:
    chunk = [entry(range(400), 0)]
    decoding = [entry([*range(400, 800), 1000 + i], 400) for i in range(20)]
    batch = build_batch(chunk + decoding)
    attention = TorchAttention(make_pool(1100, 2, torch.float64), num_heads=6, scale=SCALE)
    assert attention.prepare(batch)._merges == [(400, 420)]


def test_bfloat16_is_accumulated_in_float32() -> None:
    entries = tree(np.random.default_rng(5), torn=False)
    batch = build_batch(entries)
    pool = make_pool(4000, 2, torch.bfloat16)
    attend = TorchAttention(pool, num_heads=6, scale=SCALE).prepare(batch)
    qkv = random_rows(batch, 6, 2, torch.bfloat16)
    expected = naive(entries, batch, pool, 0, qkv).flatten(1)
    out = attend(0, *qkv)
    assert out.dtype == torch.bfloat16
    # The one rounding left is that of the result itself.
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_agree_on_output_and_log_sum_exp(dtype: torch.dtype) -> None:
    if not flash_works(dtype, torch.device("cpu")):
        pytest.skip("this torch has no CPU flash kernel in this form")
    q = torch.randn(1, 6, 70, HEAD_DIM, dtype=dtype)
    k, v = torch.randn(2, 1, 2, 333, HEAD_DIM, dtype=dtype)
    mask = torch.zeros(70, 333, dtype=dtype).masked_fill_(torch.rand(70, 333) < 0.5, HIDDEN)
    for hidden in (None, mask):
        for a, b in zip(
            flash_kernel(q, k, v, hidden, SCALE), matmul_kernel(q, k, v, hidden, SCALE), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_kernel_in_use_is_named() -> None:
    def named(dtype: torch.dtype, kernel: Kernel = "auto") -> str:
        pool = make_pool(4, 2, dtype)
        return TorchAttention(pool, num_heads=6, scale=SCALE, kernel=kernel).kernel

    works = flash_works(torch.float32, torch.device("cpu"))
    assert named(torch.float32) == ("flash" if works else "matmul")
    assert named(torch.float32, "matmul") == "matmul"
    assert named(torch.bfloat16) == "matmul"


def test_a_kernel_that_fails_or_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> tuple[Tensor, Tensor]:
        raise AttributeError("no such operation")

    def wrong(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), q.sum(-1)

    for kernel in (missing, wrong):
        monkeypatch.setattr(torch_attention, "flash_kernel", kernel)
        assert not flash_works(torch.float32, torch.device("cpu"))


def test_plans_in_these_tests_use_views_gathers_and_ragged_groups() -> None:
    plan = make_plan(build_batch(tree(np.random.default_rng(7), torn=True)))
    assert any(not item.contiguous for item in plan.items)
    assert any(item.causal for item in plan.items)
    assert len(plan.ragged)
    plan = make_plan(build_batch(tree(np.random.default_rng(7), torn=False)))
    assert any(item.contiguous for item in plan.items)

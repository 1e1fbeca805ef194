"""Runs attention plans with torch, on any device; the reference for faster executors.

The engine calls `TorchAttention.prepare(batch)` once per step and hands the result to the decoder,
which calls it once per layer. Keys and values live in the KV pool; the partial results of a step
live here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stemma.backend.local.attention.padding import PaddedGroup, padded_groups
from stemma.backend.local.attention.plan import CPU_COSTS, Costs, DenseItem, Plan, make_plan
from stemma.backend.local.batch import Batch, Rows
from stemma.backend.local.cache.kv_pool import KVPool

HIDDEN = -1e30
"""Added to the score of a key that a row must not see. Finite, so that no difference is a NaN."""

QUERY_BLOCK = 128
"""Rows of a causal item computed together: later keys are skipped, keys within are masked."""

MAX_SCORES = 1 << 23
"""Scores (rows x heads x keys) that the matmul kernel holds at once: it gets blocks of rows."""

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
"""(q [B, H, n, D], k and v [B, KV, L, D], mask [n, L] or [B, 1, 1, L], scale) -> (out [B, H, n, D],
log-sum-exp of the scores [B, H, n]), both in float32 or float64. H is a multiple of KV: query head
h belongs to KV head h // (H / KV). The mask, of the results' dtype, is added to the scaled scores.
"""


def matmul_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Two matrix products, those of all query heads of a KV head in one: K, V are not repeated."""
    batch, heads, rows, dim = q.shape
    kv_heads = k.shape[1]
    accumulate = _accumulator(q.dtype)
    grouped = (q.to(accumulate) * scale).reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    scores = grouped @ k.to(accumulate).transpose(-1, -2)
    if mask is not None:
        scores.view(batch, heads, rows, -1).add_(mask)
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = (weights @ v.to(accumulate)).div_(total)
    lse = total.log_().add_(largest)
    return out.view(batch, heads, rows, dim), lse.view(batch, heads, rows)


def flash_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's own blocked CPU kernel. It is private: use it only where `flash_works` says so."""
    result: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask, scale=scale
    )
    out: Tensor = result[0]
    lse: Tensor = result[1]
    return out, lse


def flash_works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's CPU kernel is there and right for this dtype, tried on a small case."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.float64):
        return False
    numbers = torch.Generator().manual_seed(0)
    pool = torch.randn(40, 2, 16, generator=numbers, dtype=dtype)
    k = pool[3:24].transpose(0, 1)[None]
    q = torch.randn(5, 6, 16, generator=numbers, dtype=dtype).transpose(0, 1)[None]
    mask = torch.zeros(5, 21, dtype=dtype)
    mask[:, 17:] = HIDDEN
    mask[4] = HIDDEN
    try:
        for hidden in (None, mask):
            expected, expected_lse = matmul_kernel(q, k, k, hidden, 0.25)
            out, lse = flash_kernel(q, k, k, hidden, 0.25)
            seen = 5 if hidden is None else 4  # of a row that sees nothing only the lse counts
            close = torch.allclose(out[:, :, :seen], expected[:, :, :seen], rtol=1e-4, atol=1e-4)
            close &= torch.allclose(lse, expected_lse, rtol=1e-4, atol=1e-4)
            if not (close and out.isfinite().all()):
                return False
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return True


class TorchAttention:
    """Attention over the KV pool for a model with `num_heads` query heads.

    scale: factor of the scores, usually head_dim ** -0.5. costs: what the plan weighs. window:
    sliding window in tokens, or None. kernel: "auto" takes the flash kernel where it works, else
    "matmul". The attribute `kernel` says which one is used.
    """

    kernel: Literal["flash", "matmul"]

    def __init__(
        self,
        pool: KVPool,
        *,
        num_heads: int,
        scale: float,
        costs: Costs = CPU_COSTS,
        window: int | None = None,
        kernel: Literal["auto", "matmul"] = "auto",
    ) -> None:
        self.pool = pool
        self.num_heads = num_heads
        self.scale = scale
        self.costs = costs
        self.window = window
        flash = kernel == "auto" and flash_works(pool.k[0].dtype, pool.k[0].device)
        self.kernel = "flash" if flash else "matmul"

    def prepare(self, batch: Batch) -> Attend:
        """Plan the step, and make all its index tensors, masks and buffers once for all layers."""
        return Attend(self, batch, make_plan(batch, costs=self.costs, window=self.window))


@dataclass(slots=True, eq=False)
class _Block:
    """Rows start..start+count-1 of a dense item against one stretch of its keys."""

    start: int
    count: int
    slots: Tensor | slice  # where the keys are: a view, or slots to gather
    mask: Tensor | None  # [count, L]; None for a single row, which sees all the keys of its block
    out: Tensor  # views of the partial results, in the shape that the kernel returns
    lse: Tensor


@dataclass(slots=True, eq=False)
class _Group:
    """A padded group: its rows as a view or an index, and the (slot, KV head) pairs to gather."""

    rows: Tensor | slice
    count: int
    index: Tensor  # [count * KV * T], into the pool seen as [capacity * KV, D]
    mask: Tensor | None  # [count, 1, 1, T]


class Attend:
    """Attention of one step: `attend(layer, q, k, v)`, once per layer.

    Partial results are kept by level: a level has at most one of each row, so that it is merged
    with the levels before it in one go. A row without a result in a level has weight zero there.
    """

    def __init__(self, attention: TorchAttention, batch: Batch, plan: Plan) -> None:
        self._pool = pool = attention.pool
        self._kernel: Kernel = flash_kernel if attention.kernel == "flash" else matmul_kernel
        self._scale = attention.scale
        self._heads = attention.num_heads
        self._kv_heads, self._dim = pool.k[0].shape[1:]
        self._device = pool.k[0].device
        self._accumulate = _accumulator(pool.k[0].dtype)
        self._rows = len(batch.slots)
        self._slots = self._tensor(batch.slots)

        levels = _levels(plan.items, self._rows)
        groups = padded_groups(plan.ragged, attention.costs)
        ragged_level = max(levels, default=-1) + 1
        count = ragged_level + bool(groups)
        shape = (count, self._rows, self._heads)
        self._out = torch.zeros(*shape, self._dim, dtype=self._accumulate, device=self._device)
        self._lse = torch.full(shape, HIDDEN, dtype=self._accumulate, device=self._device)
        self._blocks = [
            block
            for item, level in zip(plan.items, levels, strict=True)
            for block in self._blocks_of(item, batch.positions, level)
        ]
        self._groups = [self._group_of(group) for group in groups]
        if groups:
            self._ragged_out = self._by_kv_head(self._out[ragged_level])
            self._ragged_lse = self._by_kv_head(self._lse[ragged_level])
        self._merges = _merge_ranges(plan.items, groups, levels, count)
        indices = [block.slots for block in self._blocks if isinstance(block.slots, Tensor)]
        gathers = [len(index) * self._kv_heads for index in indices]
        gathers += [len(group.index) for group in self._groups]
        self._scratch = pool.k[0].new_empty(2, max(gathers, default=0) * self._dim)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v to the pool at the rows' slots, then attend.

        q [R, H, D], k and v [R, KV, D], of the rows of the step -> [R, H * D] in q's dtype.
        Outside of autograd only.
        """
        self._pool.write(layer, self._slots, k, v)
        if self._rows == 0:
            return q.flatten(1)
        keys, values = self._pool.k[layer], self._pool.v[layer]
        by_head, by_kv_head = q.transpose(0, 1)[None], self._by_kv_head(q)
        for block in self._blocks:
            out, lse = self._run_block(block, by_head, by_kv_head, keys, values)
            if block.count == self._rows and len(self._out) == 1:  # nothing to collect or merge
                return (out if block.count == 1 else out[0].transpose(0, 1)).flatten(1).to(q.dtype)
            block.out.copy_(out)
            block.lse.copy_(lse)
        for group in self._groups:
            out, lse = self._run_group(group, by_kv_head, keys, values)
            self._ragged_out[group.rows] = out
            self._ragged_lse[group.rows] = lse
        return self._merged().flatten(1).to(q.dtype)

    def _run_block(
        self, block: _Block, by_head: Tensor, by_kv_head: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        if isinstance(block.slots, slice):
            k, v = keys[block.slots], values[block.slots]
        else:
            k, v = self._gather(keys, values, block.slots)
        if block.count == 1:  # the query heads of a KV head as its rows: keys are read once for all
            q = by_kv_head.narrow(0, block.start, 1)
        else:
            q = by_head.narrow(2, block.start, block.count)
        return self._kernel(
            q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], block.mask, self._scale
        )

    def _run_group(
        self, group: _Group, by_kv_head: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        k, v = self._gather(keys.flatten(0, 1), values.flatten(0, 1), group.index)
        shape = (group.count, self._kv_heads, -1, self._dim)
        return self._kernel(
            by_kv_head[group.rows], k.view(shape), v.view(shape), group.mask, self._scale
        )

    def _gather(self, keys: Tensor, values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """keys[index] and values[index] in the step's own memory: new pages cost more than that."""
        shape = (len(index), *keys.shape[1:])
        k, v = (memory[: math.prod(shape)].view(shape) for memory in self._scratch)
        torch.index_select(keys, 0, index, out=k)
        torch.index_select(values, 0, index, out=v)
        return k, v

    def _merged(self) -> Tensor:
        """[R, H, D]. Of two partial results the second has weight sigmoid(lse_2 - lse_1)."""
        out, lse = self._out[0].clone(), self._lse[0].clone()
        for level, (start, stop) in enumerate(self._merges, 1):
            so_far, more = lse[start:stop], self._lse[level, start:stop]
            weight = torch.sigmoid(more - so_far).unsqueeze(-1)
            out[start:stop].lerp_(self._out[level, start:stop], weight)
            if level < len(self._merges):
                torch.logaddexp(so_far, more, out=so_far)
        return out

    def _by_kv_head(self, x: Tensor) -> Tensor:
        """[R, H, ...] seen as [R, KV, H // KV, ...]."""
        return x.view(x.shape[0], self._kv_heads, x.shape[1] // self._kv_heads, *x.shape[2:])

    # -- once per step ----------------------------------------------------------------------------

    def _blocks_of(self, item: DenseItem, positions: Rows, level: int) -> list[_Block]:
        """Cut an item by rows, and leave out keys that a whole block does not see."""
        size = item.row_stop - item.row_start
        if item.causal:
            size = min(size, QUERY_BLOCK)
        if self._kernel is matmul_kernel:
            size = min(size, max(1, MAX_SCORES // (self._heads * len(item.slots))))
        blocks = []
        for start in range(item.row_start, item.row_stop, size):
            stop = min(start + size, item.row_stop)
            rows = positions[start:stop]
            first, last = 0, len(item.slots)
            if item.causal:
                last = int(rows[-1]) + 1 - item.first_key
            if item.window is not None:
                first = max(0, int(rows.min()) - item.window + 1 - item.first_key)
            if first >= last:
                continue
            slots = item.slots[first:last].astype(np.int64)
            mask = self._mask(item, rows, np.arange(first, last) + item.first_key)
            out, lse = self._out[level, start:stop], self._lse[level, start:stop]
            if len(rows) == 1:
                out, lse = self._by_kv_head(out), self._by_kv_head(lse)
            else:
                out, lse = out.transpose(0, 1)[None], lse.transpose(0, 1)[None]
            run = slice(int(slots[0]), int(slots[-1]) + 1)
            where = run if item.contiguous else self._tensor(slots)
            blocks.append(_Block(start, len(rows), where, mask, out, lse))
        return blocks

    def _mask(self, item: DenseItem, rows: Rows, keys: Rows) -> Tensor | None:
        """For rows [n] and keys [L], given by their positions; None if all keys are seen."""
        if not item.causal and item.window is None:
            return None
        ahead = rows[:, None] - keys
        hidden = ahead < 0
        if item.window is not None:
            hidden |= ahead >= item.window
        return self._hide(hidden)

    def _group_of(self, group: PaddedGroup) -> _Group:
        count, longest = group.slots.shape
        heads = np.arange(self._kv_heads)[:, None]
        index = group.slots[:, None, :] * self._kv_heads + heads
        padding = np.arange(longest) >= group.lengths[:, None]
        first, last = int(group.rows[0]), int(group.rows[-1])
        return _Group(
            rows=slice(first, last + 1) if last - first + 1 == count else self._tensor(group.rows),
            count=count,
            index=self._tensor(index.reshape(-1)),
            mask=self._hide(padding[:, None, None, :]),
        )

    def _hide(self, hidden: np.ndarray[Any, np.dtype[np.bool_]]) -> Tensor | None:
        if not hidden.any():
            return None
        mask = torch.zeros(hidden.shape, dtype=self._accumulate)
        return mask.masked_fill_(torch.from_numpy(hidden), HIDDEN).to(self._device)

    def _tensor(self, numbers: Rows) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)


def _levels(items: list[DenseItem], rows: int) -> list[int]:
    """For each item the first level in which none of its rows has one yet."""
    used = np.zeros(rows, dtype=np.int64)
    levels = []
    for item in items:
        covered = used[item.row_start : item.row_stop]
        levels.append(int(covered.max()))
        covered[:] = levels[-1] + 1
    return levels


def _merge_ranges(
    items: list[DenseItem], groups: list[PaddedGroup], levels: list[int], count: int
) -> list[tuple[int, int]]:
    """For each level but the first the range of rows that have a partial result in it."""
    covered: list[list[int]] = [[] for _ in range(count)]
    for item, level in zip(items, levels, strict=True):
        covered[level] += (item.row_start, item.row_stop)
    for group in groups:
        covered[-1] += (int(group.rows[0]), int(group.rows[-1]) + 1)
    return [(min(ends), max(ends)) for ends in covered[1:]]


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32

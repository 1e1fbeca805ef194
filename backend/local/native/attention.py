"""Attention on a CPU by the C++ kernel: straight from the KV pool, and the same bits in any batch.

`NativeAttention` stands where `TorchAttention` does; see attention.cpp for what it promises.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stemma.backend.local.batch import Batch, Entry, build_batch
from stemma.backend.local.cache.kv_pool import KVPool
from stemma.backend.local.model.quantize import Quantization

_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 256)
_MAX_GROUP = 256


class NativeAttention:
    """See `TorchAttention`. pool: float32 or bfloat16, on the CPU; q, k, v and what comes out are
    float32. share: rows that have the same slots in a block go through it together; False is for
    measuring what that is worth.
    """

    kernel = "native"
    share = True

    def __init__(
        self,
        library: ctypes.CDLL,
        pool: KVPool,
        *,
        num_heads: int,
        scale: float,
        window: int | None = None,
    ) -> None:
        self.pool = pool
        self.num_heads = num_heads
        self.scale = scale
        self.window = window
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        # Of each layer's part of the pool, for the kernel that goes through all of them.
        addresses = pointer * len(pool.k)
        self.k_pools = addresses(*(keys.data_ptr() for keys in pool.k))
        self.v_pools = addresses(*(values.data_ptr() for values in pool.v))
        self.slot_stride, self.head_stride, _ = pool.k[0].stride()
        self.halves = pool.dtype == torch.bfloat16
        self.plan = library.stemma_attention_plan
        self.plan.restype = pointer
        self.plan.argtypes = [pointer, pointer, pointer, size, size, integer, integer, integer]
        self.free = library.stemma_attention_free
        self.free.restype = None
        self.free.argtypes = [pointer]
        self.attend = library.stemma_attention
        self.attend.restype = integer
        self.attend.argtypes = [
            *(pointer, pointer, pointer, pointer, size, size, size, pointer, pointer, size, size),
            *(integer, integer, integer, integer, ctypes.c_float, pointer, integer),
        ]

    def prepare(self, batch: Batch) -> Attend:
        """Find out which rows share which keys, once for all layers."""
        return Attend(self, batch)


class Attend:
    """Attention of one step: `attend(layer, q, k, v)`, once per layer; or all of them by the kernel
    of the layers, which takes `attention` and `plan`.
    """

    plan: Any = None  # freed with this, made or not

    def __init__(self, attention: NativeAttention, batch: Batch) -> None:
        pool = attention.pool
        self.attention = attention
        self._keys, self._values = pool.k, pool.v
        self._kv_heads, self._dim = pool.k[0].shape[1:]
        self._threads = torch.get_num_threads()
        self._tables = batch.tables  # the plan points into them
        addresses = np.array(
            [table.__array_interface__["data"][0] for table in batch.tables], dtype=np.int64
        )
        owners = np.zeros(len(batch.slots), dtype=np.int64)
        for entry, rows in enumerate(batch.entry_rows):
            owners[rows] = entry
        tables, lengths = addresses[owners], batch.positions + 1
        self.plan = attention.plan(
            tables.ctypes.data,
            lengths.ctypes.data,
            batch.slots.ctypes.data,
            len(owners),
            attention.window or 0,
            attention.num_heads // self._kv_heads,
            attention.share,
            self._threads,
        )

    def __del__(self) -> None:
        self.attention.free(self.plan)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `TorchAttention`: q [R, H, D], k and v [R, KV, D] -> [R, H * D]."""
        attention = self.attention
        rows, heads, dim = q.shape
        out = q.new_empty(rows, heads * dim)
        attention.attend(
            self.plan,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            self._keys[layer].data_ptr(),
            self._values[layer].data_ptr(),
            attention.slot_stride,
            attention.head_stride,
            attention.halves,
            heads,
            self._kv_heads,
            dim,
            attention.scale,
            out.data_ptr(),
            self._threads,
        )
        return out


def kv_dtype(quantization: Quantization | None) -> torch.dtype:
    """What the kernel's pool holds. Beside products in int8 the rounding of bfloat16 is small; it
    takes half of the memory, and processors that multiply it do so at twice the rate.
    """
    return torch.bfloat16 if quantization == "int8" else torch.float32


def works(library: ctypes.CDLL, heads: int, kv_heads: int, dim: int, *, dtype: torch.dtype) -> bool:
    """Whether the kernel has room for this shape and is right, tried on a small case. dtype: of the
    pool.
    """
    if dim not in _DIMS or heads // kv_heads > _MAX_GROUP:
        return False
    numbers = torch.Generator().manual_seed(0)
    pool = KVPool(
        layers=1,
        kv_heads=kv_heads,
        head_dim=dim,
        capacity=90,
        page_size=1,
        dtype=dtype,
        device="cpu",
        heads_first=True,
    )
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    pool.k[0].normal_(generator=numbers)
    pool.v[0].normal_(generator=numbers)
    tables = [[*range(40), *range(60, 89)], [*range(40), 59, 3, 50]]
    ids = [np.zeros(len(table), dtype=np.int32) for table in tables]
    entries = [
        Entry(token_ids, np.array(table, dtype=np.int32), len(table) - 2)
        for token_ids, table in zip(ids, tables, strict=True)
    ]
    batch = build_batch(entries)
    q = torch.randn(4, heads, dim, generator=numbers)
    k, v = torch.randn(2, 4, kv_heads, dim, generator=numbers)
    out = NativeAttention(library, pool, num_heads=heads, scale=dim**-0.5).prepare(batch)(
        0, q, k, v
    )
    for entry, table in enumerate(tables):
        for row, seen in zip(batch.rows_of(entry), (table[:-1], table), strict=True):
            keys, values = (
                x[0][seen].float().repeat_interleave(heads // kv_heads, 1) for x in (pool.k, pool.v)
            )
            scores = torch.einsum("hd,khd->hk", q[row], keys) * dim**-0.5
            expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values).flatten()
            if not torch.allclose(out[row], expected, rtol=tolerance, atol=tolerance):
                return False
    return True

"""The C++ kernel for the ragged rest of a plan: found or built, tried, and called.

Built once per machine, in the user's cache folder, by the compiler that is there; where there is
none, or where the kernel is wrong on a small case, the torch executor does its work. Runs on
torch's own OpenMP threads. Called by the torch executor.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stemma.backend.local.attention.plan import Ragged

SOURCE = Path(__file__).with_name("ragged.cpp")


class RaggedKernel:
    """The kernel in the shared library at `path`. Raises OSError if it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        self._run = ctypes.CDLL(str(path)).stemma_ragged_attention
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._run.restype = integer
        self._run.argtypes = [
            *(pointer, size, pointer, pointer, size, pointer, pointer, pointer, size),
            *(integer, integer, integer, ctypes.c_float, pointer, pointer, integer),
        ]

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        ragged: Ragged,
        scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Go on with the softmax of rows ragged.rows over their keys, in place.

        q: [R, H, D], rows may lie apart. keys, values: [slots, KV, D], of one layer. out: [R, H, D]
        and lse: [R, H], what the rows have attended to so far (lse -1e30: nothing). All float32 on
        a CPU. Raises ValueError for a shape that the kernel has no room for.
        """
        failed = self._run(
            q.data_ptr(),
            q.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            ragged.rows.ctypes.data,
            ragged.starts.ctypes.data,
            ragged.slots.ctypes.data,
            len(ragged),
            q.shape[1],
            keys.shape[1],
            q.shape[2],
            scale,
            out.data_ptr(),
            lse.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise ValueError(f"the kernel has no room for q {list(q.shape)}, k {list(keys.shape)}")


def works(kernel: RaggedKernel, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether the kernel is right for this shape, tried on a small case against torch."""
    numbers = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 90, kv_heads, dim, generator=numbers)
    q = torch.randn(3, heads, dim, generator=numbers)
    seen = [np.arange(89, 9, -1), np.array([3]), np.arange(0, 90, 2)]
    ragged = Ragged(
        rows=np.arange(3), starts=np.cumsum([0, *map(len, seen)]), slots=np.concatenate(seen)
    )
    out, lse = torch.zeros_like(q), torch.full((3, heads), -1e30)
    first = Ragged(ragged.rows[:1], np.array([0, 40]), ragged.slots[:40])
    rest = Ragged(ragged.rows, np.array([0, 40, 41, 86]), ragged.slots[40:])
    try:
        for part in (first, rest):
            kernel(q, keys, values, part, dim**-0.5, out, lse)
    except ValueError:
        return False
    for row, slots in enumerate(seen):
        k, v = (x[slots].repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
        scores = torch.einsum("hd,khd->hk", q[row], k) * dim**-0.5
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
        close = torch.allclose(out[row], expected, rtol=1e-4, atol=1e-5)
        if not close or not torch.allclose(lse[row], scores.logsumexp(-1), rtol=1e-4, atol=1e-4):
            return False
    return True

"""Masks of constrained draws, put onto rows of logits in place by a C++ kernel. Called by
`drawing.py`; without the kernel the sampler does it, on a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Rows = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]
Lower = Callable[[Tensor, Rows, Bits], None]


def masking(library: ctypes.CDLL) -> Lower | None:
    """A function of logits [any, vocab], float32 and dense, of some of their rows [n], and of masks
    for these, [n, ceil(vocab / 8)] or a little longer: it lowers the logits whose bits are 0. None
    where the kernel is wrong on a small case.
    """
    run = library.stemma_mask

    def lower(logits: Tensor, rows: Rows, bits: Bits) -> None:
        run(
            ctypes.c_void_p(logits.data_ptr()),
            ctypes.c_int64(logits.shape[1]),
            ctypes.c_void_p(rows.ctypes.data),
            ctypes.c_int64(len(rows)),
            ctypes.c_void_p(bits.ctypes.data),
            ctypes.c_int64(bits.shape[1]),
        )

    return lower if _works(lower) else None


def _works(lower: Lower) -> bool:
    allowed = np.arange(300) % 7 == 0
    allowed[64:128], allowed[128:192] = False, True
    logits = torch.ones(2, 300)
    lower(logits, np.array([1]), np.packbits(allowed, bitorder="little")[None])
    expected = torch.where(torch.from_numpy(allowed), 1.0, -torch.inf)
    return torch.equal(logits, torch.stack([torch.ones(300), expected]))

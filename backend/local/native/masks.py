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

Bits = npt.NDArray[np.uint8]
Lower = Callable[[Tensor, Bits], None]


def masking(library: ctypes.CDLL) -> Lower | None:
    """A function that lowers the logits of one row [vocab], float32 and dense, whose bits are 0;
    None where the kernel is wrong on a small case.
    """
    run = library.stemma_mask

    def lower(row: Tensor, bits: Bits) -> None:
        run(
            ctypes.c_void_p(row.data_ptr()),
            ctypes.c_void_p(bits.ctypes.data),
            ctypes.c_int64(len(row)),
        )

    return lower if _works(lower) else None


def _works(lower: Lower) -> bool:
    allowed = np.arange(300) % 7 == 0
    allowed[64:128], allowed[128:192] = False, True
    row = torch.ones(300)
    lower(row, np.packbits(allowed, bitorder="little"))
    return torch.equal(row, torch.where(torch.from_numpy(allowed), 1.0, -torch.inf))

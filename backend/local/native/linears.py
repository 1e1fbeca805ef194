"""float32 linears by a C++ kernel where there are few rows: the weights are read once, at the speed
of the memory, which general matrix products do not reach then. Called by LocalBackend.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stemma.backend.local.model.decoder import Decoder

_LANES = 16  # of the kernel: what widths must be multiples of


class FewRowsLinear(nn.Module):
    """A linear map that goes through the kernel for few rows. Outside of autograd only."""

    def __init__(self, library: ctypes.CDLL, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._run = library.stemma_float_linear_few
        self._few = int(library.stemma_few_floats())
        self._bias = ctypes.c_void_p(None if linear.bias is None else linear.bias.data_ptr())
        self._weight = ctypes.c_void_p(linear.weight.data_ptr())

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        rows, width = x.shape
        outputs = len(self.weight)
        if rows > self._few:
            return F.linear(x, self.weight, self.bias)
        x, to = x.contiguous(), x.new_empty(rows, outputs)
        self._run(
            ctypes.c_void_p(x.data_ptr()),
            self._weight,
            self._bias,
            rows,
            width,
            outputs,
            ctypes.c_void_p(to.data_ptr()),
            torch.get_num_threads(),
        )
        return to


def use_few_rows_linears(library: ctypes.CDLL, decoder: Decoder) -> None:
    """Put them in the place of the linears of a float32 decoder, where they fit; none of them if
    the kernel is wrong on a small case.
    """
    if not _works(library):
        return
    for owner in (decoder, *decoder.blocks):
        for name, linear in list(owner.named_children()):
            if isinstance(linear, nn.Linear) and linear.weight.shape[1] % _LANES == 0:
                setattr(owner, name, FewRowsLinear(library, linear))


def _works(library: ctypes.CDLL) -> bool:
    numbers = torch.Generator().manual_seed(0)
    linear = nn.Linear(48, 21)
    for weight in linear.parameters():
        weight.data.normal_(generator=numbers)
    with torch.no_grad():
        x = torch.randn(14, 48, generator=numbers)
        found = (FewRowsLinear(library, linear)(x[:rows]) for rows in range(1, 15))
        return all(torch.allclose(y, linear(x[: len(y)]), rtol=1e-4, atol=1e-4) for y in found)

"""float32 linears of few rows by the kernel."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn

from stemma.backend.local.native import linears
from stemma.backend.local.native.linears import FewRowsLinear, use_few_rows_linears
from tests.backend.model.test_quantize import make, outputs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 40, 63, 64, 65, 100])
@torch.no_grad()
def test_it_computes_what_torch_does(library: ctypes.CDLL, bias: bool, rows: int) -> None:
    linear = nn.Linear(80, 37, bias=bias)
    x = torch.randn(rows, 80)
    assert torch.allclose(FewRowsLinear(library, linear)(x), linear(x), rtol=1e-5, atol=1e-5)
    apart = torch.randn(rows, 100)[:, :80]  # rows that do not lie side by side
    assert torch.allclose(
        FewRowsLinear(library, linear)(apart), linear(apart), rtol=1e-5, atol=1e-5
    )


@torch.no_grad()
def test_a_row_has_the_same_bits_with_any_few_others(library: ctypes.CDLL) -> None:
    linear = FewRowsLinear(library, nn.Linear(128, 50))
    x = torch.randn(int(library.stemma_few_floats()), 128)
    every = linear(x)
    for rows in range(1, len(x) + 1):
        assert linear(x[:rows]).equal(every[:rows])
        assert linear(x[-rows:]).equal(every[-rows:])


def test_a_decoder_with_them_computes_the_same(library: ctypes.CDLL) -> None:
    decoder = make()
    expected = outputs(decoder)
    use_few_rows_linears(library, decoder)
    assert isinstance(decoder.head, FewRowsLinear)
    assert all(isinstance(block.down, FewRowsLinear) for block in decoder.blocks)
    assert torch.allclose(outputs(decoder), expected, rtol=1e-4, atol=1e-4)


def test_widths_that_do_not_fit_stay_with_torch(library: ctypes.CDLL) -> None:
    decoder = make(intermediate_size=100)
    use_few_rows_linears(library, decoder)
    assert all(isinstance(block.down, nn.Linear) for block in decoder.blocks)
    assert all(isinstance(block.gate_up, FewRowsLinear) for block in decoder.blocks)


def test_a_kernel_that_is_wrong_is_not_used(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = linears.FewRowsLinear.forward
    monkeypatch.setattr(linears.FewRowsLinear, "forward", lambda self, x: right(self, x) + 0.01)
    decoder = make()
    use_few_rows_linears(library, decoder)
    assert isinstance(decoder.head, nn.Linear)

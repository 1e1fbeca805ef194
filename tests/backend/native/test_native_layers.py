"""The layers of an int8 decoder by the kernels, against the same layers by torch."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stemma.backend.local.batch import Entry, build_batch
from stemma.backend.local.cache.kv_pool import KVPool
from stemma.backend.local.model.decoder import Decoder, Stages
from stemma.backend.local.model.quantize import quantize
from stemma.backend.local.native import build, layers
from stemma.backend.local.native.attention import NativeAttention
from stemma.backend.local.native.layers import compiled_layers
from tests.backend.model.test_quantize import make


def int8(**changes: Any) -> Decoder:
    shape = {"hidden_size": 64, "vocab_size": 112, "head_dim": 16, **changes}
    decoder = make(**shape)
    quantize(decoder)
    return decoder


def compiled(library: ctypes.CDLL, decoder: Decoder) -> Stages:
    found = compiled_layers(library, decoder)
    assert found is not None
    return found


def inputs(decoder: Decoder, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = decoder.config
    numbers = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, config.hidden_size, generator=numbers)
    attended = torch.randn(rows, config.num_heads * config.head_dim, generator=numbers)
    angles = torch.randn(rows, 1, config.head_dim // 2, generator=numbers)
    cos, sin = angles.cos(), angles.sin()
    return x, attended, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inner", [48, 96, 128])
@pytest.mark.parametrize("rows", [1, 3, 4, 16, 17, 40])
def test_they_compute_what_torch_does(
    library: ctypes.CDLL, bias: bool, inner: int, rows: int
) -> None:
    decoder = int8(attention_bias=bias, mlp_bias=bias, intermediate_size=inner)
    functions, eager = compiled(library, deepcopy(decoder)), decoder.eager
    for layer in range(2):
        x, *rest = inputs(decoder, rows)
        expected = eager.between(layer, x.clone(), *rest)
        for ours, theirs in zip(functions.between(layer, x, *rest), expected, strict=True):
            assert ours.shape == theirs.shape
            assert (ours - theirs).norm() < 0.01 * theirs.norm()
    x, attended, *rotation = inputs(decoder, rows)
    for ours, theirs in zip(functions.first(x, *rotation), eager.first(x, *rotation), strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()
    hidden, exact = functions.last(x.clone(), attended), eager.last(x, attended)
    assert (hidden - exact).norm() < 0.01 * exact.norm()
    logits, exact = functions.head(x), eager.head(x)
    assert (logits - exact).norm() < 1e-5 * exact.norm()


WAYS = {
    "AVX-512": ["-mno-amx-int8"],
    "AVX-VNNI": ["-mno-amx-int8", "-mno-avx512f"],
    "AVX2": ["-mno-amx-int8", "-mno-avx512f", "-mno-avxvnni"],
    "none of them": ["-mno-amx-int8", "-mno-avx512f", "-mno-avxvnni", "-mno-avx2"],
}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86-64")
@pytest.mark.parametrize("way", WAYS)
def test_products_are_the_same_integers_whatever_the_processor_has(
    library: ctypes.CDLL, way: str, tmp_path: Path
) -> None:
    """With less than this processor has, since it may not have more."""
    chosen = build.compiler()
    assert chosen is not None
    made = tmp_path / "kernels.so"
    sources = [str(build.FOLDER / name) for name in build.SOURCES]
    command = [str(chosen), *build.FLAGS, *WAYS[way], *sources, *build._openmp(), "-o", str(made)]
    subprocess.run(command, check=True)
    other = ctypes.CDLL(str(made))
    for shape in ({}, {"hidden_size": 128, "intermediate_size": 192}):
        decoder = int8(**shape)
        whole, part = compiled(library, deepcopy(decoder)), compiled(other, deepcopy(decoder))
        for rows in (1, 2, 3, 4, 5, 16, 17, 40, 70):
            x, *_ = inputs(decoder, rows)
            assert part.head(x).equal(whole.head(x))  # one product, scaled


def test_a_decoder_gives_its_weights_away(library: ctypes.CDLL) -> None:
    decoder = int8()
    compiled(library, decoder)
    assert decoder.head.weight.numel() == decoder.blocks[1].down.weight.numel() == 0


def test_a_row_has_the_same_bits_alone_and_in_any_batch(library: ctypes.CDLL) -> None:
    decoder = int8()
    functions = compiled(library, decoder)
    every = inputs(decoder, 50)
    together = [t.clone() for t in functions.between(1, every[0].clone(), *every[1:])]
    logits = functions.head(every[0]).clone()
    q = functions.first(every[0], *every[2:])[0].clone()
    hidden = functions.last(every[0].clone(), every[1]).clone()
    for row in (0, 17, 49):
        one = [t[row : row + 1].clone() for t in every]
        x = one[0].clone()
        for ours, theirs in zip(functions.between(1, *one), together, strict=True):
            assert ours[0].equal(theirs[row])
        assert functions.head(x)[0].equal(logits[row])
        assert functions.first(x, *one[2:])[0][0].equal(q[row])
        assert functions.last(x, one[1])[0].equal(hidden[row])


def test_what_is_not_finite_is_not_hidden_and_stays_in_its_row(library: ctypes.CDLL) -> None:
    decoder = int8()
    functions = compiled(library, decoder)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x, *rest = inputs(decoder, 3)
        x[1, 5] = bad
        for out in (*functions.between(0, x.clone(), *rest), functions.head(x)):
            assert out[1].isnan().all()
            assert out[0].isfinite().all()
            assert out[2].isfinite().all()


def test_rows_of_zeros(library: ctypes.CDLL) -> None:
    decoder = int8()
    functions = compiled(library, decoder)
    assert functions.head(torch.zeros(2, 64)).equal(torch.zeros(2, 112))


def test_other_decoders_have_none(library: ctypes.CDLL) -> None:
    assert compiled_layers(library, make(hidden_size=64, vocab_size=112)) is None
    assert compiled_layers(library, int8(vocab_size=101)) is None


def test_kernels_that_are_wrong_are_not_used(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = layers.NativeLayers.head
    monkeypatch.setattr(layers.NativeLayers, "head", lambda self, x: right(self, x) * 1.05)
    assert compiled_layers(library, int8()) is None


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_all_layers_in_one_call_give_the_same_bits(library: ctypes.CDLL, rows: int) -> None:
    decoder = int8()
    config = decoder.config
    stages = compiled(library, decoder)
    pool = KVPool(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        capacity=100,
        page_size=1,
        dtype=torch.float32,
        device="cpu",
    )
    for part in (*pool.k, *pool.v):
        part.normal_()
    attention = NativeAttention(library, pool, num_heads=config.num_heads, scale=0.25)
    table = np.arange(rows + 30, dtype=np.int32)
    batch = build_batch([Entry(np.zeros(len(table), dtype=np.int32), table, 30)])
    ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
    found = []
    for whole in (stages.whole, None):
        decoder.compiled = stages._replace(whole=whole)
        found.append(decoder(ids, positions, attention.prepare(batch)).clone())
    assert found[0].equal(found[1])
    assert stages.whole is not None
    assert stages.whole(torch.zeros(1, 64), ids, ids, lambda *_: ids) is None  # type: ignore[arg-type,return-value]

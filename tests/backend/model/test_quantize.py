"""int8 linears and the rotations before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stemma.backend.local.model.config import DecoderConfig
from stemma.backend.local.model.decoder import Decoder
from stemma.backend.local.model.quantize import (
    Int8Linear,
    Rotation,
    check_quantization,
    hadamard,
    quantize,
    turn,
)
from stemma.lang.errors import InvalidArgument


def make(dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    settings: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    config = DecoderConfig.from_dict({**settings, **changes}, None)
    decoder = Decoder(config, torch.device("cpu"), dtype)
    numbers = torch.Generator().manual_seed(0)
    for weight in decoder.parameters():
        weight.normal_(generator=numbers).mul_(0.3)
    return decoder


def outputs(decoder: Decoder) -> Tensor:
    """Logits of some tokens, each of which attends to the ones before."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k)
        ahead = torch.ones(len(q), len(q)).triu(1).bool()
        weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)

    with torch.no_grad():
        ids = torch.arange(20)
        return decoder.logits(decoder(ids, torch.arange(20), attend))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hidden", [48, 64, 36])
def test_a_turned_decoder_computes_the_same(tied: bool, bias: bool, hidden: int) -> None:
    changes = {
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "mlp_bias": bias,
        "hidden_size": hidden,
        "head_dim": 12,
    }
    decoder = make(torch.float64, **changes)
    before = outputs(decoder)
    embedding = decoder.embedding.clone()
    turn(decoder)
    assert not torch.allclose(decoder.embedding, embedding)
    assert torch.allclose(outputs(decoder), before, rtol=1e-9, atol=1e-9)


def test_an_int8_decoder_is_near_and_nearer_than_without_rotations() -> None:
    """One dimension of the stream is a hundred times larger than the others, as in real models."""

    def with_an_outlier() -> Decoder:
        decoder = make(hidden_size=64, num_attention_heads=4)
        decoder.embedding[:, 3] *= 100
        return decoder

    exact = outputs(with_an_outlier())
    decoder = with_an_outlier()
    quantize(decoder)
    rotated = float((outputs(decoder) - exact).norm() / exact.norm())
    decoder = with_an_outlier()
    for block in decoder.blocks:
        for name in ("qkv", "out", "gate_up", "down"):
            linear = getattr(block, name)
            setattr(block, name, Int8Linear(linear.weight, linear.bias))
    plain = float((outputs(decoder) - exact).norm() / exact.norm())
    assert rotated < 0.05
    assert rotated < 0.7 * plain


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7])
def test_an_int8_linear_is_as_near_as_its_steps(bias: bool, rows: int) -> None:
    linear = torch.nn.Linear(64, 40, bias=bias)
    x = torch.randn(rows, 64)
    for turned in (None, hadamard(16)):
        int8 = Int8Linear(linear.weight.detach(), linear.bias, turned)
        expected = linear(x)
        assert (int8(x) - expected).norm() < 0.02 * expected.norm()
        assert int8(torch.zeros(rows, 64)).equal(
            linear.bias.expand(rows, -1) if bias else torch.zeros(rows, 40)
        )


def test_rows_do_not_influence_each_other() -> None:
    int8 = Int8Linear(torch.randn(40, 64), None)
    x = torch.randn(2, 64)
    alone = int8(x[:1])
    x[1] *= 1e6
    assert int8(x)[:1].equal(alone)


@pytest.mark.parametrize("size", [1, 2, 3, 64, 576, 48, 36, 512])
def test_rotations_are_orthogonal_and_the_same_each_time(size: int) -> None:
    eye = torch.eye(size, dtype=torch.float64)
    matrix = Rotation(size, eye)(eye)
    assert torch.allclose(matrix @ matrix.T, eye)
    assert matrix.equal(Rotation(size, eye)(eye))
    x = torch.randn(5, 3 * size, dtype=torch.float64)
    turned = torch.cat([part @ matrix for part in x.split(size, 1)], 1)
    assert torch.allclose(Rotation(size, x)(x), turned)
    if size % 64 == 0:  # nothing stands out
        assert matrix.abs().max() < 0.126


@pytest.mark.parametrize(
    ("device", "dtype", "asked", "said"),
    [
        ("cpu", torch.float32, "int4", "must be 'auto', 'int8' or None"),
        ("cpu", torch.float64, "int8", "is for device='cpu' and dtype='float32'"),
        ("cuda", torch.float32, "int8", "and this is cuda and float32"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    device: str, dtype: torch.dtype, asked: Any, said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        check_quantization(asked, torch.device(device), dtype)

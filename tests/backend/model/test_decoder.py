"""The decoder computes what transformers computes, in one pass, in chunks and token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm

from stemma.backend.local.model.config import DecoderConfig
from stemma.backend.local.model.decoder import Decoder, rope_frequencies
from stemma.backend.local.model.loader import load_model

VARIANTS = (
    "plain",
    "grouped-query",
    "multi-query",
    "tied",
    "biases",
    "wide-heads",
    "llama3-rope",
    "linear-rope",
    "mistral",
)
TOKENS = torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(3))


def run(decoder: Decoder, attend: Any, chunks: Sequence[int], tokens: Tensor = TOKENS) -> Tensor:
    """Logits of all positions, computed in chunks of the given lengths."""
    parts, start = [], 0
    for length in chunks:
        positions = torch.arange(start, start + length)
        parts.append(decoder.logits(decoder(tokens[positions], positions, attend)))
        start += length
    return torch.cat(parts)


def precise_norm(self: Any, x: Tensor) -> Tensor:
    """The formula; transformers rounds to float32 in it even where the model is float64."""
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_match_transformers_in_float32(
    variant: str, make_model: Any, naive_attend: Any, tmp_path: Path
) -> None:
    reference = make_model(variant)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", dtype=torch.float32)
    attend = naive_attend(model.config.num_layers, model.config.attention_scale)
    logits = run(model.decoder, attend, [len(TOKENS)])
    expected = reference(TOKENS[None]).logits[0]
    assert expected.std() > 1  # the weights are such that a mistake shows
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_match_transformers_in_float64(
    variant: str,
    make_model: Any,
    naive_attend: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = make_model(variant)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", dtype=torch.float64)
    attend = naive_attend(model.config.num_layers, model.config.attention_scale)
    logits = run(model.decoder, attend, [len(TOKENS)])
    assert logits.dtype == torch.float64
    reference.double()
    torch.testing.assert_close(logits, reference(TOKENS[None]).logits[0], atol=1e-4, rtol=0)
    for norm in (LlamaRMSNorm, MistralRMSNorm):
        monkeypatch.setattr(norm, "forward", precise_norm)
    torch.testing.assert_close(logits, reference(TOKENS[None]).logits[0], atol=1e-9, rtol=0)


@torch.inference_mode()
def test_decoding_token_by_token_gives_the_logits_of_one_pass(
    tiny_folder: Path, naive_attend: Any
) -> None:
    model = load_model(tiny_folder, device="cpu", dtype=torch.float64)
    layers, scale = model.config.num_layers, model.config.attention_scale
    whole = run(model.decoder, naive_attend(layers, scale), [40])
    chunked = run(model.decoder, naive_attend(layers, scale), [20] + [1] * 20)
    torch.testing.assert_close(chunked, whole, atol=1e-12, rtol=0)


@pytest.fixture(scope="module")
def biased_model(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("biased")
    make_model("biases").save_pretrained(folder)
    return load_model(folder, device="cpu", dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(chunks=st.lists(st.integers(1, 30), min_size=1, max_size=5))
@torch.inference_mode()
def test_prefill_in_any_chunks_gives_the_logits_of_one_pass(
    chunks: list[int], biased_model: Any, naive_attend: Any
) -> None:
    config = biased_model.config
    layers, scale = config.num_layers, config.attention_scale
    whole = run(biased_model.decoder, naive_attend(layers, scale), [sum(chunks)])
    chunked = run(biased_model.decoder, naive_attend(layers, scale), chunks)
    torch.testing.assert_close(chunked, whole, atol=1e-12, rtol=0)


@torch.inference_mode()
def test_a_row_depends_on_its_position_not_on_its_place(tiny_folder: Path) -> None:
    decoder = load_model(tiny_folder, device="cpu", dtype=torch.float64).decoder
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q, k, v))
        return q.reshape(len(q), -1)

    positions = torch.tensor([300, 2, 2, 77])
    order = torch.tensor([2, 0, 3, 1])
    hidden = decoder(TOKENS[:4], positions, attend)
    first = seen[:]
    seen.clear()
    shuffled = decoder(TOKENS[:4][order], positions[order], attend)
    torch.testing.assert_close(shuffled, hidden[order], atol=1e-12, rtol=0)
    for rows, again in zip(first, seen, strict=True):
        for row, moved in zip(rows, again, strict=True):
            torch.testing.assert_close(moved, row[order], atol=1e-12, rtol=0)


@torch.inference_mode()
def test_bfloat16_weights_give_float32_logits_close_to_exact_ones(
    tiny_folder: Path, naive_attend: Any
) -> None:
    logits = {}
    for dtype in (torch.bfloat16, torch.float64):
        model = load_model(tiny_folder, device="cpu", dtype=dtype)
        attend = naive_attend(model.config.num_layers, model.config.attention_scale)
        logits[dtype] = run(model.decoder, attend, [60])
    assert logits[torch.bfloat16].dtype == torch.float32
    apart = logits[torch.bfloat16].double() - logits[torch.float64]
    assert apart.std() < 0.05 * logits[torch.float64].std()


@pytest.mark.parametrize("variant", VARIANTS)
def test_rotary_frequencies_are_those_of_transformers_to_the_bit(
    variant: str, make_model: Any
) -> None:
    model = make_model(variant)
    config = DecoderConfig.from_dict(json.loads(model.config.to_json_string(use_diff=False)))
    assert torch.equal(rope_frequencies(config), model.model.rotary_emb.inv_freq)


def test_the_llama3_variant_has_kept_stretched_and_mixed_frequencies(make_model: Any) -> None:
    config = make_model("llama3-rope", head_dim=32).config
    frequencies = rope_frequencies(DecoderConfig.from_dict(config.to_dict()))
    plain = 500.0 ** (-torch.arange(0, 32, 2) / 32)
    kept = torch.isclose(frequencies, plain)
    stretched = torch.isclose(frequencies, plain / 4)
    assert kept.any()
    assert stretched.any()
    assert (~kept & ~stretched).any()

"""Tiny random models as transformers saves them, and a naive attention to run them with."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped-query": {"num_key_value_heads": 2},
    "multi-query": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "wide-heads": {"head_dim": 24, "num_key_value_heads": 2},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "linear-rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}
    },
    "mistral": {"num_key_value_heads": 2, "sliding_window": None, "head_dim": 12},
}

MakeModel = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """make_model(variant, **config changes) -> a transformers model with all its weights random."""

    def make(variant: str = "plain", **changes: Any) -> PreTrainedModel:
        config_class, model_class = (
            (MistralConfig, MistralForCausalLM)
            if variant == "mistral"
            else (LlamaConfig, LlamaForCausalLM)
        )
        model = model_class(config_class(**{**SHAPE, **VARIANTS[variant], **changes})).eval()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                spread = 0.3 if parameter.dim() > 1 else 0.5
                parameter.normal_(1.0 if "norm" in name else 0.0, spread, generator=generator)
        return model

    return make


@pytest.fixture
def tiny_folder(make_model: MakeModel, tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    make_model("grouped-query").save_pretrained(folder)
    return folder


class NaiveAttend:
    """Keeps every key and value in lists, and lets each row see all positions up to its own."""

    def __init__(self, layers: int, scale: float) -> None:
        self.scale = scale
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = len(self.keys[layer])
        self.keys[layer] += k.unbind()
        self.values[layer] += v.unbind()
        repeat = q.shape[1] // k.shape[1]
        keys = torch.stack(self.keys[layer]).repeat_interleave(repeat, dim=1)
        values = torch.stack(self.values[layer]).repeat_interleave(repeat, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.scale
        query, key = torch.arange(q.shape[0]) + before, torch.arange(len(keys))
        scores = scores.masked_fill(key[None] > query[:, None], -math.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return mixed.reshape(q.shape[0], -1)


@pytest.fixture(scope="session")
def naive_attend() -> type[NaiveAttend]:
    return NaiveAttend

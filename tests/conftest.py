"""What all tests share: the default model, tiny random models, and who may run where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the GPU tests where there is no GPU; torch is asked only if there are such tests."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """The default model's folder; our own code fetches and converts it where it is not there."""
    from stemma.backend.local.model.default_model import ensure_default_model

    return ensure_default_model()


TinyModel = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A maker of random Llama models: `tiny_model(seed=1, num_hidden_layers=3)` is a folder.

    Named arguments are those of `LlamaConfig`. The same arguments give the same folder within a
    session. The tokenizer is byte-level BPE, so every text can be encoded, with ChatML control
    tokens and template.
    """
    made: dict[str, Path] = {}

    def make(*, seed: int = 0, **config: Any) -> Path:
        key = json.dumps([seed, config], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny")
            write_tiny_model(made[key], seed=seed, **config)
        return made[key]

    return make


def write_tiny_model(folder: Path, *, seed: int, **config: Any) -> None:
    """Save a random Llama model and its tokenizer as a hub repository has them."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tokenizers_for_tests import byte_level_tokenizer

    byte_level_tokenizer(folder)
    settings: dict[str, Any] = {
        "vocab_size": Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        # Far larger than a trained model's, so that the next tokens differ clearly in probability.
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**{**settings, **config})).save_pretrained(folder)

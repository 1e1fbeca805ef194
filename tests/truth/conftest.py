"""The default model as transformers runs it, our own backends on it, and texts to put to both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.tokenizer import Piece, Tokenizer
from tests.truth.exact_for_tests import load_exact, load_reference

ROOT = Path(__file__).parents[2]
Open = Callable[..., LocalBackend]


@pytest.fixture(scope="session")
def reference(default_model_folder: Path) -> LlamaForCausalLM:
    return load_reference(default_model_folder)


@pytest.fixture(scope="session")
def exact(default_model_folder: Path) -> LlamaForCausalLM:
    return load_exact(default_model_folder)


@pytest.fixture(scope="session")
def passage(default_model_folder: Path) -> list[int]:
    """The ids of a text of a few thousand tokens."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return Tokenizer.from_folder(default_model_folder).encode([Piece(text)], first=True)


@pytest.fixture(scope="module")
def open_backend(default_model_folder: Path) -> Iterator[Open]:
    """A maker of float32 backends on the default model; the same options give the same one."""
    made: dict[str, LocalBackend] = {}

    def make(**options: object) -> LocalBackend:
        key = repr(sorted(options.items()))
        if key not in made:
            settings: dict[str, object] = {
                "dtype": "float32",
                "quantization": None,
                "kv_tokens": 16384,
                **options,
            }
            made[key] = LocalBackend(default_model_folder, **settings)  # type: ignore[arg-type]
        return made[key]

    yield make
    for backend in made.values():
        backend.check()
        backend.close()

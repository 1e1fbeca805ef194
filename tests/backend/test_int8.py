"""int8 on the kernels: the same bits whatever the batch, the schedule and the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.native.build import compiler
from stemma.lang.sampling import SamplingParams
from tests.conftest import TinyModel

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SAMPLED = SamplingParams(max_tokens=20, seed=5, ignore_eos=True, logprobs=True)
Draws = list[list[tuple[int, float]]]


def draws(model: Path, prompts: list[list[int]], together: bool = True, **options: Any) -> Draws:
    """Ids and log-probabilities, to the last bit."""
    backend = LocalBackend(model, quantization="int8", compile=True, **options)
    try:
        if together:
            found = backend.generate(prompts, SAMPLED)
        else:
            found = [backend.generate([prompt], SAMPLED)[0] for prompt in prompts]
    finally:
        backend.close()
    logprobs = [completion.logprobs or [] for completion in found]
    return [[(token.token_id, token.logprob) for token in row] for row in logprobs]


def check(model: Path, prompts: list[list[int]], kv_tokens: int) -> None:
    expected = draws(model, prompts, kv_tokens=kv_tokens)
    assert all(len(row) == 20 for row in expected)
    for options in (
        {"together": False},
        {"max_step_tokens": 40, "max_running": 4},
        {"prefix_cache": False},
        {"page_size": 16},
        {"kv_tokens": max(map(len, prompts)) + 40},
    ):
        assert draws(model, prompts, **{"kv_tokens": kv_tokens, **options}) == expected, options


def test_the_same_bits_in_every_schedule_on_a_tiny_model(tiny_model: TinyModel) -> None:
    model = tiny_model(hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=528)
    shared = [(7 * i) % 500 + 5 for i in range(150)]
    tails = [[9, 8, 7], [6], list(range(20, 90)), [9, 8, 6]]
    check(model, [*(shared + tail for tail in tails), shared[:70], [3]], 2000)


@pytest.mark.slow
def test_the_same_bits_in_every_schedule_on_the_default_model(default_model_folder: Path) -> None:
    shared = [(7919 * i) % 40_000 + 100 for i in range(120)]
    check(default_model_folder, [*([*shared, t] for t in (5, 50, 500)), shared[:90], [3]], 4000)

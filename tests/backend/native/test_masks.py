"""Masks that a kernel puts onto logits: what they leave is what the sampler leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import stemma as st
from stemma.backend.local.native.build import library
from stemma.backend.local.native.masks import Lower, masking
from stemma.lang.sampling import SamplingParams


@pytest.fixture(scope="module")
def lower() -> Lower:
    kernels = library()
    if isinstance(kernels, str):
        pytest.skip(kernels)
    found = masking(kernels)
    assert found is not None
    return found


@pytest.mark.parametrize("size", [1, 7, 8, 63, 64, 65, 128, 1000, 49152])
def test_what_is_not_allowed_is_lowered_and_the_rest_is_not_touched(
    lower: Lower, size: int
) -> None:
    numbers = np.random.default_rng(size)
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        allowed = numbers.random(size) < share
        logits = torch.randn(4, size)
        before = logits.clone()
        bits = np.packbits(allowed, bitorder="little")
        bits = np.append(bits, np.uint8(255))  # masks may be longer than the vocabulary
        lower(logits, np.array([3, 1]), np.stack([bits, np.full_like(bits, 255)]))
        expected = before.clone()
        expected[3] = torch.where(torch.from_numpy(allowed), before[3], -torch.inf)
        assert torch.equal(logits, expected)


@pytest.mark.slow
def test_texts_and_log_probabilities_do_not_depend_on_the_kernel(
    default_model_folder: Path,
) -> None:
    """In fp32; what is asked for log-probabilities takes the other way in any case."""
    shape = st.Constraint.json_schema({"type": "array", "items": {"enum": ["red", "green", 7]}})
    params = SamplingParams(max_tokens=24, n=4, seed=1, constraint=shape, temperature=1.5)
    with st.LocalBackend(default_model_folder, quantization=None) as backend:
        quick = backend.generate("Some colours: ", params)
        told = backend.generate("Some colours: ", params.but(logprobs=True))
        backend.engine.lower = None
        slow = backend.generate("Some colours: ", params)
    assert [c.text for c in quick] == [c.text for c in told] == [c.text for c in slow]
    assert len({c.text for c in quick}) > 1

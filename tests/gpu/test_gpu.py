"""What to run when a GPU is at hand: `make test-gpu`. Correctness, the demo, tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from stemma.backend.local.backend import LocalBackend
from stemma.lang.sampling import SamplingParams

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=True)
PROMPTS = [[5 + (7 * i * k) % 400 for k in range(20 + 13 * i)] for i in range(6)]


@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_text_in_fp32_equals_the_cpus(
    tiny_model: Callable[..., Path], page_size: int
) -> None:
    options = {"dtype": "float32", "page_size": page_size, "kv_tokens": 4096}
    with LocalBackend(tiny_model(), device="cpu", **options) as cpu:  # type: ignore[arg-type]
        expected = cpu.generate(PROMPTS, GREEDY)
    with LocalBackend(tiny_model(), device="cuda", **options) as gpu:  # type: ignore[arg-type]
        for _ in ("cold", "warm"):
            found = gpu.generate(PROMPTS, GREEDY)
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        gpu.check()


def test_log_probabilities_in_fp32_are_within_1e_4_of_the_cpus(
    tiny_model: Callable[..., Path],
) -> None:
    scores = []
    for device in ("cpu", "cuda"):
        with LocalBackend(tiny_model(), device=device, dtype="float32", kv_tokens=4096) as backend:
            branch = backend.open()
            branch.append("The answer is")
            result = branch.score([" yes", " no", " yes and no"], unconditional=True).result()
            scores.append([torch.tensor(choice.logprobs) for choice in result.choices])
    for cpu, gpu in zip(*scores, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=0, atol=1e-4)


def test_seeded_samples_do_not_depend_on_the_batch(tiny_model: Callable[..., Path]) -> None:
    params = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
    with LocalBackend(tiny_model(), device="cuda", dtype="float32", kv_tokens=4096) as backend:
        together = [c.token_ids for c in backend.generate(PROMPTS, params)]
        alone = [backend.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    assert together == alone


def test_default_device_and_dtype_are_the_gpus(tiny_model: Callable[..., Path]) -> None:
    with LocalBackend(tiny_model(), kv_tokens=1024) as backend:
        assert backend.device.type == "cuda"
        assert backend.dtype is torch.bfloat16
        assert all(p.device.type == "cuda" for p in backend.engine.decoder.parameters())
        backend.generate(PROMPTS, GREEDY)
        backend.check()


@pytest.mark.slow
def test_demo_runs(default_model_folder: Path) -> None:
    from stemma.demo import run_demo

    run_demo(str(default_model_folder), console=Console())


@pytest.mark.slow
def test_tokens_per_second(default_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints prefill and decode rates; asserts only that the shared prompt was computed once."""
    with LocalBackend(default_model_folder) as backend:
        backend.warmup()
        ids = (backend.encode("A stemma is the tree by which texts descend. ") * 100)[:1000]
        for samples in (1, 32, 256):
            backend.flush_cache()
            params = SamplingParams(max_tokens=64, n=samples, seed=1, ignore_eos=True)
            start = time.perf_counter()
            found = backend.generate([ids], params)
            seconds = time.perf_counter() - start
            first = min(c.usage.ttft_s or 0.0 for c in found)
            rate = 64 * samples / (seconds - first)
            with capsys.disabled():
                print(
                    f"\n{samples} samples: 1,000 tokens of prompt in {first * 1000:.0f} ms, "
                    f"then {rate:,.0f} tokens/s"
                )
            assert sum(c.usage.computed_tokens for c in found) == len(ids)

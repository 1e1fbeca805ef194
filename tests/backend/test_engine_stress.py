"""A small pool under many requests: whatever is cancelled, all end and nothing stays behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from stemma.lang.errors import Cancelled
from stemma.lang.sampling import SamplingParams
from tests.backend.stepped_for_tests import Stepped

POOL = 2000
REQUESTS = 200


def mixed_prompts(rng: random.Random) -> list[list[int]]:
    """From one token to more than half of the pool; many begin alike, some are the same."""
    stems = [[rng.randrange(3, 500) for _ in range(length)] for length in (900, 300, 40, 40)]
    prompts: list[list[int]] = []
    for number in range(REQUESTS):
        stem = rng.choice(stems)
        shared = stem[: rng.randrange(len(stem) + 1)]
        own = [rng.randrange(3, 500) for _ in range(rng.choice([1, 1, 5, 30, 200]))]
        prompts.append(rng.choice(prompts) if number % 10 == 9 else (shared + own)[:1000])
    return prompts


@pytest.mark.parametrize("page_size", [1, 16])
def test_small_pool_under_many_requests_and_cancels(
    page_size: int, tiny_model: Callable[..., Path]
) -> None:
    rng = random.Random(page_size)
    stepped = Stepped(
        tiny_model(max_position_embeddings=2048),
        kv_tokens=POOL,
        page_size=page_size,
        max_running=24,
        max_step_tokens=256,
    )
    prompts = mixed_prompts(rng)
    lengths = [rng.choice([1, 2, 10, 60, 400]) for _ in prompts]
    cancelled: set[int] = set()
    steps = 0
    while len(stepped.handles) < REQUESTS or stepped.has_work:
        for _ in range(rng.choice([0, 1, 8])):
            number = len(stepped.handles)
            if number < REQUESTS:
                params = SamplingParams(
                    max_tokens=lengths[number], temperature=number % 2, seed=number, ignore_eos=True
                )
                stepped.submit(prompts[number], params, logprobs=number % 5 == 0)
        under_way = [n for n, handle in enumerate(stepped.handles) if not handle.done()]
        if under_way and rng.random() < 0.05:
            victim = rng.choice(under_way)
            cancelled.add(victim)
            stepped.cancel(victim)
        stepped.step()  # the books are checked
        steps += 1
        assert steps < 10_000
    found = [handle.future.exception(timeout=0) for handle in stepped.handles]
    for number, error in enumerate(found):
        if error is None:
            completion = stepped.handles[number].result()
            assert completion.usage.output_tokens == lengths[number]
            assert completion.usage.prompt_tokens == len(prompts[number])
        else:
            assert isinstance(error, Cancelled)
            assert number in cancelled
    assert 20 < sum(error is not None for error in found) < REQUESTS / 2
    stats = stepped.backend.stats()
    assert stats.retractions > 0  # the pool was too small indeed
    assert stats.evicted_tokens > 0
    assert stats.cached_tokens > 0
    assert stats.running == stats.waiting == 0
    assert stats.protected_tokens == stats.private_tokens == 0
    assert stats.free_tokens + stats.evictable_tokens == POOL
    stepped.backend.flush_cache()
    assert stepped.backend.stats().free_tokens == POOL
    stepped.close()

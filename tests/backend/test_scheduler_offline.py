"""What is all there from the beginning runs depth first, and hits as much as any order can."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from cache_traces import KINDS, Ids
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import SimulatedEngine, best_hit_rate, new_tokens

import stemma
from stemma.backend.base import Namespace
from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.request import Ints, Request
from stemma.backend.local.waiting_order import WAITING_ORDERS, depth_first
from stemma.lang.sampling import SamplingParams
from tests.backend.conftest import Make

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
CALLS = 80


def request(prompt: list[int]) -> Request:
    return Request(Ints(prompt), Namespace(), GREEDY, lambda _: None, lambda _: None)


def run(prompts: list[Ids], *, pool: int, policy: str, sort: bool) -> float:
    """The hit rate of prompts that are all there from the beginning."""
    engine = SimulatedEngine(pool, policy=policy, max_running=16, max_step_tokens=512)
    order = depth_first([request(p.tolist()) for p in prompts]) if sort else None
    texts = prompts if order is None else [r.tokens.view() for r in order]
    for text in texts:
        engine.submit(text, np.arange(1, 9, dtype=np.int32))
    engine.run()
    engine.memory.check()
    assert all(job.done for job in engine.jobs)
    return engine.hit_rate


@pytest.fixture(scope="module", params=list(KINDS))
def prompts(request: pytest.FixtureRequest) -> list[Ids]:
    """The first prompts of a trace."""
    calls = (call for each in KINDS[request.param](1) for call in each.calls)
    return [call.prompt for call in islice(calls, CALLS)]


@pytest.mark.parametrize("share", [0.05, 0.10, 0.25, 0.50])
@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_depth_first_hits_nearly_as_much_as_any_order_can_in_a_small_pool(
    prompts: list[Ids], policy: str, share: float
) -> None:
    pool = max(int(share * sum(new_tokens(prompts))), max(map(len, prompts)) + 9)
    assert run(prompts, pool=pool, policy=policy, sort=True) >= 0.96 * best_hit_rate(prompts)


def test_depth_first_hits_as_much_as_any_order_can_where_the_pool_holds_all(
    prompts: list[Ids],
) -> None:
    pool = sum(new_tokens(prompts)) + CALLS * 8 + 16 * 32
    assert run(prompts, pool=pool, policy="lpm", sort=True) > best_hit_rate(prompts) - 1e-9


def test_order_as_given_hits_less_in_a_small_pool() -> None:
    calls = [call.prompt for each in KINDS["few-shot"](1) for call in each.calls][:CALLS]
    pool = max(map(len, calls)) + 9
    best = best_hit_rate(calls)
    given_order = run(calls, pool=pool, policy="fcfs", sort=False)
    assert given_order < 0.7 * best
    assert run(calls, pool=pool, policy="fcfs", sort=True) >= 0.99 * best


def test_best_hit_rate_counts_what_is_new_and_one_token_of_every_prompt() -> None:
    one, two, three = (np.array(ids, dtype=np.int32) for ids in ([1, 2, 3], [1, 2, 4], [1, 2]))
    assert best_hit_rate([one]) == 0
    assert best_hit_rate([one, two]) == 1 - 4 / 6
    assert best_hit_rate([one, one, one]) == 1 - 5 / 9
    assert best_hit_rate([one, three, two]) == 1 - (2 + 1 + 1) / 8


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=20))
def test_order_is_depth_first_and_equal_prompts_stay_as_given(prompts: list[list[int]]) -> None:
    requests = [request(prompt) for prompt in prompts]
    order = depth_first(requests)
    found = [r.tokens.view().tolist() for r in order]
    assert found == sorted(prompts)
    places = {id(r): i for i, r in enumerate(requests)}
    for one, other in pairwise(order):
        if one.tokens.view().tolist() == other.tokens.view().tolist():
            assert places[id(one)] < places[id(other)]


def test_ids_above_a_byte_are_in_order() -> None:
    order = depth_first([request([256]), request([255]), request([2, 1]), request([65_536])])
    assert [r.tokens.view().tolist() for r in order] == [[2, 1], [255], [256], [65_536]]


# -- in a backend


def shuffled(rng: random.Random) -> list[list[int]]:
    """Six long stems with eight tails each, in any order."""
    stems = [[rng.randrange(3, 500) for _ in range(120)] for _ in range(6)]
    work = [[*stem, *(rng.randrange(3, 500) for _ in range(8))] for stem in stems * 8]
    rng.shuffle(work)
    return work


@pytest.mark.parametrize("policy", list(WAITING_ORDERS))
def test_generate_on_a_list_computes_every_shared_prefix_once(make: Make, policy: str) -> None:
    work = shuffled(random.Random(3))
    backend = make(policy=policy, kv_tokens=260, max_running=4, max_step_tokens=132)
    found = backend.generate(work, GREEDY)
    assert backend.stats().evicted_tokens > 0
    assert sum(c.usage.computed_tokens for c in found) == 6 * 120 + len(work) * 8
    one_by_one = make(kv_tokens=260)
    for prompt, completion in zip(work, found, strict=True):
        (alone,) = one_by_one.generate([prompt], GREEDY)
        assert completion.token_ids == alone.token_ids  # results are in the order of the prompts
    assert one_by_one.stats().hit_rate < 0.5 * backend.stats().hit_rate


def test_batch_whose_items_share_a_text_reads_it_once(tiny_model: Callable[..., Path]) -> None:
    @stemma.function
    def ask(s: stemma.ProgramState, number: int, text: str) -> None:
        s += text + f" {number}?" + stemma.gen("answer", max_tokens=2)

    texts = [f"{i} was the number that they thought of. " * 3 for i in range(8)]
    items = [{"number": number, "text": text} for number in range(6) for text in texts]
    rates = []
    for batch in (items, iter(items)):
        with LocalBackend(tiny_model(), kv_tokens=240) as backend:
            how = {"generator_style": batch is not items}
            list(ask.run_batch(batch, backend=backend, num_threads=2, seed=1, **how))
            stats = backend.stats()
            assert stats.evicted_tokens > 0
            rates.append(stats.hit_rate)
            prompts = [backend._prompt_ids(item["text"] + f" {item['number']}?") for item in items]
    best = best_hit_rate([np.array(prompt, dtype=np.int32) for prompt in prompts])
    together, as_given = rates
    assert together >= 0.96 * best
    assert as_given < 0.5 * best

"""Drafts change how many tokens a step gives, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.backend.base import Namespace
from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.cache.eviction import POLICIES
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.radix_cache import RadixCache
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.backend.local.cache.radix_tree import MANY_WAYS
from stemma.backend.local.request import IntArray, Request
from stemma.backend.local.speculation import (
    LONGEST,
    NO_DRAFT,
    Drafting,
    Speculation,
    StepCost,
    repetition,
)
from stemma.lang.sampling import SamplingParams
from tests.backend.stubbed_for_tests import (
    WORDS,
    Asked,
    InjectedFault,
    Stubbed,
    without_engine,
)
from tests.backend.test_engine_faults import WORK

HOME = Namespace()


class Guesses(Speculation):
    """Drafts of any length for every request in every step: the right tokens up to some place, then
    wrong ones.
    """

    def __init__(self, stubbed: Stubbed, seed: int) -> None:
        super().__init__(stubbed.memory)
        self.stubbed = stubbed
        self.rng = random.Random(seed)

    def draft(self, request: Request, limit: int) -> IntArray:
        asked = next(a.asked for a in self.stubbed.askings if a.request is request)
        request.drafting = request.drafting or Drafting()
        if request.drafting.off:
            return NO_DRAFT
        following = without_engine(asked).tokens[len(request.tokens) :]
        right = following[: self.rng.choice([0, 0, 1, 2, 5, 20])]
        wrong = [self.rng.randrange(len(WORDS)) for _ in range(self.rng.choice([0, 0, 1, 3]))]
        return np.array([*right, *wrong][: min(limit, LONGEST)], dtype=np.int32)


def play(page_size: int, seed: int, kind: str | None = None, number: int = 0) -> Stubbed:
    """The workload of the faults, with guesses."""
    stubbed = Stubbed(
        72, page_size=page_size, max_running=8, max_step_tokens=8 + page_size + 12, check=False
    )
    stubbed.scheduler.speculation = Guesses(stubbed, seed)
    if kind is not None:
        stubbed.faults.arm(kind, number)
    arrivals, steps = list(WORK), 0
    while arrivals or stubbed.has_work:
        while arrivals and arrivals[0][0] <= steps:
            stubbed.submit(*arrivals.pop(0)[1])
        stubbed.step()
        stubbed.engine.check()
        steps += 1
        assert steps < 1000
    return stubbed


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(8))
def test_any_guesses_give_the_text_that_comes_without(page_size: int, seed: int) -> None:
    stubbed = play(page_size, seed)
    for asking in stubbed.askings:
        asking.check()
    stubbed.check_idle()
    stats = stubbed.engine.stats()
    assert 10 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.evicted_tokens > 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_guesses_of_requests_that_outgrow_the_pool(page_size: int) -> None:
    stubbed = Stubbed(96, page_size=page_size)
    stubbed.scheduler.speculation = Guesses(stubbed, 3)
    stem = bytes(range(1, 20))
    stubbed.submit(*(Asked(stem + bytes([last]), max_tokens=60) for last in (1, 2)))
    stubbed.run(at_most=300)
    for asking in stubbed.askings:
        asking.check()
    assert stubbed.scheduler.retractions > 0
    assert stubbed.engine.counters.accepted_tokens > 10
    stubbed.check_idle()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ["forward", "sample", "alloc"])
def test_fault_in_a_step_with_drafts_leaves_nothing_of_them(page_size: int, kind: str) -> None:
    for number in range(1, 60, 3):
        stubbed = play(page_size, number, kind, number)
        for asking in stubbed.askings:
            if not isinstance(asking.error, InjectedFault):
                asking.check()
        stubbed.check_idle()


def test_bad_row_behind_a_wrong_guess_harms_nobody() -> None:
    stubbed = Stubbed(96)
    stubbed.scheduler.speculation = Guesses(stubbed, 1)
    real = stubbed.decoder.logits
    spoiled = 0

    def spoil(hidden: torch.Tensor) -> torch.Tensor:
        """Where a draft was appended, its last row is no number."""
        nonlocal spoiled
        found = real(hidden)
        (request,) = stubbed.scheduler.running
        if request.drafted > 2:
            found[-1] = torch.nan
            spoiled += 1
        return found

    stubbed.decoder.logits = spoil  # type: ignore[method-assign]
    (asking,) = stubbed.submit(Asked(b"\x01\x02\x03", max_tokens=60, temperature=1.0))
    stubbed.run(at_most=100)
    assert spoiled == 1  # it then goes on without drafts
    asking.check()
    stubbed.check_idle()


# -- from the tree and from the text


def steps_of(stubbed: Stubbed, asked: Asked) -> int:
    before = stubbed.engine.counters.steps
    (asking,) = stubbed.submit(asked)
    stubbed.run(at_most=200)
    asking.check()
    return stubbed.engine.counters.steps - before


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_was_said_before_is_said_in_few_steps(page_size: int, temperature: float) -> None:
    stubbed = Stubbed(400, page_size=page_size)
    asked = Asked(bytes(range(1, 20)), max_tokens=64, temperature=temperature, seed=7)
    first = steps_of(stubbed, asked)
    again = steps_of(stubbed, asked)
    assert first > 40
    assert again <= 10 + (page_size - 1)  # an end that fills no page is not in the tree
    stubbed.check_idle()


def test_other_namespace_or_no_cache_learns_nothing_from_the_tree() -> None:
    stubbed = Stubbed(400)
    asked = Asked(bytes(range(1, 20)), max_tokens=64, temperature=1.0, seed=7)
    first = steps_of(stubbed, asked)
    for other in (Namespace(salt="x"), Namespace(adapter="a")):
        away = Asked(asked.prompt, 64, 1.0, 7, namespace=other)
        assert steps_of(stubbed, away) == first
    assert steps_of(stubbed, Asked(asked.prompt, 64, 1.0, 7, cache="off")) == first
    assert steps_of(stubbed, Asked(asked.prompt, 64, 1.0, 7, cache="read")) < first / 4


def test_drafts_that_do_not_come_true_cost_little() -> None:
    stubbed = Stubbed(400)
    for seed in range(6):
        steps_of(stubbed, Asked(bytes(range(1, 20)), max_tokens=64, temperature=1.0, seed=seed))
    stats = stubbed.engine.stats()
    assert stats.accepted_tokens < 30
    assert stats.drafted_tokens < 6 * 64 / 4


def test_where_a_row_costs_as_much_as_a_step_one_guess_of_each_kind_is_tried() -> None:
    stubbed = Stubbed(400)
    speculation = stubbed.scheduler.speculation
    assert speculation is not None
    speculation.begin = lambda decoding: setattr(speculation, "_price", 1.0)  # type: ignore[method-assign]
    asked = Asked(bytes(range(1, 20)), max_tokens=64)
    steps_of(stubbed, asked)
    before = stubbed.engine.counters.drafted_tokens
    steps_of(stubbed, asked)
    assert stubbed.engine.counters.drafted_tokens - before <= 2


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ([], 4, []),
        ([1, 2, 3], 4, []),
        ([1, 2, 3, 1, 2, 3], 4, [1, 2, 3]),
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 4, [4, 5, 9, 1]),
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 1, [4]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 2, [5, 1]),  # the latest time
        ([7, 7, 7, 7], 3, [7]),
        ([1, 2, 4, 1, 2, 3], 3, []),
    ],
)
def test_repetition_of_the_last_three_tokens(
    text: list[int], limit: int, expected: list[int]
) -> None:
    assert repetition(np.array(text, dtype=np.int32), limit).tolist() == expected


@given(st.lists(st.sampled_from([0, 1, 256, 257, 65_536, 65_793]), max_size=40))
def test_repetition_lies_between_tokens_whatever_their_bytes(text: list[int]) -> None:
    latest = next(
        (i for i in reversed(range(len(text) - 3)) if text[i : i + 3] == text[-3:]), len(text)
    )
    expected = text[latest + 3 :][:4]
    assert repetition(np.array(text, dtype=np.int32), 4).tolist() == expected


def behind_key(cache: RadixCache, key: list[int], limit: int) -> list[int]:
    return cache.continuation(cache._tree.root, RadixKey.of(key, HOME), limit).tolist()


ids = st.lists(st.integers(0, 2), max_size=9)


@settings(max_examples=300, deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 4]),
    kept=st.lists(ids, max_size=6),
    key=ids,
    limit=st.integers(1, 8),
)
def test_continuation_is_what_is_cached_behind_the_key(
    page_size: int, kept: list[list[int]], key: list[int], limit: int
) -> None:
    allocator = PageAllocator(400, page_size)
    cache = RadixCache(allocator, eviction=POLICIES["lru"]())
    whole: list[list[int]] = []
    for each in kept:
        text = each[: len(each) - len(each) % page_size]
        found = cache.match_prefix(RadixKey.of(text, HOME))
        new = allocator.alloc(len(text) - found.length)
        assert new is not None or len(text) == found.length
        slots = found.slots if new is None else np.concatenate([found.slots, new])
        cache.insert(RadixKey.of(text, HOME), slots, owned_from=found.length)
        whole.append(text)
    continuation = behind_key(cache, key, limit)
    behind = [text[len(key) :] for text in whole if text[: len(key)] == key]
    if len(key) < page_size:  # so little tells nothing
        assert continuation == []
    else:
        assert any(continuation == text[: len(continuation)] for text in behind) or not continuation
        assert bool(continuation) == any(behind)
        assert len(continuation) <= limit
        if behind and (latest := [t for t in behind if t]):  # it goes to a leaf, or to the limit
            ends = {tuple(text[:limit]) for text in latest}
            assert tuple(continuation) in ends
    away = Namespace(salt="x")
    assert cache.continuation(cache._tree.root, RadixKey.of(key, away), limit).tolist() == []
    half = len(key) // 2 // page_size * page_size  # of a key that is in the tree, from any place
    found = cache.match_prefix(RadixKey.of(key, HOME), limit=half)
    if found.length == half:
        rest = RadixKey.of(key[half:], HOME)
        assert cache.continuation(found.node, rest, limit).tolist() == continuation


def test_continuation_follows_the_branch_that_was_used_last() -> None:
    allocator = PageAllocator(400, 1)
    cache = RadixCache(allocator, eviction=POLICIES["lru"]())

    def insert(*text: int) -> None:
        found = cache.match_prefix(RadixKey.of(text, HOME))
        new = allocator.alloc(len(text) - found.length)
        assert new is not None
        slots = np.concatenate([found.slots, new])
        cache.insert(RadixKey.of(text, HOME), slots, owned_from=found.length)

    insert(1, 2, 3, 4)
    insert(1, 2, 5, 6)
    assert behind_key(cache, [1, 2], 9) == [5, 6]
    cache.match_prefix(RadixKey.of([1, 2, 3, 4], HOME))
    assert behind_key(cache, [1], 2) == [2, 3]
    for way in range(10, 10 + MANY_WAYS):
        insert(1, 2, way)
    assert behind_key(cache, [1], 9) == [2]


# -- what a row costs


def test_cost_of_a_row_is_read_off_the_steps() -> None:
    cost = StepCost()
    for rows in (1, 9, 1, 4, 16, 1, 2, 8) * 6:
        cost.observe(rows, 0.010 + 0.002 * rows)
    assert cost.price(1) == pytest.approx(2 / 12, rel=0.15)
    assert cost.price(32) == pytest.approx(64 / 74, rel=0.15)


def test_cost_of_a_row_is_guessed_until_steps_differ() -> None:
    cost = StepCost()
    assert cost.price(1) == pytest.approx(1 / 11)
    for _ in range(50):
        cost.observe(32, 0.030)
    assert cost.price(32) == pytest.approx(32 / 42, rel=0.05)


def test_steps_that_were_held_up_change_the_price_little() -> None:
    cost, disturbed = StepCost(), StepCost()
    for i, rows in enumerate((1, 9, 1, 4, 16, 1, 2, 8) * 6):
        seconds = 0.010 + 0.001 * rows
        cost.observe(rows, seconds)
        disturbed.observe(rows, seconds * 20 if i % 10 == 5 else seconds)
    assert 0.4 * cost.price(1) < disturbed.price(1) < 2.5 * cost.price(1)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 10)), max_size=40))
def test_price_is_a_share_whatever_was_measured(steps: list[tuple[int, float]]) -> None:
    cost = StepCost()
    for rows, seconds in steps:
        cost.observe(rows, seconds)
    for rows in (1, 2, 32, 1000):
        assert 0 < cost.price(rows) <= 1


# -- on a model

LINE = [(7 * i * i + 3 * i) % 480 + 3 for i in range(30)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=60),
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=60, seed=3, logprobs=True),
        SamplingParams(temperature=1.0, max_tokens=60, seed=3, frequency_penalty=0.7),
        SamplingParams(temperature=0.7, max_tokens=60, seed=3, repetition_penalty=1.3, n=4),
        SamplingParams(temperature=1.2, max_tokens=60, seed=3, min_tokens=30, n=3),
        SamplingParams(temperature=0.5, max_tokens=60, seed=3, stop=("e", "a"), top_logprobs=2),
    ],
    ids=["greedy", "nucleus", "frequency", "repetition", "min_tokens", "stop"],
)
def test_output_is_the_same_with_and_without(
    tiny_model: Callable[..., Path], page_size: int, params: SamplingParams
) -> None:
    prompts = [LINE * 3, LINE[:20], LINE * 3, [*LINE, 9]]
    backends = [
        LocalBackend(
            tiny_model(), dtype="float64", kv_tokens=4096, page_size=page_size, speculation=wanted
        )
        for wanted in (True, False)
    ]
    for backend in backends:
        backend.engine.check_every_step = True
    for params_now in (params, params, params.but(max_tokens=80)):
        found = [backend.generate(prompts, params_now) for backend in backends]
        for ours, theirs in zip(*found, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
            assert ours.matched_stop == theirs.matched_stop
            for a, b in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-9)
    with_, without = (backend.stats() for backend in backends)
    assert with_.output_tokens == without.output_tokens
    assert with_.computed_tokens == without.computed_tokens
    assert with_.steps <= without.steps
    assert with_.accepted_tokens > 0 or (params.stop and page_size > 1)  # outputs of no page
    assert without.drafted_tokens == 0
    for backend in backends:
        backend.close()

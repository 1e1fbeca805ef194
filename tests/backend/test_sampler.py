"""Drawing a token: against a naive full sort, against transformers, at the edges of arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stemma.backend.local import sampler
from stemma.backend.local.random import exponentials
from stemma.backend.local.sampler import Draw, sample
from stemma.lang.sampling import SamplingParams

VOCAB = 49_152
BLOCK = sampler._BLOCK


def tokens(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    return [sampled.token_id for sampled in sample(logits, rows, draws)]


def reached(logits: Tensor, params: SamplingParams, count: int = 500) -> set[int]:
    """The tokens that some draws from the one row take."""
    return set(tokens(logits[None], [0] * count, [Draw(params, 0, i) for i in range(count)]))


def kept(logits: Tensor, params: SamplingParams) -> list[int]:
    """The tokens that the cuts leave in the race."""
    with patch.object(sampler, "_race", wraps=sampler._race) as race:
        tokens(logits[None], [0], [Draw(params, 0, 0)])
    weights: Tensor = race.call_args.args[0]
    return weights[0].nonzero()[:, 0].tolist()


def random_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows * vocab)
    return (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3).to(dtype)


@dataclass(frozen=True)
class Naive:
    """A sampler as the books describe it: one row, everything sorted, in fp64."""

    weights: NDArray[np.float64]  # zero where the token is cut
    margin: float  # how far the nearest decision about a cut is from going the other way

    @classmethod
    def of(cls, logits: NDArray[np.float64], params: SamplingParams) -> Naive:
        scaled = logits / params.temperature
        p = np.exp(scaled - scaled.max())
        p /= p.sum()
        best = -np.sort(-p)
        margins = [1.0]
        kept = np.ones(len(p), dtype=np.bool_)
        if params.top_k:
            best = best[: params.top_k]
            kept &= p >= best[-1]
        if params.top_p < 1:
            upto = best.cumsum() / best.sum()
            margins.append(float(np.abs(upto - params.top_p).min()))
            kept &= p >= best[np.flatnonzero(upto >= params.top_p)[0]]
        if params.min_p > 0:
            kept &= p >= best[0] * params.min_p
            margins.append(float(np.abs(p / best[0] - params.min_p).min()))
        weights = np.where(kept, p, 0)
        return cls(weights / weights.sum(), min(margins))

    def token(self, times: NDArray[np.float64]) -> tuple[int, float]:
        """Who wins, and how near the second was: 1 is far, 0 a tie."""
        blocks = [self.weights[at : at + BLOCK] for at in range(0, len(self.weights), BLOCK)]
        block, one = fastest(times[BLOCK:], [float(b.sum()) for b in blocks])
        inside, other = fastest(times, blocks[block].tolist())
        return block * BLOCK + inside, min(one, other)


def fastest(times: NDArray[np.float64], weights: Sequence[float]) -> tuple[int, float]:
    """Index of the least time / weight, and by what share of its own the second was slower."""
    arrivals = [t / w if w > 0 else np.inf for t, w in zip(times, weights, strict=False)]
    first = int(np.argmin(arrivals))
    second = min((a for i, a in enumerate(arrivals) if i != first), default=np.inf)
    return first, float(min(1.0, second / arrivals[first] - 1))


def times_of(draw: Draw, vocab: int) -> NDArray[np.float64]:
    times: NDArray[np.float64] = exponentials(
        [draw.seed], [draw.counter], BLOCK + -(-vocab // BLOCK)
    )[0]
    return times


settings_of_a_draw = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 4),
    top_k=st.sampled_from([0, 2, 3, 40, 127, 128, 129, 300, 10_000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1)),
)


@settings(max_examples=300, deadline=None)
@given(
    params=settings_of_a_draw,
    vocab=st.one_of(st.integers(1, 600), st.sampled_from([255, 256, 257, 512, 3000])),
    seed=st.integers(0, 2**64 - 1),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
    ties=st.booleans(),
)
def test_draws_equal_those_of_a_naive_full_sort(
    params: SamplingParams, vocab: int, seed: int, spread: float, ties: bool
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, vocab)
    if ties:
        logits = np.round(logits * 2) / 2
    naive = Naive.of(logits, params)
    assume(naive.margin > 1e-5)
    draws = [Draw(params, seed, c) for c in range(16)]
    expected = [naive.token(times_of(draw, vocab)) for draw in draws]
    drawn = tokens(torch.from_numpy(logits)[None], [0] * len(draws), draws)
    for token, (winner, distance) in zip(drawn, expected, strict=True):
        assert token == winner or distance < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.999, temperature=2),
        SamplingParams(top_k=40),
        SamplingParams(top_k=100, top_p=0.95),
        SamplingParams(top_k=5000, top_p=0.95, min_p=0.001),
        SamplingParams(min_p=0.02),
    ],
    ids=lambda p: f"T{p.temperature} k{p.top_k} p{p.top_p} m{p.min_p}",
)
def test_draws_equal_the_naive_ones_at_full_size(
    params: SamplingParams, dtype: torch.dtype
) -> None:
    logits = random_logits(4, VOCAB, dtype)
    draws = [Draw(params, seed, counter) for seed in range(4) for counter in range(32)]
    rows = [draw.seed for draw in draws]
    naive = [Naive.of(row.double().numpy(), params) for row in logits]
    drawn = tokens(logits, rows, draws)
    for row, token, draw in zip(rows, drawn, draws, strict=True):
        winner, distance = naive[row].token(times_of(draw, VOCAB))
        assert token == winner or distance < (1e-5 if dtype == torch.float32 else 1e-12)


def test_a_rounding_of_the_logits_changes_only_draws_that_were_about_to_tie() -> None:
    """The inverse of a running sum changed 32 of these draws: any border may lie anywhere."""
    logits = random_logits(1, VOCAB)[0]
    noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 1e-5
    draws = [Draw(SamplingParams(), seed, 0) for seed in range(4000)]
    first, second = (tokens(x[None], [0] * 4000, draws) for x in (logits, logits + noise))
    naive = Naive.of(logits.double().numpy(), SamplingParams())
    changed = [i for i in range(4000) if first[i] != second[i]]
    assert len(changed) <= 2
    assert all(naive.token(times_of(draws[i], VOCAB))[1] < 1e-4 for i in changed)


def test_cuts_agree_with_transformers() -> None:
    logits = random_logits(1, 2000, torch.float64)[0]
    for temperature, top_k, top_p, min_p in [
        (1.0, 0, 0.9, 0.0),
        (0.7, 0, 0.5, 0.0),
        (1.5, 40, 1.0, 0.0),
        (1.0, 200, 1.0, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.3, 50, 0.9, 0.01),
        (0.8, 500, 0.97, 0.02),
    ]:
        chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if top_k:
            chain.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            chain.append(TopPLogitsWarper(top_p))
        if min_p:
            chain.append(MinPLogitsWarper(min_p))
        no_ids: Any = torch.zeros(1, 1, dtype=torch.long)  # they look at the scores alone
        theirs = chain(no_ids, cast(Any, logits[None].clone()))[0].softmax(-1)
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert kept(logits, params) == theirs.nonzero()[:, 0].tolist()


def test_temperature_zero_takes_the_largest_logit_and_the_lowest_id_of_equal_ones() -> None:
    for vocab in (1, 2, 255, 256, 257, 1000, 50_257):
        logits = random_logits(3, vocab)
        greedy = [Draw(SamplingParams(temperature=0), i, 0) for i in range(3)]
        assert tokens(logits, range(3), greedy) == logits.argmax(-1).tolist()
        for first in (0, vocab // 2, vocab - 1):
            logits[:, first:] = logits.amax() + 1
            assert tokens(logits, range(3), greedy) == [first] * 3


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    params = SamplingParams(top_k=1, temperature=1e6)
    assert reached(logits, params) == {1}


def test_a_set_that_reaches_top_p_exactly_is_enough() -> None:
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    assert reached(logits, SamplingParams(top_p=0.5)) == {1}
    assert reached(logits, SamplingParams(top_p=0.8)) == {1, 2}
    assert reached(logits, SamplingParams(top_p=0.81)) == {0, 1, 2}


def test_top_p_counts_within_what_top_k_kept() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert reached(logits, SamplingParams(top_k=2, top_p=0.57)) == {0}
    assert reached(logits, SamplingParams(top_k=2, top_p=0.58)) == {0, 1}


def test_equal_probabilities_are_kept_or_dropped_together() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.5), SamplingParams(min_p=0.3)):
        assert reached(logits, params) == {0, 1, 2, 3}


def test_frequencies_follow_the_softmax() -> None:
    logits = random_logits(1, 300) / 2
    count = 40_000
    for params in (SamplingParams(), SamplingParams(temperature=1.7), SamplingParams(top_k=60)):
        draws = [Draw(params, seed, counter) for seed in range(40) for counter in range(1000)]
        seen = np.bincount(tokens(logits, [0] * count, draws), minlength=300)
        expected = Naive.of(logits[0].double().numpy(), params)
        p = expected.weights
        assert not seen[p == 0].any()
        likely = p * count >= 5
        rare = (p > 0) & ~likely
        observed = np.append(seen[likely], seen[rare].sum())
        wanted = np.append(p[likely], p[rare].sum()) * count
        chi_square = ((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
        degrees = int(likely.sum())
        assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)


def test_a_rare_token_deep_in_the_tail_comes_as_often_as_it_should() -> None:
    """One running fp32 sum could not tell apart 3e-8 and 0 where it has come near 1."""
    weights = torch.ones(1, VOCAB)
    weights[0, -1] = rare = 3e-3
    blocks = VOCAB // BLOCK
    times = torch.ones(2, BLOCK + blocks, dtype=torch.float64)
    times[:, -1] = 0.5  # the last block wins
    times[:, BLOCK - 1] = torch.tensor([rare * (1 - 1e-4), rare * (1 + 1e-4)])
    winners, _ = sampler._race(weights, torch.zeros(2, dtype=torch.long), times)
    assert winners.tolist() == [VOCAB - 1, VOCAB - BLOCK]


@settings(max_examples=200, deadline=None)
@given(
    vocab=st.sampled_from([1, 3, 255, 256, 257, 700, 1024]),
    possible=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    params=settings_of_a_draw,
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_no_number_leads_to_a_token_of_probability_zero(
    vocab: int, possible: int, seed: int, params: SamplingParams, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.full((vocab,), -torch.inf, dtype=dtype)
    ids = rng.choice(vocab, min(possible, vocab), replace=False)
    logits[ids] = torch.from_numpy(rng.normal(0, 3, len(ids))).to(dtype)
    assert reached(logits, params, 64) <= set(ids.tolist())


@pytest.mark.parametrize("vocab", [1, 1000, VOCAB, 50_257])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_race_stays_inside_even_in_fp32(vocab: int, wide: torch.dtype) -> None:
    """Some devices have no fp64."""
    entrants = BLOCK + -(-vocab // BLOCK)
    times = torch.from_numpy(exponentials([3] * 50, range(50), entrants)).to(wide)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        p = torch.rand(1, vocab, generator=generator)
        p *= torch.rand(1, vocab, generator=generator) < 0.01
        p[0, -400:] = 0
        p[0, 0] = 1e-3
        p /= p.sum()
        index, total = sampler._race(p, torch.zeros(50, dtype=torch.long), times)
        assert (p[0, index] > 0).all()
        assert total.float().allclose(torch.ones(50))


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_the_search_for_top_p_stays_inside_even_in_fp32(wide: torch.dtype) -> None:
    """Near-one shares become one in fp32, and sums are coarse."""
    share = torch.tensor([0.0, 1e-30, 0.3, 0.9999999, 1 - 2.0**-53, 1.0], dtype=wide)
    rising = torch.rand(VOCAB, generator=torch.Generator().manual_seed(0)).sort().values
    rising[:400] = 0
    found = sampler._first_beyond(rising.expand(6, -1), share)[:, 0].tolist()
    assert found[:2] == [400, 400]
    assert found == sorted(found)
    assert found[-1] == VOCAB - 1
    assert found[2] == int((rising.double().cumsum(0) > 0.3 * rising.double().sum()).nonzero()[0])


def test_extreme_temperatures_end_at_the_best_token_and_at_all_tokens_alike() -> None:
    logits = torch.tensor([10.0, -30.0, 12.0, 11.999])
    for temperature in (5e-324, 1e-30, 1e-6):
        params = SamplingParams(temperature=temperature)
        assert reached(logits, params) == {2}
    for temperature in (1e9, 1e300):
        params = SamplingParams(temperature=temperature)
        assert reached(logits, params) == {0, 1, 2, 3}
        logits[1] = -torch.inf
        assert reached(logits, params) == {0, 2, 3}
        logits[1] = -30

"""Drawing a token: against a naive full sort, against transformers, at the edges of arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from stemma.backend.local.random import uniforms
from stemma.backend.local.sampler import Draw, sample
from stemma.lang.sampling import SamplingParams

VOCAB = 49_152
NEAR_ONE = 1 - 2.0**-53


def tokens(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    return [sampled.token_id for sampled in sample(logits, rows, draws)]


@contextmanager
def drawing(*numbers: float) -> Iterator[None]:
    """The counter of a draw picks its random number from these."""
    with patch.object(sampler, "uniforms", lambda _, counters: np.array(numbers)[counters]):
        yield


def at_every(logits: Tensor, params: SamplingParams, numbers: Sequence[float]) -> list[int]:
    """The tokens that these numbers lead to, all from the one row."""
    with drawing(*numbers):
        draws = [Draw(params, 0, i) for i in range(len(numbers))]
        return tokens(logits[None], [0] * len(draws), draws)


def random_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows * vocab)
    return (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3).to(dtype)


@dataclass(frozen=True)
class Naive:
    """A sampler as the books describe it: one row, everything sorted, in fp64."""

    kept: NDArray[np.bool_]
    upto: NDArray[np.float64]
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
        return cls(kept, weights.cumsum() / weights.sum(), min(margins))

    def token(self, u: float) -> int:
        return int(np.flatnonzero((self.upto > u) & self.kept)[0])

    def doubtful(self, u: float) -> bool:
        """Whether rounding may decide this draw."""
        return float(np.abs(self.upto - u).min()) < 1e-9


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
    counters = [c for c in range(16) if not naive.doubtful(uniforms([seed], [c])[0])]
    draws = [Draw(params, seed, c) for c in counters]
    expected = [naive.token(uniforms([seed], [c])[0]) for c in counters]
    assert tokens(torch.from_numpy(logits)[None], [0] * len(draws), draws) == expected


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
    u = uniforms(rows, [draw.counter for draw in draws])
    expected = [naive[row].token(number) for row, number in zip(rows, u, strict=True)]
    differing = sum(a != b for a, b in zip(tokens(logits, rows, draws), expected, strict=True))
    # Once in some hundred draws a number is as near to a border of two tokens as fp32 can tell.
    assert differing <= (3 if dtype == torch.float32 else 0)


def test_cuts_agree_with_transformers() -> None:
    logits = random_logits(1, 2000, torch.float64)[0]
    grid = np.linspace(0, 1, 257, endpoint=False).tolist()
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
        upto = theirs.cumsum(-1).numpy()
        expected = [int(np.searchsorted(upto, u * upto[-1], side="right")) for u in grid]
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert at_every(logits, params, grid) == expected


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
    assert at_every(logits, params, [0, 0.5, NEAR_ONE]) == [1, 1, 1]


def test_a_set_that_reaches_top_p_exactly_is_enough() -> None:
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    every = np.linspace(0, 1, 101, endpoint=False).tolist()
    assert set(at_every(logits, SamplingParams(top_p=0.5), every)) == {1}
    assert set(at_every(logits, SamplingParams(top_p=0.8), every)) == {1, 2}
    assert set(at_every(logits, SamplingParams(top_p=0.81), every)) == {0, 1, 2}


def test_top_p_counts_within_what_top_k_kept() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    every = np.linspace(0, 1, 101, endpoint=False).tolist()
    assert set(at_every(logits, SamplingParams(top_k=2, top_p=0.57), every)) == {0}
    assert set(at_every(logits, SamplingParams(top_k=2, top_p=0.58), every)) == {0, 1}


def test_equal_probabilities_are_kept_or_dropped_together() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    every = np.linspace(0, 1, 501, endpoint=False).tolist()
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.5), SamplingParams(min_p=0.3)):
        assert set(at_every(logits, params, every)) == {0, 1, 2, 3}


def test_frequencies_follow_the_softmax() -> None:
    logits = random_logits(1, 300) / 2
    count = 40_000
    for params in (SamplingParams(), SamplingParams(temperature=1.7), SamplingParams(top_k=60)):
        draws = [Draw(params, seed, counter) for seed in range(40) for counter in range(1000)]
        seen = np.bincount(tokens(logits, [0] * count, draws), minlength=300)
        expected = Naive.of(logits[0].double().numpy(), params)
        p = np.diff(expected.upto, prepend=0)
        assert not seen[~expected.kept].any()
        likely = p * count >= 5
        rare = expected.kept & ~likely
        observed = np.append(seen[likely], seen[rare].sum())
        wanted = np.append(p[likely], p[rare].sum()) * count
        chi_square = ((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
        degrees = int(likely.sum())
        assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)


def test_a_rare_token_deep_in_the_tail_comes_as_often_as_it_should() -> None:
    """One running fp32 sum could not tell apart 3e-8 and 0 where it has come near 1."""
    logits = torch.zeros(VOCAB)
    logits[-1] = np.log(3e-8 * VOCAB)
    p = 3e-8 / (1 - 1 / VOCAB + 3e-8)
    numbers = [1 - p * (1 + 1e-4), 1 - p * (1 - 1e-4)]
    assert at_every(logits, SamplingParams(), numbers) == [VOCAB - 2, VOCAB - 1]


EDGES = (0.0, 5e-324, 2.0**-53, 1e-9, 0.5, 1 - 1e-9, 1 - 2.0**-52, NEAR_ONE)


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
    assert set(at_every(logits, params, EDGES)) <= set(ids.tolist())


@pytest.mark.parametrize("vocab", [1000, VOCAB, 50_257])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_the_search_stays_inside_even_in_fp32(vocab: int, wide: torch.dtype) -> None:
    """Some devices have no fp64: near-one numbers then become one, and sums are coarse."""
    u = torch.tensor([0.0, 1e-30, 0.3, 0.9999999, NEAR_ONE], dtype=wide)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        p = torch.rand(1, vocab, generator=generator)
        p *= torch.rand(1, vocab, generator=generator) < 0.01
        p[0, -400:] = 0
        p /= p.sum()
        index, total = sampler._inverse(p, torch.zeros(5, dtype=torch.long), u)
        assert (p[0, index] > 0).all()
        assert total.allclose(torch.ones(5))
        assert index[0] == p[0].nonzero()[0]
        assert index[-1] == p[0].nonzero()[-1]


def test_extreme_temperatures_end_at_the_best_token_and_at_all_tokens_alike() -> None:
    logits = torch.tensor([10.0, -30.0, 12.0, 11.999])
    grid = np.linspace(0, 1, 101, endpoint=False).tolist()
    for temperature in (5e-324, 1e-30, 1e-6):
        params = SamplingParams(temperature=temperature)
        assert set(at_every(logits, params, grid)) == {2}
    for temperature in (1e9, 1e300):
        params = SamplingParams(temperature=temperature)
        assert at_every(logits, params, [0.1, 0.4, 0.6, 0.9]) == [0, 1, 2, 3]
        logits[1] = -torch.inf
        assert 1 not in at_every(logits, params, grid)
        logits[1] = -30

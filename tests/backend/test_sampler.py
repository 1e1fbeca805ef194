"""Drawing tokens: against a naive full sort, against transformers, in any company, at the edges."""

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
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stemma.backend.local import sampler
from stemma.backend.local.logit_rules import apply_rules
from stemma.backend.local.random import uniforms
from stemma.backend.local.sampler import Draw, SamplerError, sample, token_logprobs
from stemma.lang.errors import EngineInvariantError, StemmaError
from stemma.lang.sampling import SamplingParams

VOCAB = 49_152
NEAR_ONE = 1 - 2.0**-53


def tokens(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    return [sampled.token_id for sampled in sample(logits, rows, draws)]


def one(logits: Tensor, params: SamplingParams, *, seed: int = 0, counter: int = 0) -> int:
    return tokens(logits[None], [0], [Draw(params, seed, counter)])[0]


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
    if params.top_k == 1:
        expected = [int(logits.argmax())] * len(draws)
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
    ids=repr,
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


def company() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0.3, logprobs=True),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.5, temperature=1.8),
        SamplingParams(top_k=40),
        SamplingParams(top_k=7, top_p=0.8, top_logprobs=3),
        SamplingParams(top_k=900, top_p=0.99),
        SamplingParams(min_p=0.1),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(frequency_penalty=0.5, top_p=0.7),
        SamplingParams(temperature=0, presence_penalty=0.5, top_logprobs=7),
        SamplingParams(logit_bias=((3, 4.0), (9, -2.0)), top_k=30),
    ]


@pytest.mark.parametrize("vocab", [1000, VOCAB])
def test_a_row_is_drawn_the_same_alone_and_in_any_company(vocab: int) -> None:
    logits = random_logits(13, vocab)
    rng = np.random.default_rng(1)
    mixed = [company()[i] for i in rng.integers(0, len(company()), 60)]
    rows = [int(row) for row in rng.integers(0, 13, 60)]
    draws = [
        Draw(
            params,
            seed=i,
            counter=i % 5,
            prompt_ids=np.arange(i, dtype=np.int32),
            output_ids=[i, i, i + 1],
            banned=(5, 6) if i % 7 == 0 else (),
            allowed=np.arange(i, 400) if i % 11 == 0 else None,
        )
        for i, params in enumerate(mixed)
    ]
    together = sample(logits, rows, draws)
    for i, (row, draw) in enumerate(zip(rows, draws, strict=True)):
        assert sample(logits[row : row + 1].clone(), [0], [draw]) == [together[i]]
    backwards = sample(logits, rows[::-1], draws[::-1])
    assert backwards[::-1] == together
    assert sample(logits, rows[:20], draws[:20]) + sample(logits, rows[20:], draws[20:]) == together


@pytest.mark.parametrize("params", company(), ids=repr)
def test_many_draws_from_one_row_equal_draws_from_copies_of_it(params: SamplingParams) -> None:
    logits = random_logits(1, 3000)
    draws = [Draw(params, seed, 0, np.arange(9), [3, 4]) for seed in range(64)]
    assert sample(logits, [0] * 64, draws) == sample(logits.expand(64, -1), range(64), draws)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_drawn_from_as_the_fp32_numbers_they_are(
    dtype: torch.dtype,
) -> None:
    logits = random_logits(4, 1000, dtype)
    for params in company():
        draws = [Draw(params, i, 0) for i in range(4)]
        assert sample(logits, range(4), draws) == sample(logits.float(), range(4), draws)


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(3, 1000)
    before = logits.clone()
    for params in company():
        draw = Draw(params, 1, 2, np.arange(20), [1, 2, 3], (7,), np.arange(100))
        sample(logits, [0, 2], [draw, draw])
    token_logprobs(logits, [1, 2, 3], 4)
    assert torch.equal(logits, before)


def test_nothing_to_draw_gives_nothing() -> None:
    assert sample(random_logits(2, 10), [], []) == []
    assert token_logprobs(random_logits(0, 10), []) == []


def test_rows_and_draws_must_match() -> None:
    logits = random_logits(2, 10)
    with pytest.raises(EngineInvariantError, match="2 draws"):
        sample(logits, [0], [Draw(SamplingParams(), 0, 0)] * 2)
    with pytest.raises(EngineInvariantError, match="1 targets for 2 rows"):
        token_logprobs(logits, [1])
    with pytest.raises(EngineInvariantError, match="vocabulary of 10"):
        token_logprobs(logits, [1, 10])


# -- errors --------------------------------------------------------------------------


@pytest.mark.parametrize("params", company(), ids=repr)
@pytest.mark.parametrize(("value", "words"), [(torch.nan, "NaN"), (torch.inf, r"\+inf")])
@pytest.mark.parametrize("where", [0, 500, 999])
def test_logits_that_are_no_numbers_are_an_error(
    params: SamplingParams, value: float, words: str, where: int
) -> None:
    logits = random_logits(3, 1000)
    logits[1, where] = value
    draws = [Draw(params, i, 0) for i in range(3)]
    with pytest.raises(StemmaError, match=words) as caught:
        sample(logits, range(3), draws)
    assert isinstance(caught.value, SamplerError)
    assert list(caught.value.reasons) == [1]  # and the others can still be drawn
    assert len(sample(logits, [0, 2], [draws[0], draws[2]])) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_is_found_even_where_no_token_may_come(temperature: float) -> None:
    logits = random_logits(1, 1000)
    logits[0, 77] = torch.nan
    params = SamplingParams(temperature=temperature)
    for draw in (Draw(params, 0, 0, banned=(77,)), Draw(params, 0, 0, allowed=np.array([5]))):
        with pytest.raises(SamplerError, match="NaN"):
            sample(logits, [0], [draw])


def test_a_row_of_minus_infinity_is_an_error() -> None:
    logits = torch.full((1, 300), -torch.inf)
    for params in company():
        with pytest.raises(SamplerError, match="-inf"):
            sample(logits, [0], [Draw(params, 0, 0)])


# -- log-probabilities ---------------------------------------------------------------


def test_logprobs_are_the_models_own_whatever_the_settings() -> None:
    logits = random_logits(1, 1000)
    exact = logits[0].double().log_softmax(-1)
    for params in company():
        asked = params.but(top_logprobs=5)
        draw = Draw(asked, 3, 1, np.arange(50), [1, 2, 2], (9,), np.arange(0, 1000, 2))
        (found,) = sample(logits, [0], [draw])
        assert found.logprob == pytest.approx(float(exact[found.token_id]), abs=1e-5)
        values, ids = exact.topk(5)
        assert [token for token, _ in found.top] == ids.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_come_only_where_they_are_asked_for() -> None:
    logits = random_logits(1, 1000)
    plain, single, several = sample(
        logits,
        [0, 0, 0],
        [
            Draw(SamplingParams(), 0, 0),
            Draw(SamplingParams(logprobs=True), 0, 0),
            Draw(SamplingParams(top_logprobs=3), 0, 0),
        ],
    )
    assert (plain.logprob, plain.top) == (None, ())
    assert single.logprob is not None
    assert single.top == ()
    assert len(several.top) == 3


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    (found,) = sample(torch.zeros(1, 4), [0], [Draw(SamplingParams(top_logprobs=9), 0, 0)])
    assert [token for token, _ in found.top] == [0, 1, 2, 3]  # equal ones by id
    (scored,) = token_logprobs(torch.zeros(1, 4), [2], 9)
    assert scored.top == found.top


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_token_logprobs_are_those_of_log_softmax(dtype: torch.dtype) -> None:
    logits = random_logits(100, 30_000, dtype)  # more than one chunk
    targets = [(i * 7919) % 30_000 for i in range(100)]
    exact = logits.double().log_softmax(-1)
    for row, found in enumerate(token_logprobs(logits, targets, 2)):
        assert found.token_id == targets[row]
        assert found.logprob == pytest.approx(float(exact[row, targets[row]]), abs=1e-5)
        values, ids = exact[row].topk(2)
        if dtype != torch.bfloat16:  # in which several are equal
            assert [token for token, _ in found.top] == ids.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_a_target_that_the_model_rules_out_scores_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    assert token_logprobs(logits, [1])[0].logprob == -np.inf


def test_token_logprobs_name_the_rows_that_are_no_numbers() -> None:
    logits = random_logits(4, 50)
    logits[1, 3] = torch.nan
    logits[3] = -torch.inf
    with pytest.raises(SamplerError, match="NaN") as caught:
        token_logprobs(logits, [0, 1, 2, 3])
    assert list(caught.value.reasons) == [1, 3]


# -- cost ----------------------------------------------------------------------------


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation on tensors: which ones ran, and how large their results were."""

    # What makes the host wait for the device: its result has to be known before the next call.
    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[str] = []
        self.largest = 0
        self.softmax_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        masks = name.startswith("aten.index") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool
            for argument in args
            if isinstance(argument, list | tuple)
            for i in argument
        )
        if masks or any(word in name for word in self.WAITING):
            self.waits.append(name)
        if isinstance(result, Tensor) and result._base is None:
            self.largest = max(self.largest, result.numel())
        if "softmax" in name:
            self.softmax_elements += result.numel()
        return result


def test_the_watch_sees_waits() -> None:
    with Watch() as watch:
        numbers = torch.arange(3.0)
        numbers.sum().item()
        numbers[numbers > 1]
    assert len(watch.waits) >= 2


def test_a_call_waits_for_the_device_once() -> None:
    logits = random_logits(13, 1000)
    draws = [
        Draw(params, 0, i, np.arange(9), [3], (4,) if i % 2 else (), np.arange(300))
        for i, params in enumerate(company())
    ]
    with Watch() as watch, patch.object(sampler, "_to_host", wraps=sampler._to_host) as to_host:
        sample(logits, range(13), draws)
    assert watch.waits == []
    assert to_host.call_count == 1
    with Watch() as watch, patch.object(sampler, "_to_host", wraps=sampler._to_host) as to_host:
        token_logprobs(logits, [1] * 13, 3)
    assert watch.waits == []
    assert to_host.call_count == 1


def test_working_memory_does_not_grow_with_the_number_of_rows() -> None:
    logits = random_logits(200, 30_000)
    with Watch() as watch:
        sample(logits, range(200), [Draw(SamplingParams(top_logprobs=2), i, 0) for i in range(200)])
        token_logprobs(logits, [0] * 200, 2)
    assert watch.largest <= 1 << 21 < logits.numel()


def test_samples_of_one_prompt_cost_one_softmax() -> None:
    logits = random_logits(1, 1000)
    with Watch() as watch:
        sample(logits, [0] * 32, [Draw(SamplingParams(temperature=0.7), i, 0) for i in range(32)])
    assert watch.softmax_elements == 1000


def test_plain_rows_are_neither_sorted_nor_copied_for_the_sake_of_others() -> None:
    logits = random_logits(9, 1000)
    nucleus = Draw(SamplingParams(top_p=0.9), 0, 0)
    penalised = Draw(SamplingParams(presence_penalty=0.2), 0, 0, output_ids=[1])
    plain = [Draw(SamplingParams(), i, 0) for i in range(7)]
    sorting = patch.object(sampler, "_largest", wraps=sampler._largest)
    changing = patch.object(sampler, "apply_rules", wraps=apply_rules)
    with sorting as largest, changing as rules:
        sample(logits, range(9), [*plain, nucleus, penalised])
    assert [call.args[0].shape[0] for call in largest.call_args_list] == [1]
    assert [call.args[0].shape[0] for call in rules.call_args_list] == [1]


@pytest.mark.gpu
def test_a_gpu_draws_the_tokens_of_the_cpu() -> None:
    logits = random_logits(13, 5000, torch.float64)
    draws = [
        Draw(params, i, 7, np.arange(99), [3, 3], (4,), np.arange(4000) if i % 2 else None)
        for i, params in enumerate(company())
    ]
    here = tokens(logits, range(13), draws)
    device = logits.cuda()
    assert tokens(device, range(13), draws) == here
    mask = torch.arange(5000) % 3 == 0
    for allowed in (mask, mask.nonzero()[:, 0]):
        on_host = [Draw(draw.params, draw.seed, 7, allowed=allowed) for draw in draws]
        on_device = [Draw(draw.params, draw.seed, 7, allowed=allowed.cuda()) for draw in draws]
        assert tokens(device, range(13), on_device) == tokens(logits, range(13), on_host)

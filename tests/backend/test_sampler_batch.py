"""A step of many draws: any company, errors by row, log-probabilities, and what a call costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stemma.backend.local import sampler
from stemma.backend.local.logit_rules import ruled
from stemma.backend.local.sampler import Draw, SamplerError, sample, token_logprobs
from stemma.lang.errors import EngineInvariantError, StemmaError
from stemma.lang.sampling import SamplingParams

VOCAB = 49_152


def tokens(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    return [sampled.token_id for sampled in sample(logits, rows, draws)]


def random_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows * vocab)
    return (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3).to(dtype)


def brief(params: SamplingParams) -> str:
    """Only what is not the default."""
    given = ((field.name, getattr(params, field.name)) for field in fields(params))
    default = SamplingParams()
    return ", ".join(f"{k}={v}" for k, v in given if v != getattr(default, k)) or "plain"


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


@pytest.mark.parametrize("params", company(), ids=brief)
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


@pytest.mark.parametrize("params", company(), ids=brief)
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
    changing = patch.object(sampler, "ruled", wraps=ruled)
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
    mask = np.packbits(np.arange(5000) % 3 == 0, bitorder="little")
    masked = [Draw(draw.params, draw.seed, 7, mask=mask) for draw in draws]
    assert tokens(device, range(13), masked) == tokens(logits, range(13), masked)

"""Penalties, bias, bans and allowed sets: what they do to logits; nothing gets around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from stemma.backend.local.logit_rules import Draw, has_rules, ruled
from stemma.backend.local.sampler import SamplerError, sample
from stemma.lang.errors import EngineInvariantError, StemmaError
from stemma.lang.sampling import SamplingParams

VOCAB = 60
token_ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def changed(logits: Tensor, *draws: Draw) -> Tensor:
    before = logits.clone()
    after = ruled(logits, draws)
    assert torch.equal(logits, before)
    return after


def row(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, VOCAB, generator=generator, dtype=torch.float64) * 4


def draw(prompt: list[int] | None = None, output: list[int] | None = None, **settings: Any) -> Draw:
    ids = None if prompt is None else np.array(prompt, dtype=np.int32)
    return Draw(SamplingParams(**settings), 0, 0, ids, output)


@settings(deadline=None)
@given(prompt=token_ids, output=token_ids, penalty=st.floats(0.1, 5), seed=st.integers(0, 99))
def test_repetition_penalty_is_that_of_transformers(
    prompt: list[int], output: list[int], penalty: float, seed: int
) -> None:
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    ids = torch.tensor([[*prompt, *output]], dtype=torch.long)
    expected = theirs(ids, row(seed))
    found = changed(row(seed), draw(prompt, output, repetition_penalty=penalty))
    assert found.allclose(expected, rtol=1e-15, atol=0)


@settings(deadline=None)
@given(output=token_ids, frequency=st.floats(-2, 2), presence=st.floats(-2, 2))
def test_frequency_counts_and_presence_does_not(
    output: list[int], frequency: float, presence: float
) -> None:
    expected = row()
    for token in output:
        expected[0, token] -= frequency
    for token in set(output):
        expected[0, token] -= presence
    one = draw([1, 2, 3], output, frequency_penalty=frequency, presence_penalty=presence)
    assert changed(row(), one).allclose(expected, rtol=0, atol=1e-12)  # the prompt does not count


def test_bias_is_added_after_the_penalties() -> None:
    logits = torch.tensor([[4.0, -4.0, 1.0]])
    all_of_them = draw(
        [0],
        [1, 1],
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias={0: 1.0, 1: 10.0},
    )
    assert changed(logits, all_of_them).tolist() == [[4 / 2 + 1, -4 * 2 - 1 - 0.25 + 10, 1]]


def test_each_row_gets_its_own_rules() -> None:
    draws = [
        draw(logit_bias={3: 2.0}),
        draw(),
        draw([5], [], repetition_penalty=1.5),
        Draw(SamplingParams(), 0, 0, banned=(1,)),
        Draw(SamplingParams(), 0, 0, allowed=np.array([7, 8])),
        draw([], [9], presence_penalty=1.0),
    ]
    logits = torch.cat([row(seed) for seed in range(len(draws))])
    together = changed(logits, *draws)
    for i, own in enumerate(draws):
        assert torch.equal(together[i : i + 1], changed(logits[i : i + 1], own))
        assert torch.equal(together[i], logits[i]) != has_rules(own)


def test_what_is_allowed_may_be_ids_or_bits() -> None:
    ids = np.array([3, 8, 41])
    mask = np.isin(np.arange(VOCAB), ids)
    expected = torch.where(torch.from_numpy(mask), row(), -torch.inf)
    for allowed in (ids, ids.astype(np.int32), np.append(ids, [99, -1])):
        assert torch.equal(changed(row(), Draw(SamplingParams(), 0, 0, allowed=allowed)), expected)
    bits = np.packbits(mask, bitorder="little")
    for longer in (bits, np.append(bits, np.uint8([255, 255]))):
        assert torch.equal(changed(row(), Draw(SamplingParams(), 0, 0, mask=longer)), expected)


def test_rows_with_masks_and_rows_without_do_not_touch_each_other() -> None:
    mask = np.packbits(np.arange(VOCAB) % 2 == 0, bitorder="little")
    draws = [draw(), Draw(SamplingParams(), 0, 0, mask=mask), draw(logit_bias={3: 2.0})]
    logits = torch.cat([row(seed) for seed in range(3)])
    found = changed(logits, *draws)
    assert torch.equal(found[0], logits[0])
    assert bool((found[1, 1::2] == -torch.inf).all())
    assert torch.equal(found[1, ::2], logits[1, ::2])
    assert float(found[2, 3]) == float(logits[2, 3]) + 2


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(EngineInvariantError, match="a mask of 8 bits for a vocabulary of 60"):
        changed(row(), Draw(SamplingParams(), 0, 0, mask=np.uint8([255])))


def test_known_ids_outside_the_vocabulary_are_refused() -> None:
    for one in (
        draw([VOCAB], [], repetition_penalty=1.2),
        draw([], [-1], repetition_penalty=1.2),
        draw([], [VOCAB], presence_penalty=1.0),
    ):
        with pytest.raises(EngineInvariantError, match="vocabulary of 60"):
            sample(row(), [0], [one])


settings_against_the_rules = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.7, 1e9]),
    top_k=st.sampled_from([0, 1, 2, 50, 1000]),
    top_p=st.sampled_from([1e-9, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.5, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -50.0, 50.0]),
    presence_penalty=st.sampled_from([0.0, -50.0]),
    repetition_penalty=st.sampled_from([1.0, 0.01, 100.0]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.sampled_from([-np.inf, -1e9, 1e9, 1e30]), max_size=8
    ),
)


@settings(max_examples=400, deadline=None)
@given(
    params=settings_against_the_rules,
    banned=token_ids,
    allowed=st.none() | st.lists(st.integers(0, VOCAB - 1), max_size=6),
    output=token_ids,
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_neither_bans_nor_allowed_sets_are_ever_broken(
    params: SamplingParams,
    banned: list[int],
    allowed: list[int] | None,
    output: list[int],
    seed: int,
    dtype: torch.dtype,
) -> None:
    only = None if allowed is None else np.array(allowed, dtype=np.int64)
    mask = None if only is None else np.packbits(np.isin(np.arange(VOCAB), only), bitorder="little")
    draws = [
        Draw(params, seed, counter, np.arange(9), output, tuple(banned), ids, bits)
        for counter in range(4)
        for ids, bits in ((only, None), (None, mask))
    ]
    possible = set(range(VOCAB) if allowed is None else allowed) - set(banned)
    possible -= {token for token, bias in params.logit_bias if bias == -np.inf}
    logits = row(seed).to(dtype)
    if possible:
        assert {found.token_id for found in sample(logits, [0] * 8, draws)} <= possible
    else:
        with pytest.raises(StemmaError, match="no token is left"):
            sample(logits, [0] * 8, draws)


def test_a_choice_that_is_forced_is_taken_however_improbable() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = -1e30
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.1)):
        forced = Draw(params, 0, 0, allowed=np.array([5]))
        assert sample(logits, [0], [forced])[0].token_id == 5


def test_the_greedy_token_is_that_of_the_changed_logits() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    greedy = SamplingParams(temperature=0)
    for one, expected in [
        (Draw(greedy, 0, 0), 0),
        (Draw(greedy, 0, 0, banned=(0,)), 1),
        (Draw(greedy, 0, 0, banned=(0, 77, -1), allowed=np.array([0, 2, 3])), 2),
        (Draw(greedy.but(logit_bias={3: 10}), 0, 0), 3),
        (Draw(greedy.but(presence_penalty=1.5), 0, 0, output_ids=[0, 0]), 1),
        (Draw(greedy.but(frequency_penalty=1.5), 0, 0, output_ids=[0, 0, 1]), 2),
        (Draw(greedy.but(repetition_penalty=2), 0, 0, np.array([0]), [1]), 2),
    ]:
        assert sample(logits, [0], [one])[0].token_id == expected


def test_only_the_draw_that_cannot_be_made_is_named() -> None:
    fine = Draw(SamplingParams(), 0, 0)
    hopeless = Draw(SamplingParams(), 0, 0, banned=(3,), allowed=np.array([3]))
    with pytest.raises(SamplerError, match="row 1: no token is left") as caught:
        sample(row(), [0, 0, 0], [fine, hopeless, fine])
    assert list(caught.value.reasons) == [1]


def test_a_bias_for_no_token_is_named() -> None:
    params = SamplingParams(logit_bias=((VOCAB, 1.0), (3, 1.0)))
    with pytest.raises(SamplerError, match=f"logit_bias names token {VOCAB}"):
        sample(row(), [0], [Draw(params, 0, 0)])

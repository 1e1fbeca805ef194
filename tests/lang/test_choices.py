"""The three ways to decide a choice, against numbers worked out by hand and against properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.lang.choices import (
    ChoicesMethod,
    decide,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from stemma.lang.errors import InvalidArgument

LOGPROB = st.floats(min_value=-50, max_value=0)
ROWS = st.lists(st.lists(LOGPROB, min_size=1, max_size=6), min_size=1, max_size=6)


def test_length_normalized_compares_means_not_sums() -> None:
    decision = decide(token_length_normalized, [[-1.0], [-0.5, -0.6]])
    assert decision.index == 1
    assert decision.scores == pytest.approx((-1.0, -0.55))


def test_probabilities_are_a_softmax_of_sums() -> None:
    decision = decide(token_length_normalized, [[-1.0], [-0.5, -0.6]])
    low, high = math.exp(-1.1), math.exp(-1.0)
    assert decision.probabilities == pytest.approx((high / (high + low), low / (high + low)))


def test_greedy_decides_at_the_first_column_that_differs() -> None:
    rows = [[-0.1, -9.0], [-0.1, -3.0], [-0.2, -0.1]]
    decision = decide(greedy_token_selection, rows)
    assert decision.index == 1
    assert decision.scores == (1.0, 2.0, 0.0)
    assert decide(token_length_normalized, rows).index == 2


def test_greedy_lets_an_ended_choice_go_on_with_its_mean() -> None:
    assert decide(greedy_token_selection, [[-1.0], [-1.0, -2.0]]).index == 0
    assert decide(greedy_token_selection, [[-1.0], [-1.0, -0.5]]).index == 1


def test_unconditional_takes_off_what_a_choice_has_without_the_prompt() -> None:
    rows, base = [[-1.0, -1.0], [-2.0]], [[-0.5, -0.5], [-6.0]]
    decision = decide(unconditional_likelihood_normalized, rows, base)
    assert decision.index == 1
    assert decision.scores == pytest.approx((-0.5, 4.0))


def test_unconditional_needs_the_numbers() -> None:
    with pytest.raises(InvalidArgument, match="unconditional"):
        decide(unconditional_likelihood_normalized, [[-1.0]])


def test_a_choice_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one token"):
        decide(token_length_normalized, [[-1.0], []])


def test_impossible_choices_are_equally_probable() -> None:
    decision = decide(token_length_normalized, [[-math.inf], [-math.inf]])
    assert decision.probabilities == (0.5, 0.5)


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="greedy_token_selection"):
        ChoicesMethod("best")


@given(ROWS, st.sampled_from(ChoicesMethod))
def test_probabilities_sum_to_one_and_the_winner_has_the_best_score(
    rows: list[list[float]], method: ChoicesMethod
) -> None:
    decision = decide(method, rows, [[-1.0] * len(row) for row in rows])
    assert math.fsum(decision.probabilities) == pytest.approx(1.0)
    assert decision.scores[decision.index] == max(decision.scores)


@given(ROWS)
def test_the_order_of_different_choices_does_not_matter(rows: list[list[float]]) -> None:
    for method in (token_length_normalized, greedy_token_selection):
        forwards, backwards = decide(method, rows), decide(method, rows[::-1])
        if forwards.scores.count(max(forwards.scores)) == 1:
            assert rows[::-1][backwards.index] == rows[forwards.index]

"""Selecting: scored, decided by the method, committed, and told in meta."""

from __future__ import annotations

import math

import pytest

import stemma as st
from stemma.backend.mock import MockBackend

SCORES = {
    "": {"yes": [-1.0], "no": [-4.0], "well no": [-4.0, -4.0]},
    "Wet?": {"yes": [-0.9], "no": [-1.0], "well no": [-0.8, -2.0]},
}


def scores(prompt: str, choice: str) -> list[float]:
    return SCORES[prompt][choice]


@st.function
def ask(s: st.ProgramState, method: str) -> None:
    s += "Wet?" + st.select("answer", ["yes", "no", "well no"], choices_method=method) + "!"


@pytest.mark.parametrize(
    ("method", "answer", "best"),
    [
        ("token_length_normalized", "yes", -0.9),
        ("greedy_token_selection", "well no", 2.0),
        ("unconditional_likelihood_normalized", "no", 3.0),
    ],
)
def test_the_method_decides_and_meta_tells(method: str, answer: str, best: float) -> None:
    state = ask.run(method, backend=MockBackend(scores=scores))
    assert state["answer"] == answer
    assert state.text() == f"Wet?{answer}!"
    meta = state.meta("answer")
    assert meta.choices[meta.index].text == answer
    assert meta.choices[meta.index].score == pytest.approx(best)
    assert meta.method == method
    assert [choice.logprobs for choice in meta.choices] == [(-0.9,), (-1.0,), (-0.8, -2.0)]
    assert math.fsum(meta.probabilities.values()) == pytest.approx(1)
    ratio = meta.probabilities["yes"] / meta.probabilities["well no"]
    assert ratio == pytest.approx(math.exp(-0.9 + 2.8))


def test_a_choice_is_not_preferred_for_being_long() -> None:
    backend = MockBackend(scores=lambda prompt, choice: [-0.5] * len(choice.split()))
    state = st.function(lambda s: s.append(st.select("x", ["a", "a b c"]))).run(backend=backend)
    assert state["x"] == "a"
    probabilities = state.meta("x").probabilities
    assert probabilities["a"] > probabilities["a b c"]


def test_all_choices_are_scored_in_one_request_without_the_rest() -> None:
    backend = MockBackend(scores=scores)
    ask.run("token_length_normalized", backend=backend)
    assert [call.choices for call in backend.calls] == [("yes", "no", "well no")]


def test_an_unnamed_select_writes_too() -> None:
    state = st.function(lambda s: s.append(st.select(choices=["a"]))).run(backend=MockBackend())
    assert state.text() == "a"
    assert state.variables() == []

"""Sampling parameters: loose spellings become the declared types, impossible values are refused,
and what is quick is not wrong.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

import stemma as st
from stemma.lang.errors import InvalidArgument, UnsupportedByBackend
from stemma.lang.ops import Gen
from stemma.lang.sampling import SamplingParams, derive_seed, merged


def test_loose_spellings_become_the_declared_types() -> None:
    loose: dict[str, Any] = {
        "stop": ["a", "b"],
        "stop_token_ids": iter([3, 4]),
        "logit_bias": {7: 1, 2: -3},
        "top_k": -1,
        "top_logprobs": 2,
    }
    params = SamplingParams(**loose)
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == ((2, -3.0), (7, 1.0))
    assert params.top_k == 0
    assert params.logprobs is True
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 2),
        ("frequency_penalty", math.nan),
        ("presence_penalty", math.inf),
        ("repetition_penalty", 0),
        ("stop", ("",)),
        ("stop", (3,)),
        ("top_logprobs", -1),
        ("n", 0),
        ("max_tokens", 2.5),
        ("min_tokens", "3"),
        ("top_k", None),
        ("n", True),
        ("seed", "a"),
        ("temperature", "hot"),
        ("stop", 3),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", (-1,)),
        ("stop_regex", ["a", "b"]),
        ("stop_regex", "("),
        ("stop_regex", "[a"),
        ("stop_regex", "a*"),
        ("stop_regex", ""),
        ("stop_regex", "$"),
        ("include_stop", "no"),
        ("ignore_eos", 1),
        ("logprobs", None),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {5: math.inf}),
        ("logit_bias", {-5: 1}),
        ("logit_bias", {5: math.nan}),
    ],
)
def test_a_value_that_cannot_be_meant_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}="):
        SamplingParams(**{name: value})


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at most max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_one_draw_is_the_same_settings_for_one_sample() -> None:
    params = SamplingParams(n=4, stop=("a",), temperature=0.5, top_p=0.9, seed=1)
    assert params.one_draw(7) == params.but(n=1, seed=7)
    assert params.n == 4


def test_merging_takes_the_given_fields_only() -> None:
    base, own = SamplingParams(temperature=0.2, top_k=5), SamplingParams(temperature=1.0, n=3)
    both = merged(base, own, frozenset({"temperature"}))
    assert both == SamplingParams(temperature=1.0, top_k=5)
    with pytest.raises(InvalidArgument, match="min_tokens"):
        merged(
            SamplingParams(min_tokens=9), SamplingParams(max_tokens=1), frozenset({"max_tokens"})
        )


def params_of(**settings: Any) -> SamplingParams:
    operation = st.gen("x", **settings)
    assert isinstance(operation, Gen)
    return operation.params


def test_settings_that_were_written_before_are_built_once() -> None:
    assert params_of(stop=["a"], max_tokens=3) is params_of(stop=["a"], max_tokens=3)
    assert params_of(max_tokens=3) is not params_of(max_tokens=4)


def test_a_value_of_another_type_is_not_taken_for_one_written_before() -> None:
    for temperature in (1, 1.0, 1):
        assert type(params_of(temperature=temperature).temperature) is type(temperature)


def test_what_the_program_changes_later_is_not_remembered() -> None:
    bias, stops = {1: 2.0}, ["a"]
    first = params_of(logit_bias=bias, stop=stops)
    bias[1] = 3.0
    stops[0] = "b"
    second = params_of(logit_bias=bias, stop=stops)
    assert (first.logit_bias, first.stop) == (((1, 2.0),), ("a",))
    assert (second.logit_bias, second.stop) == (((1, 3.0),), ("b",))


def test_a_backend_that_knows_no_sampling_of_its_model_says_so() -> None:
    with pytest.raises(UnsupportedByBackend, match=r"MockBackend .*generation_config"):
        SamplingParams.from_model(st.MockBackend())


def test_seeds_derive_from_the_whole_path() -> None:
    seeds = {derive_seed(1), derive_seed(1, 0), derive_seed(1, 0, 0), derive_seed(1, 1), 1}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)

"""`gen(n=...)`: the samples are drawn together, on whatever backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.backend.base import Pending
from stemma.backend.mock import MockBackend
from stemma.interpreter.flight import Flight
from stemma.lang.ops import Gen

PROMPT = "A prompt that all of the samples share."


@pytest.fixture
def backend(tiny_model: Callable[..., Path]) -> Iterator[st.LocalBackend]:
    with st.LocalBackend(tiny_model(), dtype="float64", kv_tokens=4096) as backend:
        backend.engine.check_every_step = True
        yield backend


@st.function
def sampled(s: st.ProgramState, n: int) -> None:
    s += PROMPT + st.gen("x", n=n, max_tokens=6, ignore_eos=True) + " more"


def test_samples_compute_their_prompt_once(backend: st.LocalBackend) -> None:
    usage = sampled.run(4, backend=backend, seed=1).usage
    length = len(backend.encode(PROMPT))
    assert usage.prompt_tokens == 4 * length
    assert usage.computed_tokens == length
    assert backend.stats().computed_tokens == length + 4 * 5  # of six, the last is not computed


def test_samples_are_those_that_each_draws_alone(backend: st.LocalBackend) -> None:
    state = sampled.run(4, backend=backend, seed=1)
    assert len(set(state["x"])) == 4
    assert state.text() == PROMPT + state["x"][0] + " more"
    for cache in ("read-write", "off"):
        again = sampled.run(4, backend=backend, seed=1, cache=cache)
        assert again["x"] == state["x"]
    assert sampled.run(1, backend=backend, seed=1)["x"] == state["x"][0]


def test_a_branch_that_is_closed_stops_all_of_its_samples(backend: st.LocalBackend) -> None:
    branch = backend.open()
    branch.append(PROMPT)
    long = st.SamplingParams(max_tokens=900, ignore_eos=True)
    short = long.but(max_tokens=1)
    handles = branch.sample([short, long, long])
    handles[0].result(60)
    branch.close()
    for handle in handles[1:]:
        with pytest.raises(st.errors.Cancelled):
            handle.result(60)


def test_other_samples_leave_no_branch_open() -> None:
    backend = MockBackend(["a", "b", "c"])
    branch = backend.open()
    handles = branch.sample([st.SamplingParams()] * 3)
    assert [handle.result().text for handle in handles] == ["a", "b", "c"]
    assert backend.open_branches == 1
    assert len(branch.token_ids()) == 1


def test_samples_that_cannot_all_begin_leave_no_branch_open() -> None:
    backend = MockBackend(["a"])
    with pytest.raises(st.errors.InvalidArgument, match="n=2"):
        backend.open().sample([st.SamplingParams(), st.SamplingParams(n=2)])
    assert backend.open_branches == 1


def test_ten_thousand_samples_hold_nobody_up() -> None:
    backend = MockBackend(lambda prompt, params: "a", delay=0.01)
    start = time.process_time()
    state = sampled.run(10_000, backend=backend)
    assert len(state["x"]) == 10_000
    assert time.process_time() - start < 5  # with a look at every sample at each arrival: minutes


def test_the_first_sample_that_fails_stops_the_others_once() -> None:
    branch = MockBackend(lambda prompt, params: "a", delay=30).open()
    operation = st.gen("x")
    assert isinstance(operation, Gen)
    handles: list[Pending[Any]] = [*branch.sample([st.SamplingParams()] * 3)]
    flight = Flight(operation, None, handles)
    arrivals: list[bool] = []
    flight.on_arrival(lambda: arrivals.append(True))
    assert not flight.landed()
    handles[1].cancel()
    assert len(arrivals) == 1
    assert flight.landed()
    assert len(arrivals) == 3
    assert isinstance(flight.error, st.errors.Cancelled)


def test_more_samples_than_anybody_means_are_refused_where_they_are_written() -> None:
    with pytest.raises(st.errors.InvalidArgument, match="at most 10,000"):
        st.gen("x", n=1_000_000_000)

"""Batches: every item once, results in order, errors apart or raised at the end."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.lang.errors import InvalidArgument


def echo(prompt: str, params: st.SamplingParams) -> str:
    return prompt[-2:]


bodies: list[str] = []


@st.function
def program(s: st.ProgramState, word: str, fail: bool = False) -> str:
    bodies.append(word)
    s += word + st.gen("x")
    if fail:
        raise ZeroDivisionError(word)
    return str(s["x"])


def test_results_are_in_order_and_a_body_runs_once_per_item() -> None:
    bodies.clear()
    items = [{"word": f"w{i:02}"} for i in range(30)]
    states = program.run_batch(items, backend=MockBackend(echo, delay=0.02))
    assert [state.value for state in states] == [f"{i:02}" for i in range(30)]
    assert sorted(bodies) == [item["word"] for item in items]


def test_items_may_be_positional_and_options_hold_for_all() -> None:
    backend = MockBackend(echo)
    states = program.run_batch([("a",), ("b",)], backend=backend, temperature=0.5, salt="s")
    assert [state.value for state in states] == ["a", "b"]
    assert {call.namespace.salt for call in backend.calls} == {"s"}
    assert {call.params.temperature for call in backend.calls if call.params} == {0.5}


def test_no_items_give_no_results() -> None:
    assert program.run_batch([], backend=MockBackend()) == []


def test_one_result_or_exception_per_item() -> None:
    items: list[Any] = [{"word": "a"}, {"word": "b", "fail": True}, {"wrong": 1}, {"word": "d"}, 3]
    results = program.run_batch(items, backend=MockBackend(echo), return_exceptions=True)
    kinds = [type(result) for result in results]
    assert kinds == [
        st.ProgramState,
        ZeroDivisionError,
        TypeError,
        st.ProgramState,
        InvalidArgument,
    ]
    last = results[3]
    assert isinstance(last, st.ProgramState)
    assert last["x"] == "d"


def test_an_error_in_an_items_last_expression_is_its_result() -> None:
    last = st.function(lambda s, i: s.append(st.gen("x")))
    results = last.run_batch(
        [(0,), (1,)],
        backend=MockBackend(fail={1: OSError()}),
        num_threads=1,
        return_exceptions=True,
    )
    assert isinstance(results[0], OSError)
    assert isinstance(results[1], st.errors.StemmaError)


def test_the_first_error_is_raised_after_the_rest_has_stopped() -> None:
    backend = MockBackend(echo, delay=30)
    items = [{"word": "a"}, {"word": "b"}, {"word": "bad", "fail": True}, {"word": "c"}]
    bodies.clear()
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="bad"):
        program.run_batch(items, backend=backend, num_threads=3)
    assert time.monotonic() - start < 5
    assert backend.running == 0
    assert "c" not in bodies


def test_only_so_many_items_are_at_work() -> None:
    backend = MockBackend(echo, delay=0.02)
    program.run_batch([(f"{i}",) for i in range(12)], backend=backend, num_threads=3)
    assert backend.most_running == 3
    with pytest.raises(InvalidArgument, match="num_threads"):
        program.run_batch([("a",)], backend=backend, num_threads=0)


def test_items_draw_differently_and_a_seed_repeats_them_all() -> None:
    def seeds(prompt: str, params: st.SamplingParams) -> str:
        return str(params.seed)

    def draw(**options: Any) -> list[str]:
        states = program.run_batch([("a",)] * 5, backend=MockBackend(seeds), **options)
        return [state["x"] for state in states]

    first = draw(seed=1)
    assert len(set(first)) == 5
    assert draw(seed=1, num_threads=1) == first
    assert set(draw(seed=2)).isdisjoint(first)
    assert set(draw()).isdisjoint(draw())
    state = program.run_batch([("a",)] * 5, backend=MockBackend(seeds), seed=1)[3]
    assert program.run("a", backend=MockBackend(seeds), seed=state.seed)["x"] == first[3]


def test_async_programs_and_progress_work() -> None:
    @st.function
    async def later(s: st.ProgramState, i: int) -> Any:
        s += f"{i}" + st.gen("x")
        return await s.get("x")

    states = later.run_batch([(i,) for i in range(5)], backend=MockBackend(echo), progress=True)
    assert [state.value for state in states] == [f"{i}" for i in range(5)]


def test_an_interrupt_stops_the_batch() -> None:
    backend = MockBackend(echo, delay=60)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), 2)).start()
    with pytest.raises(KeyboardInterrupt):
        program.run_batch([("a",)] * 4, backend=backend, num_threads=2)
    assert backend.running == 0

"""Batches: every item once, results in order, errors apart or raised at the end."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.interpreter.batch_order import depth_first
from stemma.interpreter.progress import BatchProgress
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


def test_items_that_share_arguments_run_one_after_the_other() -> None:
    def order(items: Any, **options: Any) -> list[str]:
        backend = MockBackend(lambda text, params: "")
        ask.run_batch(items, backend=backend, **options)
        return [call.prompt for call in backend.calls]

    @st.function
    def ask(s: st.ProgramState, question: str, text: str, times: int = 1) -> None:
        s += text + question + st.gen("x")

    items = [{"question": f"{q}", "text": text} for q in range(3) for text in ("mno", "abc", "mna")]
    together = ["abc0", "abc1", "abc2", "mna0", "mna1", "mna2", "mno0", "mno1", "mno2"]
    given = [item["text"] + item["question"] for item in items]
    assert [items[i] for i, _ in depth_first(items)] == [item for _, item in depth_first(items)]
    assert [item["text"] + item["question"] for _, item in depth_first(items)] == together
    assert sorted(order(items, num_threads=2)) == together
    assert order(items, num_threads=1) == given
    tuples = [(item["question"], item["text"], 7) for item in items]
    assert [item[1] + item[0] for _, item in depth_first(tuples)] == together
    assert [i for i, _ in depth_first([3, {}, (), None])] == [0, 1, 2, 3]  # type: ignore[list-item]


def test_items_may_be_positional_and_options_hold_for_all() -> None:
    backend = MockBackend(echo)
    states = program.run_batch([("a",), ("b",)], backend=backend, temperature=0.5, salt="s")
    assert [state.value for state in states] == ["a", "b"]
    assert {call.namespace.salt for call in backend.calls} == {"s"}
    assert {call.params.temperature for call in backend.calls if call.params} == {0.5}


def test_no_items_give_no_results() -> None:
    assert program.run_batch([], backend=MockBackend()) == []


def test_one_result_or_exception_per_item() -> None:
    items: list[Any] = [{"word": "a"}, {"word": "b", "fail": True}, {"wrong": 1}, ["d"], 3]
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
    items: list[Any] = [{"word": "c", "fail": True}, {"word": "bad", "fail": True}]
    items += [{"word": "a"}, {"word": "b"}]  # those that do not fail come first
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


def test_context_variables_of_the_caller_reach_the_bodies() -> None:
    name: ContextVar[str] = ContextVar("name", default="nobody")
    reader = st.function(lambda s: name.get())
    token = name.set("caller")
    try:
        options: dict[str, Any] = {"backend": MockBackend()}
        assert [state.value for state in reader.run_batch([{}] * 3, **options)] == ["caller"] * 3
        assert asyncio.run(reader.arun(**options)).value == "caller"
        assert reader.stream(**options).state.value == "caller"
    finally:
        name.reset(token)


def test_an_iterator_gives_the_states_in_order_as_they_come() -> None:
    may_end = threading.Event()

    @st.function
    def waiting(s: st.ProgramState, word: str) -> str:
        if word == "last":
            assert may_end.wait(10)
        return word

    items = [("a",), ("b",), ("last",), ("d",)]
    states = waiting.run_batch(items, backend=MockBackend(), generator_style=True)
    assert [next(states).value, next(states).value] == ["a", "b"]
    may_end.set()
    assert [state.value for state in states] == ["last", "d"]


def test_an_iterator_takes_items_only_a_little_ahead() -> None:
    taken: list[int] = []

    def endless() -> Iterator[tuple[str]]:
        for i in itertools.count():
            taken.append(i)
            yield (f"{i}",)

    backend = MockBackend(echo)
    states = program.run_batch(endless(), backend=backend, num_threads=2, generator_style=True)
    assert [next(states)["x"] for _ in range(10)] == [f"{i}" for i in range(10)]
    time.sleep(0.05)
    assert len(taken) <= 14
    states.close()  # type: ignore[attr-defined]
    assert list(states) == []


def test_an_iterator_that_is_closed_stops_what_is_at_work() -> None:
    backend = MockBackend(echo)
    states = program.run_batch(
        itertools.repeat(("a",)), backend=backend, num_threads=4, generator_style=True
    )
    next(states)
    while len(backend.calls) < 9 or backend.running:  # as far ahead of its reader as it goes
        time.sleep(0.005)
    backend.delay = 30
    for _ in range(4):
        next(states)
    while backend.running < 4:
        time.sleep(0.005)
    states.close()  # type: ignore[attr-defined]
    end = time.monotonic() + 5
    while backend.running and time.monotonic() < end:
        time.sleep(0.005)
    assert backend.running == 0


def test_an_iterator_raises_the_first_error_or_gives_it() -> None:
    items: list[Any] = [("a",), ("bad", True), ("c",)]
    backend = MockBackend(echo, delay=0.02)
    states = program.run_batch(items, backend=backend, num_threads=1, generator_style=True)
    assert next(states)["x"] == "a"
    with pytest.raises(ZeroDivisionError, match="bad"):
        next(states)
    results = list(
        program.run_batch(items, backend=backend, generator_style=True, return_exceptions=True)
    )
    assert [type(result) for result in results] == [
        st.ProgramState,
        ZeroDivisionError,
        st.ProgramState,
    ]


def test_an_error_of_the_items_themselves_is_raised() -> None:
    def items() -> Iterator[tuple[str]]:
        yield ("a",)
        raise OSError("no more")

    states = program.run_batch(
        items(), backend=MockBackend(echo), generator_style=True, return_exceptions=True
    )
    with pytest.raises(OSError, match="no more"):
        list(states)


def test_progress_is_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stemma.interpreter.progress.LINE_EVERY_S", 0.0)
    items: list[Any] = [("a",), ("b", True), ("c",)]
    backend = MockBackend(echo)
    program.run_batch(items, backend=backend, progress=True, return_exceptions=True, num_threads=1)
    out, err = capsys.readouterr()
    assert out == ""
    *_, last = err.splitlines()
    assert len(err.splitlines()) == 4
    assert re.fullmatch(
        r"run_batch: 3/3 items, [\d.]+ items/s, [\d.]+ tok/s, 0% cached, 1 failed", last
    )


def test_progress_is_a_bar_in_a_terminal() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=120, color_system=None)
    with BatchProgress(2, console=console) as progress:
        for state in program.run_batch([("a",), ("b",)], backend=MockBackend(echo)):
            progress.advance(state)
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "2/2" in shown
    assert "items/s" in shown
    assert "cached" in shown


def test_progress_counts_the_tokens_and_the_cache_of_all_items() -> None:
    progress = BatchProgress(None, console=Console(file=StringIO()))
    progress._started -= 10.0
    state = program.run("a", backend=MockBackend(echo))
    state._run.usages[:] = [st.Usage(100, 75, 25, 0, 50)]
    progress.advance(state)
    error = ZeroDivisionError()
    error.state = state  # type: ignore[attr-defined]
    progress.advance(error)
    assert progress.rates() == "0.2 items/s, 10 tok/s, 75% cached, 1 failed"


def test_an_interrupt_stops_the_batch() -> None:
    backend = MockBackend(echo, delay=60)

    def press() -> None:
        while backend.running < 2:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        program.run_batch([("a",)] * 4, backend=backend, num_threads=2)
    assert backend.running == 0

"""The same seed gives the same text: alone, in a batch, at any concurrency, cold or warm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.lang.sampling import derive_seed


@st.function
def program(s: st.ProgramState, word: str, forks: int) -> list[Any]:
    s += st.user(f"All of this is asked of everybody. Say {word}.") + st.assistant_begin()
    s += st.gen("first", max_tokens=6, temperature=1.5)
    branches = s.fork(forks)
    for i, branch in enumerate(branches):
        branch += (
            f" {i}:" + st.gen("part", max_tokens=5, n=2) + st.select("which", ["ab", "b", "c"])
        )
    s += st.gen("last", max_tokens=5, stop="e") + st.assistant_end()
    return [branches["part"], branches["which"], s["first"], s["last"], s.text()]


WORDS = ["tree", "tree", "trees", "stone", "river and stone", "", "x"]
ITEMS = [{"word": word, "forks": i % 3 + 1} for i, word in enumerate(WORDS)]


@pytest.fixture(scope="module")
def make(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., st.LocalBackend]]:
    """Backends whose roundings are far below what decides a draw."""
    made: list[st.LocalBackend] = []

    def new(**settings: Any) -> st.LocalBackend:
        backend = st.LocalBackend(tiny_model(), dtype="float64", device="cpu", **settings)
        made.append(backend)
        return backend

    yield new
    for backend in made:
        backend.close()


@pytest.fixture(scope="module")
def alone(make: Callable[..., st.LocalBackend]) -> list[Any]:
    """What each item comes to in a run of its own, with nothing cached."""
    values = []
    for index, item in enumerate(ITEMS):
        backend = make()
        values.append(program.run(**item, backend=backend, seed=derive_seed(11, index)).value)
    return values


def test_items_draw_each_for_itself(alone: list[Any]) -> None:
    assert alone[0][0] != alone[1][0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_tokens": 400, "max_running": 3},
        {"prefix_cache": False},
        {"max_step_tokens": 32, "max_running": 8, "policy": "fcfs", "page_size": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("concurrency", [1, 3, "auto"])
def test_in_a_batch_at_any_concurrency_cold_and_warm(
    concurrency: Any, settings: Any, make: Callable[..., st.LocalBackend], alone: list[Any]
) -> None:
    backend = make(**settings)
    for _ in ("cold", "warm"):
        states = program.run_batch(ITEMS, backend=backend, seed=11, concurrency=concurrency)
        assert [state.value for state in states] == alone


def test_as_they_finish_and_in_an_event_loop(
    make: Callable[..., st.LocalBackend], alone: list[Any]
) -> None:
    options: dict[str, Any] = {"backend": make(), "seed": 11}
    found = {index: state.value for index, state in program.iter_batch(ITEMS, **options)}
    assert [found[i] for i in range(len(ITEMS))] == alone
    states = asyncio.run(program.arun_batch(ITEMS, **options))
    assert [state.value for state in states] == alone


def test_resumed_and_gone_on_with(
    make: Callable[..., st.LocalBackend], alone: list[Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"backend": make(), "seed": 11, "checkpoint": tmp_path / "run.jsonl"}
    program.run_batch(ITEMS[:4], **options)
    computed = options["backend"].stats().prompt_tokens
    resumed = program.run_batch(ITEMS[:4], **options)
    assert options["backend"].stats().prompt_tokens == computed
    assert [state.value for state in resumed] == alone[:4]
    assert [state.value for state in program.run_batch(ITEMS, **options)] == alone
    resumed[0] += st.user("More.") + st.assistant(st.gen("more", max_tokens=3))
    assert resumed[0].meta("more").usage.output_tokens > 0

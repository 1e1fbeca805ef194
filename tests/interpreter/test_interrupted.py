"""Ctrl-C stops what waits for the model, and says how far each branch was, however it is run."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend

TEXT = " one two three" * 50


@st.function
def plain(s: st.ProgramState) -> str:
    s += st.gen("x")
    return str(s["x"])


@st.function
async def awaiting(s: st.ProgramState) -> None:
    s += st.gen("x")
    await s.get("x")


def interrupted(act: Callable[[MockBackend], object]) -> Any:
    """The KeyboardInterrupt of `act`, sent once something has been written."""
    backend = MockBackend(lambda text, params: TEXT, delay=60, pieces=600)

    def press() -> None:
        while not backend.calls:
            threading.Event().wait(0.01)
        threading.Event().wait(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt) as caught:
        act(backend)
    assert backend.running == 0
    return caught.value


WAYS: dict[str, Callable[[MockBackend], object]] = {
    "run": lambda backend: plain.run(backend=backend),
    "async": lambda backend: awaiting.run(backend=backend),
    "stream": lambda backend: list(plain.stream(backend=backend)),
    "read": lambda backend: plain.run(backend=backend, stream=True)["x"],
    "value": lambda backend: plain.run(backend=backend, stream=True).value,
    "text_iter": lambda backend: list(plain.run(backend=backend, stream=True).text_iter("x")),
}


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_says_how_far_each_branch_was(way: str) -> None:
    error = interrupted(WAYS[way])
    ((label, text),) = error.partials.items()
    assert label in ("plain", "awaiting")
    assert text
    assert TEXT.startswith(text)
    assert "after writing" in error.__notes__[0]


BATCHES: dict[str, Callable[[MockBackend], object]] = {
    "run_batch": lambda backend: plain.run_batch([{}, {}], backend=backend),
    "iter_batch": lambda backend: list(plain.iter_batch([{}, {}], backend=backend)),
    "async": lambda backend: awaiting.run_batch([{}, {}], backend=backend),
}


@pytest.mark.parametrize("way", BATCHES)
def test_of_a_batch_the_item_is_said_too(way: str) -> None:
    error = interrupted(BATCHES[way])
    name = "awaiting" if way == "async" else "plain"
    assert {f"item {i}, {name}" for i in (0, 1)} == error.partials.keys()
    assert all(text and TEXT.startswith(text) for text in error.partials.values())
    assert sorted(note.partition(":")[0] for note in error.__notes__) == ["item 0", "item 1"]


def test_a_cancelled_task_says_how_far_the_items_of_its_batch_were() -> None:
    async def main() -> Any:
        backend = MockBackend(lambda text, params: TEXT, delay=60, pieces=600)
        task = asyncio.create_task(plain.arun_batch([{}, {}], backend=backend))
        while len(backend.calls) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        return caught.value

    assert asyncio.run(main()).partials.keys() == {"item 0, plain", "item 1, plain"}


def test_items_that_were_stopped_have_not_failed(capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(lambda backend: plain.run_batch([{}] * 3, backend=backend, progress=True))
    line = capsys.readouterr().err.splitlines()[-1]
    assert "run_batch: 0/3 items" in line
    assert "3 stopped" in line
    assert "failed" not in line


def test_who_reads_on_after_ctrl_c_is_told_that_the_run_is_over() -> None:
    states: list[st.ProgramState] = []

    def read(backend: MockBackend) -> None:
        states.append(plain.run(backend=backend, stream=True))
        states[0]["x"]

    interrupted(read)
    with pytest.raises(st.errors.Cancelled, match="KeyboardInterrupt"):
        states[0]["x"]


def test_an_exit_of_the_bodys_own_is_not_blamed_on_an_operation() -> None:
    @st.function
    def leaving(s: st.ProgramState) -> None:
        s += st.gen("x")
        raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        leaving.run(backend=MockBackend([" a"], delay=60))
    assert not hasattr(caught.value, "__notes__")
    assert not hasattr(caught.value, "site")

"""What cannot be a batch's items, a checkpoint or a record is refused with a remedy."""

from __future__ import annotations

import math
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.lang.errors import InvalidArgument


@st.function
def program(s: st.ProgramState, word: str = "a") -> None:
    s += word + st.gen("x")


def echo(delay: float = 0.0) -> MockBackend:
    return MockBackend(lambda text, params: f" {text}", delay=delay)


@pytest.mark.parametrize("items", [None, 5])
def test_what_is_no_list_of_items_is_refused(items: Any) -> None:
    for way in (program.run_batch, program.iter_batch):
        with pytest.raises(InvalidArgument, match=f"items={items}: must be a list"):
            way(items, backend=echo())


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"progress": "yes"}, "progress='yes'"), ({"return_exceptions": 1}, "return_exceptions=1")],
)
def test_a_switch_is_true_or_false(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{told}: must be True or False"):
        program.run_batch([{}], backend=echo(), **settings)


def test_an_items_keys_are_names() -> None:
    with pytest.raises(InvalidArgument, match=r"item 0 has keys that are no names: \[1\]"):
        program.run_batch([{1: 2}], backend=echo())  # type: ignore[dict-item]


def test_a_checkpoint_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, told in (
        ("", "checkpoint='': must be the path"),
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is no file that keeps"),
        ("/dev/null", "is no file that keeps"),
    ):
        with pytest.raises(InvalidArgument, match=told):
            program.run_batch([{}], backend=echo(), checkpoint=path)


def test_a_checkpoint_that_cannot_be_written_on_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(OSError, match=r"run\.jsonl"):
            program.run_batch([("a" * 2000,)], backend=echo(), checkpoint=path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_endless_limit_of_time_is_none_for_a_run_and_for_an_operation() -> None:
    @st.function
    def patient(s: st.ProgramState) -> None:
        s += st.gen("x", timeout=math.inf) + st.select("y", ["a", "b"], timeout=math.inf)

    assert patient.run(backend=echo(), timeout=math.inf)["y"] == "a"


def test_a_seed_is_signed() -> None:
    with pytest.raises(InvalidArgument, match=r"signed integer of 64 bits \(from -2\*\*63"):
        program.run(backend=echo(), seed=2**63)


def test_only_one_run_at_a_time_is_recorded_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    begun, go = threading.Event(), threading.Event()

    def reply(text: str, params: st.SamplingParams) -> str:
        begun.set()
        go.wait(30)
        return " slow"

    first = program.run(backend=MockBackend(reply), record=path, stream=True)
    assert begun.wait(30)
    for second in (
        lambda: program.run(backend=echo(), record=path),
        lambda: program.run_batch([{}], backend=echo(), record=path),
    ):
        with pytest.raises(InvalidArgument, match="another run is being recorded into it"):
            second()
    go.set()
    assert first["x"] == " slow"
    first._run.finished.wait()
    assert program.run(replay=path)["x"] == " slow"


def test_a_file_is_free_again_when_its_run_has_ended_well_or_not(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    held: list[object] = []
    for _ in range(2):
        held.append(program.run(backend=echo(), record=path))
        held.append(program.run_batch([{}] * 3, backend=echo(), record=path))
        with pytest.raises(ConnectionError) as failed:
            program.run(backend=MockBackend([ConnectionError("gone")]), record=path)
        closed = echo()
        closed.close()
        with pytest.raises(st.errors.BackendClosed) as refused:
            program.run(backend=closed, record=path)
        held += [failed.value, refused.value]
    program.run("b", backend=echo(), record=path)
    assert program.run("b", replay=path)["x"] == " b"

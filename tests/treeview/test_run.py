"""Which variables of a run have a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stemma.backend.local.backend import LocalBackend
from stemma.interpreter.events import Event, TextAdded, VariableFinished
from stemma.lang.sampling import SamplingParams
from stemma.treeview import Recorder
from stemma.treeview.run import record_run


@pytest.fixture(scope="module")
def backend(tiny_model: Callable[..., Path]) -> Iterator[LocalBackend]:
    backend = LocalBackend(tiny_model(), kv_tokens=200)
    yield backend
    backend.close()


def finished(count: int) -> Iterator[Event]:
    for number in range(count):
        yield TextAdded("run", "text", "x")
        yield VariableFinished(f"run/{number}", "x", f"value\n{number}")


def test_every_variable_of_a_short_run_has_a_moment(backend: LocalBackend) -> None:
    moments = list(record_run(finished(3), Recorder(backend)))
    assert [m.title for m in moments] == ["Before the run", "run/0: x", "run/1: x", "run/2: x"]
    assert moments[1].caption == "value⏎0"


def test_long_run_has_few_moments_and_each_says_of_how_many_variables(
    backend: LocalBackend,
) -> None:
    moments = list(record_run(finished(2000), Recorder(backend)))
    assert len(moments) < 200
    assert [m.title for m in moments[1:4]] == ["run/0: x", "run/1: x", "run/2: x"]
    assert moments[45].title == "2 variables, the last is run/49: x"
    assert moments[-2].title == "49 variables, the last is run/1985: x"
    assert moments[-1].title == "The run has ended"


def test_what_happens_after_the_last_variable_is_the_end(backend: LocalBackend) -> None:
    def events() -> Iterator[Event]:
        yield from finished(1)
        backend.generate([[3, 4, 5]], SamplingParams(max_tokens=2))

    moments = list(record_run(events(), Recorder(backend)))
    assert [m.title for m in moments] == ["Before the run", "run/0: x", "The run has ended"]

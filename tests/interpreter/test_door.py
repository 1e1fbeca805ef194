"""The door: `import stemma` is quick, names what it promises, and its examples are true."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys

import pytest

import stemma as st
from stemma.backend import mock
from stemma.lang import choices, errors

QUICK = """
import sys, time
import stemma
heavy = {"torch", "transformers", "tokenizers", "numpy", "jinja2", "pydantic", "rich", "typer"}
print(time.process_time(), *heavy.intersection(sys.modules))
"""


def test_importing_costs_little_and_brings_no_heavy_package() -> None:
    seconds = []
    for _ in range(3):
        run = subprocess.run(
            [sys.executable, "-c", QUICK], capture_output=True, text=True, check=True
        )
        time, *heavy = run.stdout.split()
        assert heavy == []
        seconds.append(float(time))
    assert min(seconds) < 0.3


@pytest.mark.parametrize("name", st.__all__)
def test_a_public_name_is_the_things_own_and_told_of(name: str) -> None:
    thing = getattr(st, name)
    if isinstance(thing, type) or inspect.isfunction(thing):
        assert thing.__name__ == name
        doc = inspect.getdoc(thing)
        assert doc is not None
        assert not doc.startswith(f"{name}("), (
            "the words that dataclass has for want of a docstring"
        )


def test_every_error_of_the_language_is_public() -> None:
    family = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.StemmaError)
    }
    assert family | {"Site"} == set(st.errors.__all__)
    assert st.errors.Timeout is errors.Timeout


@pytest.mark.parametrize("module", [mock, choices])
def test_examples_in_docstrings_are_true(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0

"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import stemma.lang

MODULES = [module.name for module in pkgutil.iter_modules(stemma.lang.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_language(name: str) -> None:
    module = importlib.import_module(f"stemma.lang.{name}")
    assert doctest.testmod(module).failed == 0


def test_there_are_some() -> None:
    module = importlib.import_module("stemma.lang.constraints")
    assert doctest.testmod(module).attempted > 5

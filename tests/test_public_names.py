"""`import stemma as st`: the names are there, and cost nothing until one is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stemma
from stemma import api


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("name", api.__all__)
def test_a_public_name_is_the_packages_own(name: str) -> None:
    assert getattr(stemma, name) is getattr(api, name)
    assert name in dir(stemma)


def test_the_names_are_sorted_and_there_once() -> None:
    assert api.__all__ == sorted(set(api.__all__))


def test_importing_the_package_loads_nothing_else_of_it() -> None:
    code = "import sys, stemma; print([name for name in sys.modules if name[:7] == 'stemma.'])"
    assert python(code) == "[]"


def test_a_star_brings_exactly_the_public_names() -> None:
    code = "from stemma import *; print(sorted(name for name in dir() if name[:2] != '__'))"
    assert python(code) == str(api.__all__)


def test_errors_and_submodules_come_by_either_import() -> None:
    code = "import stemma.errors as a; from stemma import errors as b; import stemma as st; "
    assert python(code + "print(a is b is st.errors)") == "True"


@pytest.mark.parametrize("name", ["nope", "__wrapped__", "__file_"])
def test_another_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'stemma' has no attribute '{name}'"):
        getattr(stemma, name)


def test_the_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert stemma.__version__ == version("stemma-lm")

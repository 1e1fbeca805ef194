"""The kernels need a C++ compiler."""

from __future__ import annotations

import ctypes

import pytest

from stemma.backend.local.native.build import compiler
from stemma.backend.local.native.build import library as load


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    loaded = load()
    assert isinstance(loaded, ctypes.CDLL), loaded
    return loaded

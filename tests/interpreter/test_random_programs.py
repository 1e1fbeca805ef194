"""Random programs, run in every way and cut short at random: each ends in time with the right
result or the right exception, and nothing is left of it.

`STEMMA_EXAMPLES` says how many programs are tried of each kind, `STEMMA_FIRST` the number of the
first.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from stemma.backend.local.backend import LocalBackend
from tests.conftest import TinyModel
from tests.interpreter.live_programs_for_tests import try_one
from tests.interpreter.worlds_for_tests import (
    Idle,
    Scripted,
    World,
    model_operation,
    scripted_operation,
)

EXAMPLES = int(os.environ.get("STEMMA_EXAMPLES", "100"))
FIRST = int(os.environ.get("STEMMA_FIRST", "0"))

pytestmark = [
    pytest.mark.timeout(60 + EXAMPLES),
    # Of a stream that was left early.
    pytest.mark.filterwarnings("ignore:.* failed and nobody read it:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """The collector, which is asked after many a program, need not look at what was before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def scripted() -> World:
    backend = Scripted()
    return World(backend, Scripted(), scripted_operation, backend.check_idle, choices_fail=True)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Iterator[World]:
    """The reference keeps nothing, shares nothing and guesses nothing."""
    folder = tiny_model(max_position_embeddings=8192)
    with (
        LocalBackend(folder, dtype="float64", kv_tokens=16_384) as backend,
        LocalBackend(
            folder, dtype="float64", kv_tokens=16_384, prefix_cache=False, speculation=False
        ) as alone,
    ):
        yield World(backend, alone, model_operation, Idle(backend).check_idle, choices_fail=False)


def try_many(world: World, *, disturbed: bool) -> None:
    ways: Counter[str] = Counter()
    for number in range(FIRST, FIRST + EXAMPLES):
        try:
            ways[try_one(number, world, disturbed=disturbed)] += 1
        except BaseException as error:
            error.add_note(f"STEMMA_FIRST={number}")
            raise
    print(dict(ways))


def test_programs_on_a_script(scripted: World) -> None:
    try_many(scripted, disturbed=False)


def test_programs_on_a_script_that_are_cut_short(scripted: World) -> None:
    try_many(scripted, disturbed=True)


def test_programs_on_a_model(model: World) -> None:
    try_many(model, disturbed=False)


def test_programs_on_a_model_that_are_cut_short(model: World) -> None:
    try_many(model, disturbed=True)

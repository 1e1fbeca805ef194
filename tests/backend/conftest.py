"""What the tests of the engine share: backends that check their books after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stemma.backend.local.backend import LocalBackend

Make = Callable[..., LocalBackend]


@pytest.fixture
def make(tiny_model: Callable[..., Path]) -> Iterator[Make]:
    """A maker of float64 backends that check their books after every step."""
    made: list[LocalBackend] = []

    def make(**options: object) -> LocalBackend:
        settings: dict[str, object] = {"dtype": "float64", "kv_tokens": 4096, **options}
        backend = LocalBackend(tiny_model(), **settings)  # type: ignore[arg-type]
        backend.engine.check_every_step = True
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()

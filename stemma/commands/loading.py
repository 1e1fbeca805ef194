"""The backend of a command, opened and closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from stemma.backend.local.backend import LocalBackend


@contextmanager
def opened_backend(
    model: str | None, console: Console, *, kv_tokens: int | None = None
) -> Iterator[LocalBackend]:
    """A LocalBackend on `model` (see `resolve_model`), closed at the end. Raises ModelLoadError.

    Not after Ctrl-C: closing waits for the step under way, and the process ends anyway.
    """
    from stemma.backend.local.model.default_model import resolve_model

    source = resolve_model(model)
    with console.status("Loading the model"):
        from stemma.backend.local.backend import LocalBackend

        backend = LocalBackend(source, kv_tokens=kv_tokens)
    try:
        yield backend
    except KeyboardInterrupt:
        raise
    except BaseException:
        backend.close()
        raise
    backend.close()

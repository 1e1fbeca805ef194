"""The backend of programs that name none: one that was set, or the default local model."""

from __future__ import annotations

import threading

from stemma.backend.base import Backend
from stemma.lang.errors import InvalidArgument, UnsupportedByBackend

_backend: Backend | None = None
_lock = threading.Lock()


def set_default_backend(backend: Backend | None) -> None:
    """Run programs on `backend` unless a run names another; None: on the default model."""
    global _backend
    if not isinstance(backend, Backend | None):
        raise InvalidArgument(f"the default backend must be a Backend, or None; not {backend!r}")
    with _lock:
        _backend = backend


def default_backend() -> Backend:
    """The backend that was set; without one, a `LocalBackend` that is made now and kept."""
    global _backend
    with _lock:
        if _backend is None:
            from stemma.backend.local.backend import LocalBackend

            _backend = LocalBackend()
        return _backend


def flush_cache(backend: Backend | None = None, empty_cache: bool | None = None) -> int:
    """Forget what a backend has cached and no running request uses; how many tokens.

    Without `backend` the default one; where no program has used it yet there is nothing to forget.
    SGLang's `empty_cache` is refused.
    """
    if empty_cache is not None:
        raise UnsupportedByBackend(
            f"flush_cache(empty_cache={empty_cache!r}): the pool of a LocalBackend is as large as "
            "it was made; leave the argument out, or close the backend to free its memory"
        )
    chosen = backend if backend is not None else _backend
    return 0 if chosen is None else chosen.flush_cache()

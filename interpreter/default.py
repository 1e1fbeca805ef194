"""The backend of programs that name none: one that was set, or the default local model."""

from __future__ import annotations

import threading

from stemma.backend.base import Backend

_backend: Backend | None = None
_lock = threading.Lock()


def set_default_backend(backend: Backend | None) -> None:
    """Run programs on `backend` unless a run names another; None: on the default model."""
    global _backend
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


def flush_cache(backend: Backend | None = None) -> int:
    """Forget what a backend has cached and no running request uses; how many tokens."""
    return (backend if backend is not None else default_backend()).flush_cache()

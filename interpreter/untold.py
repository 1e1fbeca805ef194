"""Failures that nobody was told of, kept until a reader is told or the run's state is gone.

Owned by a `Run`: of one that streams, and of one that has ended and goes on, no caller is there to
raise to.
"""

from __future__ import annotations

import traceback
import warnings

from stemma.lang.errors import Cancelled, Site


class Untold:
    """What to say of each failure, by its id, and where; not the error itself, which would keep
    alive the state whose end is waited for.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._failures: dict[int, tuple[str, str, int]] = {}

    def add(self, error: BaseException) -> None:
        """Nobody was told of `error`. Not of a cancelling, which somebody has asked for."""
        if isinstance(error, Cancelled):
            return
        site = getattr(error, "site", None) or _innermost(error)
        what = f"{self._program} failed and nobody read it: {type(error).__name__}: {error}"
        self._failures[id(error)] = (what, site.file, site.line)

    def told(self, error: BaseException) -> None:
        self._failures.pop(id(error), None)

    def warn(self) -> None:
        """Nobody can be told any more."""
        while self._failures:
            _, (what, file, line) = self._failures.popitem()
            warnings.warn_explicit(what, RuntimeWarning, file, line)


def _innermost(error: BaseException) -> Site:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return Site("<unknown>", 0, "")
    return Site(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name)

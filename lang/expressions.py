"""Regular expressions that a program writes: compiled once, refused where they are written.

Used by `sampling.py`, which checks, and by backends, which search.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from stemma.lang.errors import InvalidArgument

if TYPE_CHECKING:
    import regex  # type: ignore[import-untyped]


@lru_cache(maxsize=256)
def compile_stop_regex(pattern: str) -> regex.Pattern[str]:
    """The expression, ready to search. Raises InvalidArgument for one that is malformed or matches
    no text."""
    import regex  # here, for most programs have none

    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise InvalidArgument(f"stop_regex={pattern!r}: {error}") from error
    if compiled.search(""):
        raise InvalidArgument(
            f"stop_regex={pattern!r} matches the empty text, so it would stop before any output"
        )
    return compiled

"""The branches and variables of the reference, and what a program may see of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stemma.backend.base import Branch
from tests.interpreter.programs_for_tests import Edge

CANCELLED, HUNG, INTERRUPTED, UNKNOWN = "cancelled", "hung", "interrupted", "unknown"


class Seen(NamedTuple):
    """What a program saw at one step: a value, or an error by its name."""

    what: str
    value: Any = None
    error: str | None = None
    caught: bool = True  # `except Exception` would catch it


class Raised(Exception):
    """An error by its name."""


class RaisedThrough(BaseException):
    """One that `except Exception` does not catch."""


@dataclass(eq=False)
class Cell:
    """A variable. sure: it was there before anybody could cancel it."""

    owner: Line
    value: Any = None
    error: str | None = None
    sure: bool = False


@dataclass(eq=False)
class Line:
    """A branch, always with all done that was queued on it.

    error: why it stands still. from_parent: because its parent never came to the fork.
    pieces: what was written since the fork, with the role of what begins or ends a message.
    tail: what the operation that failed may have written, at least so many characters of it.
    """

    label: str
    key: int
    branch: Branch
    parent: Line | None = None
    base: str = ""
    inherited: dict[str, Cell] = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)
    own: dict[str, Cell] = field(default_factory=dict)
    pieces: list[tuple[str, Edge | None]] = field(default_factory=list)
    children: list[Line] = field(default_factory=list)
    scopes: list[int] = field(default_factory=list)
    error: str | None = None
    from_parent: bool = False
    cancelled: bool = False
    draws: int = 0
    forks: int = 0
    tail: Callable[[int], str] = lambda length: ""

    @property
    def maybe(self) -> bool:
        """It may have ended with a parent that was cancelled."""
        line = self.parent
        while line is not None and not line.cancelled:
            line = line.parent
        return line is not None

    @property
    def text(self) -> str:
        return self.base + "".join(text for text, _ in self.pieces)

    def cell(self, name: str) -> Cell | None:
        return self.own.get(name) or self.inherited.get(name)

    def cancel(self, *, all_below: bool) -> None:
        self.cancelled = True
        for child in self.children if all_below else ():
            child.cancel(all_below=True)


def shown(value: Any) -> Any:
    """A value in a form that can be compared."""
    if isinstance(value, list):
        return [shown(each) for each in value]
    if (logprobs := getattr(value, "logprobs", None)) is not None:
        return ["score", *(round(logprob, 6) for logprob in logprobs)]
    return value

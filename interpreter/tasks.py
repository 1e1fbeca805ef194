"""What waits in an executor's queue: operations, each with the variable that it resolves.

Queued by `state.py`, executed by `executor.py`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from stemma.interpreter.variable import Variable
from stemma.lang.ops import Gen, Operation

if TYPE_CHECKING:
    from stemma.interpreter.executor import Executor

Task = tuple[Operation, Variable | None]
NOT_YET = object()


@dataclass(frozen=True, slots=True)
class Fork(Operation):
    """Split the branch; `children` have been taking operations since `fork` returned."""

    children: tuple[Executor, ...]


@dataclass(frozen=True, slots=True)
class Call(Gen):
    """A generation whose value the program completes and then tells by `Define`, unless it is
    unreadable."""

    @classmethod
    def of(cls, gen: Gen) -> Call:
        return cls(**{each.name: getattr(gen, each.name) for each in fields(gen)})


@dataclass(frozen=True, slots=True)
class Define(Operation):
    """Tell those who follow the run of a variable that the program has set."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Tokens(Operation):
    """Ask for the ids of the branch."""


# An error that hits a thousand branches says of so many where they were.
MOST_NOTES = 10


def annotate(
    error: BaseException,
    operation: Operation,
    label: str,
    partial: str = "",
    *,
    variable: str | None = None,
    detail: str = "",
) -> None:
    """Say on the original exception where it belongs: which operation of which branch, its line,
    and what it had written. The attributes tell of the first operation that it hits.

    variable: the one that it would have written, where that is not the operation's own.
    detail: what the note says besides.
    """
    name = variable or getattr(operation, "name", None)
    with suppress(AttributeError):  # an exception of somebody else's, with slots
        if getattr(error, "site", None) is None:
            _set(error, site=operation.site, branch=label, variable=name)
            if partial:
                _set(error, partial=partial)
        if partial:
            partials = getattr(error, "partials", None)
            if not isinstance(partials, dict):
                _set(error, partials=(partials := {}))
            partials[label] = partial
    if len(getattr(error, "__notes__", ())) < MOST_NOTES:
        what = type(operation).__name__.lower() + (f" of {name!r}" if name else "")
        note = f"{what} on branch {label}, queued at {operation.site}{detail}"
        with suppress(AttributeError):
            error.add_note(note + (f", after writing {partial!r}" if partial else ""))


def hand_on(told: BaseException, error: BaseException) -> None:
    """Say on `error`, by which a run was interrupted, what its branches were told by `told`."""
    with suppress(AttributeError):
        for name in ("site", "branch", "variable", "partial", "partials"):
            _set(error, **{name: getattr(told, name, None)})
    for note in getattr(told, "__notes__", ()):
        error.add_note(note)


def _set(error: BaseException, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(error, name, value)

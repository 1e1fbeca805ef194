"""What waits in an executor's queue: operations, each with the variable that it resolves.

Queued by `state.py`, executed by `executor.py`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stemma.interpreter.variable import Variable
from stemma.lang.ops import Operation

if TYPE_CHECKING:
    from stemma.interpreter.executor import Executor

Task = tuple[Operation, Variable | None]
NOT_YET = object()


@dataclass(frozen=True, slots=True)
class Fork(Operation):
    """Split the branch; `children` have been taking operations since `fork` returned."""

    children: tuple[Executor, ...]


@dataclass(frozen=True, slots=True)
class Define(Operation):
    """Tell those who follow the run of a variable that the program has set."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Tokens(Operation):
    """Ask for the ids of the branch."""


def annotate(error: BaseException, operation: Operation, label: str, partial: str) -> None:
    """Say on the original exception where it belongs: the first branch that it hits."""
    if getattr(error, "site", None) is not None:
        return
    with suppress(AttributeError):  # an exception of somebody else's, with slots
        error.site = operation.site  # type: ignore[attr-defined]
    name = getattr(operation, "name", None)
    what = type(operation).__name__.lower() + (f" of {name!r}" if name else "")
    note = f"{what} on branch {label}, queued at {operation.site}"
    error.add_note(note + (f", after writing {partial!r}" if partial else ""))

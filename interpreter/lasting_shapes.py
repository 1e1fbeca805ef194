"""Whether a checkpoint will be able to keep what a generation comes to, asked before it is written.

Used by `ProgramState.append` in a batch with a checkpoint, so that nothing is paid for in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

from stemma.interpreter.json_objects import is_taken_apart, refuse_lost
from stemma.lang.constraints import Constraint
from stemma.lang.pieces import Capture, Piece, Shape

ShapeCheck = Callable[[Constraint | None, str], None]


def refuse_lost_shape(shape: Constraint | None, what: str) -> None:
    """Raise InvalidArgument for a shape with a class that its name does not lead to.

    what: names the variable in the error.
    """
    for kind in () if shape is None else _classes(shape):
        refuse_lost(kind, what)


def _classes(shape: Constraint) -> Iterator[type[Any]]:
    """The program's classes that a value of the shape, or of a capture in it, may have."""
    yield from _of_reader(shape.read)
    if shape.piece is not None:
        yield from _of_captures(shape.piece)


def _of_captures(piece: Piece) -> Iterator[type[Any]]:
    for part in piece.inside:
        if isinstance(piece, Capture) and isinstance(part, Shape):
            yield from _classes(part.constraint)
        yield from _of_captures(part)


def _of_reader(read: Any) -> Iterator[type[Any]]:
    from pydantic import TypeAdapter

    owner = getattr(read, "__self__", read)
    adapter = getattr(owner, "adapter", owner)
    if isinstance(adapter, TypeAdapter):
        yield from _of_adapter(adapter)
    elif isinstance(members := getattr(owner, "values", None), Mapping):  # by their texts
        yield from {type(member) for member in members.values() if isinstance(member, Enum)}
    for _, inner in getattr(owner, "readers", ()):  # of tools
        yield from _of_reader(inner)


@lru_cache(maxsize=256)
def _of_adapter(adapter: Any) -> tuple[type[Any], ...]:
    """The classes in pydantic's description of a type."""
    found: dict[type[Any], None] = {}
    waiting: list[Any] = [adapter.core_schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            kinds = (one.get("cls"), one.get("function") if one.get("type") == "call" else None)
            for kind in kinds:
                if isinstance(kind, type) and is_taken_apart(kind):
                    found[kind] = None
            waiting += [value for key, value in one.items() if key != "metadata"]
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, Enum):  # in a Literal
            found[type(one)] = None
    return tuple(found)

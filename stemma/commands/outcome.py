"""A run as one JSON object: what `stemma run --json` prints, and in part `stemma batch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from typing import Any

from stemma.interpreter.events import Failed, Forked, TextAdded, VariableFinished
from stemma.interpreter.state import ProgramState
from stemma.interpreter.stream import Stream
from stemma.lang.errors import ConstraintError, StemmaError, Truncated

_TIMES = (date, time, timedelta)


@dataclass(slots=True)
class Written:
    """What was written on one branch, without what it had from its parent.

    variables: those that came to be on it. unreadable: why some of them have no value. error: what
    the branch has failed by.
    """

    text: str = ""
    variables: dict[str, Any] = field(default_factory=dict)
    unreadable: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def outcome(stream: Stream) -> dict[str, Any]:
    """Wait for the end of a run; the object, whose keys are always the same.

    Waits for the events, and not in a read, so that Ctrl-C cancels the run. Raises what the run
    raises. A variable that cannot be read is None. Why is told by `unreadable`, by branch and
    variable; or by `errors`, by branch, of one that the program has cancelled itself, or that
    failed with the program going on.
    """
    written = follow(stream)
    state = stream.state
    own = written[state.label]
    own.variables, own.unreadable, error = read_variables(state)
    if error is not None:
        own.error = str(error)
    errors = {label: branch.error for label, branch in written.items() if branch.error is not None}
    unreadable = {label: told for label, branch in written.items() if (told := branch.unreadable)}
    return {
        "value": as_json(state.value),
        "variables": own.variables,
        "text": written.pop(state.label).text,
        "branches": {
            label: {"variables": as_json(branch.variables), "text": branch.text}
            for label, branch in written.items()
        },
        "errors": errors,
        "unreadable": unreadable,
        "usage": asdict(state.usage),
        "seed": state.seed,
    }


def read_variables(
    state: ProgramState,
) -> tuple[dict[str, Any], dict[str, Any], StemmaError | None]:
    """Those of the program's own branch, in JSON's types; None for one that cannot be read. Why
    not, by name, of those whose text has no value; and the error of all others.
    """
    variables: dict[str, Any] = {}
    unreadable: dict[str, Any] = {}
    failure: StemmaError | None = None
    for name in state.variables():
        try:
            variables[name] = as_json(state[name])
        except (Truncated, ConstraintError) as error:
            variables[name], unreadable[name] = None, _told(error)
        except StemmaError as error:
            variables[name], failure = None, error
    return variables, unreadable, failure


def _told(error: StemmaError) -> dict[str, Any]:
    """Why a text has no value. values: of several samples those of the others."""
    return {
        "error": f"{type(error).__name__}: {error}",
        "text": error.partial,
        "values": as_json(getattr(error, "values", ())),
    }


def follow(stream: Stream) -> dict[str, Written]:
    """What each branch has written, by label, in the order in which they began."""
    written = {stream.state.label: Written()}
    for event in stream:
        match event:
            case Forked(children=children):
                written.update((label, Written()) for label in children)
            case TextAdded(branch=label, text=text):
                written[label].text += text
            case VariableFinished(
                branch=label, variable=name, value=Truncated() | ConstraintError() as error
            ):
                written[label].variables[name] = None
                written[label].unreadable[name] = _told(error)
            case VariableFinished(branch=label, variable=name, value=value):
                written[label].unreadable.pop(name, None)
                written[label].variables[name] = value
            case Failed(branch=label, error=error):
                written[label].error = str(error)
    return written


def as_json(value: Any) -> Any:
    """The value in JSON's types; what has no such form becomes text.

    Models have the names that their schemas have, times are written as in a model.
    """
    if isinstance(value, Enum):  # as an option takes it
        return as_json(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, Mapping):
        return {str(as_json(key)): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(each) for each in value]
    if hasattr(value, "__pydantic_serializer__") or isinstance(value, _TIMES):
        return as_json(_plain(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    return str(value)


def _plain(value: Any) -> Any:
    from pydantic import TypeAdapter  # which takes a while

    serializer = TypeAdapter(Any).serializer
    return serializer.to_python(value, mode="json", by_alias=True, fallback=str)

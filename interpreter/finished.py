"""A finished state as a record in JSON, and such a record as a finished state again.

Used by `checkpoint.py`. The record has what can be read of the program's own branch; not the texts
of the branches that it forked.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from stemma.backend.base import Usage
from stemma.backend.plain_values import error_of, plain_error
from stemma.interpreter.json_values import decode, encode
from stemma.interpreter.state import ProgramState
from stemma.interpreter.transcript import Piece
from stemma.interpreter.variable import Variable
from stemma.lang.errors import Cancelled, Site, Truncated

_TEMPLATES = ("begin", "end", "control")


def record_of(state: ProgramState) -> dict[str, Any]:
    """The record of a state whose run has ended well.

    Raises InvalidArgument that names the value or variable that JSON cannot give back.
    """
    return {
        "value": encode(state.value, f"what {state.label} returned"),
        "variables": {
            name: _of_variable(state._variable(name), f"the variable {name!r} of {state.label}")
            for name in state.variables()
        },
        "pieces": [_of_piece(piece) for piece in state._executor.transcript],
        "usage": encode(state.usage, "usage"),
        "own_usage": encode(sum(state._executor.transcript.usages, Usage()), "usage"),
        "seed": state.seed,
        "draws": state._executor._draws,
        "forks": state._forks,
    }


def restore(state: ProgramState, record: dict[str, Any]) -> ProgramState:
    """Make a state that has just been opened the finished one of the record.

    It can go on; then its text is tokenised anew. Raises KeyError, TypeError or ValueError for what
    is no record.
    """
    run, executor = state._run, state._executor
    assert executor.branch is not None
    pieces = [_piece(each) for each in record["pieces"]]
    for piece in pieces:
        if piece.text:
            executor.branch.append(piece.text, control=piece.kind in _TEMPLATES)
        if piece.kind == "begin":
            state._open_role = piece.role
            state._roles = [*state._roles, str(piece.role)]
        elif piece.kind == "end":
            state._open_role = None
    executor.transcript.own += pieces
    executor.transcript.usages.append(decode(record["own_usage"]))
    run.seed = executor.key = record["seed"]
    executor._draws, state._forks = record["draws"], record["forks"]
    state._own.update((name, _variable(each)) for name, each in record["variables"].items())
    run.usages.append(decode(record["usage"]))
    run.value = decode(record["value"])
    run.finish()
    return state


# Fields that have their most common value are left out.


def _of_piece(piece: Piece) -> dict[str, Any]:
    record: dict[str, Any] = {"text": piece.text}
    for name in ("kind", "variable", "role", "note", "broken"):
        if (value := getattr(piece, name)) != Piece._field_defaults[name]:
            record[name] = value
    if piece.usage is not None:
        record["usage"] = encode(piece.usage, "usage")
    if piece.reads:
        record["reads"] = [
            [name, encode(each, f"the variable {name!r}")] for name, each in piece.reads
        ]
    return record


def _piece(record: dict[str, Any]) -> Piece:
    usage: Usage | None = decode(record.get("usage"))
    reads = tuple((name, decode(each)) for name, each in record.get("reads", ()))
    return Piece(**{**record, "usage": usage, "reads": reads})


def _of_variable(variable: Variable, what: str) -> dict[str, Any]:
    if variable.error is not None:  # of a branch that the program has cancelled itself
        return {"error": f"{type(variable.error).__name__}: {variable.error}"}
    record: dict[str, Any] = {"value": encode(variable.value, what)}
    if variable.raw is not None:
        record["raw"] = (
            record["value"] if variable.raw is variable.value else encode(variable.raw, what)
        )
    if variable.unreadable is not None:
        record["unreadable"] = encode(_of_error(variable.unreadable), what)
    if variable.meta is not None:
        record["meta"] = encode(variable.meta, what)
    for name, usual in (("samples", 1), ("streamed", False), ("told", 0)):
        if (value := getattr(variable, name)) != usual:
            record[name] = value
    return record


def _variable(record: dict[str, Any]) -> Variable:
    variable = Variable()
    if "error" in record:
        variable.fail(Cancelled(record["error"]))
        return variable
    variable.samples = record.get("samples", 1)
    variable.streamed = record.get("streamed", False)
    variable.told = record.get("told", 0)
    unreadable = record.get("unreadable")
    variable.finish(
        decode(record["value"]),
        raw=decode(record.get("raw")),
        meta=decode(record.get("meta")),
        unreadable=None if unreadable is None else _error(decode(unreadable)),
    )
    return variable


_NOTES = "__notes__"


def _of_error(error: BaseException) -> dict[str, Any]:
    """With where it belongs."""
    site = getattr(error, "site", None)
    told = {name: getattr(error, name, None) for name in ("branch", "variable", _NOTES)}
    if isinstance(error, Truncated):  # which says itself what is needed
        told["message"] = error.args[0]
    return {**plain_error(error), **told, "site": None if site is None else astuple(site)}


def _error(record: dict[str, Any]) -> Exception:
    site, notes = record.pop("site", None), record.pop(_NOTES, None)
    error = error_of(record)
    if site is not None:
        error.site = Site(*site)  # type: ignore[attr-defined]
    for note in notes or ():
        error.add_note(note)
    return error

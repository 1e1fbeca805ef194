"""`run(messages=[...])`: a conversation that a run starts from, checked where it is given.

Used by `options.py`, which checks, and `running.py`, which writes it on the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from stemma.interpreter.transcript import Message
from stemma.lang.errors import InvalidArgument, UnsupportedByBackend
from stemma.lang.ops import Chain, RoleBegin, RoleEnd, operations

if TYPE_CHECKING:
    from stemma.interpreter.state import ProgramState


def conversation_of(messages: Any) -> tuple[Chain, ...]:
    """The messages as expressions. Raises InvalidArgument that names the index of the first one
    that is no message, and what is wrong with it.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidArgument(
            f"messages: must be a list of messages, not {type(messages).__name__}"
        )
    checked = [_checked(index, message) for index, message in enumerate(messages)]
    return tuple(
        Chain((RoleBegin(m["role"]), *operations(m["content"]), RoleEnd(m["role"])))
        for m in checked
    )


def begin_with(state: ProgramState, conversation: Iterable[Chain]) -> None:
    """Append the messages. Raises UnsupportedByBackend that names the index of a message that the
    model's chat format cannot write.
    """
    for index, message in enumerate(conversation):
        try:
            state.append(message)
        except UnsupportedByBackend as error:
            raise UnsupportedByBackend(f"messages[{index}]: {error}") from error


def _checked(index: int, message: Any) -> Message:
    if not isinstance(message, Mapping):
        _refuse(index, f'must be a dict with "role" and "content", not {message!r}')
    for key in ("role", "content"):
        if key not in message:
            _refuse(index, f"has no {key!r}, only {', '.join(map(repr, message)) or 'nothing'}")
        if not isinstance(message[key], str):
            kind = type(message[key]).__name__
            _refuse(index, f"its {key} must be a string, not {kind}: {message[key]!r}")
    if not message["role"]:
        _refuse(index, "its role is empty")
    beyond = [key for key in message if key not in Message.__annotations__]
    if said := [key for key in beyond if message[key] is not None]:
        _refuse(index, f"has {', '.join(map(repr, said))}, which is neither role nor content")
    return {"role": message["role"], "content": message["content"]}


def _refuse(index: int, what: str) -> NoReturn:
    raise InvalidArgument(f"messages[{index}]: {what}")

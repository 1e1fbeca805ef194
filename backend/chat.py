"""How a model wants a conversation written: the control text around the turns of each role.

Owns the pieces; contents go between them verbatim and earlier turns are never written again. Used
by the interpreter for role operations, through `Backend.chat`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from stemma.backend.chat_pieces import TemplatePieces
from stemma.backend.chat_template import ChatTemplate, Message, Refused
from stemma.backend.chat_tools import ToolPieces, told_tools, tool_pieces
from stemma.lang.errors import ModelLoadError, UnsupportedByBackend

_REMEDY = (
    "Give the pieces yourself: backend.chat = ChatFormat(begin={'user': ..., 'assistant': ...}, "
    "end={'user': ..., 'assistant': ...})"
)


class ChatFormat:
    """The pieces around the contents of turns, given, or taken from a template.

    begin, end: role -> the control text that opens and closes its turns. start: what stands before
    the first turn. tools: what stands around tool calls and their results.

    All pieces are control text: added tokens spelled in them, BOS too, become control tokens. A
    branch puts no BOS of its own before control text, so a conversation has exactly the BOS that
    its first piece spells, or none.
    """

    def __init__(
        self,
        begin: Mapping[str, str],
        end: Mapping[str, str],
        *,
        start: str = "",
        tools: ToolPieces | None = None,
    ) -> None:
        self._begin, self._end, self._start = dict(begin), dict(end), start
        self._tools, self._tools_sought = tools, False
        self._template: ChatTemplate | None = None
        self._lack = f"this chat format has pieces for {', '.join(begin) or 'no role'}"
        self._pieces: TemplatePieces | None = None

    @classmethod
    def from_template(
        cls, template: str, *, bos_token: str | None = None, eos_token: str | None = None
    ) -> ChatFormat:
        """Take a Jinja template apart. Raises ModelLoadError with the remedy if that fails."""
        chat = cls({}, {})
        try:
            source = ChatTemplate(template, bos_token=bos_token, eos_token=eos_token)
            chat._template, chat._pieces = source, TemplatePieces(source)
            for role, previous in (
                ("user", ()),
                ("assistant", ("user",)),
                ("user", ("user", "assistant")),
            ):
                chat._pieces.begin(role, previous)
                chat._pieces.end(role)
        except Refused as error:
            raise ModelLoadError(
                f"the model's chat template cannot be used: {error}. {_REMEDY}"
            ) from error
        return chat

    @classmethod
    def absent(cls, reason: str = "the model has no chat template") -> ChatFormat:
        """Of a model without a usable template: every role is refused, with the reason and the
        remedy."""
        chat = cls({}, {})
        chat._lack = reason
        return chat

    def begin(self, role: str, previous: Sequence[str] = ()) -> str:
        """The control text that opens a turn of `role` after turns of the roles `previous`.

        That of the first turn starts with what every conversation starts with: BOS, a default
        system prompt. Raises UnsupportedByBackend.
        """
        if "tool" in (role, *previous) and (tools := self.tools()) is not None:
            if role == "tool":
                return tools.begin
            if role == "assistant" and previous[-1] == "tool":
                return tools.reply
            previous = _without_results(previous, role)
        if self._pieces is None:
            return ("" if previous else self._start) + self._written(self._begin, role)
        try:
            return self._pieces.begin(role, previous)
        except Refused as error:
            raise _unsupported(role, str(error)) from error

    def end(self, role: str) -> str:
        """The control text that closes a turn of `role`. Raises UnsupportedByBackend."""
        if role == "tool" and (tools := self.tools()) is not None:
            return tools.end
        if self._pieces is None:
            return self._written(self._end, role)
        try:
            return self._pieces.end(role)
        except Refused as error:
            raise _unsupported(role, str(error)) from error

    # Tools

    def tools(self) -> ToolPieces | None:
        """How the model writes tool calls and is told their results; None where its template has no
        form for them that can be found."""
        if self._template is not None and self._pieces is not None and not self._tools_sought:
            with suppress(Refused):
                self._tools = tool_pieces(self._template, self._pieces)
            self._tools_sought = True
        return self._tools

    def told_tools(self, schemas: Sequence[dict[str, Any]]) -> str | None:
        """The control text by which the template tells a model of tools; None where it does not.

        schemas: of each its name, description and parameters, as `Tool.schema` gives them.
        """
        if self._template is None:
            return None
        with suppress(Refused):
            return told_tools(self._template, schemas)
        return None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """A conversation, (role, content) each, as one text. Raises UnsupportedByBackend."""
        roles = [role for role, _ in messages]
        parts: list[str] = []
        for n, (role, content) in enumerate(messages):
            parts += [self.begin(role, roles[:n]), content, self.end(role)]
        if add_generation_prompt:
            parts.append(self.begin("assistant", roles))
        return "".join(parts)

    def differences(self) -> list[str]:
        """Where this is not what `apply_chat_template` gives, a sentence each."""
        return self._pieces.differences() if self._pieces is not None else []

    def _written(self, pieces: Mapping[str, str], role: str) -> str:
        if role not in pieces:
            raise _unsupported(role, self._lack)
        return pieces[role]


def _without_results(previous: Sequence[str], role: str) -> list[str]:
    """The turns without tool results, so that those which follow a result follow the question."""
    turns: list[str] = []
    for turn, following in zip(previous, [*previous[1:], role], strict=True):
        if turn != "tool":
            turns.append(turn)
        elif following == "assistant" and turns[-1:] == ["assistant"]:
            turns.pop()
    return turns


def _unsupported(role: str, reason: str) -> UnsupportedByBackend:
    return UnsupportedByBackend(f"a turn of {role!r} cannot be written: {reason}. {_REMEDY}")

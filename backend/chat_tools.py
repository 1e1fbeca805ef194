"""How a model's chat template writes tool calls, their results and the tools that there are: found
by rendering a conversation of marked names and contents.

Owns what is known of one template's tools. Called by `chat.py` only; `ToolPieces` is a value that
the interpreter is given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stemma.backend.chat_pieces import TemplatePieces
from stemma.backend.chat_template import ChatTemplate, Refused
from stemma.lang.tools import CallForm

_USER, _TEXT, _NAME, _RESULT, _REPLY = (
    f"qz{what}zq" for what in ("User", "Text", "Name", "Result", "Reply")
)
_ID = "call00000"  # of every call; nine letters and digits, as some templates demand
_ARGUMENTS = {"qzOnezq": "qzTwozq", "qzThreezq": 3}
_WRITTEN = {  # by the white space between the parts of JSON
    "spaced": json.dumps(_ARGUMENTS),
    "compact": json.dumps(_ARGUMENTS, separators=(",", ":")),
}
_SCHEMA = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "qzSaidzq",
        "parameters": {
            "type": "object",
            "properties": {"qzOnezq": {"type": "string"}, "qzThreezq": {"type": "integer"}},
            "required": ["qzOnezq"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class ToolPieces:
    """What stands around a tool call in an assistant's message, and around a tool's result.

    call: of the call, within the message. begin, end: control text that opens and closes the
    message of a result. reply: what opens the assistant's message behind it. quoted: a result is
    written as within a JSON string.
    """

    call: CallForm
    begin: str
    end: str
    reply: str
    quoted: bool = False

    def dumps(self) -> str:
        """As a line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(line: str) -> ToolPieces:
        """What `dumps` was called on."""
        fields = json.loads(line)
        return ToolPieces(**{**fields, "call": CallForm(**fields["call"])})


def tool_pieces(template: ChatTemplate, pieces: TemplatePieces) -> ToolPieces:
    """The pieces of a template that knows tools. Raises Refused, with the reason, for another."""
    refused: Refused | None = None
    for arguments in (_ARGUMENTS, _WRITTEN["spaced"]):  # some templates write a string as it is
        try:
            return _taken_apart(template, pieces, arguments)
        except Refused as error:
            refused = refused or error
    assert refused is not None
    raise refused


def told_tools(template: ChatTemplate, schemas: Sequence[dict[str, Any]]) -> str | None:
    """What a template adds to a conversation for a model that may call tools; None for a template
    that adds nothing. Raises Refused."""
    for roles in (("system", "user"), ("user",)):
        contents = [f"qz{role}zq" for role in roles]
        messages = [
            {"role": role, "content": content}
            for role, content in zip(roles, contents, strict=True)
        ]
        try:
            bare = _split(template.render_fully(messages), *contents)
        except Refused:
            continue
        told = _split(template.render_fully(messages, tools=schemas), *contents)
        added = [_added(a, b).strip("\n") for a, b in zip(bare, told, strict=True)]
        return "\n\n".join(filter(None, added)) or None
    return None


def _added(bare: str, told: str) -> str:
    """What `told` has besides what `bare` has, in one passage."""
    begin = _shared(bare, told)
    bare, rest = bare[begin:], told[begin:]
    end = _shared(bare[::-1], rest[::-1])
    last = len(told) - end
    while begin < last and begin and told[begin - 1] == told[last - 1]:  # "[a][" is "[a]" as well
        begin, last = begin - 1, last - 1
    return told[begin:last]


def _shared(a: str, b: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _taken_apart(
    template: ChatTemplate, pieces: TemplatePieces, arguments: dict[str, Any] | str
) -> ToolPieces:
    done = template.render_fully(_conversation(arguments), tools=[_SCHEMA])
    whitespace, written = next((each for each in _WRITTEN.items() if each[1] in done), ("", ""))
    if not whitespace:
        raise Refused("the template does not write a tool call's arguments as JSON")
    told = done.rfind(_USER) + len(_USER)  # the tools are told of before or with the question
    before, between, rest = _split(done[told:], _NAME, written)
    opening = pieces.end("user") + pieces.begin("assistant", ("user",))
    behind = _behind(template, arguments, written)
    if before.startswith(opening):
        before = before.removeprefix(opening)
    elif behind is not None:  # the generation prompt says more than the history
        before = behind.lstrip("\n")
    else:
        raise Refused(f"before a tool call the template puts {before!r}, not {opening!r}")
    close = pieces.end("assistant")
    after, closed, begin = rest[: rest.index(_RESULT)].partition(close) if close else ("", "", "")
    if not closed:
        raise Refused(f"behind a tool call the template does not put {close!r}")
    end, reply, quoted = _result(template, pieces, arguments)
    if _NAME in begin + end:
        raise Refused("the template writes a tool's name with its result")
    form = CallForm(before, before if behind is None else behind, between, after, whitespace)
    return ToolPieces(form, begin, end, reply, quoted)


def _conversation(
    arguments: dict[str, Any] | str, *, text: str = "", result: str = _RESULT, replied: bool = True
) -> list[dict[str, Any]]:
    function = {"name": _NAME, "arguments": arguments}
    call = {"type": "function", "id": _ID, "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": _USER},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "name": _NAME, "tool_call_id": _ID, "content": result},
    ]
    return [*messages, {"role": "assistant", "content": _REPLY}] if replied else messages


def _split(text: str, *marks: str) -> list[str]:
    """What stands before, between and behind the marks. Raises Refused where one is missing."""
    found = []
    for mark in marks:
        before, there, text = text.partition(mark)
        if not there:
            raise Refused("the template does not write a tool call with name and arguments")
        found.append(before)
    return [*found, text]


def _result(
    template: ChatTemplate, pieces: TemplatePieces, arguments: dict[str, Any] | str
) -> tuple[str, str, bool]:
    """What closes a result's message, what opens the reply behind it, and whether a result is
    written as in a JSON string."""
    content = f'{_RESULT}"{_RESULT}'
    conversation = _conversation(arguments, result=content, replied=False)
    prompted = template.render_fully(conversation, tools=[_SCHEMA], add_generation_prompt=True)
    quoted = content not in prompted
    written = json.dumps(content)[1:-1] if quoted else content
    if written not in prompted:
        raise Refused("the template changes what a tool has returned")
    end, opening = prompted.rpartition(written)[2], pieces.begin("assistant", ("user",))
    if not end.endswith(opening):  # the reply goes on in the same turn
        opening = ""
    return end.removesuffix(opening), opening, quoted


def _behind(template: ChatTemplate, arguments: dict[str, Any] | str, written: str) -> str | None:
    """What stands between a text and a call in one message; None where the template drops either,
    or puts the text elsewhere."""
    try:
        done = template.render_fully(_conversation(arguments, text=_TEXT), tools=[_SCHEMA])
        return _split(done, _TEXT, _NAME, written)[1] if done.count(_TEXT) == 1 else None
    except Refused:
        return None

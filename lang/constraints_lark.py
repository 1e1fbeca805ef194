"""The tokens of a grammar in Lark, its definitions, and which of them a text can complete.

Used by `constraints_grammar.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""(?P<newline>\n)
    |(?P<skip>[ \t\r\f]+|(?://|\#)[^\n]*)
    |(?P<data>%(?:json|regex|llguidance)\b[ \t\r\n]*(?=\{))
    |(?P<directive>%[a-z]+)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<special><[^<>\s]*>)
    |(?P<reference>@[a-zA-Z0-9_\-]+)
    |(?P<name>!?[_?]?[a-z][a-z0-9_\-]*|_?[A-Z][A-Z0-9_\-]*)
    |(?P<number>[0-9]+)
    |(?P<mark>::|\.\.|->|.)""",
    re.VERBOSE,
)


@dataclass(slots=True)
class Token:
    kind: str
    text: str
    at: int


@dataclass(slots=True)
class Definition:
    name: str
    at: int
    body: list[Token] = field(default_factory=list)


def last_open(tokens: Iterable[Token]) -> Token | None:
    """The last bracket that nothing closes."""
    opened: list[Token] = []
    for token in tokens:
        if token.kind == "mark" and token.text in "([{":
            opened.append(token)
        elif token.kind == "mark" and token.text in ")]}" and opened:
            opened.pop()
    return opened[-1] if opened else None


def endless_rule(definitions: dict[str, Definition]) -> Definition | None:
    """A rule that no text can ever complete, one that needs itself if there is one."""
    users: dict[str, list[str]] = {}
    for name, definition in definitions.items():
        for token in definition.body:
            if token.kind == "name":
                users.setdefault(token.text.lstrip("!?"), []).append(name)
    ending: set[str] = set()
    waiting = list(definitions)
    while waiting:  # a rule is looked at again when one that it uses proves to end
        name = waiting.pop()
        if name not in ending and _can_end(definitions[name].body, ending, definitions):
            ending.add(name)
            waiting += users.get(name, ())
    endless = {name: body for name, body in definitions.items() if name not in ending}
    selfish = (name for name in endless if _needs_itself(name, endless))
    culprit = next(selfish, next(iter(endless), None))
    return None if culprit is None else endless[culprit]


def _needs_itself(name: str, endless: dict[str, Definition]) -> bool:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for token in endless[waiting.pop()].body:
            below = token.text.lstrip("!?")
            if below == name and token.kind == "name":
                return True
            if token.kind == "name" and below in endless and below not in seen:
                seen.add(below)
                waiting.append(below)
    return False


def _can_end(body: list[Token], ending: set[str], known: dict[str, Definition]) -> bool:
    """Whether one alternative of a body has only parts that can end. What is optional can; so can
    all that this reading does not know."""
    # One frame per open group: whether an alternative before was good, and the one being read is.
    frames = [[False, True]]
    good = True
    index = 0
    while index <= len(body):
        text = body[index].text if index < len(body) else ""
        kind = body[index].kind if index < len(body) else "end"
        if kind == "mark" and text in "([":
            frames.append([False, True])
        elif kind == "mark" and text == "|":
            frames[-1] = [frames[-1][0] or frames[-1][1], True]
        elif (kind == "mark" and text in ")]") or kind == "end":
            before, now = frames.pop()
            if not frames:
                return before or now
            good = before or now or text == "]" or _optional(body, index + 1)
            frames[-1][1] = frames[-1][1] and good
        elif kind == "name" and text.lstrip("!?") in known:
            good = text.lstrip("!?") in ending or _optional(body, index + 1)
            frames[-1][1] = frames[-1][1] and good
        index += 1
    return True


def _optional(body: list[Token], index: int) -> bool:
    """Whether what stands at `index` allows what stands before it to be left out."""
    texts = [token.text for token in body[index : index + 2]]
    return texts[:1] in (["?"], ["*"]) or texts in (["{", "0"], ["{", ","], ["~", "0"])

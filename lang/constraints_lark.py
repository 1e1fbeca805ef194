"""The tokens of a grammar in Lark, its definitions, and which of them a text can complete.

Used by `constraints_grammar.py`.
"""

from __future__ import annotations

import re
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


def can_end(body: list[Token], ending: set[str], known: dict[str, Definition]) -> bool:
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

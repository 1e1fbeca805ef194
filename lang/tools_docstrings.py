"""What a function's docstring says of it and of its parameters, in any of the usual ways to write
that: Google's, NumPy's, Sphinx's, or plain `name: what it is`.

Used by `tools.py`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection

_SPHINX = re.compile(r":param (?:[^:]* )?(\w+): *(.*)")
_PLAIN = re.compile(r"(\w+)(?: *\([^)]*\))?: +(.*)")
_NUMPY = re.compile(r"(\w+)(?: *: .*)?$")
_PARAMETERS = ("args:", "arguments:", "parameters:", "parameters")
_OTHERS = re.compile(
    r"(?:returns?|raises?|yields?|examples?|notes?|see also)(?::|$)|:(?:returns?|raises?|rtype)\b",
    re.IGNORECASE,
)


def told_by(docstring: str | None, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """The description of a function without its sections, and that of each parameter among `names`
    that it describes."""
    description: list[str] = []
    parameters: dict[str, list[str]] = {}
    current: list[str] | None = description
    indent, in_section, underlined = 0, False, False
    lines = inspect.cleandoc(docstring or "").splitlines() or [""]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        text, depth = line.strip(), len(line) - len(line.lstrip())
        ruled = bool(re.fullmatch(r"-{3,}", following.strip()))
        if re.fullmatch(r"-{3,}", text) and underlined:
            continue
        underlined = ruled
        if text.lower() in _PARAMETERS and (text.endswith(":") or ruled):
            in_section, current = True, None
        elif depth == 0 and _OTHERS.match(text) and (ruled or not text[-1:].isalpha()):
            in_section, current = False, None
        elif found := _parameter(text, names, in_section):
            name, said = found
            current, indent = parameters.setdefault(name, [said]), depth
        elif current is not None and (current is description or depth > indent or not text):
            current.append(text)
        elif current is not description:
            current = None
    told = {name: " ".join(texts).strip() for name, texts in parameters.items()}
    return "\n".join(description).strip(), {name: text for name, text in told.items() if text}


def _parameter(text: str, names: Collection[str], in_section: bool) -> tuple[str, str] | None:
    for pattern in (_SPHINX, _PLAIN):
        if (found := pattern.match(text)) and found[1] in names:
            return found[1], found[2]
    if in_section and (found := _NUMPY.match(text)) and found[1] in names:
        return found[1], ""
    return None

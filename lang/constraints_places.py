"""Places in a source as errors show them: the line, with a caret below.

Used by what reads constraints.
"""

from __future__ import annotations

import re


def place(source: str, at: int) -> str:
    """The line of a position, with a caret below."""
    line = source.count("\n", 0, at)
    begin = source.rfind("\n", 0, at) + 1
    return pointed(source, line + 1, at - begin + 1)


def pointed(source: str, line: int, column: int) -> str:
    """A line, counted from 1, and a caret under its column; long lines are cut around it."""
    lines = source.split("\n")
    text = lines[line - 1].rstrip("\r") if line <= len(lines) else ""
    from_ = max(0, column - 61)
    shown = re.sub(r"[\x00-\x1f\x7f]", " ", text[from_ : from_ + 100])
    head = f"{line:>4} | "
    return f"{head}{shown}\n{' ' * (len(head) + column - 1 - from_)}^"

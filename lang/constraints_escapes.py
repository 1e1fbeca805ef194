"""Texts in quotes in a grammar in Lark: what of them llguidance cannot read, and what to write.

Used by `constraints_grammar.py`.
"""

from __future__ import annotations

import re

_KNOWN = re.compile(r"""\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})|[^\\\x00-\x1f\x7f]""")
_SURROGATE = re.compile(r"\\u[dD][89abAB]..(?P<low>\\u[dD][c-fC-F]..)?|\\u[dD][c-fC-F]..")
_HEX = {"u": "four hexadecimal digits, as \\u00e9", "x": "two hexadecimal digits, as \\x41"}


def fault_of_text(text: str) -> tuple[int, str] | None:
    """Where a text in quotes has an escape or a character that none can have, and what to write
    there; None where it has none."""
    at = 1
    end = text.rindex('"')
    while at < end:
        if (found := _KNOWN.match(text, at)) is None:
            return at, _remedy(text[at : at + 2])
        if pair := _SURROGATE.match(text, at):
            if not pair["low"]:
                return at, f"{pair[0]} is half of a surrogate pair: write the character itself"
            found = pair
        at = found.end()
    return None


def _remedy(found: str) -> str:
    sign = found[1:]
    if found[0] != "\\":
        return f"a text cannot have this character as it is: write \\u{ord(found[0]):04x}"
    unknown = f"a text has no escape {found}"
    if sign in _HEX:
        return f"{found} has {_HEX[sign]}"
    if sign in ("U", "N"):
        return f"{unknown}: write the character itself"
    if sign.isdigit():
        return f"{unknown}: write \\u and four hexadecimal digits, as \\u0000"
    if sign in tuple("dDwWsSpP"):
        return f"{unknown}: for a class of characters write a regular expression, /{found}/"
    return f"{unknown}: leave the backslash out, or write two for one that is meant"

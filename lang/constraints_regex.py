"""Regular expressions as constraints: the dialect of Rust's `regex` crate, checked where written.

Used by `constraints.py` and `constraints_types.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NoReturn

from stemma.lang.constraints_matcher import emptiness, refusal
from stemma.lang.errors import InvalidArgument

_ASSERTIONS = {
    "Start": "^",
    "End": "$",
    "StartLF": "^",
    "EndLF": "$",
    "StartCRLF": "^",
    "EndCRLF": "$",
    "WordUnicode": r"\b",
    "WordUnicodeNegate": r"\B",
    "WordAscii": r"\b",
    "WordAsciiNegate": r"\B",
}
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")


def compiled_regex(pattern: str) -> str:
    """llguidance's form of a regular expression that the whole text must match.

    Raises InvalidArgument for one that is malformed, that needs to look around or back, that is
    possessive, or that matches nothing; with a caret below the place where there is one.
    """
    from llguidance import LLMatcher

    for at, text in _pieces(pattern):
        if text == "possessive":
            _refuse(pattern, at, "possessive quantifiers are not supported: leave the '+' out")
    compiled = LLMatcher.grammar_from_regex(pattern)
    if message := refusal(compiled):
        _refuse_as_llguidance_does(pattern, message)
    if reason := emptiness(compiled):
        matches = "matches nothing" if reason == "nothing" else f"is too complex: {reason}"
        raise InvalidArgument(f"regex={_short(pattern)}: it {matches}")
    return compiled


def literal(text: str) -> str:
    """A regular expression that matches exactly `text`."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/\s]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)


def any_of(texts: Iterable[str]) -> str:
    """A regular expression that matches each of the texts and nothing else."""
    return f"(?:{'|'.join(map(literal, texts))})"


def can_contain(pattern: str, text: str) -> bool:
    """Whether some text that matches `pattern` has `text` in it."""
    from llguidance import LLMatcher, regex_to_lark

    inside = regex_to_lark(pattern, "").replace("\n", r"\n")
    both = f"start: BOTH\nBOTH: /{inside}/ & /(?s:.*){literal(text)}(?s:.*)/\n"
    compiled = LLMatcher.grammar_from_lark(both)
    return bool(refusal(compiled)) or emptiness(compiled) != "nothing"


def _pieces(pattern: str) -> Iterator[tuple[int, str]]:
    """What of a pattern is outside of character classes: escapes, single characters, and
    "possessive" at a `+` that follows a quantifier."""
    at, depth = 0, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            if not depth:
                yield at, pattern[at : at + 2]
            at += 2
        elif character == "[":
            depth += 1
            at += 2 if pattern[at + 1 : at + 2] == "]" else 1
        elif character == "]" and depth:
            depth -= 1
            at += 1
        elif not depth and (found := _QUANTIFIER.match(pattern, at)) and at:
            at = found.end()
            if pattern[at : at + 1] == "+":
                yield at, "possessive"
        else:
            if not depth:
                yield at, character
            at += 1


def _refuse_as_llguidance_does(pattern: str, message: str) -> NoReturn:
    if found := re.search(r"look\w* not supported yet; (\w+) in regex", message):
        sign = _ASSERTIONS.get(found[1], found[1])
        places = [at for at, text in _pieces(pattern) if text == sign]
        if sign in "^$":  # those at the ends are allowed
            places = [at for at in places if 0 < at < len(pattern) - 1] or places
        said = f"{sign} is not supported here; the whole text must match, so ^ and $ are not needed"
        _refuse(pattern, places[0] if places else None, said)
    if found := re.search(r"regex parse error:\n(.*)\nerror: ([^\n]*)", message, re.DOTALL):
        shown = found[1].split("\n   1 | ")[0]
        raise InvalidArgument(f"regex={_short(pattern)}: {found[2]}\n{shown[:2_000]}")
    said = message.strip().split("\n")[0]
    raise InvalidArgument(f"regex={_short(pattern)}: {said[:500]}")


def _refuse(pattern: str, at: int | None, said: str) -> NoReturn:
    shown = ""
    if at is not None and "\n" not in pattern:
        begin = max(0, at - 60)
        shown = f"\n    {pattern[begin : begin + 100]}\n    {' ' * (at - begin)}^"
    raise InvalidArgument(f"regex={_short(pattern)}: {said}{shown}")


def _short(pattern: str) -> str:
    return repr(pattern) if len(pattern) <= 100 else f"{pattern[:100]!r}..."

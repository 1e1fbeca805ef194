"""Regular expressions as constraints: the dialect of Rust's `regex` crate, checked where written.

Used by `constraints.py` and `constraints_types.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NoReturn

from stemma.lang.constraints_limits import MOST_CLASSES, MOST_LEAST, MOST_LOOSE, meaning
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
_LOOSE = re.compile(r"[*?]|\{0+[,}]")
_CLASS = re.compile(r"\\[pPwWdDsS]|\[")
_PART = re.compile(
    r"\\(?:[xuUpPb]\{[^}]*\}|x\w\w|u\w{4}|U\w{8}|.)|\(\?[a-zA-Z-]*\)"
    rf"|\((?:\?(?:[a-zA-Z-]*:|P?<\w*>))?|{_QUANTIFIER.pattern}|.",
    re.DOTALL,
)
_NONE = 2**62  # longer than anything
_WORD = 2**32  # llguidance counts below it


def compiled_regex(pattern: str) -> str:
    """llguidance's form of a regular expression that the whole text must match.

    Raises InvalidArgument for one that is malformed, that needs to look around or back, that is
    possessive, or that matches nothing; with a caret below the place where there is one.
    """
    from llguidance import LLMatcher

    for (_, text), (at, after) in pairwise(_parts(pattern)):
        if after == "+" and _QUANTIFIER.fullmatch(text):
            _refuse(pattern, at, "possessive quantifiers are not supported: leave the '+' out")
    if large := too_long(pattern):
        _refuse(pattern, *large)
    compiled = LLMatcher.grammar_from_regex(pattern)
    if message := refusal(compiled):
        _refuse_as_llguidance_does(pattern, message)
    if reason := emptiness(compiled):
        matches = "it matches nothing" if reason == "nothing" else f"it is too complex: {reason}"
        raise InvalidArgument(f"regex={_short(pattern)}: {matches}")
    return compiled


def too_long(pattern: str) -> tuple[int, str] | None:
    """Where a pattern repeats something more often than a text can, and what to say there; None
    where it does not."""
    sums = [[_NONE, 0]]  # of each open group: its shortest alternative, and that being read
    last = 0  # how many characters what was read last has at least
    before = ""
    if (loose := loose_parts(pattern)) > MOST_LOOSE:
        return len(pattern), (
            f"{loose:,} parts may be left out (by *, ? or {{0,...}}); at most {MOST_LOOSE:,} are "
            "taken: write less at once, or use a grammar of rules"
        )
    if (classes := sum(bool(_CLASS.match(text)) for _, text in _parts(pattern))) > MOST_CLASSES:
        return len(pattern), (
            f"{classes:,} classes of characters; at most {MOST_CLASSES:,} are taken: write less at "
            "once, or use repeats"
        )
    for at, text in _parts(pattern):
        if lazy := text == "?" and bool(_QUANTIFIER.fullmatch(before)):
            pass
        elif _QUANTIFIER.fullmatch(text):
            counts = [int(count[:20]) for count in re.findall(r"\d+", text)] or [int(text == "+")]
            if max(counts) >= _WORD:
                return at, f"{text:.40} is too large; at most {_WORD - 1:,} is taken"
            least = last * counts[0]
            if least > MOST_LEAST:
                return at, (
                    f"{text:.40} stands for at least {least:,} characters; at most "
                    f"{MOST_LEAST:,} are taken"
                )
            sums[-1][1] += least - last
            last = least
        elif text == "|":
            sums[-1] = [min(sums[-1]), 0]
        elif text == ")" and len(sums) > 1:
            last = min(sums.pop())
            sums[-1][1] += last
        elif text.startswith("(") and not text.endswith(")"):
            sums.append([_NONE, 0])
        else:
            last = int(text not in ("^", "$") and not text.startswith("("))
            sums[-1][1] += last
        before = "" if lazy else text
    return None


def loose_parts(pattern: str) -> int:
    """How many parts of a pattern may be left out. What such ones cost grows with their square."""
    loose = 0
    before = ""
    for _, text in _parts(pattern):
        loose += bool(_LOOSE.match(text)) and not _QUANTIFIER.fullmatch(before)
        before = text
    return loose


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


def _parts(pattern: str) -> Iterator[tuple[int, str]]:
    """The parts of a pattern with their places: characters, escapes, classes (as "["), the
    beginnings and ends of groups, quantifiers."""
    at = 0
    while at < len(pattern):
        if pattern[at] == "[":
            yield at, "["
            at = _end_of_class(pattern, at)
        elif found := _PART.match(pattern, at):
            yield at, found[0]
            at = found.end()


def _end_of_class(pattern: str, at: int) -> int:
    depth = 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 2
            continue
        if character == "[":
            depth += 1
            at += 1 if pattern[at + 1 : at + 2] == "]" else 0
        elif character == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return at


def _refuse_as_llguidance_does(pattern: str, message: str) -> NoReturn:
    if found := re.search(r"look\w* not supported yet; (\w+) in regex", message):
        sign = _ASSERTIONS.get(found[1], found[1])
        places = [at for at, text in _parts(pattern) if text == sign]
        if sign in "^$":  # those at the ends are allowed
            places = [at for at in places if 0 < at < len(pattern) - 1] or places
        said = f"{sign} is not supported here; the whole text must match, so ^ and $ are not needed"
        _refuse(pattern, places[0] if places else None, said)
    if found := re.search(r"regex parse error:\n(.*)\nerror: ([^\n]*)", message, re.DOTALL):
        if "\n" not in pattern and (caret := re.search(r"\n( *)\^", found[1])):
            _refuse(pattern, len(caret[1]) - 4, meaning(found[2]))
        shown = found[1].split("\n   1 | ")[0]
        raise InvalidArgument(f"regex={_short(pattern)}: {meaning(found[2])}\n{shown[:2_000]}")
    raise InvalidArgument(f"regex={_short(pattern)}: {meaning(message):.500}")


def _refuse(pattern: str, at: int | None, said: str) -> NoReturn:
    shown = ""
    if at is not None and "\n" not in pattern:
        begin = max(0, at - 60)
        shown = f"\n    {pattern[begin : begin + 100]}\n    {' ' * (at - begin)}^"
    raise InvalidArgument(f"regex={_short(pattern)}: {said}{shown}")


def _short(pattern: str) -> str:
    return repr(pattern) if len(pattern) <= 100 else f"{pattern[:100]!r}..."

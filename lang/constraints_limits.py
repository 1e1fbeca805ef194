"""What a constraint may cost, and what to say where that is not enough.

llguidance limits what it spends on a grammar and on each step of a walk, and says so in its own
terms; here are the limits that it is given, and what each of its messages means for what the user
wrote. Used wherever it may hit one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llguidance import LLParserLimits

K = TypeVar("K", bound=Hashable)

MOST_ALTERNATIVES = 5_000  # of all rules of a grammar; a row of its parser may hold them all
MOST_LEAST = 256 * 1024  # characters of the shortest text: as many as a source may have
MOST_COUNT = 2**31 - 1  # of a repeat
MOST_LOOSE = 2_000  # parts of a regular expression that may be left out; squared time and memory
MOST_CLASSES = 10_000  # of characters in a regular expression; a large one takes 14 kB
MOST_MEETING = 12  # expressions that must hold at once; each may double what the others cost
_ROW = 6_000  # takes squared time: up to a fortieth of a second

_TERMINAL = (
    'write plain texts as one terminal, its name in capitals (WORD: "a" | "b"), and prefer '
    "`list: item | list item` to `list: item | item list`"
)
_EXPRESSION = "give its repeats smaller bounds, or let fewer of them stand beside each other"
_MEANINGS = (
    (
        r"Current row has (\d+) items; max is (\d+)",
        f"{{0}} rules are open at once, and at most {{1}} can be: {_TERMINAL}",
    ),
    (
        r"Too many items \(limit (\d+)",
        f"it is too ambiguous: one step has more than {{0}} ways to be read: {_TERMINAL}",
    ),
    (
        r"too many expressions constructed",
        f"a regular expression has too many ways to go on at once: {_EXPRESSION}",
    ),
    (
        r"too many states: (\d+)",
        f"a regular expression has more than {{0}} states: {_EXPRESSION}",
    ),
    (
        r"initial lexer configuration \(grammar\) too big \(limit for this grammar: (\d+)",
        "its regular expressions are too large together (the limit is {0}): " + _EXPRESSION,
    ),
    (
        r"grammar size \(number of symbols\) too big \(limit for this grammar: (\d+)",
        "its rules have more than {0} symbols, with repeats written out: use fewer or shorter ones",
    ),
    (
        r"fuel exhausted when checking relevance of lexemes \((\d+)",
        "whether its regular expressions match anything takes more than {0} steps to find out: "
        "let fewer of them meet (`&`, `~`, allOf)",
    ),
    (
        r"lark grammar too deeply nested",
        "its groups are nested too deep: make rules of the inner ones",
    ),
    (
        r"exceed the maximum number of nested parentheses/brackets \((\d+)\)",
        "its groups are nested more than {0} deep: leave out those that group nothing",
    ),
    (
        r"Unable to determine if regex is empty",
        "whether some text fits all its patterns takes too long to find out: let fewer meet, as in "
        "allOf, or write one that says the same",
    ),
    (
        r"symbols\.len\(\) < u16::MAX",
        "its rules have more than 65,000 symbols, in GBNF one for each character of a text: use "
        "fewer or shorter ones",
    ),
    (
        r"lexer precomputation failed|initial_lexer_fuel",
        "its regular expressions take too long to prepare: " + _EXPRESSION,
    ),
    (r"^NoExtension", "no text goes on from here"),
    (r"schema too large", "it is too large when the cases of allOf are written out: use fewer"),
)


def parser_limits() -> LLParserLimits:
    """What one step of a walk may cost. A mask that hits a limit has taken a tenth of a second."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, max_items_in_row=_ROW)


def meaning(reason: str) -> str:
    """What llguidance's word for a limit that was hit means, and the remedy; its first line, as
    what it says, where it is none that is known."""
    for pattern, said in _MEANINGS:
        if found := re.search(pattern, reason):
            return said.format(*(f"{int(number):,}" for number in found.groups()))
    first = reason.strip().partition("\n")[0] or "nothing about it"
    return f"llguidance says: {first}"


def gathered(
    start: Iterable[K], own: Callable[[K], int], parts: Callable[[K], Iterable[K]], most: int
) -> K | None:
    """The first of those that count for more than `most`, with all that they are made of; None
    where there is none. What is part of itself counts as nothing there."""
    known: dict[K, int] = {}
    for first in start:
        waiting = [first]
        while waiting:
            one = waiting[-1]
            if known.get(one, -1) >= 0:
                waiting.pop()
                continue
            below = list(parts(one))
            new = [] if one in known else [each for each in below if each not in known]
            known.setdefault(one, -1)  # being counted
            if not new:
                total = own(one) + sum(max(known.get(each, 0), 0) for each in below)
                known[one] = min(total, most + 1)
                waiting.pop()
            waiting += new
        if known[first] > most:
            return first
    return None

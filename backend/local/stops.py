"""Stop strings and stop expressions, watched in a text that grows.

Owns the decision where a text ends and how much of it may still become part of a stop. Called by
`detokenize.py`, and by the scripted backend on a whole reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import regex  # type: ignore[import-untyped]

from stemma.lang.errors import ConstraintError

EXPRESSION_SECONDS = 0.1
"""What one search with a stop expression may take: meanwhile all other requests wait."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop found: its place in the text, in characters, and what it matched."""

    start: int
    end: int
    text: str


class StopWatch:
    """Finds the first stop in a text that is fed in pieces, the same however it is divided.

    The stop that is complete at the earliest character wins; of those complete there, the one that
    begins first. An expression matches as soon as the text so far holds a match. Strings cost time
    in proportion to the new text; an expression whose beginning stays open (`a.*b`) is tried again
    from there for every character.

    settled: the first `settled` characters can no longer be part of a stop.
    """

    def __init__(self, strings: Sequence[str], expression: regex.Pattern[str] | None) -> None:
        self._strings = tuple(strings)
        self._expression = expression
        # The text from `_offset` on: all of it for an expression, which may look behind, else what
        # is not settled.
        self._text = ""
        self._offset = 0
        self.settled = 0

    def feed(self, new: str) -> StopMatch | None:
        """Look at more text. Not to be called again after a match."""
        start, old = self.settled - self._offset, len(self._text)
        self._text += new
        found = self._search_strings(start)
        opening = self._opening(start)
        if self._expression is not None:
            match, first = self._search_expression(self._expression, start, old)
            opening = min(opening, first)
            found += [match] if match is not None else []
        if found:
            best = min(found, key=lambda match: (match.end, match.start))
            return StopMatch(best.start + self._offset, best.end + self._offset, best.text)
        self._settle(opening)
        return None

    def pass_over(self, new: str) -> None:
        """More text, in which no stop may begin; nor may one go on into it."""
        self._text += new
        self._settle(len(self._text))

    def _settle(self, opening: int) -> None:
        self.settled = self._offset + opening
        if self._expression is None:
            self._text, self._offset = self._text[opening:], self.settled

    def _search_strings(self, start: int) -> list[StopMatch]:
        places = ((self._text.find(stop, start), stop) for stop in self._strings)
        return [StopMatch(at, at + len(stop), stop) for at, stop in places if at >= 0]

    def _opening(self, start: int) -> int:
        """Where the longest end of the text begins that is the beginning of a stop string."""
        text, longest = self._text, 0
        for stop in self._strings:
            for length in range(min(len(stop) - 1, len(text) - start), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return len(text) - longest

    def _search_expression(
        self, expression: regex.Pattern[str], start: int, old: int
    ) -> tuple[StopMatch | None, int]:
        """The match that is complete first, or None and where one may yet begin."""
        for end in range(old + 1, len(self._text) + 1):
            match = _searched(expression, self._text, start, end)
            if match is not None and not match.partial:
                return StopMatch(match.start(), match.end(), match.group()), match.start()
            start = end if match is None else match.start()
        return None, start


def _searched(
    expression: regex.Pattern[str], text: str, start: int, end: int, *, again: bool = True
) -> regex.Match[str] | None:
    """A match in start..end, perhaps one that only begins there. Raises ConstraintError for an
    expression that takes too long, twice: once may be because something else had the processor.
    """
    try:
        return expression.search(text, start, end, partial=True, timeout=EXPRESSION_SECONDS)
    except TimeoutError as error:
        if again:
            return _searched(expression, text, start, end, again=False)
        raise ConstraintError(
            f"stop_regex={expression.pattern!r} took over {EXPRESSION_SECONDS} s on "
            f"{end - start} characters of output: it goes back over the text too often; "
            "write it without nested repetition"
        ) from error

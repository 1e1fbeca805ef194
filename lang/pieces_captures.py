"""What the captures of a piece are in a text.

Used by `Constraint.captured`. llguidance's own captures are not exact where a text can be read in
several ways: it tells all of them, in no order. So the pieces are matched here, with llguidance for
each part alone. Read from left to right, each piece takes as much as it can with the rest still
matching, and of alternatives the longest is taken. Where JSON or grammars meet, llguidance lets the
white space that one of them allows inside stand around it, too; a text that can only be read with
that is read with that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from stemma.lang.constraints_matcher import MOST_SECONDS, ends, matcher
from stemma.lang.errors import ConstraintError, StemmaError
from stemma.lang.pieces import Capture, Literal, OneOf, Optional, Piece, Repeat, Seq, Shape

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from stemma.lang.constraints import Constraint


class Captured(NamedTuple):
    """What a capture is in a text.

    value: a text, or the value of its constraint; in a repeat a list of them; None where it took no
    part. text: as it was written, or a list of texts; empty where it took no part. error: why it
    has no value of its constraint's type. open: whether it ends where the text ends and is no text
    itself, so that it might be another value if the text went on.
    """

    value: Any
    text: Any
    error: StemmaError | None = None
    open: bool = False


def captured(piece: Piece, text: str) -> dict[str, Captured] | None:
    """The captures by name, in the order in which they are written; None where the text is not one
    of the piece.

    Raises ConstraintError where that takes too long to find out.
    """
    data = text.encode()
    found = _read_whole(piece, data, loose=False) or _read_whole(piece, data, loose=True)
    if found is None:
        return None
    by_name = _collected(found, data)
    return {
        name: _listed(by_name.get(name, [])) if is_list else by_name.get(name, [_NO_PART])[0]
        for name, is_list in piece.captures
    }


class _Found(NamedTuple):
    """A piece in the text. inside: what its parts are."""

    piece: Piece
    start: int
    end: int
    inside: tuple[_Found, ...] = ()


def _read_whole(piece: Piece, data: bytes, *, loose: bool) -> _Found | None:
    search = _Search(data, loose=loose)
    return next((each for each in search.ends(piece, 0) if each.end == len(data)), None)


class _Ends:
    """Where a piece that begins at one place can end, found one after the other, and kept: each
    place once, in the way that was found first."""

    def __init__(self, source: Iterator[_Found]) -> None:
        self._source = source
        self._known: dict[int, _Found] = {}
        self._order: list[_Found] = []

    def __iter__(self) -> Iterator[_Found]:
        at = 0
        while at < len(self._order) or self._more():
            yield self._order[at]
            at += 1

    def _more(self) -> bool:
        for found in self._source:
            if found.end not in self._known:
                self._known[found.end] = found
                self._order.append(found)
                return True
        return False


class _Search:
    """The pieces of one text. loose: white space may stand around JSON and grammars."""

    def __init__(self, data: bytes, *, loose: bool) -> None:
        self._data = data
        self._loose = loose
        self._deadline = time.monotonic() + MOST_SECONDS
        self._ends: dict[tuple[int, int], _Ends] = {}
        self._beginnings: dict[str, LLMatcher] = {}

    def ends(self, piece: Piece, start: int) -> _Ends:
        key = id(piece), start
        if key not in self._ends:
            if time.monotonic() > self._deadline:
                raise ConstraintError(
                    f"the captures are too ambiguous: to find them took more than {MOST_SECONDS:g} "
                    "s; put texts between the pieces that they cannot contain"
                )
            self._ends[key] = _Ends(self._look(piece, start))
        return self._ends[key]

    def _look(self, piece: Piece, start: int) -> Iterator[_Found]:
        match piece:
            case Literal(text=text):
                written = text.encode()
                if self._data.startswith(written, start):
                    yield _Found(piece, start, start + len(written))
            case Shape(constraint=constraint):
                for end in self._shape_ends(constraint, start):
                    yield _Found(piece, start, end)
            case Seq(parts=parts):
                yield from self._row(piece, start, parts)
            case OneOf(parts=parts):
                every = [each for part in parts for each in self.ends(part, start)]
                for each in sorted(every, key=lambda found: -found.end):
                    yield _Found(piece, start, each.end, (each,))
            case Optional(part=part):
                for each in self.ends(part, start):
                    yield _Found(piece, start, each.end, (each,))
                yield _Found(piece, start, start)
            case Capture(part=part):
                for each in self.ends(part, start):
                    yield _Found(piece, start, each.end, (each,))
            case Repeat():
                yield from self._turns(piece, start)

    def _shape_ends(self, constraint: Constraint, start: int) -> list[int]:
        beginning = self._beginning(constraint.compiled)
        found = ends(beginning.deep_copy(), self._data, start)
        if not self._loose or constraint.pattern is not None:
            return found
        if (inside := self._behind_space(start)) > start:
            found += ends(beginning.deep_copy(), self._data, inside)
        return sorted({*found, *map(self._behind_space, found)}, reverse=True)

    def _behind_space(self, at: int) -> int:
        rest = self._data[at:]
        return at + len(rest) - len(rest.lstrip(b" \t\r\n"))

    def _row(self, piece: Piece, start: int, parts: tuple[Piece, ...]) -> Iterator[_Found]:
        """By a loop with what is still to be tried for each part; no place is tried twice."""
        row: list[_Found] = []
        seen: set[tuple[int, int]] = set()
        waiting = [iter(self.ends(parts[0], start))]
        while waiting:
            found = next(waiting[-1], None)
            if found is None:
                waiting.pop()
                if row:
                    row.pop()
                continue
            row.append(found)
            if len(row) == len(parts):
                yield _Found(piece, start, found.end, tuple(row))
            elif (len(row), found.end) not in seen:
                seen.add((len(row), found.end))
                waiting.append(iter(self.ends(parts[len(row)], found.end)))
                continue
            row.pop()

    def _turns(self, piece: Repeat, start: int) -> Iterator[_Found]:
        """As many turns as fit first. A turn without text is taken only where turns are missing."""
        part, least, most = piece.part, piece.at_least, piece.at_most
        row: list[_Found] = []
        seen: set[tuple[int, int]] = set()
        waiting = [iter(self.ends(part, start)) if most != 0 else iter(())]
        while waiting:
            found = next(waiting[-1], None)
            at = row[-1].end if row else start
            if found is None:
                waiting.pop()
                if len(row) >= least:
                    yield _Found(piece, start, at, tuple(row))
                if row:
                    row.pop()
                continue
            turns = len(row) + 1
            key = (turns if most is not None else min(turns, least), found.end)
            if key in seen or (found.end == at and turns > least):
                continue
            seen.add(key)
            row.append(found)
            full = most is not None and turns >= most
            waiting.append(iter(()) if full else iter(self.ends(part, found.end)))

    def _beginning(self, compiled: str) -> LLMatcher:
        if compiled not in self._beginnings:
            self._beginnings[compiled] = matcher(compiled)
        return self._beginnings[compiled]


_NO_PART = Captured(None, "")


def _collected(found: _Found, data: bytes) -> dict[str, list[Captured]]:
    """The captures of what was found, by name, in the order of the text."""
    by_name: dict[str, list[Captured]] = {}
    if isinstance(found.piece, Capture):
        by_name[found.piece.name] = [_read(found.piece.part, found, data)]
    for inner in found.inside:
        within = _collected(inner, data)
        if isinstance(found.piece, Repeat):
            _complete(within, found.piece.part)
        for name, values in within.items():
            by_name.setdefault(name, []).extend(values)
    if isinstance(found.piece, Seq) and by_name:
        _complete(by_name, found.piece)
    return by_name


def _complete(by_name: dict[str, list[Captured]], piece: Piece) -> None:
    """Name the captures that took no part where the piece did, so that lists fit each other."""
    for name, is_list in piece.captures:
        if not is_list:
            by_name.setdefault(name, [_NO_PART])


def _read(part: Piece, found: _Found, data: bytes) -> Captured:
    text = data[found.start : found.end].decode(errors="replace")
    if not isinstance(part, Shape) or part.constraint.read is str:
        return Captured(text, text)
    is_open = found.end == len(data)
    try:
        return Captured(part.constraint.value_of(text), text, None, is_open)
    except ConstraintError as error:
        return Captured(None, text, error, is_open)


def _listed(values: list[Captured]) -> Captured:
    return Captured(
        [each.value for each in values],
        [each.text for each in values],
        next((each.error for each in values if each.error is not None), None),
        any(each.open for each in values),
    )

"""A piece as one grammar of llguidance.

Used by `Constraint.grammar`. What is regular (texts, regular expressions, types that are written
bare, and all that combines only them) becomes one terminal, which llguidance matches exactly. JSON
and grammars are grammars of their own, named by reference. Between two such parts llguidance's
lexer lets the first take all that it can, whether the second then fits or not; a whole for which
that leaves out texts is refused, as far as a few texts can tell.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from stemma.lang.constraints_matcher import consume, emptiness, grammars_of, matcher, refusal
from stemma.lang.errors import ConstraintError, InvalidArgument
from stemma.lang.pieces import Capture, Literal, OneOf, Optional, Piece, Repeat, Seq, Shape

_TRIED = 12  # texts of the parts, to see whether the whole takes them
_TURNS = 2  # more than a repeat needs, in such a text
_MOST_DRAWN = 3_000  # pieces in such a text


def compiled_piece(piece: Piece) -> str:
    """llguidance's form of a piece.

    Raises InvalidArgument for one that is too complex, that has a capture's name twice, or whose
    parts run into each other.
    """
    if piece.doubled is not None:
        raise InvalidArgument(
            f"capture({piece.doubled!r}): the name is there twice, and both may take part: give "
            "each a name of its own, or capture it within a repeat, which makes a list"
        )
    compiled = _written(piece)
    if message := refusal(compiled) or emptiness(compiled):
        raise InvalidArgument(f"grammar={piece!r:.200}: it is too complex: {message:.500}")
    if not is_regular(piece):
        _check_seams(piece, compiled)
    return compiled


def is_regular(piece: Piece) -> bool:
    """Whether some regular expression has the same texts."""
    if isinstance(piece, Shape):
        return piece.constraint.pattern is not None
    return all(map(is_regular, piece.inside))


def _written(piece: Piece) -> str:
    writer = _Writer()
    start = writer.name(piece)
    lines = [f"start: {start}", *writer.lines]
    whole = {"name": "pieces", "lark_grammar": "\n".join(lines) + "\n"}
    return json.dumps({"grammars": [whole, *writer.grammars.values()]})


class _Writer:
    """Writes a rule for each piece, once for equal ones."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.grammars: dict[str, dict[str, Any]] = {}  # by what they are compiled to
        self._names: dict[Piece, str] = {}

    def name(self, piece: Piece) -> str:
        """The name of the rule that a piece is written as; of a terminal if it is regular."""
        if isinstance(piece, Capture):
            return self.name(piece.part)
        if piece not in self._names:
            body = self._body(piece)
            self._names[piece] = f"{'T' if is_regular(piece) else 'r'}{len(self._names)}"
            self.lines.append(f"{self._names[piece]}: {body}")
        return self._names[piece]

    def _body(self, piece: Piece) -> str:
        match piece:
            case Literal(text=text):
                return json.dumps(text)
            case Shape(constraint=constraint):
                if constraint.pattern is not None:
                    return _terminal(constraint.pattern)
                return self._reference(constraint.compiled, constraint.label)
            case Seq():
                parts = _flat(piece)
                return " ".join(map(self.name, parts if is_regular(piece) else _merged(parts)))
            case OneOf(parts=parts):
                return " | ".join(map(self.name, parts))
            case Optional(part=part):
                return f"{self.name(part)}?"
        assert isinstance(piece, Repeat)
        most = "" if piece.at_most is None else piece.at_most
        return f"{self.name(piece.part)}{{{piece.at_least},{most}}}"

    def _reference(self, compiled: str, label: str) -> str:
        if compiled not in self.grammars:
            grammars = grammars_of(compiled)
            if len(grammars) > 1:
                raise InvalidArgument(
                    f"grammar={label}: a part is one grammar, and this is made of several: build "
                    "it by st.seq and the like"
                )
            self.grammars[compiled] = {**grammars[0], "name": f"piece{len(self.grammars)}"}
        return f"@{self.grammars[compiled]['name']}"


def _terminal(pattern: str) -> str:
    from llguidance import regex_to_lark

    inside = regex_to_lark(pattern, "").replace("\n", r"\n")
    return f"/{inside}/" if inside else '""'


def _flat(piece: Piece) -> Iterator[Piece]:
    """The parts of a sequence, those of sequences within it for themselves, without captures."""
    if isinstance(piece, Capture):
        yield from _flat(piece.part)
    elif isinstance(piece, Seq):
        for part in piece.parts:
            yield from _flat(part)
    else:
        yield piece


def _merged(parts: Iterable[Piece]) -> Iterator[Piece]:
    """Neighbours that are regular as one piece, so that one terminal is made of them."""
    for regular, group in groupby(parts, is_regular):
        neighbours = tuple(group)
        if regular and len(neighbours) > 1:
            yield Seq(neighbours)
        else:
            yield from neighbours


def _check_seams(piece: Piece, compiled: str) -> None:
    """Refuse a whole that does not take what its parts make."""
    maker = _TextMaker()
    for _ in range(_TRIED):
        try:
            text = maker.text_of(piece)
            data, walk = text.encode(), matcher(compiled)
            taken = consume(walk, data)
        except ConstraintError:  # too long, or too complex, to be tried
            continue
        if taken == len(data) and walk.is_accepting():
            continue
        good = data[:taken].decode(errors="ignore")
        raise InvalidArgument(
            f"grammar={piece!r:.200}: its parts run into each other: {text!r:.200} is made of "
            f"them and is not allowed, for in {good[-40:]!r} a part has taken what belongs to "
            "another one; put a text between them that the first cannot contain, as a line break "
            "or a quotation mark, and let alternatives begin with different texts"
        )


class _TextMaker:
    """Makes texts of a piece, the same ones each time."""

    def __init__(self) -> None:
        self._draw = random.Random(0)
        self._examples: dict[str, list[str]] = {}

    def text_of(self, piece: Piece) -> str:
        """Raises ConstraintError where a part has no example, or the text would be too long."""
        self._left = _MOST_DRAWN
        return self._text(piece)

    def _text(self, piece: Piece) -> str:
        self._left -= 1
        if self._left < 0:
            raise ConstraintError("too long")
        match piece:
            case Literal(text=text):
                return text
            case Shape(constraint=constraint):
                if constraint.compiled not in self._examples:
                    self._examples[constraint.compiled] = constraint.examples(3)
                return self._draw.choice(self._examples[constraint.compiled])
            case OneOf(parts=parts):
                return self._text(self._draw.choice(parts))
            case Optional(part=part):
                return self._text(part) if self._draw.random() < 0.7 else ""
            case Repeat(part=part, at_least=least, at_most=most):
                turns = least + self._draw.randint(0, _TURNS)
                return "".join(
                    self._text(part) for _ in range(turns if most is None else min(turns, most))
                )
        return "".join(map(self._text, piece.inside))

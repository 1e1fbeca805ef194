"""Grammar pieces: parts of a text as values that combine into the shape of a whole output.

Written in programs (`st.gen("x", grammar=st.seq(...))`); nothing here runs anything. A piece is
compiled by `pieces_grammar.py`, and what its captures are in a text is found by
`pieces_captures.py`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from stemma.lang.constraints import Constraint
from stemma.lang.errors import InvalidArgument

MOST_PIECES = 2_000  # in one piece, each as often as it stands there
MOST_DEPTH = 100  # of pieces within pieces
MOST_TURNS = 1_000  # that a repeat can count


@dataclass(frozen=True, slots=True)
class Piece(ABC):
    """Some of a text, as `seq`, `one_of`, `optional`, `repeat` and `capture` make it.

    A value: it may be kept, compared, and used in any number of other pieces.
    size: how many pieces it is made of, itself included. depth: how many are within each other.
    captures: the names of its captures in the order in which they are written, each with whether it
    is in a repeat and so a list. doubled: a name that stands twice where both may take part, and no
    repeat makes a list of it; a whole must not have any.
    """

    size: int = field(init=False, compare=False)
    depth: int = field(init=False, compare=False)
    captures: tuple[tuple[str, bool], ...] = field(init=False, compare=False)
    doubled: str | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        put, parts = object.__setattr__, self.inside
        put(self, "size", 1 + sum(part.size for part in parts))
        put(self, "depth", 1 + max((part.depth for part in parts), default=0))
        if self.size > MOST_PIECES or self.depth > MOST_DEPTH:
            raise InvalidArgument(
                f"{self._word}: {self.size:,} pieces, {self.depth:,} of them within each other; at "
                f"most {MOST_PIECES:,} and {MOST_DEPTH} are taken: use repeat where the same comes "
                "again, or write it as a grammar, st.Constraint.grammar(...)"
            )
        captures = self._captures()
        put(self, "captures", tuple(captures.items()))
        put(self, "doubled", self._doubled(captures))

    @property
    @abstractmethod
    def inside(self) -> tuple[Piece, ...]:
        """The pieces that it is directly made of."""

    @property
    def _word(self) -> str:
        return repr(self)[:40].partition("(")[0]

    def _captures(self) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for part in self.inside:
            for name, is_list in part.captures:
                found[name] = is_list or found.get(name, False)
        return found

    def _doubled(self, captures: dict[str, bool]) -> str | None:
        within = (part.doubled for part in self.inside)
        return next((name for name in within if name is not None and not captures[name]), None)


@dataclass(frozen=True, slots=True, repr=False)
class Literal(Piece):
    """Exactly this text."""

    text: str

    @property
    def inside(self) -> tuple[Piece, ...]:
        return ()

    def __repr__(self) -> str:
        return repr(self.text)


@dataclass(frozen=True, slots=True, repr=False)
class Shape(Piece):
    """A text that a constraint allows."""

    constraint: Constraint

    @property
    def inside(self) -> tuple[Piece, ...]:
        return ()

    def __repr__(self) -> str:
        return self.constraint.label


@dataclass(frozen=True, slots=True, repr=False)
class Seq(Piece):
    """All parts, one after the other."""

    parts: tuple[Piece, ...]

    @property
    def inside(self) -> tuple[Piece, ...]:
        return self.parts

    def __repr__(self) -> str:
        return f"seq({', '.join(map(repr, self.parts))})"

    def _doubled(self, captures: dict[str, bool]) -> str | None:
        seen: set[str] = set()
        for part in self.parts:
            names = {name for name, _ in part.captures}
            for name in names & seen:
                if not captures[name]:
                    return name
            seen |= names
        return Piece._doubled(self, captures)


@dataclass(frozen=True, slots=True, repr=False)
class OneOf(Piece):
    """One of the parts."""

    parts: tuple[Piece, ...]

    @property
    def inside(self) -> tuple[Piece, ...]:
        return self.parts

    def __repr__(self) -> str:
        return f"one_of({', '.join(map(repr, self.parts))})"


@dataclass(frozen=True, slots=True, repr=False)
class Optional(Piece):
    """The part, or nothing."""

    part: Piece

    @property
    def inside(self) -> tuple[Piece, ...]:
        return (self.part,)

    def __repr__(self) -> str:
        return f"optional({self.part!r})"


@dataclass(frozen=True, slots=True, repr=False)
class Repeat(Piece):
    """The part several times, one after the other. at_most: None for any number of times."""

    part: Piece
    at_least: int
    at_most: int | None

    @property
    def inside(self) -> tuple[Piece, ...]:
        return (self.part,)

    def __repr__(self) -> str:
        said = [repr(self.part)]
        if self.at_least:
            said.append(f"at_least={self.at_least}")
        if self.at_most is not None:
            said.append(f"at_most={self.at_most}")
        return f"repeat({', '.join(said)})"

    def _captures(self) -> dict[str, bool]:
        return {name: True for name, _ in self.part.captures}


@dataclass(frozen=True, slots=True, repr=False)
class Capture(Piece):
    """The part, whose text is a variable."""

    name: str
    part: Piece

    @property
    def inside(self) -> tuple[Piece, ...]:
        return (self.part,)

    def __repr__(self) -> str:
        return f"capture({self.name!r}, {self.part!r})"

    def _captures(self) -> dict[str, bool]:
        return {self.name: False, **Piece._captures(self)}

    def _doubled(self, captures: dict[str, bool]) -> str | None:
        if self.name in dict(self.part.captures) and not captures[self.name]:
            return self.name
        return Piece._doubled(self, captures)


Part = str | Piece | Constraint


def seq(*parts: Part) -> Piece:
    """All parts, one after the other. A part is a text, a piece or a `Constraint`.

    Raises InvalidArgument for what is no part, for none, and for more than 2,000 pieces, or 100
    within each other; so do the others. How the whole is read where it can be read in several ways
    says docs/pieces.md.

    >>> seq("Name: ", capture("name", Constraint.regex("[A-Z][a-z]+")))
    seq('Name: ', capture('name', regex='[A-Z][a-z]+'))
    """
    return Seq(_parts("seq", parts))


def one_of(*parts: Part) -> Piece:
    """One of the parts. Captures may have the same name in several of them: one takes part.

    >>> one_of("yes", "no")
    one_of('yes', 'no')
    """
    return OneOf(_parts("one_of", parts))


def optional(part: Part) -> Piece:
    """The part, or nothing.

    >>> optional(" please")
    optional(' please')
    """
    return Optional(_part("optional", part))


def repeat(part: Part, at_least: int = 0, at_most: int | None = None) -> Piece:
    """The part several times, one after the other; at_most=None for any number of times.

    Raises InvalidArgument unless 0 <= at_least <= at_most <= 1,000 and at_most is at least 1.

    >>> repeat(seq(capture("item", Constraint.regex("[a-z]+")), ";"), at_most=3)
    repeat(seq(capture('item', regex='[a-z]+'), ';'), at_most=3)
    """
    for name, value in (("at_least", at_least), ("at_most", at_most)):
        if value is None and name == "at_most":
            continue
        if type(value) is not int or not 0 <= value <= MOST_TURNS:
            raise InvalidArgument(
                f"repeat({name}={value!r}): must be a number of times, from 0 to {MOST_TURNS:,}; "
                "without at_most there is no limit"
            )
    if at_most is not None and at_most < max(1, at_least):
        wanted = f"at_least={at_least}" if at_least else "1"
        raise InvalidArgument(
            f"repeat(at_most={at_most}): must be at least {wanted}; leave the piece out where it "
            "is not to come"
        )
    return Repeat(_part("repeat", part), at_least, at_most)


def capture(name: str, part: Part) -> Piece:
    """The part, whose text becomes the variable `name`; of a `Constraint` its value.

    Within a `repeat` the variable is a list; one that took no part, in an `optional` or a `one_of`,
    is None. Raises InvalidArgument for a name that is no text or empty; `gen(grammar=...)` does for
    one that is there twice where both may take part.

    >>> capture("age", Constraint.of_type(int))
    capture('age', dtype=int)
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgument(
            f"capture({name!r:.100}): the variable's name comes first, a non-empty string, then "
            'the part, as in capture("age", st.Constraint.of_type(int))'
        )
    return Capture(name, _part(f"capture({name!r})", part))


def _parts(word: str, parts: tuple[object, ...]) -> tuple[Piece, ...]:
    if not parts:
        raise InvalidArgument(f"{word}(): there must be at least one part, a text or a piece")
    return tuple(_part(word, part) for part in parts)


def _part(word: str, part: object) -> Piece:
    if isinstance(part, Piece):
        return part
    if isinstance(part, Constraint):
        return Shape(part) if part.piece is None else part.piece
    if isinstance(part, str):
        try:
            part.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(
                f"{word}: {part!r:.100} has half of a surrogate pair, which no text can contain"
            ) from None
        return Literal(part)
    raise InvalidArgument(
        f"{word}: {part!r:.100} is no part, which is a text, a piece or a st.Constraint"
        f"{_hint(word, part)}"
    )


def _hint(word: str, part: Any) -> str:
    if isinstance(part, type):
        return f": write st.Constraint.of_type({part.__name__})"
    if isinstance(part, re.Pattern):
        return f": write st.Constraint.regex({part.pattern!r:.60})"
    if isinstance(part, list | tuple | set | frozenset):
        return f": give them one by one, as {word.partition('(')[0]}(*parts)"
    if isinstance(part, bool | int | float):
        return f": write it as a text, {str(part)!r}"
    if callable(part):
        return (
            ": what contains itself is written as a grammar, st.Constraint.grammar('start: ...'), "
            "which can be a part"
        )
    return ""

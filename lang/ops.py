"""What a program can say: one frozen dataclass per operation, and `Chain` for several in a row.

Built by `primitives.py`, queued by `ProgramState`, executed by `interpreter/executor.py`. An
operation is a value: it may be kept, added to others with `+`, and appended to any number of
branches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from stemma.lang.choices import ChoicesMethod
from stemma.lang.constraints import Constraint
from stemma.lang.errors import InvalidArgument, Site
from stemma.lang.pieces import Piece
from stemma.lang.reasoning import Marks
from stemma.lang.sampling import SamplingParams

Role = Literal["system", "user", "assistant"]


def here() -> Site:
    """The line of the running program: the innermost frame that is not of these floors."""
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = outer
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def _is_ours(module: str) -> bool:
    return module.startswith(("stemma.lang.", "stemma.interpreter.", "stemma.backend."))


def check_text(what: str, text: str) -> None:
    """Raise InvalidArgument for half of a surrogate pair, which no model's text can contain."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            place = error.start
            raise InvalidArgument(
                f"{what}: character {place} is {text[place]!r}, half of a surrogate pair and no "
                "character of its own; replace it, as by text.encode(errors='replace').decode()"
            ) from None


class Expr:
    """Anything that `s += ...` takes besides a string. `"a" + gen("x") + "b"` is a `Chain`."""

    __slots__ = ()

    def __add__(self, other: object) -> Chain:
        return Chain((*operations(self), *operations(other)))

    def __radd__(self, other: object) -> Chain:
        return Chain((*operations(other), *operations(self)))

    def __format__(self, spec: str) -> NoReturn:
        self.__str__()

    def __str__(self) -> NoReturn:
        raise InvalidArgument(
            f"{type(self).__name__} inside an f-string, or in str(), would become plain text: join "
            'it with +, as in "Answer: " + st.gen("x")'
        )


@dataclass(frozen=True, slots=True)
class Operation(Expr):
    """One operation. `site`, the program's line that made it, is no part of equality."""

    site: Site = field(default_factory=here, compare=False, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Text(Operation):
    """A literal. Only with `control` do control tokens that it spells become control tokens."""

    text: str
    control: bool = False

    def __post_init__(self) -> None:
        check_text("control" if self.control else "text", self.text)


@dataclass(frozen=True, slots=True)
class Gen(Operation):
    """Let the model continue.

    given: the fields of `params` that do not leave it to the run. reasoning: the variable that gets
    what stands between `marks`; without marks between those of the model. timeout: seconds from
    where it is begun.
    """

    name: str | None
    params: SamplingParams
    given: frozenset[str] = frozenset()
    heal: bool = True
    reasoning: str | None = None
    marks: Marks | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        self.refuse_shape_of_reasoning(self.params.constraint)

    def refuse_shape_of_reasoning(self, shape: Constraint | None) -> None:
        """Raise InvalidArgument for a shape, which would hold for the reasoning, too."""
        if shape is not None and self.reasoning is not None:
            raise InvalidArgument(
                f"gen(reasoning={self.reasoning!r}) with {shape.label}: the shape would hold for "
                "the reasoning, too: write two, as st.gen('why', stop='</think>', "
                "include_stop=True) + st.gen('answer', ...)"
            )


@dataclass(frozen=True, slots=True)
class Select(Operation):
    """Let the model choose one of `choices`, decided by `method`."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Score(Operation):
    """Log-probabilities of `text` as a continuation. The branch stays as it is."""

    text: str
    name: str | None = None
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class RoleBegin(Operation):
    """Open a message. `template`: the chat format's text, filled in by the state.

    role: one of the three `Role`s where a program writes it; a conversation that a run starts from
    may have others.
    """

    role: str
    template: str = ""


@dataclass(frozen=True, slots=True)
class RoleEnd(Operation):
    """Close the message that is open."""

    role: str
    template: str = ""


@dataclass(frozen=True, slots=True)
class ScopeBegin(Operation):
    """From here on the text belongs to the variable `name`, too."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Operation):
    """The text since the matching `ScopeBegin` is the value of `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class Chain(Expr):
    """Operations in order, made by `+`."""

    parts: tuple[Operation, ...]

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.parts)


def operations(value: object) -> tuple[Operation, ...]:
    """The operations that `value` stands for; a string is literal text.

    Raises TypeError for anything else: a number or None is more often a mistake than a text.
    """
    if isinstance(value, str):
        return (Text(value),) if value else ()
    if isinstance(value, Operation):
        return (value,)
    if isinstance(value, Chain):
        return value.parts
    if value is None:
        raise TypeError(
            "a program appends strings and operations, not None: s.user(...) and its like append "
            "by themselves and return nothing; write them without `s +=`, or `s += st.user(...)`"
        )
    if isinstance(value, Piece):
        raise TypeError(
            f"a program appends strings and operations, not the piece {value!r:.100}: let the "
            'model write a text of it, by st.gen("x", grammar=piece)'
        )
    raise TypeError(
        f"a program appends strings and operations, not {type(value).__name__}: "
        'write it into a string first, as in f"{value}"'
    )

"""What shape a text must have, as one value: a regular expression, a JSON Schema, a grammar, a type
or a list of choices.

A `Constraint` is validated when it is built and can be asked about texts without any model. It is
compiled to llguidance's form of a grammar (`compiled`), which is what an engine executes.
"""

from __future__ import annotations

import json
import sys
import warnings as python_warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from stemma.lang import constraints_matcher as walks
from stemma.lang.constraints_grammar import compiled_grammar
from stemma.lang.constraints_regex import any_of, can_contain, compiled_regex
from stemma.lang.constraints_schema import check_whitespace, compiled_schema
from stemma.lang.constraints_sources import check_source, schema_of_text, utf8
from stemma.lang.constraints_types import Reader, bare, described, is_type, loads, name_of
from stemma.lang.errors import ConstraintError, InvalidArgument

if TYPE_CHECKING:
    from stemma.lang.pieces import Piece
    from stemma.lang.pieces_captures import Captured


class ConstraintWarning(UserWarning):
    """Something about a constraint that can be meant but seldom is, as a rule that nothing uses."""


# Without slots: with them Python 3.11 fails by an error of its own where a name is assigned.
@dataclass(frozen=True, repr=False)
class Constraint:
    """What texts are allowed, and what value each of them is.

    Built by `regex`, `json_schema`, `grammar`, `of_type` and `choices`, which raise InvalidArgument
    for what is malformed, not supported or matches nothing, and warn (ConstraintWarning, also kept
    in `warnings`) of what seems not meant.

    label: how errors call it, as "dtype=int". compiled: the grammar in llguidance's form. pattern:
    a regular expression with the same texts, where it is one. read: makes the value of a text.
    piece: what it was built of, where that are pieces, with their captures.
    Two constraints are equal if they allow the same by the same words and read it the same way.

    >>> Constraint.regex("[a-z]+").matches("abc")
    True
    """

    label: str
    compiled: str
    read: Reader
    pattern: str | None = None
    warnings: tuple[str, ...] = ()
    piece: Piece | None = None

    def __repr__(self) -> str:
        return f"<Constraint {self.label}>"

    @staticmethod
    def regex(pattern: str) -> Constraint:
        """Texts that match `pattern` as a whole; the value is the text.

        The dialect is that of Rust's `regex`: like Python's, without looking around or back, `^`
        and `$` at the ends only. At most 262,144 characters. Raises InvalidArgument for what is
        malformed, not in the dialect, too large or matches nothing.

        >>> year = Constraint.regex(r"(19|20)\\d\\d")
        >>> year.parse("1931"), year.matches("931"), year.prefix_ok("19")
        ('1931', False, True)
        """
        check_source("regex", pattern)
        return Constraint(f"regex={pattern!r:.80}", compiled_regex(pattern), str, pattern)

    @staticmethod
    def json_schema(schema: Any, *, whitespace: str | None = None) -> Constraint:
        """JSON that a schema allows; the value is what the JSON says.

        schema: a JSON Schema (draft 2020-12, 2019-09 or 7) as an object, a boolean or a string; or
        a pydantic model, dataclass, TypedDict, TypeAdapter or another type, whose values are then
        the values. whitespace: "flexible", as None, allows between JSON's parts a space or two, or
        one line break and its indentation; "spaced" is one space behind each comma and colon, as
        `json.dumps` writes; "compact" is none.

        Raises InvalidArgument, with the place as a JSON pointer (RFC 6901), for a keyword that is
        not supported (docs/json-schema.md has all), and for a schema that is malformed or admits
        nothing; warns (ConstraintWarning) of keywords that nobody knows.

        >>> film = Constraint.json_schema({"enum": ["M", 1931]}, whitespace="compact")
        >>> film.parse("1931"), film.prefix_ok('"N')
        (1931, False)
        """
        named = "json_schema"
        read: Reader = loads
        if is_type(schema):
            named = f"json_schema={name_of(schema)}"
            schema, read = described(schema, "json_schema")
        elif isinstance(schema, str):
            check_source(named, schema)
            schema = schema_of_text(schema)
        elif not isinstance(schema, Mapping | bool):
            raise InvalidArgument(
                f"json_schema={schema!r:.100}: must be a schema (an object, or a string with one) "
                "or a type"
            )
        return _of_schema(named, schema, read, whitespace)

    @staticmethod
    def grammar(source: str | Piece) -> Constraint:
        """Texts of a context-free grammar, in llguidance's dialect of Lark or in GBNF, or of a
        piece, as `seq` and its like make it; the value is the text.

        source: a piece, or a grammar of at most 262,144 characters and 2,000 rules, of which
        `start` (in GBNF `root`) is the whole. Raises InvalidArgument, with the line, for what is
        malformed, not supported, matches nothing or can never end; warns (ConstraintWarning) of
        rules that nothing uses.

        >>> Constraint.grammar('start: item ("," item)*\\nitem: /[a-z]+/').matches("a,bc")
        True
        >>> Constraint.grammar('root ::= "a" root | "b"').closing("aa")
        'b'
        """
        from stemma.lang.pieces import Piece
        from stemma.lang.pieces_grammar import compiled_piece

        if isinstance(source, Piece):
            return Constraint(f"grammar={source!r:.80}", compiled_piece(source), str, piece=source)
        if not isinstance(source, str):
            raise InvalidArgument(
                f"grammar={source!r:.100}: must be a string or a piece, as st.seq(...) makes it"
            )
        check_source("grammar", source)
        compiled, warnings = compiled_grammar(source)
        return Constraint(f"grammar={source!r:.80}", compiled, str, None, _warned(warnings))

    @staticmethod
    def of_type(dtype: Any, *, whitespace: str | None = None) -> Constraint:
        """Texts that are a value of a type; the value is of that type.

        int, float, bool, str, Decimal, date, time, datetime, UUID, Literal and Enum are written
        bare, dates and times as in ISO 8601. Every other type is JSON as by `json_schema`, which
        says what `whitespace` is: list[...], Optional, models, ...

        Raises InvalidArgument for what is no type, for `whitespace` of one that is written bare,
        and, with the place, for one whose JSON no schema can describe or pydantic does not know.

        >>> Constraint.of_type(int).parse("-12"), Constraint.of_type(list[int]).parse("[1, 2]")
        (-12, [1, 2])
        """
        label = f"dtype={dtype if isinstance(dtype, str) else name_of(dtype)}"
        if (found := bare(dtype)) is not None:
            if whitespace is not None:
                check_whitespace(whitespace)
                said = f"whitespace={whitespace!r} is that of JSON, and this is written bare"
                raise InvalidArgument(f"{label}: {said}: leave it out")
            pattern, read = found
            return Constraint(label, compiled_regex(pattern), read, pattern)
        schema, read = described(dtype, "dtype")
        return _of_schema(label, schema, read, whitespace)

    @staticmethod
    def choices(options: Iterable[str]) -> Constraint:
        """Exactly one of the texts; the value is the text.

        Raises InvalidArgument for what is no list of strings, for none, and for one that is there
        twice.

        >>> Constraint.choices(["yes", "no"]).matches("maybe")
        False
        """
        if isinstance(options, str) or not isinstance(options, Iterable):
            what = ", not one string" if isinstance(options, str) else ""
            raise InvalidArgument(f"choices={options!r:.100}: must be a list of strings{what}")
        texts = list(options)
        for text in texts:
            if not isinstance(text, str):
                raise InvalidArgument(f"choices: every choice is a string, not {text!r:.100}")
        if not texts:
            raise InvalidArgument("choices=[]: there must be at least one")
        if len(set(texts)) < len(texts):
            double = next(text for text in texts if texts.count(text) > 1)
            raise InvalidArgument(f"choices: {double!r} is there twice")
        pattern = any_of(texts)
        check_source("choices", pattern)
        return Constraint(f"choices={texts!r:.80}", compiled_regex(pattern), str, pattern)

    def matches(self, text: str) -> bool:
        """Whether the whole text is allowed. Raises ConstraintError where a limit is hit."""
        data = utf8(text)
        if data is None:
            return False
        walk = walks.matcher(self.compiled)
        return walks.consume(walk, data) == len(data) and walk.is_accepting()

    def prefix_ok(self, text: str) -> bool:
        """Whether some allowed text begins with `text`, or is it."""
        data = utf8(text)
        return data is not None and self._accepted(data) == len(data)

    def forced_prefix(self) -> str:
        """What every allowed text begins with: the whole text, where there is only one."""
        return walks.forced(self.compiled)

    def examples(self, n: int = 3, *, seed: int = 0) -> list[str]:
        """Up to n different allowed texts, short ones first drawn; the same for the same seed.

        Fewer where there are fewer. Raises ConstraintError where none is found.
        """
        if type(n) is not int or not 0 <= n <= 1_000:
            raise InvalidArgument(f"examples(n={n!r}): must be an integer from 0 to 1,000")
        return walks.examples(self.compiled, n, seed)

    def closing(self, text: str, *, steps: int = 500) -> str | None:
        """A short text that makes an allowed one of `text`; "" where it is one, None where none is
        found in so many steps.

        Short, but not always the shortest.
        """
        walk = walks.matcher(self.compiled)
        data = utf8(text)
        if data is None or walks.consume(walk, data) < len(data):
            return None
        found = walks.closing(walk, steps=steps)
        return None if found is None else found.decode(errors="ignore")

    def parse(self, text: str) -> Any:
        """The value of an allowed text.

        Raises ConstraintError for a text that is not allowed, with the place where it goes wrong,
        and for one that the type does not take though its schema does (a validator of a model).
        """
        if not self.matches(text):
            data = utf8(text)
            good = "" if data is None else data[: self._accepted(data)].decode(errors="ignore")
            rest = text[len(good) :]
            wrong = f"{rest[:40]!r} cannot follow" if rest else "the text is not complete after"
            raise ConstraintError(
                f"{self.label}: {text!r:.100} does not match: {wrong} {good[-40:]!r}"
            )
        return self.value_of(text)

    def value_of(self, text: str) -> Any:
        """The value of a text that is known to be allowed.

        Raises ConstraintError for one that the type does not take though its schema does, whatever
        a validator of it raises.
        """
        try:
            return self.read(text)
        except Exception as error:
            plain = isinstance(error, ValueError | ArithmeticError)  # pydantic's errors, too
            why = str(error) if plain else f"{type(error).__name__}: {error}"
            raise ConstraintError(f"{self.label}: {text!r:.100} is not taken: {why}") from error

    @property
    def captures(self) -> tuple[str, ...]:
        """The names of its captures; none where it was not built of pieces."""
        return () if self.piece is None else tuple(name for name, _ in self.piece.captures)

    def captured(self, text: str) -> dict[str, Captured]:
        """What its captures are in an allowed text, by name, in the order they are written in.

        Raises ConstraintError for a text that is not allowed.

        >>> from stemma.lang.pieces import capture, seq
        >>> aged = Constraint.grammar(seq("age ", capture("age", Constraint.of_type(int))))
        >>> aged.captured("age 36")["age"].value
        36
        """
        self.parse(text)
        return self.captures_of(text)

    def captures_of(self, text: str) -> dict[str, Captured]:
        """`captured` of a text that is known to be allowed.

        Raises ConstraintError where finding them takes too long.
        """
        from stemma.lang.pieces_captures import captured

        if self.piece is None or not self.piece.captures:
            return {}
        if (found := captured(self.piece, text)) is None:
            raise ConstraintError(
                f"{self.label}: {text!r:.100} cannot be told apart into its pieces"
            )
        return found

    def never_contains(self, text: str) -> bool:
        """True where no allowed text can have `text` in it, as a stop string that never comes.

        Decided for regular expressions, choices and types that are written bare. For JSON and
        grammars it is False: unknown.
        """
        return self.pattern is not None and not can_contain(self.pattern, text)

    def _accepted(self, data: bytes) -> int:
        return walks.consume(walks.matcher(self.compiled), data)


def constraint_of(
    *, whitespace: str | None = None, constraint: object = None, **sources: Any
) -> Constraint | None:
    """The constraint that one of `regex`, `json_schema`, `grammar` and `dtype` describes; None
    where all are None.

    Built once for what a program's loop writes again and again. Raises InvalidArgument for two at
    once, and for a `whitespace` that means nothing.
    """
    given = {name: source for name, source in sources.items() if source is not None}
    if constraint is not None:
        given["constraint"] = constraint
    if len(given) > 1:
        raise InvalidArgument(f"{' and '.join(given)}: only one of them can say what is allowed")
    if whitespace is not None and not given.keys() & {"json_schema", "dtype"}:
        raise InvalidArgument(
            f"whitespace={whitespace!r} is that of JSON: it needs json_schema=, or dtype=list[int]"
        )
    for name, source in given.items():
        _check_kind(name, source)
        if isinstance(source, Constraint):
            return source
        return _built(name, source, whitespace)
    return None


def _check_kind(name: str, source: object) -> None:
    """Refuse what another parameter takes, by its name."""
    from stemma.lang.pieces import Piece

    kinds = {
        "constraint": (Constraint, "a Constraint"),
        "grammar": (Piece, "a piece"),
        "json_schema": (Mapping, "an object"),
        "dtype": (type, "a type"),
    }
    for right, (kind, called) in kinds.items():
        if isinstance(source, kind) and right != name and (name, right) != ("json_schema", "dtype"):
            raise InvalidArgument(f"{name}={source!r:.100} is {called}: give it as {right}=")
    if name == "constraint" and not isinstance(source, Constraint):
        raise InvalidArgument(
            f"constraint={source!r:.100}: must be a Constraint, as st.Constraint.regex('[a-z]+')"
        )


def _built(name: str, source: Any, whitespace: str | None) -> Constraint:
    key: object = source
    if isinstance(source, Mapping | list):  # may change: what it is now counts
        try:
            key = json.dumps(source)
        except (TypeError, ValueError, RecursionError):
            key = object()
    try:
        return _remembered(name, source.__class__, _Held(key, source), whitespace)
    except TypeError:  # not hashable
        return _new(name, source, whitespace)


@dataclass(frozen=True, slots=True)
class _Held:
    """A key, and what it is the key of."""

    key: object
    source: Any = field(compare=False)


def _new(name: str, source: Any, whitespace: str | None) -> Constraint:
    if name in ("json_schema", "dtype"):
        build = Constraint.json_schema if name == "json_schema" else Constraint.of_type
        return build(source, whitespace=whitespace)
    return Constraint.regex(source) if name == "regex" else Constraint.grammar(source)


@lru_cache(maxsize=256)
def _remembered(name: str, kind: type, held: _Held, whitespace: str | None) -> Constraint:
    return _new(name, held.source, whitespace)


def _of_schema(named: str, schema: Any, read: Reader, whitespace: str | None) -> Constraint:
    white = "flexible" if whitespace is None else whitespace
    compiled, warnings = compiled_schema(schema, white, named)
    return Constraint(named, compiled, read, None, _warned(warnings))


def _warned(warnings: list[str]) -> tuple[str, ...]:
    for message in warnings:
        warn(message)
    return tuple(warnings)


def warn(message: str) -> None:
    """Give a ConstraintWarning of the program's own line."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("stemma."):
        frame, level = frame.f_back, level + 1
    python_warnings.warn(message, ConstraintWarning, stacklevel=level)

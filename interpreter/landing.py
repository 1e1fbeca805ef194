"""What an operation has come to when the backend is through with it: pieces of text, and values of
variables.

Pure functions of a flight and its results; the executor writes and resolves what they return.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from stemma.backend.base import ChoiceScore, Completion, ScoredChoices
from stemma.interpreter.flight import Flight
from stemma.interpreter.meta import Meta, ScoreMeta, SelectMeta
from stemma.interpreter.transcript import Piece
from stemma.interpreter.variable import Variable
from stemma.lang.choices import decide
from stemma.lang.ops import Gen, Score, Select
from stemma.lang.reasoning import Part


class Value(NamedTuple):
    """What a variable becomes. The variable of an operation that nobody can read is None."""

    variable: Variable | None
    value: Any
    raw: Any
    meta: Any

    def resolve(self) -> None:
        if self.variable is not None:
            self.variable.finish(self.value, raw=self.raw, meta=self.meta)


class Landing(NamedTuple):
    """The pieces that the branch has grown by, and the values that can be read now."""

    pieces: tuple[Piece, ...]
    values: tuple[Value, ...]


def land_generation(flight: Flight, operation: Gen, results: list[Completion]) -> Landing:
    """One completion, or one per sample: the branch goes on with the first."""
    if len(results) == 1 and flight.marks is None:
        return _text_landed(flight, operation, results[0].text, Meta.of(results[0]))
    metas = tuple(Meta.of(completion) for completion in results)
    parted = [flight.parts(completion.text) for completion in results]
    variable = flight.variable
    answers = [_joined(parts, "answer") for parts in parted]
    values = [_samples(variable, answers, metas)]
    reads = [(operation.name, values[0].value)] if operation.name is not None else []
    if operation.reasoning is not None:
        aside = None if variable is None else variable.aside
        thoughts = [_joined(parts, "reasoning") for parts in parted]
        values.insert(0, _samples(aside, thoughts, metas))
        reads.insert(0, (operation.reasoning, values[0].value))
    *before, last = parted[0] or [Part("answer", "")]
    end = Piece(
        last.text, operation, flight.name_of(last), last.kind, reads=tuple(reads), metas=metas
    )
    return Landing((*(part_of(flight, part) for part in before), end), tuple(values))


def land_choice(
    flight: Flight, operation: Select, scored: ScoredChoices
) -> tuple[Landing, ChoiceScore, SelectMeta]:
    """With the winner, which the branch has to commit, and how it was decided."""
    base = None
    if operation.method.needs_unconditional:
        base = [choice.unconditional or () for choice in scored.choices]
    decision = decide(operation.method, [choice.logprobs for choice in scored.choices], base)
    meta = SelectMeta.of(operation.method, decision, scored.choices, scored.usage)
    winner = scored.choices[decision.index]
    return _text_landed(flight, operation, winner.text, meta), winner, meta


def land_score(flight: Flight, operation: Score, scored: ScoredChoices) -> Landing:
    """No text: the branch stays as it is."""
    choice, meta = scored.choices[0], ScoreMeta(scored.usage)
    reads = ((operation.name, choice),) if operation.name is not None else ()
    piece = Piece("", operation, reads=reads, metas=(meta,))
    return Landing((piece,), (Value(flight.variable, choice, choice.text, meta),))


def _text_landed(
    flight: Flight, operation: Gen | Select, text: str, meta: Meta | SelectMeta
) -> Landing:
    """The common case: one text, which is the value of one variable."""
    name = operation.name
    reads = ((name, text),) if name is not None else ()
    piece = Piece(text, operation, name, "answer", reads, (meta,))
    return Landing((piece,), (Value(flight.variable, text, text, meta),))


def broken_off(flight: Flight, text: str) -> list[Piece]:
    """What an operation had written when it failed."""
    return [part_of(flight, part, broken=True) for part in flight.parts(text)]


def part_of(flight: Flight, part: Part, *, broken: bool = False) -> Piece:
    return Piece(part.text, flight.operation, flight.name_of(part), part.kind, broken=broken)


def _joined(parts: list[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def _samples(variable: Variable | None, texts: list[str], metas: tuple[Meta, ...]) -> Value:
    """The value of one sample is a text, that of several a list of texts."""
    if len(texts) == 1:
        return Value(variable, texts[0], texts[0], metas[0])
    return Value(variable, texts, list(texts), list(metas))

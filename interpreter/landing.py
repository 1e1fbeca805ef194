"""What an operation has come to when the backend is through with it: pieces of text, and values of
variables.

Pure functions of a flight and its results; the executor writes and resolves what they return.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from stemma.backend.base import ChoiceScore, Completion, ScoredChoices, Usage
from stemma.interpreter.flight import Flight
from stemma.interpreter.meta import Meta, ScoreMeta, SelectMeta
from stemma.interpreter.transcript import Kind, Piece
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
    first, name = results[0], operation.name
    if len(results) == 1 and flight.marks is None:
        reads = ((name, first.text),) if name is not None else ()
        piece = Piece(
            first.text, "generated", name, reads=reads, usage=first.usage, note=_ending(first)
        )
        return Landing((piece,), (Value(flight.variable, first.text, first.text, Meta.of(first)),))
    metas = [Meta.of(completion) for completion in results]
    parted = [flight.parts(completion.text) for completion in results]
    values = [_samples(flight.variable, parted, "answer", metas)]
    names = [name]
    if operation.reasoning is not None:
        aside = None if flight.variable is None else flight.variable.aside
        values.insert(0, _samples(aside, parted, "reasoning", metas))
        names.insert(0, operation.reasoning)
    note = _ending(first)
    if len(results) > 1:
        note += f"; the first of {len(results)} samples"
    *before, last = parted[0] or [Part("answer", "")]
    end = _piece(flight, last)._replace(
        reads=tuple((n, v.value) for n, v in zip(names, values, strict=True) if n is not None),
        usage=sum((completion.usage for completion in results), Usage()),
        note=note,
    )
    return Landing((*(_piece(flight, part) for part in before), end), tuple(values))


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
    name, text = operation.name, winner.text
    reads = ((name, text),) if name is not None else ()
    likely = decision.probabilities[decision.index]
    note = f"{likely:.0%} of {len(scored.choices)} choices"
    piece = Piece(text, "selected", name, reads=reads, usage=scored.usage, note=note)
    return Landing((piece,), (Value(flight.variable, text, text, meta),)), winner, meta


def land_score(flight: Flight, operation: Score, scored: ScoredChoices) -> Landing:
    """No text: the branch stays as it is."""
    choice, name = scored.choices[0], operation.name
    reads = ((name, choice),) if name is not None else ()
    note = f"{math.fsum(choice.logprobs):.2f} for {choice.text!r}"
    piece = Piece("", "score", name, reads=reads, usage=scored.usage, note=note)
    value = Value(flight.variable, choice, choice.text, ScoreMeta(scored.usage))
    return Landing((piece,), (value,))


def broken_off(flight: Flight, text: str) -> list[Piece]:
    """What an operation had written when it failed."""
    return [_piece(flight, part)._replace(broken=True) for part in flight.parts(text)]


def _piece(flight: Flight, part: Part) -> Piece:
    kind: Kind = "generated" if part.kind == "answer" else part.kind
    return Piece(part.text, kind, flight.name_of(part))


def _ending(completion: Completion) -> str:
    if completion.finish_reason == "length":
        return "cut by max_tokens"
    if isinstance(completion.matched_stop, str):
        return f"stopped at {completion.matched_stop!r}"
    return "ended"


def _samples(
    variable: Variable | None, parted: list[list[Part]], kind: str, metas: list[Meta]
) -> Value:
    """The value of one sample is a text, that of several a list of texts."""
    texts = ["".join(part.text for part in parts if part.kind == kind) for parts in parted]
    if len(texts) == 1:
        return Value(variable, texts[0], texts[0], metas[0])
    return Value(variable, texts, list(texts), metas)

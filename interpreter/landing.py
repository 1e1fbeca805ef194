"""What an operation has come to when the backend is through with it: pieces of text, and values of
variables.

Pure functions of a flight and its results; the executor writes and resolves what they return.
"""

from __future__ import annotations

import math
from copy import copy
from functools import partial
from typing import Any, NamedTuple

from stemma.backend.base import Backend, ChoiceScore, Completion, ScoredChoices, Usage
from stemma.interpreter.flight import Flight
from stemma.interpreter.meta import Meta, ScoreMeta, SelectMeta
from stemma.interpreter.tasks import annotate
from stemma.interpreter.transcript import Kind, Piece
from stemma.interpreter.variable import Variable
from stemma.lang.choices import decide
from stemma.lang.constraints import Constraint
from stemma.lang.errors import ConstraintError, StemmaError, Truncated
from stemma.lang.ops import Gen, Score, Select
from stemma.lang.pieces_captures import Captured
from stemma.lang.reasoning import Part
from stemma.lang.sampling import SamplingParams

_Typed = tuple[Any, StemmaError | None]  # a value, or why there is none


class Value(NamedTuple):
    """What a variable becomes. The variable of an operation that nobody can read is None.

    unreadable: why there is only a text, and no value of the type that was asked for. sample: of
    several the one that this is about, counted from 1.
    """

    name: str | None
    variable: Variable | None
    value: Any
    raw: Any
    meta: Any
    unreadable: StemmaError | None = None
    sample: int | None = None

    def annotate(self, flight: Flight, label: str, backend: Backend) -> None:
        """Say why it is unreadable of which variable of which operation on which branch."""
        error, shape, detail = self.unreadable, flight.draws[0].constraint, ""
        if error is None or shape is None:
            return
        if self.sample is not None:
            detail = f"; sample {self.sample} of {len(self.raw)}, `values` has the others'"
        annotate(error, flight.operation, label, variable=self.name, detail=detail)
        if isinstance(error, Truncated):  # it is the reader who takes the time to find out
            error.find_needed = partial(_needed, shape, error.partial, backend)
        else:
            error.partial = self.raw if self.sample is None else self.raw[self.sample - 1]

    def resolve(self) -> None:
        if self.variable is not None:
            self.variable.finish(
                self.value, raw=self.raw, meta=self.meta, unreadable=self.unreadable
            )

    @property
    def told(self) -> Any:
        """What an event says of it."""
        return self.value if self.unreadable is None else self.unreadable


class Landing(NamedTuple):
    """The pieces that the branch has grown by, and the values that can be read now."""

    pieces: tuple[Piece, ...]
    values: tuple[Value, ...]


def land_generation(flight: Flight, operation: Gen, results: list[Completion]) -> Landing:
    """One completion, or one per sample: the branch goes on with the first."""
    first, name = results[0], operation.name
    metas = [Meta.of(completion) for completion in results]
    if flight.marks is None:
        texts = [completion.text for completion in results]
        typed = [typed_value(flight.draws[0], completion) for completion in results]
        values = [
            _value(name, flight.variable, typed, texts, metas),
            *_captures(flight, typed, results, metas),
        ]
        before, last = [], Part("answer", first.text)
    else:
        parted = [flight.parts(completion.text) for completion in results]
        asides = () if flight.variable is None else flight.variable.asides
        values = [
            _value(name_, variable, [(text, None) for text in texts], texts, metas)
            for name_, variable, texts in (
                (operation.reasoning, next(iter(asides), None), _texts(parted, "reasoning")),
                (name, flight.variable, _texts(parted, "answer")),
            )
        ]
        *before, last = parted[0] or [Part("answer", "")]
    note = _ending(first, flight.draws[0])
    if len(results) > 1:
        note += f"; the first of {len(results)} samples"
    end = _piece(flight, last)._replace(
        reads=tuple(
            (v.name, v.raw if v.unreadable else v.value) for v in values if v.name is not None
        ),
        usage=sum((completion.usage for completion in results), Usage()),
        note=note,
    )
    return Landing((*(_piece(flight, part) for part in before), end), tuple(values))


def typed_value(params: SamplingParams, completion: Completion) -> _Typed:
    """The value of a text in the shape that was asked for, or why it has none."""
    shape, text = params.constraint, completion.text
    if shape is None:
        return text, None
    cut, stop = completion.finish_reason == "length", completion.matched_stop
    stopped = isinstance(stop, str) or stop in params.stop_token_ids
    if stopped and shape.read is str:  # the stop stands in place of what would have followed
        return text, None
    might_go_on = cut and params.on_limit == "cut" and shape.read is not str
    if might_go_on:
        return None, _cut_off(params, completion)
    try:
        if shape.matches(text):
            return shape.value_of(text), None
        if cut or stopped:
            return None, _cut_off(params, completion)
        return shape.parse(text), None  # raises, and tells where it goes wrong
    except ConstraintError as error:
        return None, error


def _cut_off(params: SamplingParams, completion: Completion) -> Truncated:
    shape, stop = params.constraint, completion.matched_stop
    assert shape is not None
    if stop is not None:
        by, remedy = f"the stop {stop!r}", "leave the stop out, for the shape says where it ends"
    elif params.max_tokens is not None:
        by, remedy = _limit(params), "raise max_tokens, or leave it out"
    else:
        by, remedy = _limit(params), "shorten the prompt, or bound the shape"
    return Truncated(
        f"{by} ended the text before it was known to be complete ({shape.label}): "
        f"{completion.text[-80:]!r}; {remedy}",
        partial=completion.text,
    )


def _limit(params: SamplingParams) -> str:
    """What has ended a text that was too long: without a shape there always is a `max_tokens`."""
    endless = params.max_tokens is None and params.constraint is not None
    return "the end of the model's context" if endless else "max_tokens"


def _needed(shape: Constraint, text: str, backend: Backend) -> int | None:
    """How many more tokens would have closed a text that was cut off."""
    try:
        return backend.count_tokens(shape.closing(text) or "") or None
    except ConstraintError:
        return None


def _captures(
    flight: Flight, typed: list[_Typed], results: list[Completion], metas: list[Meta]
) -> list[Value]:
    """The values of the captures in the texts of a generation."""
    params, asides = flight.draws[0], () if flight.variable is None else flight.variable.asides
    if params.constraint is None or not asides:
        return []
    found = [
        captured_values(params, completion, error)
        for completion, (_, error) in zip(results, typed, strict=True)
    ]
    return [
        _value(
            name,
            variable,
            [(each[name].value, each[name].error) for each in found],
            [each[name].text for each in found],
            metas,
        )
        for name, variable in zip(params.constraint.captures, asides, strict=True)
    ]


def captured_values(
    params: SamplingParams, completion: Completion, error: StemmaError | None
) -> dict[str, Captured]:
    """The captures in a text, which has no value by `error`. One that is of a type and may have
    gone on where the text was cut off has none either.
    """
    shape = params.constraint
    assert shape is not None
    found: dict[str, Captured] = {}
    if error is None:
        stopped = isinstance(completion.matched_stop, str)  # then nobody has looked at the text
        try:
            text = completion.text
            found = shape.captured(text) if stopped else shape.captures_of(text)
        except ConstraintError as failed:
            error = _cut_off(params, completion) if stopped else failed
    if error is not None:
        return {name: Captured(None, "", copy(error)) for name in shape.captures}
    if completion.finish_reason == "length" and params.on_limit == "cut":
        for name, each in found.items():
            if each.open:
                found[name] = each._replace(value=None, error=_cut_off(params, completion))
    return found


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
    return Landing((piece,), (Value(name, flight.variable, text, text, meta),)), winner, meta


def land_score(flight: Flight, operation: Score, scored: ScoredChoices) -> Landing:
    """No text: the branch stays as it is."""
    choice, name = scored.choices[0], operation.name
    reads = ((name, choice),) if name is not None else ()
    note = f"{math.fsum(choice.logprobs):.2f} for {choice.text!r}"
    piece = Piece("", "score", name, reads=reads, usage=scored.usage, note=note)
    value = Value(name, flight.variable, choice, choice.text, ScoreMeta(scored.usage))
    return Landing((piece,), (value,))


def broken_off(flight: Flight, text: str) -> list[Piece]:
    """What an operation had written when it failed."""
    return [_piece(flight, part)._replace(broken=True) for part in flight.parts(text)]


def _piece(flight: Flight, part: Part) -> Piece:
    kind: Kind = "generated" if part.kind == "answer" else part.kind
    return Piece(part.text, kind, flight.name_of(part))


def _ending(completion: Completion, params: SamplingParams) -> str:
    if completion.finish_reason == "length":
        closed = params.on_limit == "close" and params.constraint is not None
        return f"{'closed' if closed else 'cut'} by {_limit(params)}"
    if isinstance(completion.matched_stop, str):
        return f"stopped at {completion.matched_stop!r}"
    return "ended"


def _texts(parted: list[list[Part]], kind: str) -> list[str]:
    return ["".join(part.text for part in parts if part.kind == kind) for parts in parted]


def _value(
    name: str | None,
    variable: Variable | None,
    typed: list[_Typed],
    texts: list[Any],
    metas: list[Meta],
) -> Value:
    """One sample has one value, several have a list; if one is unreadable, all of them are."""
    if len(texts) == 1:
        value, error = typed[0]
        return Value(name, variable, value, texts[0], metas[0], error)
    values = [value for value, _ in typed]
    sample, found = next(
        ((i, error) for i, (_, error) in enumerate(typed, 1) if error is not None), (None, None)
    )
    if isinstance(found, Truncated | ConstraintError):
        found.values = tuple(values)
    return Value(name, variable, values, list(texts), metas, found, sample)

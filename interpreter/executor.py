"""Turns the operations of one branch into backend calls.

Owned by a `ProgramState`, which only appends to the queue; all else happens on the dispatcher's
thread. When an operation is begun, and what ends a branch, is in `cursor.py`.
"""

from __future__ import annotations

from functools import partial

from stemma.backend.base import Branch, ScoredChoices, Usage
from stemma.interpreter.cursor import Cursor
from stemma.interpreter.events import Forked, Selected, VariableFinished, VariableStarted
from stemma.interpreter.flight import Flight, draws_of
from stemma.interpreter.landing import Landing, land_choice, land_generation, land_score
from stemma.interpreter.run import Run
from stemma.interpreter.tasks import Call, Define, Fork, Task, Tokens
from stemma.interpreter.transcript import Piece, Transcript
from stemma.interpreter.variable import Variable
from stemma.lang.ops import (
    Gen,
    Operation,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Score,
    Select,
    Text,
)
from stemma.lang.reasoning import is_open
from stemma.lang.sampling import derive_seed

# The two kinds of seeds that a branch hands out, kept apart in the path they are derived from.
_OF_BRANCH, _OF_DRAW = 0, 1


class Executor(Cursor):
    """One branch of a run, and what operations do there."""

    def __init__(
        self, run: Run, label: str, key: int, *, branch: Branch | None = None, main: bool = False
    ) -> None:
        super().__init__(run, label, key, branch=branch, main=main)
        self._draws = 0
        self._scopes: list[int] = []

    def child(self, name: str, ordinal: int, index: int, seed: int | None = None) -> Executor:
        """An executor that starts where a `Fork` with it is reached; which fork, which of it.

        seed: what its key derives from instead of this one's key and the fork.
        """
        if seed is None:
            key = derive_seed(self.key, _OF_BRANCH, ordinal, index)
        else:
            key = derive_seed(seed, _OF_BRANCH, index)
        return type(self)(self.run, f"{self.label}/{name}", key)

    def _begin(self, task: Task) -> None:
        try:
            self._perform(*task)
        except BaseException as error:
            self._fail(error, task)

    def _perform(self, operation: Operation, variable: Variable | None) -> None:
        branch = self.branch
        assert branch is not None
        match operation:
            case Text(text=text, control=control):
                branch.append(text, control=control)
                self._write_literal(Piece(text, "control" if control else "literal"))
            case RoleBegin(role=role, template=text) | RoleEnd(role=role, template=text):
                branch.append(text, control=True)
                begins = isinstance(operation, RoleBegin)
                self._write_literal(Piece(text, "begin" if begins else "end", role=role))
            case Gen():
                self._generate(branch, operation, variable)
            case Select(choices=choices, method=method):
                handle = branch.score(choices, unconditional=method.needs_unconditional)
                self._fly(Flight(operation, variable, [handle]))
            case Score(text=text):
                self._fly(Flight(operation, variable, [branch.score([text])]))
            case Fork(children=children):
                self._fork(branch, children)
            case Define(name=name, value=value):
                self._listeners.tell_run(VariableFinished(self.label, name, value))
            case Tokens() if variable is not None:
                variable.finish(branch.token_ids())
            case ScopeBegin():
                self._scopes.append(len(self.transcript.own))
            case ScopeEnd(name=name) if variable is not None:
                start = self._scopes.pop()
                text = "".join(piece.text for piece in self.transcript.own[start:])
                variable.finish(text, raw=text)
                self._listeners.tell_run(VariableFinished(self.label, name, text))

    def _write_literal(self, piece: Piece) -> None:
        self.transcript.own.append(piece)
        self._listeners.tell_text(piece.text)

    def _fork(self, branch: Branch, children: tuple[Executor, ...]) -> None:
        number = next(self.run.fork_numbers)
        for child, split in zip(children, branch.fork(len(children)), strict=True):
            transcript = Transcript(child.label, self.transcript, number)
            self.run.keep(transcript)
            # By way of the queue: a chain of thousands of forks must not become a deep stack.
            self.run.dispatcher.call(partial(child.start, split, transcript))
        if self._listeners:
            self._listeners.tell(Forked(self.label, tuple(child.label for child in children)))

    def _generate(self, branch: Branch, operation: Gen, variable: Variable | None) -> None:
        flight = Flight(operation, variable)
        if operation.reasoning is not None:
            flight.marks = operation.marks or self.run.backend.reasoning_marks
            flight.inside = is_open(self.transcript.since_message(), flight.marks)
        if self._listeners:
            for name in (operation.reasoning, operation.name):
                if name is not None:
                    self._listeners.tell(VariableStarted(self.label, name))
        seed = derive_seed(self.key, _OF_DRAW, self._draws)
        flight.draws = draws_of(operation, self.run.sampling, seed)
        operation.refuse_shape_of_reasoning(flight.draws[0].constraint)
        self._draws += 1
        flight.handles += branch.sample(flight.draws, heal=operation.heal)
        self._listeners.follow(flight)
        self._fly(flight)

    def _fly(self, flight: Flight) -> None:
        self._flight = flight
        if (seconds := flight.operation.timeout) is not None:
            run_out = partial(self._run_out, flight, seconds)
            flight.set_timer(self.run.dispatcher.call_in(seconds, run_out))
        # From the backend's thread: only say that there is something to do.
        flight.on_arrival(lambda: self.run.dispatcher.call(self.advance))

    def _land(self, flight: Flight) -> None:
        """The backend is through with an operation."""
        operation = flight.operation
        try:
            if flight.error is not None:
                raise flight.error
            results = [handle.result() for handle in flight.handles]
            for result in results:
                self._count(result.usage)
            match operation:
                case Gen():
                    flight.finish_relays(results[0].text)
                    landing = land_generation(flight, operation, results)
                    for value in landing.values:
                        value.annotate(flight, self.label, self.run.backend)
                    self._arrive(landing, completed=not isinstance(operation, Call))
                case Select():
                    self._choose(flight, operation, results[0])
                case Score():
                    self._arrive(land_score(flight, operation, results[0]))
        except BaseException as error:
            self._fail(error, (operation, flight.variable), self._break_off(flight))

    def _choose(self, flight: Flight, operation: Select, scored: ScoredChoices) -> None:
        assert self.branch is not None
        landing, winner, meta = land_choice(flight, operation, scored)
        self.branch.commit(winner)
        if self._listeners:
            name, text = operation.name, winner.text
            self._listeners.tell_text(text, name)
            self._listeners.tell(Selected(self.label, name, text, meta.probabilities))
        self._arrive(landing)

    def _arrive(self, landing: Landing, *, completed: bool = True) -> None:
        """Write what an operation has come to; its variables can be read from here on.

        completed: what can be read is final; else the program tells the run of it.
        """
        self.transcript.own += landing.pieces
        for value in landing.values:
            value.resolve()
        if self._listeners:
            for value in landing.values:
                if value.name is not None:
                    final = completed or value.unreadable is not None
                    tell = self._listeners.tell if final else self._listeners.tell_readers
                    tell(VariableFinished(self.label, value.name, value.told))

    def _count(self, usage: Usage) -> None:
        self.transcript.usages.append(usage)
        self.run.usages.append(usage)

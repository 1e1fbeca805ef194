"""What must come out of a random program: the language in its simplest form.

`Reference` plays a program on a backend of its own, one operation after the other, each to its end.
It is led by the tape of the run that it judges: at every step it knows what may have been seen
there, and where that is more than one thing (what had a cancelled branch finished? which branch was
first?) it goes on from what was.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from stemma.backend.base import Backend
from stemma.lang.choices import ChoicesMethod, decide
from stemma.lang.ops import Gen, Score, Select
from stemma.lang.sampling import derive_seed
from tests.interpreter.programs_for_tests import (
    Choose,
    Draw,
    Edge,
    First,
    Fork,
    Join,
    Program,
    Step,
    Weigh,
    Write,
    at_once,
    play,
)
from tests.interpreter.reference_lines_for_tests import (
    CANCELLED,
    HUNG,
    INTERRUPTED,
    UNKNOWN,
    Cell,
    Line,
    Raised,
    RaisedThrough,
    Seen,
    shown,
)


class Lines(NamedTuple):
    parent: Line
    labels: tuple[str, ...]
    lines: list[Line]


class Reference:
    """A `Machine`. disturbed: from any step on the run may have been stopped from outside."""

    def __init__(
        self,
        backend: Backend,
        operation: Callable[[Step], Any],
        tape: list[Seen],
        *,
        name: str,
        seed: int,
        disturbed: bool,
    ) -> None:
        self.chat = backend.chat
        self.operation = operation
        self.tape = tape
        self.place = 0
        self.disturbed = disturbed
        self.interrupted = False
        self.raised: str | None = None  # by the body
        self.told: set[str] = set()
        self.main = Line(name, seed, backend.open())
        self.lines = [self.main]

    def judge(self, program: Program, outcome: Seen) -> None:
        """Play it along the tape; `outcome` is what the run came to. AssertionError."""
        try:
            at_once(play(self, self.main, program))
        except (Raised, RaisedThrough) as error:
            self.raised = str(error)
        assert self.place == len(self.tape), ("seen afterwards", self.tape[self.place :])
        allowed = {INTERRUPTED} if self.disturbed else set()
        if self.raised is not None:
            allowed.add(self.raised)
        elif not self.interrupted:
            allowed |= self.failures()
        assert outcome.error in allowed, (outcome, allowed)

    def failures(self) -> set[str | None]:
        """What a run may raise at its end; None: nothing."""
        if self.main.error is not None:
            return {self.main.error}
        failed = [
            line
            for line in self.lines
            if line.error and line.error not in self.told and not line.cancelled
        ]
        found: set[str | None] = {line.error for line in failed}
        if all(line.maybe for line in failed):
            found.add(None)
        return found

    def close(self) -> None:
        for line in self.lines:
            line.branch.close()

    # The tape

    def seen(self, what: str, check: Callable[[Any], bool], errors: set[str | None]) -> Any:
        """What was seen at this step: a value that passes the check, or one of the errors."""
        assert self.place < len(self.tape), f"the tape ends before {what}"
        seen = self.tape[self.place]
        self.place += 1
        assert seen.what == what, (seen, what)
        if seen.error is None:
            assert check(seen.value), (seen, errors, self.place)
            return seen.value
        if seen.error == INTERRUPTED and self.disturbed:
            self.interrupted = True
        else:
            assert seen.error in errors, (seen, errors, self.place)
            self.told.add(seen.error)
        raise (Raised if seen.caught else RaisedThrough)(seen.error)

    def refusals(self, line: Line) -> tuple[set[str | None], bool]:
        """What taking no more is said by, and whether it must be said."""
        errors: set[str | None] = {CANCELLED} if line.maybe or line.cancelled else set()
        if line.cancelled:
            return {CANCELLED, line.error}, True
        if line.error is not None and line.error in self.told:
            # A read that was interrupted has told nobody.
            return errors | {line.error}, not line.from_parent and not self.interrupted
        return errors, False

    # Machine

    def branches(self, forks: Lines) -> list[Line]:
        return forks.lines

    def cancel(self, branch: Line) -> None:
        branch.cancel(all_below=False)

    def call(self, s: Line, steps: Program) -> Coroutine[Any, Any, None]:
        return play(self, s, steps)

    def error(self, name: str) -> Exception:
        return Raised(name)

    async def assign(self, s: Line, name: str, value: object) -> None:
        s.own[name] = Cell(s, value, sure=True)

    async def append(self, s: Line, step: Step) -> None:
        errors, must = self.refusals(s)
        self.seen("append", lambda _: not must, errors)
        self.do(s, step)

    async def read(self, s: Line, name: str) -> Any:
        cell = s.cell(name)
        if cell is None:
            return self.seen("read", lambda _: False, {UNKNOWN})
        errors: set[str | None] = {cell.error} if cell.error is not None else set()
        if not cell.sure and (cell.owner.cancelled or cell.owner.maybe):
            errors.add(CANCELLED)
        value = self.seen("read", lambda found: cell.error is None and found == cell.value, errors)
        cell.sure = True
        return value

    async def whole(self, s: Line, *, in_pieces: bool) -> Any:
        errors: set[str | None] = {s.error} if s.error is not None else set()
        if s.cancelled or s.maybe:
            errors.add(CANCELLED)
        return self.seen("whole", lambda text: s.error is None and text == s.text, errors)

    async def fork(self, s: Line, step: Fork) -> Lines:
        errors, must = self.refusals(s)
        labels = step.labels or tuple(str(i) for i in range(len(step.bodies)))
        prefix = f"{s.forks + 1}:" if s.forks else ""
        names = [f"{s.label}/{prefix}{label}" for label in labels]
        self.seen("fork", lambda found: not must and found == names, errors)
        ordinal = s.forks
        s.forks += 1
        for index, (name, branch) in enumerate(zip(names, s.branch.fork(len(names)), strict=True)):
            key = derive_seed(s.key, 0, ordinal, index)
            child = Line(name, key, branch, s, s.text, {**s.inherited, **s.own}, [*s.roles])
            child.error, child.from_parent = s.error, s.error is not None
            s.children.append(child)
            self.lines.append(child)
        return Lines(s, labels, s.children[len(s.children) - len(names) :])

    async def first(self, forks: Lines, end: First) -> None:
        wanted = max(1, end.k)
        good = [
            line
            for line in forks.lines
            if line.error is None and not (end.even and len(str(line.own["w"].value)) % 2)
        ]
        failed = [line for line in forks.lines if line.error not in (None, HUNG)]
        found = good
        try:
            labels = self.seen(
                "first",
                lambda labels: (
                    len(labels) == wanted
                    and labels == [line.label for line in good if line.label in labels]
                ),
                {f"too few: {[g.label for g in good]}, {[f.label for f in failed]}"}
                if len(good) < wanted
                else set(),
            )
            found = [line for line in good if line.label in labels]
        except Raised as error:
            if str(error) == INTERRUPTED:
                raise
            self.told |= {line.error for line in failed if line.error is not None}
            raise
        finally:
            for line in forks.lines:
                if line not in found:
                    line.cancel(all_below=True)

    async def join(self, forks: Lines, end: Join) -> None:
        allowed: set[str | None] = set()
        surely = False
        for line in forks.lines:
            if line.error is not None and not line.cancelled:
                self.told.add(line.error)
            if end.on_error == "raise" and line.error and not line.cancelled and not surely:
                allowed.add(line.error)
                surely = not line.maybe
        gathers = end.mode == "gather_variable"
        lacking = {"surely": False, "maybe": False}
        if gathers:
            own = [line for line in forks.lines if end.on_error != "drop" or not line.error]
            names = {name for line in own for name in line.own}
            for line in own:
                if names - line.own.keys() and not line.cancelled and not line.error:
                    lacking["maybe" if line.maybe else "surely"] = True
        else:
            errors, must = self.refusals(forks.parent)
            allowed |= errors
            surely = surely or must
        if any(lacking.values()):
            allowed.add(UNKNOWN)

        def fits(found: Any) -> bool:
            return not surely and self.fits(forks, end, found)

        found = self.seen("join", fits, allowed)
        if gathers:
            for name, values in found["lists"].items():
                forks.parent.own[name] = Cell(forks.parent, values, sure=True)
            return
        for line in forks.lines:
            if line.label not in found["errors"]:
                for text, edge in line.pieces:
                    self.do(forks.parent, edge or Write(text))

    @staticmethod
    def fits(forks: Lines, end: Join, found: Any) -> bool:
        """Whether a join may have returned this."""
        errors, labels, lists = found["errors"], found["labels"], found["lists"]
        places = []
        for line in forks.lines:
            unsure = line.cancelled or line.maybe
            told = errors.get(line.label)
            if end.on_error == "raise":
                fine = told is None
            else:
                fine = told in ({line.error, CANCELLED, None} if unsure else {line.error})
            if not fine or (line.label in labels) != (end.on_error != "drop" or told is None):
                return False
            if line.label in labels:
                places.append(line)
        if end.mode != "gather_variable":
            return not lists
        names = list(dict.fromkeys(name for line in places for name in line.own))
        if list(lists) != names:
            return False
        for name in names:
            for line, value in zip(places, lists[name], strict=True):
                unsure = line.cancelled or line.maybe
                cell, told = line.own.get(name), errors.get(line.label)
                possible: list[Any] = []
                if cell is not None and cell.error is None:
                    possible.append(cell.value)
                if told is not None and (cell is None or cell.error is not None or not cell.sure):
                    possible.append(f"error {told}")
                if unsure and end.on_error == "raise" and (cell is None or not cell.sure):
                    possible.append(None)
                if unsure and cell is None:
                    possible.append(None)
                if value not in possible:
                    return False
        return True

    # One operation

    def do(self, line: Line, step: Step) -> None:
        """Its effect on a branch that takes it."""
        if isinstance(step, Edge) and step.kind != "scope":
            edge = step
            text = (
                self.chat.begin(edge.kind, line.roles) if edge.begins else self.chat.end(edge.kind)
            )
            if edge.begins:
                line.roles.append(edge.kind)
            if line.error is None:
                line.branch.append(text, control=True)
                line.pieces.append((text, edge))
            return
        name = getattr(step, "name", None) or None
        cell = Cell(line, error=line.error)
        if name is not None:
            line.own[name] = cell
        if line.error is not None:
            return
        mood = getattr(step, "mood", "well")
        match step:
            case Write(text=text):
                line.branch.append(text)
                line.pieces.append((text, None))
            case Edge(begins=True):
                line.scopes.append(len(line.pieces))
            case Edge():
                cell.value = "".join(text for text, _ in line.pieces[line.scopes.pop() :])
            case Draw():
                self.draw(line, step, cell)
            case _ if mood == "fault":
                pass
            case Choose():
                operation: Select = self.operation(step)
                scored = line.branch.score(operation.choices).result().choices
                winner = scored[
                    decide(
                        ChoicesMethod.TOKEN_LENGTH_NORMALIZED, [c.logprobs for c in scored]
                    ).index
                ]
                line.branch.commit(winner)
                line.pieces.append((winner.text, None))
                cell.value = winner.text
            case Weigh():
                score: Score = self.operation(step)
                cell.value = shown(line.branch.score([score.text]).result().choices[0])
        if mood != "well":
            timeout = getattr(step, "timeout", None)
            kind = "fault" if mood == "fault" else "timeout" if timeout is not None else None
            line.error = f"{kind} {name}" if kind is not None else HUNG
            cell.error = line.error

    def draw(self, line: Line, step: Draw, cell: Cell) -> None:
        operation: Gen = self.operation(step)
        seed = derive_seed(line.key, 1, line.draws)
        line.draws += 1
        params = operation.params
        if step.mood == "well":
            seeds = [seed, *(derive_seed(seed, i) for i in range(1, step.n))]
            draws = [params.one_draw(each) for each in seeds]
            texts = [handle.result().text for handle in line.branch.sample(draws)]
            line.pieces.append((texts[0], None))
            cell.value = texts[0] if step.n == 1 else texts
            return

        def tail(length: int) -> str:
            if params.max_tokens is not None and params.max_tokens >= 10**6:
                return ""  # more than there is room for: it never begins
            (branch,) = line.branch.fork(1)
            draw = params.one_draw(seed).but(max_tokens=length + 8, stop=())
            text = branch.generate(draw).result().text
            branch.close()
            return text

        line.tail = tail

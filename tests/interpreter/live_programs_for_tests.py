"""Random programs on the interpreter: run in every way, cut short from outside, and judged.

`try_one` makes programs from a number, runs them, and checks that each ended in time as the
reference says, and that nothing is left of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import stemma as st
from stemma.lang.errors import Cancelled, ContextOverflow, Timeout, TooFewBranches, UnknownVariable
from tests.interpreter.leftovers_for_tests import check_threads, eventually, watchdog
from tests.interpreter.program_maker_for_tests import Maker
from tests.interpreter.programs_for_tests import (
    First,
    Fork,
    Join,
    Mine,
    Program,
    Step,
    at_once,
    play,
)
from tests.interpreter.reference_for_tests import Reference
from tests.interpreter.reference_lines_for_tests import (
    CANCELLED,
    INTERRUPTED,
    UNKNOWN,
    Line,
    Seen,
    shown,
)
from tests.interpreter.ways_to_run_for_tests import BATCH_CUTS, CUTS, Cut, leaving_no_task
from tests.interpreter.worlds_for_tests import Fault, Scripted, World

# -- programs


def named(error: BaseException) -> str:
    """What the reference calls an error."""
    text = str(error)
    match error:
        case Fault() | ContextOverflow():
            return f"fault {error.variable}"  # type: ignore[union-attr]
        case Timeout() if not text.startswith("the run did not end"):
            return f"timeout {error.variable}"
        case Cancelled() if text.startswith("branch "):
            return CANCELLED
        case Timeout() | Cancelled() | asyncio.CancelledError():
            return INTERRUPTED
        case Mine():
            return text
        case UnknownVariable():
            return UNKNOWN
        case TooFewBranches():
            failed = [
                branch.label
                for label, branch in zip(
                    error.found._parent_labels, error.found._parent_states, strict=True
                )
                if label in error.errors
            ]
            return f"too few: {[state.label for state in error.found]}, {failed}"
    return f"{type(error).__name__}: {text}"


def noted(value: Any) -> Any:
    """A value in a form that can be compared; errors that stand in a list by their names."""
    if isinstance(value, list):
        return [noted(each) for each in value]
    return f"error {named(value)}" if isinstance(value, BaseException) else shown(value)


@dataclass
class Record:
    """One run: what its body saw, its branches, and what it came to."""

    program: Program
    tape: list[Seen] = field(default_factory=list)
    states: list[st.ProgramState] = field(default_factory=list)
    seed: int | None = None
    ended: bool = False
    outcome: Seen | None = None
    told: dict[str, str] | None = None  # the texts of a stream by branch, read to its end

    def end(self, result: object) -> None:
        if isinstance(result, BaseException):
            self.outcome = Seen("run", error=named(result))
        else:
            assert isinstance(result, st.ProgramState)
            assert result.value == "done"
            self.outcome = Seen("run")


class Live:
    """A `Machine` that notes on the tape what a program sees."""

    def __init__(self, record: Record, operation: Callable[[Step], Any], *, waits: bool) -> None:
        self.record = record
        self.operation = operation
        self.waits = waits  # it is an async program's

    @contextmanager
    def seeing(self, what: str) -> Iterator[list[Any]]:
        """Notes the value that is put into the list, or the error."""
        value: list[Any] = []
        try:
            yield value
        except BaseException as error:
            caught = isinstance(error, Exception)
            self.record.tape.append(Seen(what, error=named(error), caught=caught))
            raise
        self.record.tape.append(Seen(what, *value))

    async def append(self, s: st.ProgramState, step: Step) -> None:
        with self.seeing("append"):
            s += self.operation(step)

    async def assign(self, s: st.ProgramState, name: str, value: object) -> None:
        s[name] = value

    async def read(self, s: st.ProgramState, name: str) -> Any:
        with self.seeing("read") as seen:
            seen.append(noted(await s.get(name) if self.waits else s[name]))
        return seen[0]

    async def whole(self, s: st.ProgramState, *, in_pieces: bool) -> Any:
        with self.seeing("whole") as seen:
            if not self.waits:
                seen.append("".join(s.text_iter()) if in_pieces else s.text())
            elif in_pieces:
                seen.append("".join([piece async for piece in s.text_async_iter()]))
            else:
                await s.wait()
                seen.append(s.text())

    async def fork(self, s: st.ProgramState, step: Fork) -> Any:
        with self.seeing("fork") as seen:
            forks = s.fork(step.labels if step.labels is not None else len(step.bodies))
            seen.append([branch.label for branch in forks])
        self.record.states += forks
        return forks

    async def join(self, forks: Any, end: Join) -> None:
        with self.seeing("join") as seen:
            how: Any = {"mode": end.mode, "on_error": end.on_error}
            found = await forks.ajoin(**how) if self.waits else forks.join(**how)
            full = dict(zip(forks.labels, (branch.label for branch in forks), strict=True))
            seen.append(
                {
                    "labels": [full[label] for label in found.labels],
                    "errors": {full[label]: named(e) for label, e in found.errors.items()},
                    "lists": {name: noted(values) for name, values in found.items()},
                }
            )

    async def first(self, forks: Any, end: First) -> None:
        def even(branch: st.ProgramState) -> bool:
            return len(str(branch["w"])) % 2 == 0

        with self.seeing("first") as seen:
            try:
                if end.k == 0 and not end.even:
                    found = [await forks.arace() if self.waits else forks.race()]
                else:
                    how: Any = {"k": max(1, end.k), "when": even if end.even else None}
                    found = await forks.afirst(**how) if self.waits else forks.first(**how)
            except TooFewBranches as error:
                error.found._parent_labels = forks.labels
                error.found._parent_states = list(forks)
                raise
            seen.append([branch.label for branch in found])

    def branches(self, forks: Any) -> list[st.ProgramState]:
        return list(forks)

    def cancel(self, branch: st.ProgramState) -> None:
        branch.cancel()

    def error(self, name: str) -> Exception:
        return Mine(name)

    async def call(self, s: st.ProgramState, steps: Program) -> None:
        if self.waits:
            await async_part(s, self, steps)
        else:
            part(s, self, steps)


@st.function
def part(s: st.ProgramState, live: Live, steps: Program) -> None:
    at_once(play(live, s, steps))


@st.function
async def async_part(s: st.ProgramState, live: Live, steps: Program) -> None:
    await play(live, s, steps)


def program_of(records: list[Record], world: World, *, waits: bool, holds: bool) -> Any:
    """A program whose argument says which of the records it is to play."""

    def begin(s: st.ProgramState, which: int) -> tuple[Live, Program]:
        record = records[which]
        record.seed = s.seed
        record.states.append(s)
        return Live(record, world.operation, waits=waits), record.program

    def end(which: int) -> str:
        if not holds:
            del records[which].states[1:]
        return "done"

    @st.function
    def program(s: st.ProgramState, which: int = 0) -> str:
        live, steps = begin(s, which)
        try:
            at_once(play(live, s, steps))
            return end(which)
        finally:
            records[which].ended = True

    @st.function
    async def async_program(s: st.ProgramState, which: int = 0) -> str:
        live, steps = begin(s, which)
        try:
            await play(live, s, steps)
            return end(which)
        finally:
            records[which].ended = True

    return async_program if waits else program


# -- judging


def check_lines(record: Record, reference: Reference, *, stopped: bool) -> None:
    """Texts and variables of all branches, after the run. stopped: it was cut short."""
    for state, line in zip(record.states, reference.lines, strict=False):
        assert state.label == line.label
        text = state._executor.transcript.text()
        unsure = stopped or line.cancelled or line.maybe or line.from_parent
        if line.error is None and not unsure:
            assert text == line.text, line.label
        else:
            assert unsure or text.startswith(line.text), (line.label, text, line.text)
            more = len(text) - len(line.text)
            whole = line.text + (line.tail(more) if more > 0 and line.error else "")
            assert whole.startswith(text), (line.label, text, whole)
        check_variables(state, line, stopped=stopped)
        if record.told is not None:
            told = record.told.get(line.label, "")
            own = text[len(line.base) :] if len(text) >= len(line.base) else ""
            assert told == own or (unsure and own.startswith(told)), (line.label, told, own)


def check_variables(state: st.ProgramState, line: Line, *, stopped: bool) -> None:
    names = {**line.inherited, **line.own}
    assert set(state.variables()) == set(names)
    for name, cell in names.items():
        variable = state._own.get(name) or state._inherited[name]
        assert variable.done, (line.label, name)
        if variable.error is None:
            assert cell.error is None, (line.label, name)
            assert noted(variable.value) == cell.value, (line.label, name)
            continue
        allowed = {cell.error}
        if cell.owner.cancelled or cell.owner.maybe:
            allowed.add(CANCELLED)
        if stopped:
            allowed.add(INTERRUPTED)
        assert named(variable.error) in allowed, (line.label, name, variable.error, allowed)


def judge(record: Record, world: World, name: str, *, disturbed: bool) -> None:
    """Check one run that has ended."""
    if record.seed is None:  # its body never began
        return
    assert record.ended
    reference = Reference(
        world.reference,
        world.operation,
        record.tape,
        name=name,
        seed=record.seed,
        disturbed=disturbed,
    )
    try:
        outcome = record.outcome or Seen("run", error=INTERRUPTED)
        reference.judge(record.program, outcome)
        stopped = disturbed or reference.raised is not None
        check_lines(record, reference, stopped=stopped)
    finally:
        reference.close()


def run_it(way: Callable[..., Any], *how: Any) -> str | None:
    """Run programs that way; the name of the error."""
    try:
        work = way(*how)
        if isinstance(work, Coroutine):
            asyncio.run(leaving_no_task(work))
    except (Exception, asyncio.CancelledError) as error:
        return named(error)
    return None


def try_one(number: int, world: World, *, disturbed: bool) -> str:
    """Make, run and judge the programs of that number; in which way they ran."""
    random = Random(number)
    in_batch = random.random() < 0.25
    ways = BATCH_CUTS if in_batch else CUTS
    way = random.choice([*ways])
    cut = Cut()
    if disturbed:
        kind = random.choice(ways[way])
        amount: Any = random.randint(1, 12) if kind == "after" else random.uniform(0.0005, 0.05)
        if in_batch and kind == "after":
            amount = 1
        cut = replace(cut, **{kind: amount})
    count = random.randint(1, 4) if in_batch else 1
    endless = disturbed and cut.after is None and random.random() < 0.5
    records = []
    for _ in range(count):
        maker = Maker(random, faulty=random.random() < 0.6, choices_fail=world.choices_fail)
        maker.endless = endless
        records.append(Record(maker.program()))
    if isinstance(world.backend, Scripted):
        world.backend.delay = random.choice([0.0, 0.0, 0.001, 0.004])
        world.backend.pieces = random.randint(1, 3)
    waits = random.random() < 0.5
    program = program_of(records, world, waits=waits, holds=random.random() < 0.7)
    how: dict[str, Any] = {"backend": world.backend, "seed": random.getrandbits(40)}
    if cut.timeout is not None:
        how["timeout"] = cut.timeout
    if in_batch and random.random() < 0.5:
        how["concurrency"] = random.randint(1, 3)
    given: Any = records if in_batch else records[0]
    with watchdog(f"programs {number}"):
        before = set(threading.enumerate())
        error = run_it(way, given, program, how, cut)
        if error is not None:  # of a batch only what was cut short raises
            assert not in_batch or cut.after_s is not None, error
            for record in records:
                record.outcome = record.outcome or Seen("run", error=error)
        eventually(lambda: check_threads(before))
        for record in records:
            judge(record, world, program.name, disturbed=disturbed)
        records.clear()
        del given, record
        eventually(world.check_idle)
    return str(way.__name__)

"""Programs as values: what one is, and how it is played.

A program is a tuple of steps. `play` takes them on anything that has the methods of `Machine`: the
interpreter (`live_programs_for_tests.py`) or the reference (`reference_for_tests.py`), which does
one thing after the other and knows what must come out.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

Mood = Literal["well", "fault", "hang"]
"""What becomes of an operation: it ends, it fails, or it goes on for ever."""


class Step:
    """One thing that a program does."""


@dataclass(frozen=True)
class Write(Step):
    text: str


@dataclass(frozen=True)
class Draw(Step):
    name: str | None
    max_tokens: int
    n: int = 1
    stop: tuple[str, ...] = ()
    temperature: float = 1.0
    mood: Mood = "well"
    timeout: float | None = None


@dataclass(frozen=True)
class Choose(Step):
    name: str
    choices: tuple[str, ...]
    mood: Mood = "well"


@dataclass(frozen=True)
class Weigh(Step):
    """Score a text."""

    name: str
    text: str
    mood: Mood = "well"


@dataclass(frozen=True)
class Edge(Step):
    """Begin or end a message, or a scope."""

    kind: Literal["user", "assistant", "scope"]
    begins: bool
    name: str = ""


@dataclass(frozen=True)
class Assign(Step):
    name: str
    value: object


@dataclass(frozen=True)
class Quote(Step):
    """Read a variable and write what it says."""

    name: str


@dataclass(frozen=True)
class Read(Step):
    name: str


@dataclass(frozen=True)
class Whole(Step):
    """Read the text, at once or in pieces."""

    in_pieces: bool


@dataclass(frozen=True)
class Around(Step):
    """Steps between two edges, of which the second also comes after an error."""

    begin: Edge
    steps: tuple[Step, ...]
    end: Edge


@dataclass(frozen=True)
class Call(Step):
    """A subroutine."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Try(Step):
    """Go on after whatever exception."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Raise(Step):
    name: str


class End:
    """What is done with the branches of a fork."""


@dataclass(frozen=True)
class Join(End):
    on_error: str
    mode: str = "gather_variable"


@dataclass(frozen=True)
class First(End):
    """k: how many; 0 is a race. even: only branches whose "w" has an even length."""

    k: int
    even: bool = False


@dataclass(frozen=True)
class Gather(End):
    """Read a variable of all."""

    name: str


@dataclass(frozen=True)
class GoOn(End):
    """Play steps on the branches once more."""

    place: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Fork(Step):
    """hanging: the branches that must be cancelled, or nothing ends; cancelled before the ends,
    unless a race does it.
    """

    labels: tuple[str, ...] | None
    bodies: tuple[tuple[Step, ...], ...]
    ends: tuple[End, ...]
    hanging: tuple[int, ...] = ()
    cancelled: tuple[int, ...] = ()


Program = tuple[Step, ...]


class Mine(Exception):
    """What a body raises."""


# -- playing


class Machine(Protocol):
    """What a program is played on; `s` is a branch of it. Everything may raise."""

    async def append(self, s: Any, step: Step) -> None: ...
    async def assign(self, s: Any, name: str, value: object) -> None: ...
    async def read(self, s: Any, name: str) -> object: ...
    async def whole(self, s: Any, *, in_pieces: bool) -> object: ...
    async def fork(self, s: Any, step: Fork) -> Any: ...
    async def join(self, forks: Any, end: Join) -> object: ...
    async def first(self, forks: Any, end: First) -> object: ...
    def branches(self, forks: Any) -> list[Any]: ...
    def cancel(self, branch: Any) -> None: ...
    def call(self, s: Any, steps: Program) -> Coroutine[Any, Any, object]: ...
    def error(self, name: str) -> Exception: ...


async def play(machine: Machine, s: Any, steps: Program) -> None:
    for step in steps:
        match step:
            case Assign(name=name, value=value):
                await machine.assign(s, name, value)
            case Quote(name=name):
                value = await machine.read(s, name)
                await machine.append(s, Write(f"<{value}>"))
            case Read(name=name):
                await machine.read(s, name)
            case Whole(in_pieces=in_pieces):
                await machine.whole(s, in_pieces=in_pieces)
            case Around(begin=begin, steps=inner, end=end):
                await machine.append(s, begin)
                try:
                    await play(machine, s, inner)
                finally:
                    await machine.append(s, end)
            case Call(steps=inner):
                await machine.call(s, inner)
            case Try(steps=inner):
                with suppress(Exception):
                    await play(machine, s, inner)
            case Raise(name=name):
                raise machine.error(name)
            case Fork():
                await play_fork(machine, s, step)
            case _:
                await machine.append(s, step)


async def play_fork(machine: Machine, s: Any, step: Fork) -> None:
    forks = await machine.fork(s, step)
    branches = machine.branches(forks)
    try:
        for branch, body in zip(branches, step.bodies, strict=True):
            await play(machine, branch, body)
        for place in step.cancelled:
            machine.cancel(branches[place])
        for end in step.ends:
            match end:
                case Join():
                    await machine.join(forks, end)
                case First():
                    await machine.first(forks, end)
                case Gather(name=name):
                    for branch in branches:
                        await machine.read(branch, name)
                case GoOn(place=place, steps=steps):
                    await play(machine, branches[place], steps)
    except BaseException:
        for place in step.hanging:
            machine.cancel(branches[place])
        raise


T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run what never waits for an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("it waits for an event loop")

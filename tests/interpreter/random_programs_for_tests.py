"""Random programs as values: what one is, how one is made, and how one is played.

A program is a tuple of steps. `play` takes them on anything that has the methods of `Machine`: the
interpreter (`live_programs_for_tests.py`) or the reference (`reference_for_tests.py`), which does
one thing after the other and knows what must come out.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, Protocol, TypeVar

Mood = Literal["well", "fault", "hang"]
"""What becomes of an operation: it ends, it fails, or it goes on for ever."""

WORDS = ["red", "Öl", "tea", "日本", "nine", "x=", "so", "né", "?", "the cat"]


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


# -- making


@dataclass
class Maker:
    """Makes programs out of a seed.

    faulty: operations may fail, and bodies raise. choices_fail: selects and scores, too. endless:
    some operations never end, and nothing in the program ends them.
    """

    random: Random
    faulty: bool = True
    choices_fail: bool = True
    endless: bool = False
    left: int = 0
    numbers: int = 0

    def program(self) -> Program:
        self.left = self.random.randint(6, 26)
        return (Write("Go "), *self.steps(0))

    def unique(self, letter: str) -> str:
        self.numbers += 1
        return f"{letter}{self.numbers}"

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def name(self) -> str:
        return self.random.choice("abcd")

    def text(self) -> str:
        words = self.random.choices(WORDS, k=self.random.randint(1, 3))
        return self.random.choice(["", " ", "\n"]) + " ".join(words) + self.random.choice(["", " "])

    def steps(self, depth: int, *, reads: bool = True, open: bool = False) -> Program:
        made: list[Step] = []
        for _ in range(self.random.randint(1, 6 if depth == 0 else 3)):
            if self.left <= 0 and made:
                break
            self.left -= 1
            made.append(self.step(depth, reads, open))
        return tuple(made)

    def step(self, depth: int, reads: bool, open: bool) -> Step:
        """open: a message, in which no other may begin."""
        kinds = {"write": 3, "draw": 6, "choose": 2, "weigh": 0.6, "assign": 1}
        if reads:
            kinds |= {"read": 2, "quote": 1.5, "whole": 0.8}
        if depth < 3:
            kinds |= {"fork": 3.5, "call": 1, "scope": 0.8, "try": 1}
            if not open:
                kinds |= {"message": 1}
        if self.faulty:
            kinds |= {"raise": 0.15}
        (kind,) = self.random.choices([*kinds], [*kinds.values()])
        deeper = depth + 1
        match kind:
            case "write":
                return Write(self.text())
            case "draw":
                return self.draw()
            case "choose" | "weigh":
                return self.choice(kind)
            case "assign":
                return Assign(self.name(), self.random.choice([7, "set", None]))
            case "read":
                return Read(self.random.choice("abcde"))
            case "quote":
                return Quote(self.name())
            case "whole":
                return Whole(in_pieces=self.chance(0.4))
            case "call":
                return Call(self.steps(deeper, reads=reads, open=open))
            case "try":
                return Try(self.steps(deeper, reads=reads, open=open))
            case "raise":
                return Raise(self.unique("raised"))
            case "scope":
                begin, end = Edge("scope", True), Edge("scope", False, self.name())
                return Around(begin, self.steps(deeper, reads=reads, open=open), end)
            case "message":
                role: Any = self.random.choice(["user", "assistant"])
                steps = self.steps(deeper, reads=reads, open=True)
                return Around(Edge(role, True), steps, Edge(role, False))
            case _:
                return self.fork(deeper, reads, open)

    def draw(self, name: str | None = None) -> Draw:
        if self.faulty and name is None and self.chance(0.06):
            return Draw(self.unique("fault"), 8, n=self.random.choice([1, 1, 3]), mood="fault")
        if self.faulty and name is None and self.chance(0.04):
            return Draw(
                self.unique("late"), 8, mood="hang", timeout=self.random.choice([0.01, 0.03])
            )
        if self.endless and name is None and self.chance(0.06):
            return Draw(self.unique("hang"), 8, mood="hang")
        if name is None and self.chance(0.85):
            name = self.name()
        return Draw(
            name,
            max_tokens=self.random.randint(1, 6),
            n=self.random.choice([1, 1, 1, 1, 2, 4]),
            stop=self.random.choice([(), (), (" ",), ("e", "né"), ("a b",)]),
            temperature=self.random.choice([0.0, 1.0, 1.0, 3.0]),
            timeout=60.0 if self.chance(0.1) else None,
        )

    def choice(self, kind: str) -> Step:
        mood: Mood = "well"
        if self.faulty and self.choices_fail and self.chance(0.05):
            mood = "fault"
        name = self.name() if mood == "well" else self.unique("fault")
        if kind == "weigh":
            return Weigh(name, " " + self.text(), mood)
        texts = dict.fromkeys(" " + self.text() for _ in range(self.random.randint(1, 4)))
        return Choose(name, tuple(texts), mood)

    def fork(self, depth: int, reads: bool, open: bool) -> Fork:
        count = self.random.choice([0, 1, 2, 2, 3, 3, 5])
        labels = None
        if self.chance(0.4):
            labels = tuple(f"{'pqrst'[i]}{self.unique('-')}" for i in range(count))
        races = reads and count > 0 and self.chance(0.3)
        bodies = [self.steps(depth, reads=reads, open=open) for _ in range(count)]
        hanging: tuple[int, ...] = ()
        cancelled: tuple[int, ...] = ()
        ends: list[End] = []
        if races:
            first = First(self.random.randint(0, max(1, count - 1)), even=self.chance(0.3))
            bodies = [(*body, self.draw("w")) for body in bodies]
            if not first.even and self.faulty is False and self.chance(0.4):
                hanging = tuple(range(max(1, first.k), count))
            ends.append(first)
        elif count and self.chance(0.2):
            cancelled = tuple(
                sorted(self.random.sample(range(count), self.random.randint(1, count)))
            )
            hanging = tuple(place for place in cancelled if self.chance(0.3))
        for place in hanging:
            hang = Draw(self.unique("hang"), 8, mood="hang")
            after = self.steps(3, reads=False, open=open)
            bodies[place] = (*bodies[place], hang, *after)
        if reads and count and self.chance(0.3):
            ends.append(Gather(self.name()))
        if count and self.chance(0.3):
            place = self.random.randrange(count)
            ends.append(GoOn(place, self.steps(3, reads=reads, open=open)))
        if reads and self.chance(0.5):
            again = not cancelled and not races and self.chance(0.25)
            mode = "concate_and_append" if again else "gather_variable"
            ends.append(Join(self.random.choice(["raise", "return", "drop"]), mode))
        return Fork(labels, tuple(bodies), tuple(ends), hanging, cancelled)

"""Programs out of a seed: forks within forks, joins, races, choices, messages, failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.interpreter.programs_for_tests import (
    Around,
    Assign,
    Call,
    Choose,
    Draw,
    Edge,
    End,
    First,
    Fork,
    Gather,
    GoOn,
    Join,
    Mood,
    Program,
    Quote,
    Raise,
    Read,
    Step,
    Try,
    Weigh,
    Whole,
    Write,
)

WORDS = ["red", "Öl", "tea", "日本", "nine", "x=", "so", "né", "?", "the cat"]


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
    named: list[str] = field(default_factory=list)

    def program(self) -> Program:
        self.left = self.random.randint(8, 40)
        return (Write("Go "), *self.steps(0))

    def unique(self, letter: str) -> str:
        self.numbers += 1
        return f"{letter}{self.numbers}"

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def name(self) -> str:
        self.named.append(self.random.choice("abcd"))
        return self.named[-1]

    def known(self) -> str:
        """A variable to read, most often one that is there."""
        return self.random.choice(self.named if self.named and self.chance(0.9) else "abcde")

    def text(self) -> str:
        words = self.random.choices(WORDS, k=self.random.randint(1, 3))
        return self.random.choice(["", " ", "\n"]) + " ".join(words) + self.random.choice(["", " "])

    def steps(self, depth: int, *, reads: bool = True, open: bool = False) -> Program:
        made: list[Step] = []
        for _ in range(self.random.randint(3, 8) if depth == 0 else self.random.randint(1, 3)):
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
            kinds |= {"fork": 4, "call": 1, "scope": 0.8, "try": 1.5}
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
                return Read(self.known())
            case "quote":
                return Quote(self.known())
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
        if self.faulty and name is None and self.chance(0.08):
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
            if self.faulty and self.chance(0.4):
                place = cancelled[0]
                bodies[place] = (*bodies[place], Draw(self.unique("fault"), 8, mood="fault"))
        for place in hanging:
            hang = Draw(self.unique("hang"), 8, mood="hang")
            after = self.steps(3, reads=False, open=open)
            bodies[place] = (*bodies[place], hang, *after)
        if reads and count and self.chance(0.3):
            ends.append(Gather(self.known()))
        if count and self.chance(0.3):
            place = self.random.randrange(count)
            ends.append(GoOn(place, self.steps(3, reads=reads, open=open)))
        if reads and self.chance(0.5):
            again = not cancelled and not races and self.chance(0.25)
            mode = "concate_and_append" if again else "gather_variable"
            ends.append(Join(self.random.choice(["raise", "return", "drop"]), mode))
        return Fork(labels, tuple(bodies), tuple(ends), hanging, cancelled)

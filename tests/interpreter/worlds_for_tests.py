"""What random programs run on: a script whose answers follow from what is asked, or a model.

A step can be told to fail or never to end; here is how a backend is made to do that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import stemma as st
from stemma.backend.base import Backend, Pending
from stemma.backend.local.backend import LocalBackend
from stemma.backend.mock import Broken, Call, MockBackend, Reply
from stemma.lang.ops import ScopeBegin, ScopeEnd
from stemma.lang.sampling import SamplingParams
from tests.interpreter.program_maker_for_tests import WORDS
from tests.interpreter.programs_for_tests import (
    Choose,
    Draw,
    Edge,
    Step,
    Weigh,
    Write,
)


class Fault(Exception):
    """What the backend lets go wrong."""


class Scripted(MockBackend):
    """Replies follow from prompt and seed. A stop string or a choice "<fault>" fails the request,
    "<hang>" lets it write its reply and never end.
    """

    def __init__(self, *, delay: float = 0.0, pieces: int = 1) -> None:
        super().__init__(self._answer, scores=self._weigh, delay=delay, pieces=pieces)
        self._hangs = False

    @staticmethod
    def _answer(prompt: str, params: SamplingParams) -> Reply:
        seed = params.seed if params.temperature else 0
        random = Random(f"{prompt}|{seed}|{params.temperature}")
        text = "".join(" " + word for word in random.choices(WORDS, k=random.randint(0, 8)))
        return Broken(text, Fault()) if "<fault>" in params.stop else text

    @staticmethod
    def _weigh(prompt: str, choice: str) -> list[float]:
        random = Random(f"{prompt}|{choice}")
        return [-random.random() for _ in range(len(choice.split()) or 1)]

    def _start(self, pending: Pending[Any], call: Call) -> BaseException | None:
        marks = call.params.stop if call.params is not None else call.choices
        self._hangs = "<hang>" in marks
        error = super()._start(pending, call)
        return Fault() if call.params is None and "<fault>" in marks else error

    def _play(self, steps: Sequence[Callable[[], object]]) -> None:
        """Each in a time of its own; what hangs never comes to its last step."""
        delay = self.delay
        self.delay = delay * Random(len(self.calls)).choice([0, 0.5, 1, 2])
        super()._play(steps[:-1] if self._hangs else steps)
        self.delay = delay

    def check_idle(self) -> None:
        assert (self.running, self.open_branches, len(self._in_the_air)) == (0, 0, 0)


class Idle:
    """Whether an engine holds nothing for anybody."""

    def __init__(self, backend: LocalBackend) -> None:
        self.backend = backend

    def check_idle(self) -> None:
        stats = self.backend.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert (stats.protected_tokens, stats.private_tokens) == (0, 0)
        self.backend.check()


def scripted_operation(step: Step) -> Any:
    """What a step appends on a scripted backend."""
    mark = () if (mood := getattr(step, "mood", "well")) == "well" else (f"<{mood}>",)
    match step:
        case Write(text=text):
            return text
        case Draw():
            return st.gen(
                step.name,
                max_tokens=step.max_tokens,
                n=step.n,
                stop=[*step.stop, *mark] or None,
                temperature=step.temperature,
                timeout=step.timeout,
            )
        case Choose():
            return st.select(step.name, [*step.choices, *mark])
        case Weigh():
            return st.score(mark[0] if mark else step.text, step.name)
        case Edge(kind="scope"):
            return ScopeBegin("scope") if step.begins else ScopeEnd(step.name)
        case Edge():
            return getattr(st, f"{step.kind}_{'begin' if step.begins else 'end'}")()
    raise AssertionError(step)


def model_operation(step: Step) -> Any:
    """On a model: it fails where it has no room, and hangs where it has a lot to write."""
    if not isinstance(step, Draw) or step.mood == "well":
        return scripted_operation(step)
    limit = 10**6 if step.mood == "fault" else 4000
    return st.gen(
        step.name,
        max_tokens=limit,
        n=step.n,
        ignore_eos=True,
        temperature=step.temperature,
        timeout=step.timeout,
    )


@dataclass(frozen=True)
class World:
    """backend: of the programs. reference: another with the same answers, used one by one."""

    backend: Backend
    reference: Backend
    operation: Callable[[Step], Any]
    check_idle: Callable[[], None]
    choices_fail: bool

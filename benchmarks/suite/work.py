"""What a workload asks of a model, as token ids, and what came of it: the values that travel
between the suite and its peers.

Imported by peers, under interpreters that have nothing but their own engine: standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Ids = list[int]

TEMPERATURE = 1.0
"""Of every generation, so that the samples of one prompt differ."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a program.

    round: calls of one round depend on earlier rounds only, so they can run together. Its prompt is
    the first `keep` tokens of what call number `after` read and wrote, then `suffix`; `after` is
    None for a text of its own. Either `new` tokens are to be sampled, whatever they are, or
    `choices` are to be scored.
    """

    round: int
    after: int | None
    keep: int
    suffix: Ids
    new: int = 0
    choices: list[Ids] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ready:
    """A call whose prompt is known. until: the last round that goes on from it, -1 for none."""

    index: int
    prompt: Ids
    new: int
    choices: list[Ids]
    until: int

    @property
    def prompt_tokens(self) -> int:
        """Of all its sequences: a choice is scored behind a prompt of its own."""
        return len(self.prompt) * max(1, len(self.choices)) + sum(map(len, self.choices))


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call. ids: the tokens sampled. first_token_s: since its round began, if
    known.
    """

    ids: Ids = field(default_factory=list)
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a workload.

    prompt_tokens: of all calls together. prompt_computed: those of them that were run through the
    model. rows: everything that was, outputs, choices and padding included. steps: how many forward
    passes that took, None where the contender does not tell. first_token_s: of the calls after the
    first round, where they are told. parts: of the seconds, by what they went to, where it is told.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    prompt_computed: int
    rows: int
    steps: int | None = None
    first_token_s: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that need not be computed."""
        return 1 - self.prompt_computed / self.prompt_tokens


class Replay:
    """Gives the calls of a work round by round; the texts go on from what the peer itself wrote."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._texts: list[Ids] = [[] for _ in calls]
        self._until = [-1] * len(calls)
        for call in calls:
            if call.after is not None:
                self._until[call.after] = max(self._until[call.after], call.round)

    def rounds(self) -> Iterator[list[Ready]]:
        """`wrote` has to be told of every call of a round before the next is asked for."""
        for number in range(1 + max(call.round for call in self._calls)):
            yield [self._ready(i) for i, call in enumerate(self._calls) if call.round == number]

    def wrote(self, index: int, ids: Ids) -> None:
        self._texts[index] = self._texts[index] + ids

    def _ready(self, index: int) -> Ready:
        call = self._calls[index]
        before = [] if call.after is None else self._texts[call.after][: call.keep]
        self._texts[index] = prompt = before + call.suffix
        return Ready(index, prompt, call.new, call.choices, self._until[index])


def to_json(calls: Sequence[Call]) -> list[dict[str, Any]]:
    return [asdict(call) for call in calls]


def from_json(rows: Sequence[dict[str, Any]]) -> list[Call]:
    return [Call(**row) for row in rows]


def common_length(a: Ids, b: Ids) -> int:
    """How many leading ids two texts share."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)

"""Traces of requests for `cache_policies.py`: what programs of nine kinds ask of the cache, as
token ids without a model.

    python benchmarks/cache_traces.py      # what is in them

Every generator is a function of its seed. A trace is a list of rounds; the calls of a round run
together. Lengths are in tokens; text is random ids, shared only where the kind shares it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

Ids = npt.NDArray[np.int32]
VOCABULARY = 50_000


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request: its whole prompt and what is sampled behind it. branch: None for a request that
    is by itself, of which nobody says what comes after it.
    """

    branch: int | None
    prompt: Ids
    output: Ids

    @property
    def text(self) -> Ids:
        """Prompt and output: where the branch stands afterwards."""
        return np.concatenate((self.prompt, self.output))


@dataclass(slots=True)
class Round:
    """Calls that run together, then branches that their program is done with."""

    calls: list[Call] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)


Trace = list[Round]


class Writer:
    """Draws texts and numbers its branches; two writers of the same seed write the same."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._ids = np.random.default_rng(seed)
        self._branches = count()

    def branch(self) -> int:
        return next(self._branches)

    def text(self, shortest: int, longest: int) -> Ids:
        length = self.random.randint(shortest, longest)
        return self._ids.integers(0, VOCABULARY, length, dtype=np.int32)

    def popular(self, things: Sequence[Ids]) -> Ids:
        """One of them, the k-th with a chance of 1/k (Zipf)."""
        weights = [1 / k for k in range(1, len(things) + 1)]
        return self.random.choices(things, weights)[0]


Session = Iterator[Round]
"""What one program asks, round by round; between two of them other programs have their turns."""


def interleave(
    random: Random, sessions: Sequence[Session], *, open_at_once: int, together: int = 4
) -> Trace:
    """Let programs take turns at random, `open_at_once` of them under way; `together` of their
    rounds run in one.
    """
    waiting = list(reversed(sessions))
    under_way: list[Session] = []
    trace: Trace = []
    while waiting or under_way:
        while waiting and len(under_way) < open_at_once:
            under_way.append(waiting.pop())
        merged = Round()
        for session in random.sample(under_way, min(together, len(under_way))):
            part = next(session, None)
            if part is None:
                under_way.remove(session)
            else:
                merged.calls += part.calls
                merged.closes += part.closes
        if merged.calls or merged.closes:
            trace.append(merged)
    return trace


def join(*texts: Ids) -> Ids:
    return np.concatenate(texts)


# -- the kinds


def chat(seed: int, *, stateless: bool = False) -> Trace:
    """Conversations with one of a few assistants; the users think between their turns, and one
    in ten never says that the conversation is over.
    """
    w = Writer(seed)
    assistants = [w.text(150, 500) for _ in range(6)]

    def conversation() -> Session:
        branch, text = w.branch(), w.popular(assistants)
        while True:
            call = Call(branch, join(text, w.text(10, 80)), w.text(30, 200))
            text = call.text
            over = w.random.random() < 0.25
            closes = over and w.random.random() < 0.9
            if stateless:
                yield Round([Call(None, call.prompt, call.output)])
            else:
                yield Round([call], [branch] if closes else [])
            if over:
                return

    return interleave(w.random, [conversation() for _ in range(260)], open_at_once=40)


def stateless_chat(seed: int) -> Trace:
    """The same conversations, every turn a request by itself that brings the whole history."""
    return chat(seed, stateless=True)


def few_shot(seed: int) -> Trace:
    """Questions behind the examples of one of many tasks; which tasks are popular drifts."""
    w = Writer(seed)
    tasks = [w.text(400, 1_200) for _ in range(40)]

    def question(task: Ids) -> Session:
        branch = w.branch()
        yield Round([Call(branch, join(task, w.text(20, 80)), w.text(3, 30))], [branch])

    sessions = []
    for i in range(1_200):
        window = tasks[i // 60 : i // 60 + 20]
        sessions.append(question(w.popular(window)))
    return interleave(w.random, sessions, open_at_once=8)


def agents(seed: int) -> Trace:
    """Agents that think, call a tool and read what it says; some ask a helper with its own
    instructions in between.
    """
    w = Writer(seed)
    kinds = [w.text(600, 1_200) for _ in range(4)]
    helper = w.text(300, 500)

    def agent() -> Session:
        branch, text = w.branch(), join(w.popular(kinds), w.text(30, 120))
        for _ in range(w.random.randint(3, 10)):
            call = Call(branch, text, w.text(20, 90))
            yield Round([call])
            text = join(call.text, w.text(30, 300))
            if w.random.random() < 0.3:
                side = w.branch()
                question = join(helper, w.text(100, 300))
                yield Round([Call(side, question, w.text(20, 60))], [side])
        yield Round([Call(branch, text, w.text(50, 150))], [branch])

    return interleave(w.random, [agent() for _ in range(110)], open_at_once=16)


def tree_search(seed: int) -> Trace:
    """Tree of thoughts: of each thought on the frontier three continuations are drawn, each is
    judged by another prompt, and the best five go on.
    """
    w = Writer(seed)
    judge = w.text(150, 250)

    def search() -> Session:
        root, problem = w.branch(), w.text(150, 400)
        yield Round([Call(root, problem, w.text(20, 40))])
        frontier = [(root, problem)]
        for _ in range(4):
            grown = []
            drawn = Round()
            for _, text in frontier:
                for _ in range(3):
                    call = Call(w.branch(), text, w.text(30, 90))
                    drawn.calls.append(call)
                    grown.append((call.branch, join(call.text, w.text(4, 8))))
            drawn.closes += [branch for branch, _ in frontier]
            yield drawn
            judged = Round()
            for _, text in grown:
                side = w.branch()
                judged.calls.append(Call(side, join(judge, text[len(problem) :]), w.text(2, 4)))
                judged.closes.append(side)
            w.random.shuffle(grown)
            frontier, pruned = grown[:5], grown[5:]
            judged.closes += [branch for branch, _ in pruned]
            yield judged
        last = w.branch()
        answer = Call(last, frontier[0][1], w.text(40, 100))
        yield Round([answer], [last, *(branch for branch, _ in frontier)])

    return interleave(w.random, [search() for _ in range(36)], open_at_once=5, together=2)


def rag(seed: int) -> Trace:
    """A template, some documents in the order of their scores, a question; sometimes a second
    question about the same documents.
    """
    w = Writer(seed)
    template = w.text(80, 160)
    documents = [w.text(150, 400) for _ in range(250)]

    def lookup() -> Session:
        branch, found = w.branch(), [w.popular(documents) for _ in range(3)]
        call = Call(branch, join(template, *found, w.text(15, 50)), w.text(30, 120))
        again = w.random.random() < 0.25
        yield Round([call], [] if again else [branch])
        if again:
            yield Round([Call(branch, join(call.text, w.text(15, 50)), w.text(30, 120))], [branch])

    return interleave(w.random, [lookup() for _ in range(900)], open_at_once=20)


def random_prefixes(seed: int) -> Trace:
    """Prompts that go on from a random place of a random earlier text; half of the branches stay
    open for a while without being used again.
    """
    w = Writer(seed)
    texts = [w.text(200, 600)]

    def prompt() -> Session:
        text = w.random.choice(texts)
        branch = w.branch()
        beginning = text[: w.random.randint(0, len(text))]
        call = Call(branch, join(beginning[:1_500], w.text(20, 300)), w.text(10, 100))
        texts.append(call.text)
        if w.random.random() < 0.5:
            yield Round([call], [branch])
        else:
            yield Round([call])
            yield Round([], [branch])

    return interleave(w.random, [prompt() for _ in range(1_000)], open_at_once=30)


def epochs(seed: int) -> Trace:
    """The same prompts again and again in the same order, as when a program is tuned on a set."""
    w = Writer(seed)
    instruction = w.text(100, 200)
    questions = [w.text(150, 400) for _ in range(150)]
    trace: Trace = []
    for _ in range(6):
        for start in range(0, len(questions), 4):
            part = Round()
            for question in questions[start : start + 4]:
                branch = w.branch()
                part.calls.append(Call(branch, join(instruction, question), w.text(20, 80)))
                part.closes.append(branch)
            trace.append(part)
    return trace


def mixed(seed: int) -> Trace:
    """All of the above against one pool, a round of each kind in turn."""
    parts = [kind(seed + i) for i, kind in enumerate(KINDS.values()) if kind is not mixed]
    trace: Trace = []
    for i, part in enumerate(parts):
        for each in part:
            each.calls = [
                Call(None if c.branch is None else len(parts) * c.branch + i, c.prompt, c.output)
                for c in each.calls
            ]
            each.closes = [len(parts) * branch + i for branch in each.closes]
    length = max(map(len, parts))
    for step in range(length):
        for part in parts:
            first, last = step * len(part) // length, (step + 1) * len(part) // length
            trace += part[first:last]
    return trace


KINDS: dict[str, Callable[[int], Trace]] = {
    "chat": chat,
    "stateless": stateless_chat,
    "few-shot": few_shot,
    "agents": agents,
    "tree search": tree_search,
    "RAG": rag,
    "random": random_prefixes,
    "epochs": epochs,
    "mixed": mixed,
}


def main() -> None:
    table = Table(title="traces, seed 0")
    for column in ("kind", "rounds", "calls", "prompt tokens", "output tokens", "what it is"):
        table.add_column(column, justify="left" if column == "what it is" else "right")
    for name, kind in KINDS.items():
        trace = kind(0)
        calls = [call for each in trace for call in each.calls]
        prompts, outputs = sum(len(c.prompt) for c in calls), sum(len(c.output) for c in calls)
        doc = " ".join((kind.__doc__ or "").split())
        row = (f"{n:,}" for n in (len(trace), len(calls), prompts, outputs))
        table.add_row(name, *row, doc)
    Console().print(table)


if __name__ == "__main__":
    main()

"""A backend that plays back a record, without a model.

Made by the interpreter for `run(replay=...)`. What is asked is found by what it is, not by when it
comes: forks run in any order.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import unified_diff
from typing import Any, TypeVar

from stemma.backend.base import (
    Backend,
    Branch,
    CacheMode,
    ChoiceScore,
    Generation,
    Namespace,
    Pending,
    ScoredChoices,
)
from stemma.backend.chat import ChatFormat
from stemma.backend.chat_pieces import recent
from stemma.backend.chat_tools import ToolPieces
from stemma.backend.clock import Clock
from stemma.backend.plain_values import completion_of, error_of, scores_of
from stemma.backend.record_file import (
    Record,
    RecordedCall,
    as_written,
    common_length,
    key_of,
    read_record,
)
from stemma.backend.recording import asked_to_generate, asked_to_score
from stemma.backend.sent import Sent
from stemma.lang.errors import BackendClosed, Cancelled, ReplayMismatch, UnsupportedByBackend
from stemma.lang.sampling import SamplingParams

T = TypeVar("T")

# How much longer than it took then a generation that was cancelled waits to be cancelled again.
CANCEL_S = 10.0

# Of a difference, how wide its lines are and how many of them are shown.
_WIDTH, _LINES = 100, 40

_NAMES = {"generate": "generation", "score": "scoring of choices", "tokens": "list of token ids"}
_clock = Clock()


class ReplayBackend(Backend):
    """Answers as the backend did that was recorded.

    path: of the record. Each recorded answer is given once. seed: what the recorded run drew with,
    None where every item of a batch had its own.

    Raises InvalidArgument for a file that is no record. Its branches raise ReplayMismatch for what
    is not recorded.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.record = read_record(path)
        self.seed = self.record.seed
        self.chat = _RecordedChat(self.record)
        self.model_name = self.record.model
        self.reasoning_marks = self.record.reasoning_marks
        self.control_tokens = self.record.control_tokens
        self._given: Counter[tuple[str, str, str]] = Counter()
        self._lock = threading.Lock()
        self._closed = False

    def open(
        self,
        namespace: Namespace = Namespace(),
        *,
        cache: CacheMode = "read-write",
        priority: int = 0,
    ) -> Branch:
        self._check_open()
        return _ReplayBranch(self, Sent(), namespace)

    def flush_cache(self, namespace: Namespace | None = None) -> int:
        return 0

    def close(self) -> None:
        self._closed = True

    def take(self, call: str, sent: Sent, ask: dict[str, Any]) -> RecordedCall:
        """The next answer to a call. Raises ReplayMismatch."""
        self._check_open()
        key = key_of(call, sent.id, ask)
        recorded = self.record.calls.get(key, [])
        with self._lock:
            number = self._given[key]
            if number < len(recorded):
                self._given[key] += 1
                return recorded[number]
        raise ReplayMismatch(_mismatch(self.record, call, sent, ask, recorded))

    def _check_open(self) -> None:
        if self._closed:
            raise BackendClosed("the backend that plays back a record was closed")


class _ReplayBranch(Branch):
    def __init__(self, backend: ReplayBackend, sent: Sent, namespace: Namespace) -> None:
        self._backend = backend
        self._sent = sent
        self._namespace = namespace
        self._waiting: Pending[Any] | None = None

    def append(self, text: str, *, control: bool = False) -> None:
        self._sent = self._sent.text(text, control=control)

    def generate(self, params: SamplingParams, *, heal: bool = True) -> Generation:
        ask = asked_to_generate(params, heal=heal, namespace=self._namespace)
        found = self._backend.take("generate", self._sent, ask)
        if found.answer is not None:
            completion = completion_of(found.answer)
            generation = _Played(found.pieces or [completion.text])
            self._sent = self._sent.output(completion)
            generation.finish(completion)
            return generation
        generation = _Played(found.pieces)
        self._fail(generation, found)
        return generation

    def score(
        self, choices: Sequence[str], *, unconditional: bool = False
    ) -> Pending[ScoredChoices]:
        ask = asked_to_score(choices, unconditional=unconditional, namespace=self._namespace)
        found = self._backend.take("score", self._sent, ask)
        pending: Pending[ScoredChoices] = Pending()
        if found.answer is not None:
            pending.finish(scores_of(found.answer))
        else:
            self._fail(pending, found)
        return pending

    def _fail(self, pending: Pending[T], found: RecordedCall) -> None:
        """As it did then."""
        told = found.error or {"type": "StemmaError", "message": "the record has no answer"}
        error = error_of(told)
        if isinstance(error, Cancelled):
            self._waiting = pending
            _wait_to_be_cancelled(pending, error, found, str(self._backend.record.path))
        else:
            pending.fail(error)

    def commit(self, choice: ChoiceScore) -> None:
        self._sent = self._sent.choice(choice)

    def fork(self, n: int) -> list[Branch]:
        return [_ReplayBranch(self._backend, self._sent, self._namespace) for _ in range(n)]

    def token_ids(self) -> list[int]:
        found = self._backend.take("tokens", self._sent, {})
        return list(found.answer["ids"]) if found.answer is not None else []

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()


class _Played(Generation):
    """Listeners get the recorded pieces one by one, though all of them are there at once."""

    def __init__(self, pieces: Sequence[str]) -> None:
        super().__init__()
        self._pieces = pieces

    def subscribe(self, listener: Callable[[str], None]) -> None:
        for piece in self._pieces:
            if piece:
                listener(piece)


def _wait_to_be_cancelled(
    pending: Pending[T], error: Cancelled, found: RecordedCall, path: str
) -> None:
    """The program did so when it was recorded; where it does not now, it fails."""
    lock = threading.Lock()

    def end(failure: Exception) -> None:
        with lock:
            if pending.done():
                return
            pending.on_cancel = None
            pending.fail(failure)

    pending.on_cancel = lambda: end(error)
    patience = found.seconds + CANCEL_S
    late = ReplayMismatch(
        f"in the record {path!r}, line {found.line}, this was cancelled, and nothing "
        f"has cancelled it now within {patience:.3g} s; record the program again"
    )
    _clock.at(time.monotonic() + patience, lambda: end(late))


class _RecordedChat(ChatFormat):
    """The pieces that the recorded run was given."""

    def __init__(self, record: Record) -> None:
        super().__init__({}, {})
        self._record = record

    def begin(self, role: str, previous: Sequence[str] = ()) -> str:
        return self._piece("begin", role, recent(previous))

    def end(self, role: str) -> str:
        return self._piece("end", role, ())

    def tools(self) -> ToolPieces | None:
        line = self._piece("tools", "assistant", ())
        return ToolPieces.loads(line) if line else None

    def told_tools(self, schemas: Sequence[dict[str, Any]]) -> str | None:
        return self._piece("told tools", json.dumps(schemas), ()) or None

    def _piece(self, turn: str, role: str, previous: tuple[str, ...]) -> str:
        found = self._record.turns.get((turn, role, previous))
        if found is None:
            after = f" after turns of {', '.join(previous)}" if previous else ""
            raise ReplayMismatch(
                f"the record {str(self._record.path)!r} has no {turn} of a turn of {role!r}{after}"
                f": the recorded run of {self._record.program!r} had none there; "
                + _remedy(self._record)
            )
        if "refused" in found:
            raise UnsupportedByBackend(found["refused"])
        return found["text"]


def _mismatch(
    record: Record, call: str, sent: Sent, ask: dict[str, Any], recorded: list[RecordedCall]
) -> str:
    """What was asked that is not recorded, beside what is recorded and most like it."""
    ask = as_written(ask)
    name, path = _NAMES[call], repr(str(record.path))
    if recorded:
        times = "once" if len(recorded) == 1 else f"{len(recorded)} times"
        return (
            f"the record {path} has the answer to this {name} {times} (line "
            f"{recorded[-1].line}), and it is asked for once more; {_remedy(record)}"
        )
    calls = [each for found in record.calls.values() for each in found if each.call == call]
    if not calls:
        return f"the record {path} has no {name}, and one is asked for; {_remedy(record)}"
    alike = [each for each in calls if each.prompt == sent.id]
    if alike:
        nearest = min(alike, key=lambda each: len(_settings(each.ask, ask)))
        differing = _settings(nearest.ask, ask)
        told = "\n".join(differing)
        if len(differing) == 1 and differing[0].startswith("    seed: "):
            told += (
                "\nonly the seed of the draw is another: replay without seed=, the program as it "
                "was, and the items of a batch in the same places; or"
            )
        return (
            f"the record {path} has a {name} after this text, but with other settings (line "
            f"{nearest.line}):\n{told}\n{_remedy(record)}"
        )
    text = record.text(sent)
    texts = {each.prompt: record.text(record.prompts[each.prompt]) for each in calls}
    nearest = max(calls, key=lambda each: _likeness(texts[each.prompt], text))
    told = _difference(texts[nearest.prompt], text)
    return (
        f"the record {path} has no {name} after this text; the most like it that it has (line "
        f"{nearest.line}) differs:\n{told}\n{_remedy(record)}"
    )


def _remedy(record: Record) -> str:
    return f"record the program again: run(record={str(record.path)!r})"


def _settings(recorded: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """A line for each setting that is not the same."""
    before = {**recorded, **recorded.get("params", {})}
    now = {**asked, **asked.get("params", {})}
    return [
        f"    {name}: {_shown(before, name)} in the record, {_shown(now, name)} now"
        for name in sorted((before.keys() | now.keys()) - {"params"})
        if _shown(before, name) != _shown(now, name)
    ]


def _shown(settings: dict[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "not set"


def _likeness(a: str, b: str) -> tuple[int, int]:
    """How many characters two texts share at their beginning, and then at their end."""
    start = common_length(a, b)
    return start, common_length(a[start:][::-1], b[start:][::-1])


def _difference(recorded: str, asked: str) -> str:
    if recorded == asked:
        return (
            "    the text is the same; what differs is which of it is control text, or the tokens "
            "that the model wrote"
        )
    lines = list(
        unified_diff(_cut(recorded), _cut(asked), "in the record", "now", n=2, lineterm="")
    )
    left = len(lines) - _LINES
    more = [f"... and {left} more lines"] if left > 0 else []
    return "\n".join(f"    {line}" for line in (*lines[:_LINES], *more))


def _cut(text: str) -> list[str]:
    """Lines, long ones in pieces."""
    return [
        line[i : i + _WIDTH]
        for line in text.split("\n")
        for i in range(0, max(len(line), 1), _WIDTH)
    ]

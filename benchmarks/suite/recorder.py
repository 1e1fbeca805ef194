"""A backend that notes what a program asks of the model, as `Call`s that peers can replay.

It answers with a real backend, a round at a time: what a program asks is held until the program
asks for nothing more without an answer, then all of it is answered at once. So calls of one round
are those that need nothing of one another. Used by `measure.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stemma.backend.base import (
    Backend,
    Branch,
    CacheMode,
    ChoiceScore,
    Completion,
    Generation,
    Namespace,
    Pending,
    ScoredChoices,
)
from stemma.lang.sampling import SamplingParams
from suite.work import Call, Ids, common_length

WORTH_KEEPING = 16
"""Tokens: less in common is what all texts of a kind begin with."""


@dataclass(frozen=True, slots=True)
class Request:
    """One that is held. start: asks the real backend. note: takes down what that answered."""

    handle: Pending[Any]
    start: Callable[[], Pending[Any]]
    note: Callable[[Any], None]


class Recorder(Backend):
    """Programs run on it as on `inner`; `calls` is what they asked for.

    quiet_s: a round begins when nothing was asked for that long.
    """

    def __init__(self, inner: Backend, *, quiet_s: float = 0.1) -> None:
        self.inner = inner
        self.chat, self.model_name = inner.chat, inner.model_name
        self.reasoning_marks = inner.reasoning_marks
        self.calls: list[Call] = []
        self.texts: list[Ids] = []
        self.round = 0
        self._quiet_s = quiet_s
        self._changed = threading.Condition()
        self._held: list[Request] = []
        self._asked_at = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._answer_rounds, daemon=True)
        self._thread.start()

    def open(
        self,
        namespace: Namespace = Namespace(),
        *,
        cache: CacheMode = "read-write",
        priority: int = 0,
    ) -> Branch:
        branch = self.inner.open(namespace, cache=cache, priority=priority)
        return RecordingBranch(self, branch, after=None)

    def flush_cache(self, namespace: Namespace | None = None) -> int:
        return self.inner.flush_cache(namespace)

    def close(self) -> None:
        """Ends the recording; `inner` stays open."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def ask(self, request: Request, prompt: Ids, after: int | None, *, new: int = 0) -> int:
        """Hold a request for the next round; the number of its call."""
        with self._changed:
            keep, origin = self._origin(prompt, after)
            self.calls.append(Call(self.round, origin, keep, prompt[keep:], new))
            self.texts.append(prompt)
            self._held.append(request)
            self._asked_at = time.monotonic()
            self._changed.notify_all()
            return len(self.calls) - 1

    def note_output(self, number: int, text: Ids) -> None:
        """The text of a call with what was written. Where it ends in part of a token, that may be
        more tokens than were sampled.
        """
        longest = len(self.texts[number]) + self.calls[number].new
        self.texts[number] = text[:longest]

    def note_choices(self, number: int, start: int, choices: list[Ids]) -> None:
        """The ids of a call's choices, which begin at token `start` of its text."""
        call = self.calls[number]
        suffix = call.suffix[: max(0, start - call.keep)]
        self.calls[number] = replace(
            call, keep=min(call.keep, start), suffix=suffix, choices=choices
        )
        self.texts[number] = self.texts[number][:start]

    def _origin(self, prompt: Ids, after: int | None) -> tuple[int, int | None]:
        """The call of an earlier round that has most of a prompt, and how much: the one before on
        the branch, if it has as much as any, or what an expert on the program would keep for it.
        """
        lengths = [
            (common_length(text, prompt), number == after, number)
            for number, (call, text) in enumerate(zip(self.calls, self.texts, strict=True))
            if call.round < self.round
        ]
        keep, _, origin = max(lengths, default=(0, False, 0))
        return (keep, origin) if keep >= WORTH_KEEPING else (0, None)

    def _answer_rounds(self) -> None:
        while (held := self._next_round()) is not None:
            begun = []
            for request in held:
                try:
                    begun.append((request, request.start()))
                except Exception as error:
                    request.handle.fail(error)
            for request, answer in begun:
                if answer.future.exception() is None:
                    request.note(answer.result())
            for request, answer in begun:  # from here on the program goes on
                if (failure := answer.future.exception()) is not None:
                    request.handle.fail(failure)
                else:
                    request.handle.finish(answer.result())

    def _next_round(self) -> list[Request] | None:
        """What is held, when the program has come to rest; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._held or self._closed)
            while (left := self._asked_at + self._quiet_s - time.monotonic()) > 0:
                self._changed.wait(left)
            if not self._held:
                return None
            held, self._held = self._held, []
            self.round += 1
            return held


class RecordingBranch(Branch):
    """after: the number of the call whose text it goes on from."""

    def __init__(self, recorder: Recorder, inner: Branch, after: int | None) -> None:
        self._recorder, self._inner, self._after = recorder, inner, after

    def append(self, text: str, *, control: bool = False) -> None:
        self._inner.append(text, control=control)

    def generate(self, params: SamplingParams, *, heal: bool = True) -> Generation:
        assert params.max_tokens is not None, "the same work for all: say max_tokens"
        handle = Generation()

        def start() -> Generation:
            answer = self._inner.generate(params, heal=heal)
            answer.subscribe(handle.push)
            return answer

        def note(_: Completion) -> None:
            self._recorder.note_output(number, self._inner.token_ids())

        number = self._ask(Request(handle, start, note), new=params.max_tokens)
        return handle

    def score(
        self, choices: Sequence[str], *, unconditional: bool = False
    ) -> Pending[ScoredChoices]:
        handle: Pending[ScoredChoices] = Pending()

        def start() -> Pending[ScoredChoices]:
            return self._inner.score(choices, unconditional=unconditional)

        def note(scored: ScoredChoices) -> None:
            ids = [list(choice.token_ids) for choice in scored.choices]
            self._recorder.note_choices(number, scored.choices[0].start, ids)

        number = self._ask(Request(handle, start, note))
        return handle

    def _ask(self, request: Request, *, new: int = 0) -> int:
        self._after = self._recorder.ask(request, self._inner.token_ids(), self._after, new=new)
        return self._after

    def commit(self, choice: ChoiceScore) -> None:
        self._inner.commit(choice)

    def fork(self, n: int) -> list[Branch]:
        return [
            RecordingBranch(self._recorder, inner, self._after) for inner in self._inner.fork(n)
        ]

    def token_ids(self) -> list[int]:
        return self._inner.token_ids()

    def close(self) -> None:
        self._inner.close()

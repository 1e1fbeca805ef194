"""A backend that writes down what it is asked and what the one below it answers.

Made by the interpreter for `run(record=...)`; `replay.py` plays back what it wrote.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from stemma.backend.base import (
    Backend,
    Branch,
    CacheMode,
    Completion,
    Generation,
    Namespace,
    Pending,
    ScoredChoices,
)
from stemma.backend.chat import ChatFormat
from stemma.backend.chat_pieces import recent
from stemma.backend.chat_tools import ToolPieces
from stemma.backend.plain_values import (
    Plain,
    plain_completion,
    plain_error,
    plain_params,
    plain_scores,
)
from stemma.backend.record_file import Recording
from stemma.backend.sent import Sent
from stemma.backend.wrapping import WrappingBackend, WrappingBranch, pass_on
from stemma.lang.errors import Cancelled, UnsupportedByBackend
from stemma.lang.sampling import SamplingParams

T = TypeVar("T")


def asked_to_generate(params: SamplingParams, *, heal: bool, namespace: Namespace) -> Plain:
    """What a generation is found by, besides its prompt. Salts only say who may share a cache."""
    healing: Plain = {} if heal else {"heal": False}
    return {"params": plain_params(params), **healing, **_asked_in(namespace)}


def asked_to_score(choices: Sequence[str], *, unconditional: bool, namespace: Namespace) -> Plain:
    alone: Plain = {"unconditional": True} if unconditional else {}
    return {"choices": list(choices), **alone, **_asked_in(namespace)}


def _asked_in(namespace: Namespace) -> Plain:
    return {} if namespace.adapter is None else {"adapter": namespace.adapter}


class RecordingBackend(WrappingBackend):
    """Around `inner`, whose answers go into `recording`. Closing it closes `inner`."""

    def __init__(self, inner: Backend, recording: Recording, *, program: str = "") -> None:
        super().__init__(inner)
        self.recording = recording
        self._chat = _RecordingChat(inner.chat, recording)
        recording.begin(program, inner)

    @property
    def chat(self) -> ChatFormat:
        return self._chat

    @chat.setter
    def chat(self, chat: ChatFormat) -> None:
        self._chat = _RecordingChat(chat, self.recording)

    def open(
        self,
        namespace: Namespace = Namespace(),
        *,
        cache: CacheMode = "read-write",
        priority: int = 0,
    ) -> Branch:
        inner = self.inner.open(namespace, cache=cache, priority=priority)
        return _RecordingBranch(inner, Sent(), self.recording, namespace)


class _RecordingBranch(WrappingBranch):
    def __init__(
        self, inner: Branch, sent: Sent, recording: Recording, namespace: Namespace
    ) -> None:
        super().__init__(inner, sent)
        self._recording = recording
        self._namespace = namespace

    def around(self, inner: Branch) -> Branch:
        return _RecordingBranch(inner, self.sent, self._recording, self._namespace)

    def sample(self, draws: Sequence[SamplingParams], *, heal: bool = True) -> list[Generation]:
        sent = self.sent
        asks = [asked_to_generate(params, heal=heal, namespace=self._namespace) for params in draws]
        try:
            handles = self.inner.sample(draws, heal=heal)
        except Exception as error:
            self._recording.call("generate", sent, asks[0], error=plain_error(error))
            raise
        outers = [Generation() for _ in handles]
        for i, (ask, inner, outer) in enumerate(zip(asks, handles, outers, strict=True)):
            pass_on(inner, outer, self._noting(sent, ask, inner, goes_on=i == 0))
        return outers

    def _noting(
        self, sent: Sent, ask: Plain, inner: Generation, *, goes_on: bool
    ) -> Callable[[Completion | BaseException], object]:
        pieces: list[str] = []
        inner.subscribe(pieces.append)
        answered = _answering(plain_completion)

        def noted(result: Completion | BaseException) -> None:
            answer = answered(result)
            if isinstance(result, Completion) and goes_on:
                self.sent = sent.output(result)
            if pieces and (len(pieces) > 1 or isinstance(result, BaseException)):
                answer["pieces"] = pieces
            self._recording.call("generate", sent, ask, **answer)

        return noted

    def score(
        self, choices: Sequence[str], *, unconditional: bool = False
    ) -> Pending[ScoredChoices]:
        sent, recording = self.sent, self._recording
        ask = asked_to_score(choices, unconditional=unconditional, namespace=self._namespace)
        try:
            inner = self.inner.score(choices, unconditional=unconditional)
        except Exception as error:
            recording.call("score", sent, ask, error=plain_error(error))
            raise
        outer: Pending[ScoredChoices] = Pending()
        answered = _answering(plain_scores)
        pass_on(inner, outer, lambda result: recording.call("score", sent, ask, **answered(result)))
        return outer

    def token_ids(self) -> list[int]:
        ids = self.inner.token_ids()
        self._recording.call("tokens", self.sent, {}, answer={"ids": ids})
        return ids


def _answering(plain: Callable[[T], Plain]) -> Callable[[T | BaseException], Plain]:
    """What to write of the result of a request that begins now."""
    start = time.monotonic()

    def answered(result: T | BaseException) -> Plain:
        if not isinstance(result, BaseException):
            return {"answer": plain(result)}
        error: Plain = {"error": plain_error(result)}
        if isinstance(result, Cancelled):
            error["seconds"] = round(time.monotonic() - start, 3)
        return error

    return answered


class _RecordingChat(ChatFormat):
    """Each piece goes into the record when it is first asked for."""

    def __init__(self, inner: ChatFormat, recording: Recording) -> None:
        super().__init__({}, {})
        self._inner = inner
        self._recording = recording

    def begin(self, role: str, previous: Sequence[str] = ()) -> str:
        return self._piece(
            "begin", role, recent(previous), lambda: self._inner.begin(role, previous)
        )

    def end(self, role: str) -> str:
        return self._piece("end", role, (), lambda: self._inner.end(role))

    def tools(self) -> ToolPieces | None:
        tools = self._inner.tools()
        self._piece("tools", "assistant", (), lambda: tools.dumps() if tools is not None else "")
        return tools

    def told_tools(self, schemas: Sequence[dict[str, Any]]) -> str | None:
        told = self._inner.told_tools(schemas)
        self._piece("told tools", json.dumps(schemas), (), lambda: told or "")
        return told

    def differences(self) -> list[str]:
        return self._inner.differences()

    def _piece(
        self, turn: str, role: str, previous: tuple[str, ...], ask: Callable[[], str]
    ) -> str:
        line: dict[str, Any] = {"turn": turn, "role": role, "previous": previous}
        key = (turn, role, previous)
        try:
            text = ask()
        except UnsupportedByBackend as error:
            self._recording.write_once(key, {**line, "refused": str(error)})
            raise
        self._recording.write_once(key, {**line, "text": text})
        return text

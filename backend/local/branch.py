"""`LocalBranch`: one line of text on the local engine: committed token ids plus one pending
literal.

Owns ids and text, never memory: an idle branch holds no lock, only a hint where it stands, and its
prefix is found in the tree when it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stemma.backend.base import (
    Branch,
    ChoiceScore,
    Generation,
    Pending,
    ScoredChoices,
    Usage,
)
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.backend.local.literal import Literal
from stemma.backend.local.place import Place
from stemma.backend.local.request import CacheUse, Request, State
from stemma.lang.errors import BackendClosed, InvalidArgument, StemmaError
from stemma.lang.sampling import SamplingParams

if TYPE_CHECKING:
    from stemma.backend.local.backend import LocalBackend


class LocalBranch(Branch):
    """See `Branch`. Made by `LocalBackend.open` and `fork`."""

    def __init__(
        self,
        backend: LocalBackend,
        use: CacheUse,
        *,
        ids: list[int],
        literal: Literal,
        place: Place | None = None,
    ) -> None:
        self._backend = backend
        self._use = use
        self._ids = ids  # never changed in place: forks share it
        self._literal = literal
        self._place = place
        self._running: list[Request] = []
        self._closed = False

    def append(self, text: str, *, control: bool = False) -> None:
        self._literal = self._literal.append(text, control=control)

    def token_ids(self) -> list[int]:
        return self._ids + self._backend.with_bos(self._literal, open_end=True)

    def fork(self, n: int) -> list[Branch]:
        return [
            LocalBranch(
                self._backend, self._use, ids=self._ids, literal=self._literal, place=self._place
            )
            for _ in range(n)
        ]

    def close(self) -> None:
        self._closed = True
        self._backend.engine.cancel(self._running)
        self._running, self._place = [], None

    # -- generating

    def generate(self, params: SamplingParams, *, heal: bool = True) -> Generation:
        return self.sample([params], heal=heal)[0]

    def sample(self, draws: Sequence[SamplingParams], *, heal: bool = True) -> list[Generation]:
        """See `Branch`. Handed in together, so that they compute the prompt once, in one step."""
        self._must_be_free()
        prompt = self._ids + self._backend.with_bos(self._literal, open_end=heal)
        candidates = self._heal_candidates(prompt) if heal else None
        generations = [Generation() for _ in draws]
        self._submit(
            [
                self._drawing(prompt, params, candidates, generation, goes_on=i == 0)
                for i, (params, generation) in enumerate(zip(draws, generations, strict=True))
            ]
        )
        return generations

    def _drawing(
        self,
        prompt: list[int],
        params: SamplingParams,
        candidates: npt.NDArray[np.int32] | None,
        generation: Generation,
        *,
        goes_on: bool,
    ) -> Request:
        """One draw after the prompt; goes_on: the branch takes its output."""
        if params.n != 1:
            raise InvalidArgument(f"n={params.n}: a branch draws one sample; fork it for more")
        backend = self._backend

        def finish(request: Request) -> None:
            if goes_on:
                self._take_output(request, prompt)
            # No circle outlives the request.
            self._running = [other for other in self._running if other is not request]
            generation.on_cancel = None
            generation.finish(request.completion())

        request = backend.make_request(
            prompt,
            params,
            self._use.namespace,
            cache=self._use.mode,
            priority=self._use.priority,
            on_finish=finish,
            on_error=generation.fail,
            on_text=generation.push,
            seed=backend.seed_of(params),
            heal=candidates,
        )
        request.own_start = request.prompt_length
        generation.on_cancel = lambda: backend.engine.cancel([request])
        return request

    def _heal_candidates(self, prompt: list[int]) -> npt.NDArray[np.int32] | None:
        """The ids that may stand in place of the prompt's last token: those that begin with its
        text.
        """
        if len(prompt) < 2 or not self._literal.can_heal:
            return None
        text = self._backend.text
        candidates = text.ids_starting_with(text.bytes_of(prompt[-1]))
        return candidates if len(candidates) > 1 else None

    def _take_output(self, request: Request, prompt: list[int]) -> None:
        """Go on from the kept tokens; what of the text they do not cover becomes the pending
        literal.
        """
        end = request.end
        kept = request.output_ids[: end.kept] if end is not None else []
        if (
            request.healed and kept
        ):  # the first output token stands in place of the last of the prompt
            prompt = prompt[:-1]
        self._ids = prompt + kept
        self._literal = Literal(self._backend.text, first=False)
        if end is not None:
            self._literal = self._literal.append(end.rest)
        if self._use.mode != "off" and not self._closed:
            self._place = Place(self._backend.engine)
            self._place.settle(RadixKey(request.tokens.view(len(self._ids)), request.namespace))

    # -- choosing

    def score(
        self, choices: Sequence[str], *, unconditional: bool = False
    ) -> Pending[ScoredChoices]:
        self._must_be_free()
        if not choices or "" in choices or len(set(choices)) < len(choices):
            raise InvalidArgument(
                f"choices={list(choices)!r}: at least one, none empty, none twice"
            )
        prompt = self.token_ids()
        if not prompt:
            raise InvalidArgument("nothing stands before the choices: append text first")
        scoring = _Scoring(self._backend, self._use, unconditional=unconditional)
        scoring.build(prompt, self._lines(prompt, choices))
        scoring.handle.on_cancel = scoring.cancel
        self._submit(scoring.requests)
        return scoring.handle

    def _lines(self, prompt: list[int], choices: Sequence[str]) -> dict[str, list[int]]:
        """Per choice the ids of the branch with it, tokenised as one text with the pending literal.

        Where a choice would change the very first token, which no logits predict, the branch's
        tokens stay as they are and the choices are tokenised behind them.
        """
        lines = {c: self._ids + self._backend.with_bos(self._literal.append(c)) for c in choices}
        if all(line[0] == prompt[0] for line in lines.values()):
            return lines
        behind = Literal(self._backend.text, first=False)
        return {c: [*prompt, *behind.append(c).ids()] for c in choices}

    def commit(self, choice: ChoiceScore) -> None:
        self._ids = [*self.token_ids()[: choice.start], *choice.token_ids]
        self._literal = Literal(self._backend.text, first=False)
        if self._use.mode != "off":
            engine, place = self._backend.engine, Place(self._backend.engine)
            key = RadixKey.of(self._ids, self._backend.versioned(self._use.namespace))
            engine.tell(lambda: place.settle(key))
            self._place = place

    # -- requests

    def _must_be_free(self) -> None:
        if self._closed:
            raise BackendClosed("the branch was closed")
        if any(request.state is not State.FINISHED for request in self._running):
            raise StemmaError("the branch is at work: its last operation has not resolved yet")

    def _submit(self, requests: list[Request]) -> None:
        self._running = requests
        self._backend.submit(requests)


class _Scoring:
    """The requests of one `score` call: each choice behind the branch, and alone where that is
    asked.

    They are handed in together, so what they share is computed once, in one step. After that
    everything happens on the engine's thread.
    """

    def __init__(self, backend: LocalBackend, use: CacheUse, *, unconditional: bool) -> None:
        self.handle: Pending[ScoredChoices] = Pending()
        self.requests: list[Request] = []
        self._backend = backend
        self._use = use
        self._unconditional = unconditional
        self._start = 0
        self._scored: list[_Scored] = []
        self._open = 0

    def build(self, prompt: list[int], lines: dict[str, list[int]]) -> None:
        """prompt: the branch's ids. lines: per choice the ids of branch and choice, tokenised as
        one.
        """
        text = self._backend.text
        bos = [text.bos_id] if text.adds_bos and text.bos_id is not None else []
        self._start = min(common_length(prompt, line) for line in lines.values())
        for choice, line in lines.items():
            tail = line[self._start :]
            alone = self._request([*bos, *tail], len(tail)) if self._unconditional else None
            self._scored.append(_Scored(choice, tail, self._request(line, len(tail)), alone))
        self._open = len(self.requests)

    def _request(self, ids: list[int], tail: int) -> Request | None:
        """Scores the last `tail` ids, except one that nothing stands before; None where none is
        left.
        """
        if len(ids) < 2:
            return None
        request = self._backend.make_request(
            ids,
            SamplingParams(max_tokens=0),
            self._use.namespace,
            cache=self._use.mode,
            priority=self._use.priority,
            next_logprob=max(1, len(ids) - tail),
            on_finish=self._finished,
            on_error=self._failed,
            scored=True,
        )
        request.own_start = len(ids) - tail
        self.requests.append(request)
        return request

    def cancel(self) -> None:
        self._backend.engine.cancel(self.requests)

    def _finished(self, _: Request) -> None:
        self._open -= 1
        if not self._open and not self.handle.done():
            self.resolve()

    def _failed(self, error: BaseException) -> None:
        if not self.handle.done():
            self.handle.fail(error)
            self.cancel()

    def resolve(self) -> None:
        scores = [
            ChoiceScore(
                text=s.choice,
                start=self._start,
                token_ids=tuple(s.tail),
                logprobs=_padded(s.behind, len(s.tail)),
                unconditional=_padded(s.alone, len(s.tail)) if self._unconditional else None,
            )
            for s in self._scored
        ]
        usage = sum((request.usage() for request in self.requests), Usage())
        self.handle.finish(ScoredChoices(tuple(scores), usage))


@dataclass(frozen=True, slots=True)
class _Scored:
    """One choice: its tokens from the common start on, scored behind the branch and alone."""

    choice: str
    tail: list[int]
    behind: Request | None
    alone: Request | None


def _padded(request: Request | None, length: int) -> tuple[float, ...]:
    """One log-probability per token; 0 for a first token that nothing stands before."""
    found = [] if request is None else [logprob.logprob for logprob in request.prompt_logprobs]
    return (*[0.0] * (length - len(found)), *found)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids two lists share."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length

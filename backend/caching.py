"""A backend that asks the one below it only what nobody has asked before: answers are kept on disk.

Wraps any backend; used by programs that are run again and again.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
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
    Usage,
)
from stemma.backend.plain_values import (
    completion_of,
    plain_completion,
    plain_params,
    plain_scores,
    scores_of,
)
from stemma.backend.response_cache import ResponseCache
from stemma.backend.sent import Sent
from stemma.backend.wrapping import WrappingBackend, WrappingBranch, pass_on
from stemma.lang.errors import InvalidArgument
from stemma.lang.sampling import SamplingParams


class CachedBackend(WrappingBackend):
    """Around `inner`: a request that is exactly one that was answered before gets that answer.

    responses: a `ResponseCache`, or the path of one, which is then closed together with this.

    A request is the same if the model is (weights, dtype, quantization: `Backend.identity`), the
    namespace, the tokens, what of them may be healed, and all sampling parameters with the seed; at
    temperature 0 no seed counts. Without a seed, above temperature 0, nothing is looked up or kept,
    and neither are failures. `cache="off"` does neither, `cache="read"` keeps nothing. The branch
    goes on from an answer just as if it had been computed; its usage says `cached_responses=1`.
    """

    def __init__(self, inner: Backend, responses: ResponseCache | str | os.PathLike[str]) -> None:
        if not isinstance(inner, Backend):
            raise InvalidArgument(f"CachedBackend goes around a Backend, not {inner!r}")
        super().__init__(inner)
        self._owns = not isinstance(responses, ResponseCache)
        self.responses = (
            responses if isinstance(responses, ResponseCache) else ResponseCache(responses)
        )

    def open(
        self,
        namespace: Namespace = Namespace(),
        *,
        cache: CacheMode = "read-write",
        priority: int = 0,
    ) -> Branch:
        inner = self.inner.open(namespace, cache=cache, priority=priority)
        return _CachedBranch(inner, Sent(), self, namespace, cache)

    def close(self) -> None:
        super().close()
        if self._owns:
            self.responses.close()

    def __enter__(self) -> CachedBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _CachedBranch(WrappingBranch):
    def __init__(
        self,
        inner: Branch,
        sent: Sent,
        backend: CachedBackend,
        namespace: Namespace,
        mode: CacheMode,
    ) -> None:
        super().__init__(inner, sent)
        self._backend = backend
        self._namespace = namespace
        self._mode = mode
        self._spare: Branch | None = None

    def around(self, inner: Branch) -> Branch:
        return _CachedBranch(inner, self.sent, self._backend, self._namespace, self._mode)

    def close(self) -> None:
        super().close()
        if self._spare is not None:
            self._spare.close()

    # Generating

    def sample(self, draws: Sequence[SamplingParams], *, heal: bool = True) -> list[Generation]:
        """See `Branch`. Those that are not known are asked for together."""
        before = self.inner.token_ids()
        keys = [self._key_of_draw(params, before, heal=heal) for params in draws]
        known = [self._look_up(key, to_go_on=i == 0) for i, key in enumerate(keys)]
        missing = [i for i, each in enumerate(known) if each is None]
        asked = self._ask(missing, [draws[i] for i in missing], heal=heal)
        sent, generations = self.sent, []
        for i, (key, plain) in enumerate(zip(keys, known, strict=True)):
            generation = Generation()
            if plain is not None:
                self._answer(generation, plain, goes_on=i == 0)
            else:
                noted = self._noting(key, sent, before, goes_on=i == 0)
                pass_on(asked[i], generation, noted)
            generations.append(generation)
        return generations

    def _ask(
        self, missing: list[int], draws: list[SamplingParams], *, heal: bool
    ) -> dict[int, Generation]:
        """Handles by place. If the first draw is known, the others are those of a branch beside."""
        if not missing:
            return {}
        if missing[0] == 0:
            return dict(zip(missing, self.inner.sample(draws, heal=heal), strict=True))
        (spare,) = self.inner.fork(1)
        try:
            handles = spare.sample(draws, heal=heal)
        except BaseException:
            spare.close()
            raise
        self._spare = spare
        left = len(handles)

        def one_less(_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                spare.close()

        for handle in handles:
            handle.add_done_callback(one_less)
        return dict(zip(missing, handles, strict=True))

    def _answer(self, generation: Generation, plain: dict[str, Any], *, goes_on: bool) -> None:
        completion = completion_of(plain["completion"])
        if goes_on:
            start, ids = plain["state"]
            kept = completion.text[: len(completion.text) - len(completion.rest)]
            self.inner.commit(ChoiceScore(kept, start, tuple(ids), ()))
            self.inner.append(completion.rest)
            self.sent = self.sent.output(completion)
        if completion.text:
            generation.push(completion.text)
        generation.finish(replace(completion, usage=_from_cache(completion.usage)))

    def _noting(
        self, key: bytes | None, sent: Sent, before: list[int], *, goes_on: bool
    ) -> Callable[[Completion | BaseException], object]:
        def noted(result: Completion | BaseException) -> None:
            if not isinstance(result, Completion):
                return
            if goes_on:
                self.sent = sent.output(result)
            if key is None or self._mode != "read-write":
                return
            responses = self._backend.responses
            state = _state_after(self.inner.token_ids(), before, result) if goes_on else None
            if state is not None or responses.get(key) is None:  # what knows less replaces nothing
                value = {"completion": plain_completion(result), "state": state}
                responses.put(key, json.dumps(value))

        return noted

    # Choosing

    def score(
        self, choices: Sequence[str], *, unconditional: bool = False
    ) -> Pending[ScoredChoices]:
        key = self._key(["score", list(choices), unconditional], self.inner.token_ids())
        outer: Pending[ScoredChoices] = Pending()
        if (plain := self._look_up(key)) is not None:
            scored = scores_of(plain)
            outer.finish(replace(scored, usage=_from_cache(scored.usage)))
            return outer

        def noted(result: ScoredChoices | BaseException) -> None:
            if self._mode == "read-write" and isinstance(result, ScoredChoices):
                self._backend.responses.put(key, json.dumps(plain_scores(result)))

        pass_on(self.inner.score(choices, unconditional=unconditional), outer, noted)
        return outer

    # Keys

    def _key_of_draw(self, params: SamplingParams, ids: list[int], *, heal: bool) -> bytes | None:
        """None for a draw that nobody could draw again."""
        if params.temperature == 0:
            params = params.but(seed=None)
        elif params.seed is None:
            return None
        return self._key(["generate", plain_params(params), heal], ids)

    def _key(self, asked: list[Any], ids: list[int]) -> bytes:
        """A hash of all that the answer depends on."""
        where = [self._backend.identity(), astuple(self._namespace), self.sent.pending]
        content = json.dumps([where, asked], sort_keys=True, default=repr).encode()
        hashed = hashlib.blake2b(content, digest_size=32)
        hashed.update(array("q", ids).tobytes())
        return hashed.digest()

    def _look_up(self, key: bytes | None, *, to_go_on: bool = False) -> dict[str, Any] | None:
        """to_go_on: of no use is a draw beside others, after which no branch has gone on."""
        if key is None or self._mode == "off":
            return None
        responses = self._backend.responses
        value = responses.get(key)
        plain: dict[str, Any] | None = None if value is None else json.loads(value)
        if plain is None or (to_go_on and plain["state"] is None):
            responses.note_miss()
            return None
        responses.note_hit(key)
        return plain


def _from_cache(usage: Usage) -> Usage:
    """What an answer costs that was there already: nothing is computed."""
    return replace(
        usage,
        cached_tokens=usage.prompt_tokens,
        computed_tokens=0,
        ttft_s=0.0 if usage.ttft_s is not None else None,
        total_s=0.0,
        cached_responses=1,
    )


def _state_after(
    after: list[int], before: list[int], completion: Completion
) -> tuple[int, list[int]] | None:
    """How a branch goes on from an answer: how many of its ids before stay, and the ids from there.

    What of the text no kept token covers is pending, as text: its tokens, the last of `after`, are
    left out. None where that cannot be told.
    """
    if completion.rest:
        end = _end_of_output(after, completion)
        if end is None:
            return None
        after = after[:end]
    # Of the prompt at most the last token goes, by healing, or a few by another tokenisation.
    for start in (len(before), len(before) - 1):
        if start >= 0 and after[:start] == before[:start]:
            return start, after[start:]
    return 0, after


def _end_of_output(after: list[int], completion: Completion) -> int | None:
    """Where the kept tokens end: behind the prompt, or one sooner where the first of them stands in
    place of its last token (healing)."""
    kept, prompt = list(completion.token_ids), completion.usage.prompt_tokens
    ends = [
        start + len(kept)
        for start in ((prompt - 1, prompt) if kept else (prompt,))
        if start >= 0 and after[start : start + len(kept)] == kept
    ]
    return ends[0] if len(ends) == 1 else None

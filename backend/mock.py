"""A backend without a model: replies come from a script. For tests of programs, and for measuring
the interpreter.

Remembers what it was asked (`prompts`, `calls`), can be slow, fail on purpose, stream in pieces,
and counts its open branches. A token is a word with the white space before it; a prompt is computed
whole, nothing is cached.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from stemma.backend.base import (
    Backend,
    Branch,
    CacheMode,
    ChoiceScore,
    Completion,
    FinishReason,
    Generation,
    Namespace,
    Pending,
    ScoredChoices,
    TokenLogprob,
    Usage,
)
from stemma.backend.chat import ChatFormat
from stemma.backend.clock import Clock
from stemma.backend.script import (
    WORD,
    Broken,
    Call,
    Reply,
    Script,
    check_script,
    checked_reply,
    cut_at_stop,
    refuse_what_needs_ids,
    split,
)
from stemma.backend.worker import Worker
from stemma.lang.errors import (
    BackendClosed,
    Cancelled,
    ConstraintError,
    InvalidArgument,
    StemmaError,
)
from stemma.lang.sampling import DEFAULT_MAX_TOKENS, SamplingParams

_clock = Clock()
_ANYWHERE = Namespace()
_ROLES = ("system", "user", "assistant")
CHATML = ChatFormat(
    begin={role: f"<|im_start|>{role}\n" for role in _ROLES},
    end=dict.fromkeys(_ROLES, "<|im_end|>\n"),
)


ReplyFunction = Callable[[str, SamplingParams], Reply]
ScoreFunction = Callable[[str, str], Sequence[float]]


class MockBackend(Backend):
    r"""Plays a script.

    replies: what generations write, in the order in which they are asked for (an exception fails
        that one); or a function of the text so far and the params, called in a thread of its own,
        one call at a time. Stop strings, `stop_regex` and
        `max_tokens` cut what is written, `min_tokens` keeps stops out of its first words; a script
        may end sooner. A reply that has not the shape that was asked for is an error. What weighs
        tokens against each other is noted in `calls` and changes nothing. `stop_token_ids`,
        `logit_bias` and `top_logprobs` are refused: a script has no ids.
    choices: what selects choose, in the order in which they are asked for (an exception fails that
        one). An answer that is none of the choices is an error.
    scores: instead of it a function of the text so far and a choice, giving the log-probability of
        each of the choice's words; without either every word has -1.
    delay: seconds from request to answer.
    pieces: how many pieces of like length a reply comes in, for a program that streams; spread over
        the delay, without one all at once.
    fail: the n-th request, counted from 1 -> the error to fail it with.
    chat: how messages are written; ChatML unless given, None for a model without a chat format.
    replies_left, choices_left: how much of what was given as a list has not been asked for.
    controls: the control texts that were appended, in order.

    >>> branch = MockBackend([" Paris.\n2."]).open()
    >>> branch.append("1. The capital of France is")
    >>> branch.generate(SamplingParams(stop="\n")).result().text
    ' Paris.'
    """

    def __init__(
        self,
        replies: Iterable[Reply] | ReplyFunction = (),
        *,
        choices: Iterable[str | BaseException] | None = None,
        scores: ScoreFunction | None = None,
        delay: float = 0.0,
        pieces: int = 1,
        fail: Mapping[int, BaseException] | None = None,
        chat: ChatFormat | None = CHATML,
    ) -> None:
        if type(pieces) is not int or pieces < 1:
            raise InvalidArgument(f"pieces={pieces!r}: must be an integer of at least 1")
        if not 0 <= delay < math.inf:
            raise InvalidArgument(f"delay={delay!r}: must be at least 0 seconds")
        if choices is not None and scores is not None:
            raise InvalidArgument("choices= and scores=: two ways to say what is chosen; give one")
        if isinstance(replies, str) or isinstance(choices, str):
            raise InvalidArgument("a script is a list of texts, not one text")
        if not callable(replies):
            check_script(replies)
        self.chat = chat if chat is not None else ChatFormat.absent()
        self.model_name = "mock"
        self.delay = delay
        self.pieces = pieces
        self.calls: list[Call] = []
        self.controls: list[str] = []
        self.open_branches = 0
        self.running = 0
        self.most_running = 0
        self._closed = False
        self._script = Script("reply", () if callable(replies) else replies)
        self._reply = replies if callable(replies) else self._script.next
        self._has_function = callable(replies)
        self._worker = Worker()
        self._choices = None if choices is None else Script("choice", choices)
        self._scores = scores if scores is not None else _all_alike
        self._fail = dict(fail or {})
        self._vocabulary: dict[str, int] = {}
        self._in_the_air: set[Pending[Any]] = set()
        self._lock = threading.Lock()

    @property
    def replies_left(self) -> int:
        return self._script.left

    @property
    def choices_left(self) -> int:
        return 0 if self._choices is None else self._choices.left

    @property
    def prompts(self) -> list[str]:
        """The text before each request, in order."""
        return [call.prompt for call in self.calls]

    def open(
        self,
        namespace: Namespace = _ANYWHERE,
        *,
        cache: CacheMode = "read-write",
        priority: int = 0,
    ) -> MockBranch:
        self._check_open()
        return MockBranch(self, namespace, cache=cache, priority=priority)

    def flush_cache(self, namespace: Namespace | None = None) -> int:
        return 0

    def close(self) -> None:
        self._closed = True
        for pending in tuple(self._in_the_air):
            self._resolve(pending, BackendClosed("the mock backend was closed"))

    def _check_open(self) -> None:
        if self._closed:
            raise BackendClosed("the mock backend was closed")

    def _ids(self, text: str) -> tuple[int, ...]:
        """One id per word; the same word has the same id."""
        known = self._vocabulary
        with self._lock:
            return tuple(known.setdefault(word, len(known)) for word in WORD.findall(text))

    def _count_branch(self, change: int) -> None:
        with self._lock:
            self.open_branches += change

    def _start(self, pending: Pending[Any], call: Call) -> BaseException | None:
        """Take a request; returns the error that the script has for it."""
        self._check_open()
        with self._lock:
            self.calls.append(call)
            self._in_the_air.add(pending)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            return self._fail.get(len(self.calls))

    def _play(self, steps: Sequence[Callable[[], object]]) -> None:
        """Run `steps` spread over the delay, the last one at its end; without a delay at once."""
        if self.delay <= 0:
            for step in steps:
                step()
            return
        start = time.monotonic()
        for i, step in enumerate(steps, 1):
            _clock.at(start + self.delay * i / len(steps), step)

    def _push(self, generation: Generation, piece: str) -> None:
        if generation in self._in_the_air:
            generation.push(piece)

    def _resolve(self, pending: Pending[Any], outcome: object) -> None:
        """Answer a request, unless it has its answer, by being cancelled perhaps."""
        with self._lock:
            if pending not in self._in_the_air:
                return
            self._in_the_air.remove(pending)
            self.running -= 1
        if isinstance(outcome, BaseException):
            pending.fail(outcome)
        else:
            pending.finish(outcome)


class MockBranch(Branch):
    """Text, and nothing else."""

    def __init__(
        self,
        backend: MockBackend,
        namespace: Namespace,
        text: str = "",
        *,
        cache: CacheMode = "read-write",
        priority: int = 0,
    ) -> None:
        self._backend = backend
        self._namespace = namespace
        self._cache = cache
        self._priority = priority
        self._text = text
        self._pending: Pending[Any] | None = None
        self._closed = False
        backend._count_branch(+1)

    def append(self, text: str, *, control: bool = False) -> None:
        self._text += text
        if control:
            self._backend.controls.append(text)

    def generate(self, params: SamplingParams, *, heal: bool = True) -> Generation:
        if params.n != 1:
            raise InvalidArgument(f"n={params.n}: a branch draws one sample")
        refuse_what_needs_ids(params)
        backend, prompt = self._backend, self._text
        written: list[str] = []

        def cancelled() -> None:
            partial_text = "".join(written)
            backend._resolve(generation, Cancelled("cancelled", partial=partial_text))

        generation = Generation(cancelled)
        reply: Reply | None = backend._start(
            generation,
            Call(prompt, self._namespace, params, heal, cache=self._cache, priority=self._priority),
        )
        self._pending = generation

        def push(piece: str) -> None:
            written.append(piece)
            backend._push(generation, piece)

        def answer() -> None:
            text, outcome = self._answer(prompt, reply, params)

            def end() -> None:
                if not isinstance(outcome, BaseException):
                    self._text = prompt + text
                backend._resolve(generation, outcome)

            backend._play([*(partial(push, piece) for piece in split(text, backend.pieces)), end])

        if reply is None and backend._has_function:
            backend._worker.call(answer)
        else:
            answer()
        return generation

    def _answer(
        self, prompt: str, reply: Reply | None, params: SamplingParams
    ) -> tuple[str, Completion | BaseException]:
        """What a reply, that of the script unless one is given, comes to; or why there is none."""
        try:
            if reply is None:
                reply = checked_reply(self._backend._reply(prompt, params))
            return self._outcome(prompt, reply, params)
        except BaseException as error:
            return "", error

    def _outcome(
        self, prompt: str, reply: Reply, params: SamplingParams
    ) -> tuple[str, Completion | BaseException]:
        """The text that a reply writes, and what it comes to."""
        if isinstance(reply, BaseException):
            return "", reply
        if isinstance(reply, Broken):
            return reply.text, reply.error
        completion = self._completion(prompt, reply, params)
        return completion.text, completion

    def _completion(self, prompt: str, reply: str, params: SamplingParams) -> Completion:
        """What is left of a reply after its stop and `max_tokens`."""
        finish_reason: FinishReason = "stop"
        text, matched = cut_at_stop(reply, params)
        words = WORD.findall(text)
        shape, limit = params.constraint, params.max_tokens
        if limit is None:
            limit = len(words) if shape is not None else DEFAULT_MAX_TOKENS
        if len(words) > limit:
            text, matched, finish_reason = _within(limit, words, params), None, "length"
        elif shape is not None and matched is None and not shape.matches(text):
            raise ConstraintError(
                f"the script's reply {text!r:.200} is not of the shape that was asked for, "
                f"{shape.label}"
            )
        ids, prompt_tokens = self._backend._ids(text), len(self._backend._ids(prompt))
        delay = self._backend.delay
        return Completion(
            text=text,
            token_ids=ids,
            finish_reason=finish_reason,
            matched_stop=matched,
            usage=Usage(
                prompt_tokens,
                computed_tokens=prompt_tokens,
                output_tokens=len(ids),
                ttft_s=delay / (len(split(text, self._backend.pieces)) + 1),
                total_s=delay,
            ),
            logprobs=tuple(TokenLogprob(i, -1.0) for i in ids) if params.logprobs else None,
        )

    def score(
        self, choices: Sequence[str], *, unconditional: bool = False
    ) -> Pending[ScoredChoices]:
        backend, prompt = self._backend, self._text
        pending: Pending[ScoredChoices] = Pending(
            lambda: backend._resolve(pending, Cancelled("cancelled"))
        )
        call = Call(
            prompt,
            self._namespace,
            choices=tuple(choices),
            cache=self._cache,
            priority=self._priority,
        )
        self._pending = pending
        outcome: ScoredChoices | BaseException | None = backend._start(pending, call)
        chosen: str | None = None
        if outcome is None and backend._choices is not None:
            found = backend._choices.next(prompt)
            if isinstance(found, BaseException):
                outcome = found
            elif found not in choices:
                outcome = StemmaError(
                    f"the script chooses {found!r}, which is none of the choices {list(choices)!r}"
                    f", after {prompt!r}"
                )
            else:
                chosen = found

        def answer() -> None:
            try:
                scored = outcome or self._scored(prompt, choices, chosen, unconditional)
            except BaseException as error:
                scored = error
            backend._play([lambda: backend._resolve(pending, scored)])

        if outcome is None and backend._scores is not _all_alike:
            backend._worker.call(answer)
        else:
            answer()
        return pending

    def _scored(
        self, prompt: str, choices: Sequence[str], chosen: str | None, unconditional: bool
    ) -> ScoredChoices | BaseException:
        """The scores of choices; of those of a script, that which it has chosen is far ahead."""
        backend = self._backend
        start = len(backend._ids(prompt))

        def score(choice: str) -> ChoiceScore:
            ids = backend._ids(choice)
            if chosen is None:
                logprobs = tuple(backend._scores(prompt, choice))
            else:
                logprobs = tuple((-0.1 if choice == chosen else -9.0) for _ in ids)
            alone = tuple(backend._scores("", choice)) if unconditional else None
            return ChoiceScore(choice, start, ids, logprobs, alone)

        usage = Usage(start, computed_tokens=start, total_s=backend.delay)
        return ScoredChoices(tuple(map(score, choices)), usage)

    def commit(self, choice: ChoiceScore) -> None:
        self._text += choice.text

    def fork(self, n: int) -> list[Branch]:
        return [
            MockBranch(
                self._backend,
                self._namespace,
                self._text,
                cache=self._cache,
                priority=self._priority,
            )
            for _ in range(n)
        ]

    def token_ids(self) -> list[int]:
        return list(self._backend._ids(self._text))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._backend._count_branch(-1)
            if self._pending is not None:
                self._pending.cancel()


def _within(limit: int, words: Sequence[str], params: SamplingParams) -> str:
    """So many of the words; with `on_limit="close"` fewer, and what completes them."""
    text = "".join(words[:limit])
    if params.constraint is None or params.on_limit == "cut":
        return text
    for kept in range(limit, -1, -1):
        text = "".join(words[:kept])
        end = params.constraint.closing(text)
        if end is not None and len(WORD.findall(text + end)) <= limit:
            return text + end
    raise ConstraintError(
        f"max_tokens={limit} with {params.constraint.label}: no text that was found is as short: "
        "raise max_tokens, or leave it out"
    )


def _all_alike(prompt: str, choice: str) -> list[float]:
    return [-1.0] * len(WORD.findall(choice))

"""What a scripted backend answers: the script itself, and what stops and limits leave of a reply.

Used by `mock.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stemma.backend.base import CacheMode, Namespace
from stemma.backend.local.stops import StopWatch
from stemma.lang.errors import InvalidArgument, StemmaError, UnsupportedByBackend
from stemma.lang.expressions import compile_stop_regex
from stemma.lang.sampling import SamplingParams

T = TypeVar("T")
WORD = re.compile(r"\s*\S+|\s+")
"""A token of a script: a word with the white space before it."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A scripted reply that writes `text` and then fails."""

    text: str
    error: BaseException


Reply = str | BaseException | Broken


@dataclass(frozen=True, slots=True)
class Call:
    """One request: a generation after `prompt`, or, with `choices`, their scores."""

    prompt: str
    namespace: Namespace
    params: SamplingParams | None = None
    heal: bool = True
    choices: tuple[str, ...] = ()
    cache: CacheMode = "read-write"
    priority: int = 0


class Script(Generic[T]):
    """What is to be answered, in order.

    left: how much has not been asked for, of a list; of what is made while it is asked for nobody
    knows.
    """

    def __init__(self, what: str, answers: Iterable[T]) -> None:
        self._what = what
        self._answers = iter(answers)
        self._given = 0
        self._size = len(answers) if isinstance(answers, Sized) else 0

    @property
    def left(self) -> int:
        return max(0, self._size - self._given)

    def next(self, prompt: str, params: SamplingParams | None = None) -> T | StemmaError:
        self._given += 1
        try:
            return next(self._answers)
        except StopIteration:
            return StemmaError(
                f"the script has no {self._what} number {self._given}, to {prompt!r}"
            )


def check_script(replies: Iterable[Any]) -> None:
    """Raise InvalidArgument for a list with something in it that is no reply."""
    if not isinstance(replies, Iterable):
        raise InvalidArgument(
            f"replies={replies!r}: must be a list of texts, or a function of the text so far and "
            "the sampling parameters"
        )
    for i, reply in enumerate(replies if isinstance(replies, Sequence) else ()):
        checked_reply(reply, f"reply {i}")


def checked_reply(reply: Any, what: str = "the script's reply") -> Reply:
    """The reply. Raises InvalidArgument for what is none."""
    if isinstance(reply, str | BaseException | Broken):
        return reply
    raise InvalidArgument(f"{what} is {reply!r}: must be a text, or an exception to fail with")


def refuse_what_needs_ids(params: SamplingParams) -> None:
    for name, instead in (
        ("stop_token_ids", "write the reply as it ends, or give stop strings"),
        ("logit_bias", "write the reply as the bias makes it"),
        ("top_logprobs", "a script knows no other tokens"),
    ):
        if value := getattr(params, name):
            raise UnsupportedByBackend(f"{name}={value!r} on a MockBackend: {instead}")


def cut_at_stop(text: str, params: SamplingParams) -> tuple[str, str | None]:
    """The text up to its stop, found as the engine finds it, and what that matched."""
    expression = None if params.stop_regex is None else compile_stop_regex(params.stop_regex)
    if not params.stop and expression is None:
        return text, None
    watch = StopWatch(params.stop, expression)
    guarded = "".join(WORD.findall(text)[: params.min_tokens])
    if guarded:
        watch.pass_over(guarded)
    match = watch.feed(text[len(guarded) :])
    if match is None:
        return text, None
    return text[: match.end if params.include_stop else match.start], match.text


def split(text: str, pieces: int) -> list[str]:
    size = max(1, -(-len(text) // pieces))
    return [text[i : i + size] for i in range(0, len(text), size)]

"""The seam between programs and models: `Backend` opens branches, a `Branch` is one growing line of
text.

The interpreter knows nothing else of a model. Everything that takes time returns a handle at once
(`Pending`, `Generation`); a branch is used by one operation at a time: the next call comes after
the handle has resolved.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from stemma.lang.errors import UnsupportedByBackend
from stemma.lang.reasoning import THINK, Marks
from stemma.lang.sampling import SamplingParams

if TYPE_CHECKING:
    from stemma.backend.chat import ChatFormat

T = TypeVar("T")
FinishReason = Literal["stop", "length", "cancelled"]
CacheMode = Literal["read-write", "read", "off"]
"""How a request uses cached state: takes and leaves, takes only, neither."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal, besides the tokens, before two requests may share cached state. Compared
    as a tuple.
    """

    model_version: str = ""
    adapter: str | None = None
    salt: str = ""
    extra_key: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and seconds of one request, or of many added up. cached + computed == prompt.

    prompt_tokens: tokens before the first output token. cached_tokens: those whose KV was there
    already or was computed for another request in the same step. computed_tokens: those run through
    the model for this request.
    forced_tokens: output tokens that a constraint left no choice about. ttft_s: time to first
    token. Added up, ttft_s is the smallest and total_s the sum.
    cached_responses: requests that a `CachedBackend` had the whole answer to.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    forced_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    total_s: float = 0.0
    cached_responses: int = 0

    def __add__(self, other: Usage) -> Usage:
        firsts = [t for t in (self.ttft_s, other.ttft_s) if t is not None]
        sums = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(Usage)
            if f.name != "ttft_s"
        }
        return Usage(**sums, ttft_s=min(firsts, default=None))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, its natural-log probability under the model, and the most probable alternatives
    (id, logprob).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What a generation gave.

    text: the output as the program sees it. token_ids: the ids that were kept, without the stop.
    rest: the visible characters of `text` that `token_ids` does not cover (the head of a token cut
    by a stop).
    matched_stop: the stop string, stop token id or regex match that ended it.
    logprobs: per kept token, if asked. prompt_logprobs: per prompt token from the second on, if
    asked.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None = None
    rest: str = ""
    usage: Usage = Usage()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """One scored choice: the token ids and log-probabilities l_1..l_k from position `start` of the
    branch on.

    start: the shortest common prefix of the branch's ids with the ids of branch + choice, over all
    choices; the same for every choice. token_ids: the ids of branch + choice from there.
    unconditional: u_1..u_k, the same tokens without the branch, where asked.
    """

    text: str
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ScoredChoices:
    """The scores of all choices, in the order given, and what computing them took."""

    choices: tuple[ChoiceScore, ...]
    usage: Usage = Usage()


class Pending(Generic[T]):
    """A result on its way. The backend resolves it once; any thread may wait, listen or cancel."""

    def __init__(self, on_cancel: Callable[[], None] | None = None) -> None:
        self.future: Future[T] = Future()
        self.on_cancel = on_cancel

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result; raises what the work raised."""
        return self.future.result(timeout)

    def done(self) -> bool:
        return self.future.done()

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call `fn(future)` when resolved, at once if it is. It runs on the backend's thread: it
        must be quick.
        """
        self.future.add_done_callback(fn)

    def cancel(self) -> None:
        """Ask the backend to stop; the handle then fails with `Cancelled`. Harmless when already
        resolved.
        """
        on_cancel = self.on_cancel  # read once: the backend may forget it when it resolves
        if on_cancel is not None and not self.future.done():
            on_cancel()

    def finish(self, value: T) -> None:
        """Backend side: resolve."""
        self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Backend side: resolve with an error."""
        self.future.set_exception(error)


class Generation(Pending[Completion]):
    """A completion on its way, with its text as it grows. Listeners get whole characters only, each
    exactly once.
    """

    def __init__(self, on_cancel: Callable[[], None] | None = None) -> None:
        super().__init__(on_cancel)
        self._lock = threading.Lock()
        self._text: list[str] = []
        self._listeners: list[Callable[[str], None]] = []

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Call `listener(piece)` for the text so far and for each further piece. It must be
        quick.
        """
        with self._lock:
            if self._text:
                listener("".join(self._text))
            self._listeners.append(listener)

    def push(self, piece: str) -> None:
        """Backend side: more text."""
        with self._lock:
            self._text.append(piece)
            for listener in self._listeners:
                listener(piece)


class Branch(ABC):
    """One line of text, append-only, forked cheaply. Not thread-safe; used by one operation at a
    time.
    """

    @abstractmethod
    def append(self, text: str, *, control: bool = False) -> None:
        """Add text to the pending literal. Only with `control` do added tokens in it become control
        tokens.
        """

    @abstractmethod
    def generate(self, params: SamplingParams, *, heal: bool = True) -> Generation:
        """Continue the branch; when the handle resolves, the branch includes the output. `params.n`
        must be 1.

        heal: let the first draw redo the last token of a literal that stands directly before.
        Raises ContextOverflow, OutOfCacheMemory, UnsupportedByBackend, BackendClosed at once.
        """

    def sample(self, draws: Sequence[SamplingParams], *, heal: bool = True) -> list[Generation]:
        """`generate` once for each of `draws`, all from here; the branch goes on with the first.

        Raises as `generate`. A backend that computes them together overrides this.
        """
        spare = self.fork(len(draws) - 1)
        try:
            handles = [
                branch.generate(params, heal=heal)
                for branch, params in zip((self, *spare), draws, strict=True)
            ]
        except BaseException:
            for branch in spare:
                branch.close()
            raise
        for branch, handle in zip(spare, handles[1:], strict=True):
            handle.add_done_callback(_closing(branch))
        return handles

    @abstractmethod
    def score(
        self, choices: Sequence[str], *, unconditional: bool = False
    ) -> Pending[ScoredChoices]:
        """Log-probabilities of each choice as a continuation. Leaves the branch as it is."""

    @abstractmethod
    def commit(self, choice: ChoiceScore) -> None:
        """Append a scored choice by its ids. The branch must be as it was when the choice was
        scored.
        """

    @abstractmethod
    def fork(self, n: int) -> list[Branch]:
        """`n` independent branches that continue from here. This one stays usable."""

    @abstractmethod
    def token_ids(self) -> list[int]:
        """The ids of the whole branch, its pending literal tokenised as for a healed generation.

        Unhealed, white space at its end may be sent as other ids of the same text.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up the branch: cancels what runs on it, releases what it holds. May be called
        twice.
        """


def _closing(branch: Branch) -> Callable[[Future[Completion]], None]:
    return lambda _: branch.close()


class Backend(ABC):
    """A model to run programs on. Serves any number of threads.

    reasoning_marks: what the model puts around its reasoning. control_tokens: the texts of its
    control tokens; None where the backend does not know them. max_running: how many requests it
    works on at once; None where that has no bound. model_version: changes whenever the weights, or
    how they are computed, do; "" where that is not known.
    """

    chat: ChatFormat
    model_name: str
    reasoning_marks: Marks = THINK
    control_tokens: Collection[str] | None = None
    max_running: int | None = None
    model_version: str = ""

    def identity(self) -> str:
        """What the answers depend on besides the request: the weights, and how they are computed.

        Answers are kept for later (`CachedBackend`) under this. Here it is the kind of backend, and
        the version of the weights, or of a backend without one the model's name.
        """
        return f"{type(self).__name__} {self.model_version or self.model_name}"

    def count_tokens(self, text: str) -> int | None:
        """How many tokens a text is on its own; None where that is not known, as here."""
        return None

    def model_sampling(self) -> SamplingParams:
        """The sampling that the model's authors recommend, of backends that know it."""
        raise UnsupportedByBackend(
            f"{type(self).__name__} does not know what sampling {self.model_name!r} comes with; "
            "st.LocalBackend reads a model's generation_config.json"
        )

    @abstractmethod
    def open(
        self,
        namespace: Namespace = Namespace(),
        *,
        cache: CacheMode = "read-write",
        priority: int = 0,
    ) -> Branch:
        """An empty branch. Branches share cached state only within one namespace.

        cache: how the branch and its forks use cached state. priority: what their requests are
        worth, the larger the dearer; a backend that would not look at it refuses all but 0. Raises
        UnsupportedByBackend for an adapter that the backend does not have.
        """

    @abstractmethod
    def flush_cache(self, namespace: Namespace | None = None) -> int:
        """Forget cached tokens that no running request uses, of one namespace or all; returns how
        many.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop. Running work fails with `BackendClosed`. May be called twice."""

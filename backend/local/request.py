"""A request: some known tokens to compute, and perhaps more to sample after them.

Plain data with small questions about itself. The scheduler decides when it runs, `memory.py` moves
its slots, the engine appends its tokens. Generation, prompt log-probabilities and scored choices
are all this one thing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt

from stemma.backend.base import (
    CacheMode,
    Completion,
    FinishReason,
    Namespace,
    TokenLogprob,
    Usage,
)
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.lang.errors import EngineInvariantError, InvalidArgument, UnsupportedByBackend
from stemma.lang.sampling import SamplingParams

if TYPE_CHECKING:
    from stemma.backend.local.cache.radix_tree import RadixNode
    from stemma.backend.local.constrain import Guide
    from stemma.backend.local.detokenize import OutputEnd, OutputText
    from stemma.backend.local.speculation import Drafting

IntArray = npt.NDArray[np.int32]


class Ints:
    """An int32 array that grows at the end; `view()` is its live part, not a copy, and `size` the
    length of that, which is read for every token.
    """

    __slots__ = ("_data", "size")

    def __init__(self, values: npt.ArrayLike = ()) -> None:
        self._data: IntArray = np.array(values, dtype=np.int32)
        self.size = len(self._data)

    def __len__(self) -> int:
        return self.size

    def view(self, stop: int | None = None) -> IntArray:
        return self._data[: self.size if stop is None else stop]

    def extend(self, values: npt.ArrayLike) -> None:
        new = np.asarray(values, dtype=np.int32)
        size = self.size + len(new)
        if size > len(self._data):
            grown = np.empty(max(size, 2 * len(self._data), 16), dtype=np.int32)
            grown[: self.size] = self.view()
            self._data = grown
        self._data[self.size : size] = new
        self.size = size

    def truncate(self, size: int) -> None:
        self.size = min(size, self.size)


def check_namespace(namespace: object) -> None:
    """Raises InvalidArgument for what is no namespace."""
    if not isinstance(namespace, Namespace):
        raise InvalidArgument(
            f"namespace={namespace!r}: must be a Namespace, as st.Namespace(salt='tenant')"
        )


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a branch's requests have to do with the cache: what they share with whom, and what they
    are worth.
    """

    namespace: Namespace
    mode: CacheMode
    priority: int

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        modes = get_args(CacheMode)
        if self.mode not in modes:
            raise InvalidArgument(
                f"cache={self.mode!r}: must be one of {', '.join(map(repr, modes))}"
            )
        if self.namespace.adapter is not None:
            raise UnsupportedByBackend(
                f"adapter={self.namespace.adapter!r}: this backend has none, for adapters cannot "
                "be loaded yet; leave it out, or give st.LocalBackend a model with the adapter "
                "merged into it"
            )
        if type(self.priority) is not int:
            raise InvalidArgument(f"priority={self.priority!r}: must be an integer")


NOWHERE = sys.maxsize
"""A position behind all."""


class State(Enum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One line of tokens on its way through the engine.

    tokens: all known ids: the prompt, then what was sampled; while a step runs, behind them a draft
    of `drafted` tokens. A scored choice is a prompt that samples nothing.
    prompt_length: how many of them were given.
    scored: a choice: its last token is scored, never computed, for it predicts nothing.
    samples: whether to go on sampling after the known tokens; else it ends when its
    log-probabilities are known.
    next_logprob: position of the first known token whose log-probability is wanted and not there
    yet; None when
        none is wanted. `prompt_logprobs` collects them.
    cache: what it takes from the tree and leaves there. own_start: from this position on the
    tokens are wanted by nobody but the branch that asks: what is sampled, or a choice. priority:
    for the policies of that name, of eviction and of waiting; the larger the dearer.
    arrival, rank: its number in order of submission, and its place in the fair order, smallest
    first. overtaken: how many requests that rank behind it were admitted while it waited. matched:
    cached tokens it begins with, when an order looked last.
    logprobs_end: where the tokens end whose log-probability is wanted; those behind the prompt are
    output that a constraint has forced. wants_prompt_logprobs: whether those of the prompt are.
    heal: ids that may stand in place of the last prompt token, for the first draw; None once
    decided.
    guide: what the constraint of the output allows next. forced: output tokens that it left no
    choice about.
    on_finish, on_error: one of them is called once, on the engine's thread, after all locks and
    slots are released.
    on_text: called with each new piece of certain text, on the engine's thread.
    """

    tokens: Ints
    namespace: Namespace
    params: SamplingParams
    on_finish: Callable[[Request], None]
    on_error: Callable[[BaseException], None]
    on_text: Callable[[str], None] | None = None
    seed: int = 0
    samples: bool = True
    scored: bool = False
    next_logprob: int | None = None
    heal: IntArray | None = None
    guide: Guide | None = None
    output: OutputText | None = None
    max_tokens: int = 0
    prompt_top_logprobs: int = 0
    cache: CacheMode = "read-write"
    priority: int = 0
    own_start: int = NOWHERE

    # progress
    state: State = State.NEW
    prompt_length: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    wants_prompt_logprobs: bool = False
    logprobs_end: int = 0
    healed: bool = False
    forced: int = 0
    finish_reason: FinishReason = "length"
    end: OutputEnd | None = None

    # memory, moved by memory.py only
    table: Ints = field(default_factory=Ints)
    node: RadixNode | None = None
    shared: int = 0
    computed: int = 0
    scheduled_end: int = 0
    publish_end: int = 0

    # speculation: what is known about drafts, and how many of the tokens are one
    drafting: Drafting | None = None
    drafted: int = 0

    # queueing and accounting
    arrival: int = 0
    rank: tuple[int, int] = (0, 0)
    overtaken: int = 0
    matched: int = 0
    counted: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    unaligned_tokens: int | None = None
    submitted_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        if self.prompt_length < (2 if self.scored else 1):
            raise EngineInvariantError(
                f"a request of {self.prompt_length} tokens leaves nothing to compute"
            )
        self.publish_end = self.known_end
        self.logprobs_end = self.prompt_length
        self.wants_prompt_logprobs = self.next_logprob is not None

    @property
    def known_end(self) -> int:
        """Where the tokens that must be computed end. The last token of a scored choice predicts
        nothing, and those of a draft are not known.
        """
        return self.tokens.size - self.drafted - (1 if self.scored else 0)

    @property
    def key(self) -> RadixKey:
        """What the tree is asked with: the tokens that must be computed, in the namespace."""
        return RadixKey(self.tokens.view(self.known_end), self.namespace)

    @property
    def is_decoding(self) -> bool:
        return bool(self.output_ids) and self.known_end - self.computed == 1

    @property
    def draws_from(self) -> int:
        """First position whose logits the next draw needs: its row and all later ones belong in one
        step.
        """
        return self.known_end - (1 if self.heal is None else 2)

    @property
    def logits_from(self) -> int:
        """First position whose logits are still needed; its row, and all later ones, must be
        computed.
        """
        first = self.draws_from
        if self.next_logprob is not None and self.next_logprob < self.logprobs_end:
            first = min(first, self.next_logprob - 1)
        return first

    @property
    def is_scored(self) -> bool:
        """Whether no log-probability of a known token is missing."""
        return self.next_logprob is None or self.next_logprob >= self.logprobs_end

    @property
    def remaining_output(self) -> int:
        return self.max_tokens - len(self.output_ids) if self.samples else 0

    @property
    def draw_counter(self) -> int:
        """Index of the next draw: its position counted from the last token of the prompt as it was
        given. The healing draw has 0.
        """
        return len(self.output_ids) + (0 if self.healed else 1)

    def take_draft(self, draft: IntArray) -> None:
        """Let a draft stand behind the known tokens, for one step."""
        self.tokens.extend(draft)
        self.drafted = len(draft)

    def drop_draft(self) -> IntArray:
        """Take the draft off again and return it."""
        draft = self.tokens.view()[len(self.tokens) - self.drafted :].copy()
        self.tokens.truncate(len(self.tokens) - self.drafted)
        self.drafted = 0
        return draft

    @property
    def text_out(self) -> OutputText:
        """The output text of a request that samples."""
        if self.output is None:
            raise EngineInvariantError("a request that samples nothing has no output text")
        return self.output

    def count(self, start: int, end: int, *, cached: bool) -> None:
        """Account prompt positions start..end as cached or computed, each position once in a
        request's life.
        """
        end = min(end, self.prompt_length)
        fresh = end - max(start, self.counted)
        if fresh > 0:
            self.counted = end
            if cached:
                self.cached_tokens += fresh
            else:
                self.computed_tokens += fresh

    def usage(self) -> Usage:
        now = time.perf_counter()
        first = self.first_token_at
        return Usage(
            prompt_tokens=self.cached_tokens + self.computed_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            forced_tokens=self.forced,
            output_tokens=len(self.output_ids),
            ttft_s=None if first is None else first - self.submitted_at,
            total_s=now - self.submitted_at,
        )

    def completion(self) -> Completion:
        """What a finished request gave."""
        end = self.end
        kept = end.kept if end is not None else 0
        return Completion(
            text=end.text if end is not None else "",
            token_ids=tuple(self.output_ids[:kept]),
            finish_reason=self.finish_reason,
            matched_stop=end.matched_stop if end is not None else None,
            rest=end.rest if end is not None else "",
            usage=self.usage(),
            logprobs=tuple(self.logprobs[:kept]) if self.params.logprobs else None,
            prompt_logprobs=tuple(self.prompt_logprobs) if self.wants_prompt_logprobs else None,
        )

"""The engine with everything real but the model: scheduler, tree, pool, sampler, text; a test takes
the steps.

The stub is attention in whole numbers, exact and two layers deep: what a layer keeps of a token in
its slot depends on all tokens before it, and a row adds up what it finds in the slots it is told to
see. So a slot that was given away too early, shared between two prefixes, left unfilled or read at
another position changes the text. `without_engine` says what comes out where nothing is shared,
kept or scheduled.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stemma.backend.base import CacheMode, Namespace
from stemma.backend.local.batch import Batch
from stemma.backend.local.cache.eviction import POLICIES
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.radix_cache import RadixCache, RadixNode
from stemma.backend.local.detokenize import OutputText
from stemma.backend.local.engine import Engine
from stemma.backend.local.logit_rules import Draw
from stemma.backend.local.memory import RequestMemory
from stemma.backend.local.request import NOWHERE, Ints, Request, State
from stemma.backend.local.sampler import sample
from stemma.backend.local.scheduler import Scheduler
from stemma.backend.local.speculation import Speculation
from stemma.lang.sampling import SamplingParams

Numbers = npt.NDArray[np.uint64]

END = 0
WORDS = [b"", *(bytes([c]) for c in b"abcdefgh"), *(bytes([a, b]) for a in b"abc" for b in b"abcd")]
"""The bytes of each token: an end, letters, and pairs that begin with a letter, for healing."""


class Letters:
    """What `OutputText` asks a tokenizer for."""

    eos_ids = frozenset({END})

    def bytes_of(self, token_id: int) -> bytes:
        return WORDS[token_id]


# -- the model


def scramble(numbers: Numbers) -> Numbers:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): any change changes everything."""
    x = numbers + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def embed(token_ids: npt.ArrayLike, positions: npt.ArrayLike) -> Numbers:
    tokens = np.asarray(token_ids).astype(np.uint64)
    return scramble((tokens << np.uint64(32)) ^ np.asarray(positions).astype(np.uint64))


def weigh(kept: Numbers, first_position: int) -> Numbers:
    """By position, so that keys in another order, or shifted, add up to something else."""
    positions = np.arange(first_position, first_position + len(kept), dtype=np.uint64)
    return kept * (np.uint64(2) * positions + np.uint64(1))


class StubDecoder:
    """Fills its slots and gives hidden states, one whole number a row. Empty slots hold garbage."""

    def __init__(self, capacity: int, faults: Faults) -> None:
        rng = np.random.default_rng(1)
        self.layers = [rng.integers(1 << 63, size=capacity, dtype=np.uint64) for _ in range(2)]
        self.faults = faults
        self.entries = 0
        self.rows = 0

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def __call__(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        self.entries = len(batch.entry_rows)
        self.rows += len(batch.token_ids)
        x = embed(token_ids.numpy(), positions.numpy())
        for number, layer in enumerate(self.layers):
            layer[batch.slots] = x
            if number == 0:  # a pass that fails has filled its slots in part
                self.faults.pass_by("forward")
            x = scramble(self.attend(batch, layer))
        return torch.from_numpy(x.view(np.int64))

    @staticmethod
    def attend(batch: Batch, layer: Numbers) -> Numbers:
        found = np.zeros(len(batch.token_ids), dtype=np.uint64)
        for segment in batch.segments:
            seen = weigh(layer[segment.slots], segment.first_position)
            own = segment.row_start + segment.own_rows
            if segment.own_rows:
                found[segment.row_start : own] += np.cumsum(seen, dtype=np.uint64)
            found[own : segment.row_stop] += seen.sum(dtype=np.uint64)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        self.faults.pass_by("sample")
        return logits(hidden.numpy().view(np.uint64))


def logits(hidden: Numbers) -> Tensor:
    """Whole numbers to [rows, vocab], uniform in [0, 6)."""
    tokens = np.arange(len(WORDS), dtype=np.uint64) << np.uint64(40)
    x = scramble(hidden[:, None] ^ tokens) >> np.uint64(11)
    return torch.from_numpy(x.astype(np.float64) * (6 / (1 << 53)))


@lru_cache(1 << 12)
def kept_of(tokens: bytes) -> tuple[Numbers, Numbers]:
    """What the slots of a text hold, layer by layer."""
    first = embed(list(tokens), range(len(tokens)))
    return first, scramble(np.cumsum(weigh(first, 0), dtype=np.uint64))


def hidden_of(tokens: bytes) -> Numbers:
    return scramble(np.cumsum(weigh(kept_of(tokens)[1], 0), dtype=np.uint64))


# -- requests


@dataclass(frozen=True)
class Asked:
    """A request as a value. heal: the last token may be drawn anew. scored: a choice."""

    prompt: bytes
    max_tokens: int = 4
    temperature: float = 0.0
    seed: int = 0
    ignore_end: bool = True
    namespace: Namespace = Namespace()
    cache: CacheMode = "read-write"
    heal: bool = False
    logprobs: bool = False
    scored: bool = False
    own_start: int = NOWHERE

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, ignore_eos=self.ignore_end
        )

    @property
    def candidates(self) -> npt.NDArray[np.int32] | None:
        """What may stand in place of the last token."""
        if not self.heal or len(self.prompt) < 2 or self.max_tokens == 0:
            return None
        beginning = WORDS[self.prompt[-1]]
        found = [i for i, word in enumerate(WORDS) if beginning and word.startswith(beginning)]
        return np.array(found, dtype=np.int32) if len(found) > 1 else None


@dataclass(frozen=True)
class Expected:
    """What a request gives: its text, all its output ids, its tokens in the end, how many of these
    have been through the model, and the log-probabilities of its prompt.
    """

    text: str
    output_ids: tuple[int, ...]
    tokens: bytes
    computed: int
    prompt_logprobs: tuple[float, ...]


@lru_cache(1 << 12)
def without_engine(asked: Asked) -> Expected:
    """One sequence, computed whole for every token."""
    tokens, output_ids = asked.prompt, list[int]()
    text = OutputText(Letters(), asked.params, end_ids=Letters.eos_ids)  # type: ignore[arg-type]
    logprobs = prompt_logprobs(asked.prompt) if asked.logprobs or asked.scored else ()
    if asked.max_tokens == 0:
        return Expected("", (), tokens, len(tokens) - asked.scored, logprobs)

    def draw(row: int, counter: int, allowed: npt.NDArray[np.int32] | None = None) -> int:
        found = logits(hidden_of(tokens)[row:][:1])
        draw = Draw(asked.params, seed=asked.seed, counter=counter, allowed=allowed)
        return sample(found, [0], [draw])[0].token_id

    candidates = asked.candidates
    redone = None if candidates is None else draw(len(tokens) - 2, 0, candidates)
    if redone is not None and redone != tokens[-1]:
        text.stand_for(tokens[-1])
        tokens, token = tokens[:-1], redone
    else:
        token = draw(len(tokens) - 1, 1)
    while True:
        ended = text.push(token)
        if text.num_tokens == len(output_ids):  # the end
            return Expected(text.finish().text, tuple(output_ids), tokens, len(tokens), logprobs)
        output_ids.append(token)
        tokens += bytes([token])
        if ended or len(output_ids) == asked.max_tokens:
            end = text.finish().text
            return Expected(end, tuple(output_ids), tokens, len(tokens) - 1, logprobs)
        token = draw(len(tokens) - 1, len(tokens) - len(asked.prompt) + 1)


def prompt_logprobs(prompt: bytes) -> tuple[float, ...]:
    table = logits(hidden_of(prompt)[:-1]).log_softmax(-1)
    return tuple(float(table[i, token]) for i, token in enumerate(prompt[1:]))


@dataclass(eq=False)
class Asking:
    """A request under way and what came of it."""

    asked: Asked
    request: Request
    pieces: list[str] = field(default_factory=list)
    error: BaseException | None = None
    ended: bool = False

    def end(self, error: BaseException | None) -> None:
        assert not self.ended, "a request ended twice"
        assert self.request.node is None, "a result came before the locks were released"
        assert self.request.state is State.FINISHED
        self.ended, self.error = True, error

    def check(self) -> None:
        """It finished, and gave what it gives alone."""
        assert self.ended
        assert self.error is None, self.error
        expected, found = without_engine(self.asked), self.request.completion()
        assert tuple(self.request.output_ids) == expected.output_ids
        assert "".join(self.pieces) == found.text == expected.text
        assert self.request.tokens.view().tolist() == list(expected.tokens)
        usage = found.usage
        assert usage.cached_tokens + usage.computed_tokens == len(self.asked.prompt) - (
            1 if self.asked.scored else 0
        )
        given = tuple(logprob.logprob for logprob in found.prompt_logprobs or ())
        np.testing.assert_allclose(given, expected.prompt_logprobs, rtol=0, atol=1e-12)


# -- faults


class InjectedFault(Exception):
    """What the test lets go wrong."""


class Faults:
    """The places where a step can go wrong, by kind, counted; one of them may be told to."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.armed: dict[str, int] = {}
        self.fired: list[str] = []

    def arm(self, kind: str, number: int) -> None:
        """Let the number-th one from now on (from 1) raise."""
        self.armed[kind] = self.seen[kind] + number

    def pass_by(self, kind: str) -> None:
        self.seen[kind] += 1
        if self.armed.get(kind) == self.seen[kind]:
            self.fired.append(kind)
            raise InjectedFault(kind)


class FaultyAllocator(PageAllocator):
    """Fails when told to."""

    def __init__(self, capacity: int, page_size: int, faults: Faults) -> None:
        self.faults = faults
        super().__init__(capacity, page_size)

    def alloc(self, tokens: int, *, after: int | None = None) -> npt.NDArray[np.int32] | None:
        self.faults.pass_by("alloc")
        return super().alloc(tokens, after=after)


# -- the engine


class Stubbed:
    """An engine on the stub. The calling thread is taken for the engine's."""

    def __init__(
        self,
        kv_tokens: int,
        *,
        page_size: int = 1,
        prefix_cache: bool = True,
        eviction: str = "lru",
        cache: Callable[..., RadixCache] = RadixCache,
        check: bool = True,
        **scheduling: Any,
    ) -> None:
        self.now = 0.0
        self.faults = Faults()
        self.allocator = FaultyAllocator(kv_tokens, page_size, self.faults)
        self.cache = cache(self.allocator, eviction=POLICIES[eviction]())
        self.memory = RequestMemory(
            self.allocator, self.cache, prefix_cache=prefix_cache, clock=lambda: self.now
        )
        settings = {"policy": "lpm", "max_running": 8, "max_step_tokens": 64, **scheduling}
        speculation = Speculation(self.memory)
        self.scheduler = Scheduler(self.memory, speculation=speculation, **settings)
        self.decoder = StubDecoder(self.allocator.capacity, self.faults)
        self.engine = Engine(
            self.decoder,  # type: ignore[arg-type]
            self.decoder,  # type: ignore[arg-type]
            self.scheduler,
            device=torch.device("cpu"),
            end_ids=Letters.eos_ids,
            check_every_step=check,
        )
        self.engine._thread = threading.current_thread()
        self.askings: list[Asking] = []

    def submit(self, *wanted: Asked) -> list[Asking]:
        """Hand in requests together."""
        new = [self._asking(asked) for asked in wanted]
        self.askings += new
        self.engine.submit([asking.request for asking in new])
        self.engine._read_inbox(wait=False)
        return new

    def _asking(self, asked: Asked) -> Asking:
        text = OutputText(Letters(), asked.params, end_ids=Letters.eos_ids)  # type: ignore[arg-type]
        samples = asked.max_tokens > 0
        request = Request(
            tokens=Ints(list(asked.prompt)),
            namespace=asked.namespace,
            params=asked.params,
            on_finish=lambda _: asking.end(None),
            on_error=lambda error: asking.end(error),
            on_text=lambda piece: asking.pieces.append(piece),
            seed=asked.seed,
            samples=samples,
            scored=asked.scored,
            next_logprob=1 if asked.logprobs or asked.scored else None,
            heal=asked.candidates,
            output=text if samples else None,
            max_tokens=asked.max_tokens,
            cache=asked.cache,
            own_start=asked.own_start,
        )
        asking = Asking(asked, request)
        return asking

    def cancel(self, asking: Asking) -> None:
        self.engine.cancel([asking.request])
        self.engine._read_inbox(wait=False)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> None:
        with torch.inference_mode():
            self.engine.step()

    def run(self, *, at_most: int) -> None:
        """Steps until nothing is left to do."""
        for _ in range(at_most):
            if not self.has_work:
                return
            self.step()
        left = len(self.scheduler.running), len(self.scheduler.waiting)
        raise AssertionError(f"after {at_most} steps still {left} running and waiting")

    def check_slots(self) -> None:
        """What the tree says is cached is what its slots hold."""
        prefix_of: dict[RadixNode | None, bytes] = {None: b"", self.cache._tree.root: b""}
        for node in self.cache._tree.nodes():
            above = prefix_of[node.parent]
            prefix_of[node] = above + bytes(node.key.tolist())
            for layer, expected in zip(self.decoder.layers, kept_of(prefix_of[node]), strict=True):
                assert (layer[node.slots] == expected[len(above) :]).all()

    def check_idle(self) -> None:
        """Nothing is left of any request but what is cached, and that is right."""
        self.check_slots()
        self.check_idle_books()

    def check_idle_books(self) -> None:
        """Nothing runs, waits, is locked or private; nothing is lost."""
        self.engine.check()
        stats = self.engine.stats()
        assert stats.running == stats.waiting == 0
        assert stats.protected_tokens == stats.private_tokens == 0
        assert stats.free_tokens + stats.evictable_tokens == stats.pool_tokens

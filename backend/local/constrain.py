"""Constraints at work: which tokens a request may draw next, and which it has to write.

A `Constrainer` is made once per backend, compiles grammars on threads of their own and keeps them;
each constrained request has a `Guide` of its own, which follows its tokens. Built on llguidance;
the tokens and the way a text is tokenised are those of `tokenizer.py`.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from stemma.backend.local.tokenizer import Piece, Tokenizer
from stemma.lang.constraints import Constraint
from stemma.lang.constraints_limits import meaning, parser_limits
from stemma.lang.constraints_matcher import behind, closing, matcher
from stemma.lang.constraints_stack import STACK_BYTES
from stemma.lang.errors import ConstraintError
from stemma.lang.own_thread import start_thread

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILED = 256
"""Compiled grammars that are kept, the ones used last; and as many ways to close one."""
MASK_BUDGET = 2.0
"""Most processor time for all masks of a request, besides `MASK_BUDGET_PER_TOKEN` for each token of
it: meanwhile all other requests wait. Of one mask llguidance limits the work; its time may be that
of a garbage collection."""
MASK_BUDGET_PER_TOKEN = 0.005

CLOSING_STEPS = 32
"""How far is looked for how a text that was cut off could have ended: for milliseconds."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Bits = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int32]
Spell = Callable[[bytes], list[int]]
"""The tokens of some bytes, which may begin or end within a character."""


class _Vocabulary:
    """The model's tokens as llguidance asks for them. The end is none of the model's: which of its
    tokens end a text is for the engine to say."""

    bos_token_id = None

    def __init__(self, text: Tokenizer, size: int) -> None:
        self._text = text
        self.eos_token_id = size
        self.tokens = [text.bytes_of(i) for i in range(size)] + [b"<end>"]
        self.special_token_ids = [i for i in range(size) if text.is_control(i)] + [size]

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens that say just this text: where the model's tokenizer would write another one,
        as a normal form of it, the longest ones.
        """
        data = text if isinstance(text, bytes) else text.encode()
        ids = self._text.encode([Piece(data.decode())], first=False)
        if b"".join(map(self._text.bytes_of, ids)) == data:
            return ids
        return self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            length = min(len(data) - at, self._most_bytes)
            while length > 1 and data[at : at + length] not in self._ids:
                length -= 1
            ids += self._ids.get(data[at : at + length], ())
            at += length
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, tuple[int]]:
        special = set(self.special_token_ids)
        return {data: (i,) for i, data in enumerate(self.tokens) if data and i not in special}

    @cached_property
    def _most_bytes(self) -> int:
        return max(map(len, self._ids))


class _Kept(Generic[K, V]):
    """Values that are made once each, on a thread of their own, however many ask for them
    meanwhile. Those that were used last are kept. For any thread.
    """

    def __init__(self) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()
        self._making: dict[K, Future[V]] = {}
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V]) -> Future[V]:
        """What `make` returns or raises, now or once. What it raised is not kept."""

        def work() -> V:
            try:
                value = make()
                with self._lock:
                    self._values[key] = value
                    if len(self._values) > COMPILED:
                        self._values.popitem(last=False)
                return value
            finally:
                with self._lock:
                    del self._making[key]

        with self._lock:
            if (future := self._making.get(key)) is not None:
                return future
            if key in self._values:
                self._values.move_to_end(key)  # behind those that were used before
                future = Future()
                future.set_result(self._values[key])
                return future
            _, self._making[key] = start_thread(work, "stemma-grammar", stack_bytes=STACK_BYTES)
            return self._making[key]


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where the outputs of a constraint begin. It is kept: what moves is a copy.

    heal: the tokens that may stand in place of the prompt's last one, where the first token redoes
    it; None where it is not redone. closing: where `on_limit` is "close".
    """

    matcher: LLMatcher
    vocab_size: int
    heal: Ids | None
    closing: Closing | None
    jump_forward: bool

    def guide(self, constraint: Constraint) -> Guide:
        """A guide for one request. constraint: as it calls it."""
        return Guide(
            constraint,
            self.matcher.deep_copy(),
            self.vocab_size,
            None if self.closing is None else self.closing.copy(),
            jump_forward=self.jump_forward,
        )


class Constrainer:
    """Makes the beginnings of one model's constrained outputs.

    jump_forward: whether what has to come is told by `Guide.forced`; else it is drawn, from a mask
    that leaves nothing else.
    """

    def __init__(self, text: Tokenizer, vocab_size: int, *, jump_forward: bool) -> None:
        self._text = text
        self._size = vocab_size
        self._jump_forward = jump_forward
        self._beginnings: _Kept[tuple[str, bytes, bool], Beginning] = _Kept()
        self._closings: _Kept[str, Closing] = _Kept()
        self._made: LLTokenizer | None = None
        self._lock = threading.Lock()

    def beginning(
        self, constraint: Constraint, *, literal: bytes = b"", close: bool = False
    ) -> Future[Beginning]:
        """Where outputs of a constraint begin; at once where that is known, else when its grammar
        is compiled.

        literal: whole characters, those of the prompt's last token where that may be redone
        (healing); the first token that a guide takes then begins with them. close: see
        `SamplingParams.on_limit`. Fails with ConstraintError where the grammar is too complex for
        this vocabulary, or no way to its end is found.
        """
        key = (constraint.compiled, literal, close)
        return self._beginnings.get(key, lambda: self._begin(constraint, literal, close))

    def _begin(self, constraint: Constraint, literal: bytes, close: bool) -> Beginning:
        if close:
            beginning = self.beginning(constraint, literal=literal).result()
            return replace(beginning, closing=self._closing(constraint))
        walk = self._compile(constraint, literal)
        heal: Ids | None = None
        if literal:
            mask = Guide(constraint, walk.deep_copy(), self._size).mask()
            heal = allowed_among(mask, self._text.ids_starting_with(literal))
            if not len(heal):
                return self.beginning(constraint).result()
        return Beginning(walk, self._size, heal, None, self._jump_forward)

    def _closing(self, constraint: Constraint) -> Closing:
        spell = self._tokenizer().tokenize_bytes
        return self._closings.get(constraint.compiled, lambda: Closing(constraint, spell)).result()

    def _compile(self, constraint: Constraint, literal: bytes) -> LLMatcher:
        """On a deep stack, which grammars need, see `constraints_stack.py`."""
        from llguidance import LLMatcher

        grammar = behind(literal, constraint.compiled) if literal else constraint.compiled
        made = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=parser_limits())
        if made.is_error():
            raise ConstraintError(f"{constraint.label}: {_too_complex(made)}")
        return made

    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:  # it takes a while, and is needed once
            if self._made is None:
                self._made = LLTokenizer(TokenizerWrapper(_Vocabulary(self._text, self._size)))
            return self._made


@dataclass(slots=True)
class _Time:
    """What the masks of a request have cost, in seconds."""

    spent: float = 0.0


class Guide:
    """Follows the output of one request. Used on the engine's thread, from its submission on."""

    def __init__(
        self,
        constraint: Constraint,
        matcher: LLMatcher,
        vocab_size: int,
        closing: Closing | None = None,
        *,
        jump_forward: bool = False,
    ) -> None:
        self.constraint = constraint
        self.closing = closing
        self._jump_forward = jump_forward
        self._matcher = matcher
        self._size = vocab_size
        self._due: list[int] = []  # tokens that have to come next, as far as they were looked for
        self._time = _Time()
        self._tokens = 0

    def ahead(self) -> Guide:
        """Another one that stands where this one does, to look behind tokens that may come. Whether
        the output can be closed there it does not know."""
        other = Guide(self.constraint, self._matcher.deep_copy(), self._size)
        other._due, other._time, other._tokens = self._due, self._time, self._tokens
        return other

    @property
    def may_end(self) -> bool:
        """Whether the output is complete as it stands."""
        return bool(self._matcher.is_accepting())

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped()) and self.may_end

    def untake(self) -> None:
        """Forget the last token."""
        self._matcher.rollback(1)
        self._due = []
        self._tokens -= 1

    def take(self, token_id: int) -> bool:
        """Follow a token; False, and nothing has happened, where it is not allowed."""
        if self._matcher.try_consume_tokens([token_id]) != 1:
            self._check()
            return False
        self._due = self._due[1:] if self._due[:1] == [token_id] else []
        self._tokens += 1
        return True

    def allowed_length(self, token_ids: Ids) -> int:
        """How many of some tokens may come next, one after the other."""
        return int(self._matcher.validate_tokens(token_ids.tolist()))

    def forced(self) -> list[int]:
        """The tokens that have to come next, as the model's tokenizer would write their text. The
        guide does not take them."""
        return self._look_ahead() if self._jump_forward else []

    def _look_ahead(self) -> list[int]:
        """What has to come. Kept: behind its first token alone it might be written otherwise."""
        if not self._due:
            self._due = list(self._matcher.compute_ff_tokens())
        return self._due

    def mask(self) -> Bits:
        """Which tokens may come next: a bit for each, [ceil(vocab / 8)] or a little longer, the
        lowest first.

        Raises ConstraintError where that takes too long, or more memory than llguidance grants.
        """
        begun = time.thread_time()
        if due := self._look_ahead():
            bits = np.zeros(4 * (self._size // 32 + 1), dtype=np.uint8)  # as long as llguidance's
            bits[due[0] >> 3] = 1 << (due[0] & 7)
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        spent = time.thread_time() - begun
        self._check()
        self._time.spent += spent
        budget = MASK_BUDGET + MASK_BUDGET_PER_TOKEN * self._tokens
        if self._time.spent > budget:
            raise ConstraintError(
                f"{self.constraint.label}: too ambiguous: what may come after "
                f"{self._tokens} tokens took {self._time.spent:.1f} s to find out; prefer `item+` "
                "to `items: items items | item`"
            )
        return bits

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"{self.constraint.label}: {_too_complex(self._matcher)}")


class Closing:
    """Sees to it that an output can be closed within its tokens: always knows a way to its end.

    way: the tokens that complete the output as it stands, not many.
    """

    def __init__(self, constraint: Constraint, spell: Spell) -> None:
        self._spell = spell
        self._walk = matcher(constraint.compiled)
        end = closing(self._walk)
        if end is None:
            raise ConstraintError(
                f"{constraint.label}: on_limit='close' needs to know how a text ends early, and no "
                "short one was found: leave it out"
            )
        self._end = end
        self.way = spell(end)

    def copy(self) -> Closing:
        other = copy.copy(self)
        other._walk = self._walk.deep_copy()
        return other

    def take(self, data: bytes, room: int) -> bool:
        """Follow some output, if a way to the end behind it fits `room` tokens."""
        walk = self._walk.deep_copy()
        if not walk.consume_tokens(list(data)):
            return False
        for end in self._ends(walk, data):
            way = self.way if end == self._end else self._spell(end)
            if len(way) <= room:
                self._walk, self._end, self.way = walk, end, way
                return True
        return False

    def fits(self, data: bytes, room: int) -> bool:
        """Whether `take` would follow."""
        return self.copy().take(data, room)

    def _ends(self, walk: LLMatcher, data: bytes) -> Iterator[bytes]:
        """Ways on from behind some output: those that were known before it, and the one that is
        found when these are too long.
        """
        known = [self._end]
        if self._end.startswith(data):
            known.insert(0, self._end[len(data) :])
        for end in known:
            on = walk.deep_copy()
            if on.consume_tokens(list(end)) and on.is_accepting():
                yield end
        if (found := closing(walk, steps=CLOSING_STEPS)) is not None:
            yield found


def allowed_among(mask: Bits, ids: Sequence[int] | Ids) -> Ids:
    """Those of the ids that a mask allows."""
    some = np.asarray(ids, dtype=np.int32)
    may_come = (mask[some >> 3] >> (some & 7) & 1).astype(np.bool_)
    return np.compress(may_come, some)


def _too_complex(walk: LLMatcher) -> str:
    return f"too complex for the model's vocabulary: {meaning(walk.get_error())}"

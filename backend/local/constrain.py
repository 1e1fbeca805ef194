"""Constraints at work: which tokens a request may draw next, and which it has to write.

A `Constrainer` is made once per backend and keeps compiled grammars; each constrained request has a
`Guide` of its own, which follows its tokens. Built on llguidance; the tokens and the way a text is
tokenised are those of `tokenizer.py`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stemma.backend.local.tokenizer import Piece, Tokenizer
from stemma.lang.constraints import Constraint
from stemma.lang.constraints_matcher import behind, closing, matcher, parser_limits
from stemma.lang.errors import ConstraintError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILED = 256
"""Compiled grammars that are kept, the ones used last."""
MASK_SECONDS = 0.25
"""Most processor time for one mask: meanwhile all other requests wait."""
MASK_BUDGET = 2.0
"""Most processor time for all masks of a request, besides `MASK_BUDGET_PER_TOKEN` for each token of
it."""
MASK_BUDGET_PER_TOKEN = 0.005

CLOSING_SECONDS = 0.05
"""What the engine looks for how a text that was cut off could have ended."""

Mask = npt.NDArray[np.bool_]


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
        plain = text.decode() if isinstance(text, bytes) else text
        return self._text.encode([Piece(plain)], first=False)


class Constrainer:
    """Makes the guides of one model's requests.

    jump_forward: whether what has to come is told by `Guide.forced`; else it is drawn, from a mask
    that leaves nothing else.
    """

    def __init__(self, text: Tokenizer, vocab_size: int, *, jump_forward: bool) -> None:
        self._text = text
        self._size = vocab_size
        self._jump_forward = jump_forward
        self._compiled: OrderedDict[tuple[str, bytes], LLMatcher] = OrderedDict()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._text, self._size)))

    def guide(self, constraint: Constraint, *, literal: bytes = b"", close: bool = False) -> Guide:
        """A guide at the beginning of an output.

        literal: the bytes of the prompt's last token where that may be redone (healing); the first
        token that the guide takes then begins with them. close: see `SamplingParams.on_limit`.
        Raises ConstraintError where the grammar is too complex for this vocabulary.
        """
        key = (constraint.compiled, literal)
        beginning = self._compiled.get(key)
        if beginning is None:
            beginning = self._compile(constraint, literal)
            self._compiled[key] = beginning
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(key)
        return Guide(
            constraint,
            beginning.deep_copy(),
            self._text,
            self._size,
            Closing(self._text, constraint) if close else None,
            jump_forward=self._jump_forward,
        )

    def _compile(self, constraint: Constraint, literal: bytes) -> LLMatcher:
        from llguidance import LLMatcher

        grammar = behind(literal, constraint.compiled) if literal else constraint.compiled
        made = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if made.is_error():
            raise ConstraintError(f"{constraint.label}: {_reason(made)}")
        return made


class Guide:
    """Follows the output of one request. Used on the engine's thread, from its submission on."""

    def __init__(
        self,
        constraint: Constraint,
        matcher: LLMatcher,
        text: Tokenizer,
        vocab_size: int,
        closing: Closing | None = None,
        *,
        jump_forward: bool = False,
    ) -> None:
        self.constraint = constraint
        self.closing = closing
        self._jump_forward = jump_forward
        self._matcher = matcher
        self._text = text
        self._size = vocab_size
        self._seconds = 0.0
        self._tokens = 0

    def copy(self) -> Guide:
        """Another one that stands where this one does, for a token that may come."""
        return Guide(self.constraint, self._matcher.deep_copy(), self._text, self._size)

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
        self._tokens -= 1

    def take(self, token_id: int) -> bool:
        """Follow a token; False, and nothing has happened, where it is not allowed."""
        if self._matcher.try_consume_tokens([token_id]) != 1:
            self._check()
            return False
        self._tokens += 1
        return True

    def allowed_length(self, token_ids: npt.NDArray[np.int32]) -> int:
        """How many of some tokens may come next, one after the other."""
        return int(self._matcher.validate_tokens(token_ids.tolist()))

    def forced(self) -> list[int]:
        """The tokens that have to come next, as the model's tokenizer would write their text. The
        guide does not take them."""
        return list(self._matcher.compute_ff_tokens()) if self._jump_forward else []

    def closing_tokens(self, output: str) -> int | None:
        """How many tokens would complete an output, in a short way that is found at once."""
        try:
            found = self.constraint.closing(output, seconds=CLOSING_SECONDS)
        except ConstraintError:
            return None
        return None if found is None else len(self._text.encode([Piece(found)], first=False))

    def mask(self) -> Mask:
        """Which tokens may come next, of [vocab].

        Raises ConstraintError where that takes too long, or more memory than llguidance grants.
        """
        begun = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        spent = time.thread_time() - begun
        self._check()
        self._seconds += spent
        budget = MASK_BUDGET + MASK_BUDGET_PER_TOKEN * self._tokens
        if spent > MASK_SECONDS or self._seconds > budget:
            raise ConstraintError(
                f"{self.constraint.label}: too ambiguous: what may come after "
                f"{self._tokens} tokens took {self._seconds:.1f} s to find out; prefer `item+` to "
                "`items: items items | item`"
            )
        return np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"{self.constraint.label}: {_reason(self._matcher)}")


class Closing:
    """Sees to it that an output can be closed within its tokens: always knows a way to its end.

    way: the tokens that complete the output as it stands, not many.
    """

    def __init__(self, text: Tokenizer, constraint: Constraint) -> None:
        self._text = text
        self._walk = matcher(constraint.compiled)
        way = self._look()
        if way is None:
            raise ConstraintError(
                f"{constraint.label}: on_limit='close' needs to know how a text ends early, and no "
                "short one was found: leave it out"
            )
        self.way = way

    def take(self, data: bytes, room: int) -> bool:
        """Follow some output, if a way to the end behind it fits `room` tokens."""
        before = self._walk.deep_copy()
        way = self._look() if self._walk.consume_tokens(list(data)) else None
        if way is None or len(way) > room:
            self._walk = before
            return False
        self.way = way
        return True

    def _look(self) -> list[int] | None:
        found = closing(self._walk)
        if found is None:
            return None
        return self._text.encode([Piece(found.decode(errors="ignore"))], first=False)


def allowed_among(mask: Mask, ids: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Those of the ids that a mask allows."""
    some = np.asarray(ids, dtype=np.int32)
    return some[mask[some]]


def _reason(walk: LLMatcher) -> str:
    lines = walk.get_error().strip().splitlines()
    return f"too complex for the model's vocabulary: {lines[0] if lines else 'no reason given'}"

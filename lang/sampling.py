"""How the next token is drawn: one frozen value that travels from `gen` to the engine.

Imports nothing but errors; validated when built, so an impossible value is refused on the line that
writes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stemma.lang.errors import InvalidArgument

DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one generation.

    max_tokens: most output tokens; None means `DEFAULT_MAX_TOKENS`, clipped to the room left in the
    context.
        An explicit value that does not fit is refused with `ContextOverflow`.
    min_tokens: no stop of any kind before this many output tokens.
    temperature: divides the logits; 0 takes the most probable token.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probabilities reach p (nucleus; Holtzman et al.
    2020).
    min_p: drop tokens less probable than min_p times the most probable one.
        Order: penalties and bias on the logits, then temperature, top_k, top_p, min_p.
    frequency_penalty, presence_penalty: subtracted from the logit of an output token, per
    occurrence and once.
    repetition_penalty: divides positive and multiplies negative logits of every token of prompt and
    output
        (CTRL; Keskar et al. 2019).
    logit_bias: token id -> number added to its logit.
    stop: strings that end the output; also across token borders. The match is not part of the text.
    stop_token_ids: token ids that end the output.
    stop_regex: a regular expression whose first match in the output ends it.
    include_stop: keep the matched stop in the text.
    ignore_eos: go on past the model's end-of-text tokens.
    seed: of the draws; None takes one from the run.
    logprobs: report the log-probability of every output token (of the model: before temperature and
    cuts).
    top_logprobs: how many alternatives to report with each.
    n: how many samples. A Branch always draws one; the interpreter and `LocalBackend.generate`
    multiply.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: str | None = None
    include_stop: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        # The loose spellings people write (one string, a list, a dict) become the declared types.
        put = object.__setattr__
        stop: object = self.stop
        bias: object = self.logit_bias
        put(self, "stop", (stop,) if isinstance(stop, str) else tuple(self.stop))
        put(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        pairs = bias.items() if isinstance(bias, Mapping) else self.logit_bias
        put(self, "logit_bias", tuple(sorted((int(i), float(b)) for i, b in pairs)))
        if self.top_logprobs:
            put(self, "logprobs", True)
        if self.top_k == -1:  # the other common spelling of "all"
            put(self, "top_k", 0)
        self._check()

    def _check(self) -> None:
        need = _need
        if self.max_tokens is not None:
            need(self.max_tokens >= 0, "max_tokens", self.max_tokens, "at least 0, or None")
            need(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                "at most max_tokens",
            )
        need(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        need(
            0 <= self.temperature < math.inf,
            "temperature",
            self.temperature,
            "finite and at least 0",
        )
        need(self.top_k >= 0, "top_k", self.top_k, "at least 1, or 0 for all tokens")
        need(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        need(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        need(
            math.isfinite(self.frequency_penalty),
            "frequency_penalty",
            self.frequency_penalty,
            "finite",
        )
        need(
            math.isfinite(self.presence_penalty),
            "presence_penalty",
            self.presence_penalty,
            "finite",
        )
        need(
            0 < self.repetition_penalty < math.inf,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0",
        )
        need(all(isinstance(s, str) for s in self.stop), "stop", self.stop, "a string or strings")
        need("" not in self.stop, "stop", self.stop, "non-empty strings")
        need(self.top_logprobs >= 0, "top_logprobs", self.top_logprobs, "at least 0")
        need(self.n >= 1, "n", self.n, "at least 1")

    def but(self, **changes: Any) -> SamplingParams:
        """The same settings with some replaced."""
        return replace(self, **changes)

    def one_draw(self, seed: int) -> SamplingParams:
        """These settings for one sample with that seed. Quick: the rest was checked already."""
        draw = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:
            object.__setattr__(draw, name, getattr(self, name))
        object.__setattr__(draw, "seed", seed)
        object.__setattr__(draw, "n", 1)
        return draw


def _need(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise InvalidArgument(f"{name}={value!r}: must be {wanted}")


def derive_seed(seed: int, *path: int) -> int:
    """A seed of its own for each place in a program: a hash of `seed` and the path to the place. 63
    bits.
    """
    words = b"".join(int(word).to_bytes(9, "little", signed=True) for word in (seed, *path))
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1

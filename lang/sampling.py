"""How the next token is drawn: one frozen value that travels from `gen` to the engine.

Validated when built, so an impossible value is refused on the line that writes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter, index
from typing import Any, Literal, NoReturn, Protocol, SupportsIndex, get_args

from stemma.lang.constraints import Constraint
from stemma.lang.errors import InvalidArgument
from stemma.lang.expressions import compile_stop_regex

OnLimit = Literal["cut", "close"]
DEFAULT_MAX_TOKENS = 128
MOST_SAMPLES = 10_000


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
    n: how many samples, at most `MOST_SAMPLES`. A Branch always draws one; the interpreter and
    `LocalBackend.generate` multiply.
    constraint: the shape that the output must have; then `max_tokens=None` means the room left in
    the context. on_limit: what `max_tokens` does to an output that is not complete by then: "cut"
    it, or "close" it in time, in a short way that the constraint allows.
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
    constraint: Constraint | None = None
    on_limit: OnLimit = "cut"

    def __post_init__(self) -> None:
        # The loose spellings people write (one string, a list, a dict) become the declared types.
        put = object.__setattr__
        stop: object = self.stop
        bias: object = self.logit_bias
        if type(stop) is not tuple:
            put(self, "stop", (stop,) if isinstance(stop, str) else _tuple("stop", stop))
        if self.stop_token_ids != ():
            ids = _tuple("stop_token_ids", self.stop_token_ids)
            put(self, "stop_token_ids", tuple(_token_id("stop_token_ids", i) for i in ids))
        if bias != ():
            pairs = bias.items() if isinstance(bias, Mapping) else bias
            put(self, "logit_bias", tuple(sorted(map(_bias, _tuple("logit_bias", pairs)))))
        if self.top_logprobs:
            put(self, "logprobs", True)
        if self.top_k == -1:  # the other common spelling of "all"
            put(self, "top_k", 0)
        self._check()

    def _check(self) -> None:
        for name in _INTEGERS:
            value = getattr(self, name)
            if type(value) is not int and not (value is None and name in _OPTIONAL):
                object.__setattr__(self, name, _integer(name, value))
        for name in _NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, float | int) or isinstance(value, bool):
                _refuse(name, value, "a number")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        if self.stop_regex is not None:
            if not isinstance(self.stop_regex, str):
                _refuse("stop_regex", self.stop_regex, "one string; write several as r'one|other'")
            compile_stop_regex(self.stop_regex)
        if self.max_tokens is not None:
            if not self.max_tokens >= 0:
                _refuse("max_tokens", self.max_tokens, "at least 0, or None")
            if not self.min_tokens <= self.max_tokens:
                _refuse("min_tokens", self.min_tokens, "at most max_tokens")
        if not self.min_tokens >= 0:
            _refuse("min_tokens", self.min_tokens, "at least 0")
        if not 0 <= self.temperature < math.inf:
            _refuse("temperature", self.temperature, "finite and at least 0")
        if not self.top_k >= 0:
            _refuse("top_k", self.top_k, "at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            _refuse("min_p", self.min_p, "between 0 and 1")
        if not math.isfinite(self.frequency_penalty):
            _refuse("frequency_penalty", self.frequency_penalty, "finite")
        if not math.isfinite(self.presence_penalty):
            _refuse("presence_penalty", self.presence_penalty, "finite")
        if not 0 < self.repetition_penalty < math.inf:
            _refuse("repetition_penalty", self.repetition_penalty, "above 0")
        for stop in self.stop:
            if not isinstance(stop, str):
                _refuse("stop", self.stop, "a string or strings")
            if not stop:
                _refuse("stop", self.stop, "non-empty strings")
        if not self.top_logprobs >= 0:
            _refuse("top_logprobs", self.top_logprobs, "at least 0")
        if not 1 <= self.n <= MOST_SAMPLES:
            _refuse("n", self.n, f"at least 1 and at most {MOST_SAMPLES:,}")
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            _refuse("constraint", self.constraint, "a Constraint, as st.Constraint.regex('[a-z]+')")
        if self.on_limit not in get_args(OnLimit):
            _refuse("on_limit", self.on_limit, "'cut' or 'close'")
        object.__setattr__(self, "seed", checked_seed(self.seed))

    @classmethod
    def from_model(cls, backend: _KnowsItsSampling) -> SamplingParams:
        """The sampling that a model's authors recommend: its `generation_config`.

        Raises UnsupportedByBackend for a backend without one, and for settings in it that have no
        name here.

        >>> tips.run(sampling=st.SamplingParams.from_model(backend))  # doctest: +SKIP
        """
        return backend.model_sampling()

    def but(self, **changes: Any) -> SamplingParams:
        """The same settings with some replaced."""
        return replace(self, **changes)

    def one_draw(self, seed: int) -> SamplingParams:
        """These settings for one sample with that seed. Quick: the rest was checked already."""
        draw = object.__new__(SamplingParams)
        for put, value in zip(_PUTS, _values(self), strict=True):
            put(draw, value)
        _put_seed(draw, seed)
        _put_n(draw, 1)
        return draw


class _KnowsItsSampling(Protocol):
    """A backend, as far as this floor knows of backends."""

    def model_sampling(self) -> SamplingParams: ...


# A frozen value is copied by its slots: half the time of `object.__setattr__`.
_NAMES = SamplingParams.__slots__
_values = attrgetter(*_NAMES)
_PUTS: list[Callable[[SamplingParams, Any], None]] = [
    getattr(SamplingParams, name).__set__ for name in _NAMES
]
_put_seed, _put_n = _PUTS[_NAMES.index("seed")], _PUTS[_NAMES.index("n")]


@lru_cache(maxsize=1024)
def merged(base: SamplingParams, own: SamplingParams, given: frozenset[str]) -> SamplingParams:
    """`base` with the fields of `own` that are `given`. Remembered: programs repeat themselves."""
    return base.but(**{name: getattr(own, name) for name in given})


_INTEGERS = ("max_tokens", "min_tokens", "top_k", "top_logprobs", "n")
_OPTIONAL = ("max_tokens",)
_SWITCHES = ("include_stop", "ignore_eos", "logprobs")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def _tuple(name: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        _refuse(name, values, "a list")
    return tuple(values)


def _integer(name: str, value: object) -> int:
    """The value as an int; of other types only those that mean one, such as numpy's."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        _refuse(name, value, "an integer")
    return index(value)


def _token_id(name: str, value: object) -> int:
    token_id = _integer(name, value)
    if token_id < 0:
        _refuse(name, value, "a token id, which is at least 0")
    return token_id


def _bias(pair: object) -> tuple[int, float]:
    match pair:
        case (token_id, (float() | int()) as bias) if -math.inf <= bias < math.inf:
            pass
        case _:
            _refuse("logit_bias", pair, "a token id and a number below infinity")
    return _token_id("logit_bias", token_id), float(bias)


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise InvalidArgument(f"{name}={value!r}: must be {wanted}")


def checked_seed(seed: object) -> int | None:
    """The seed of a run, a batch, a fork or a draw, as an int. Raises InvalidArgument."""
    if seed is None:
        return None
    number = _integer("seed", seed)
    if not -(2**63) <= number < 2**63:
        _refuse("seed", seed, "a signed integer of 64 bits (from -2**63 to 2**63 - 1), or None")
    return number


def derive_seed(seed: int, *path: int) -> int:
    """A seed of its own for each place in a program: a hash of `seed` and the path to the place. 63
    bits.
    """
    words = b"".join(word.to_bytes(9, "little", signed=True) for word in (seed, *path))
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1

"""The options of a run, and how they are told apart from the program's own arguments.

Used by `program.py`. Options have reserved names; SGLang's sampling keywords and `messages` yield
to a parameter of that name.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, get_args

from stemma.backend.base import Backend, CacheMode
from stemma.backend.record_file import Recording
from stemma.backend.replay import ReplayBackend
from stemma.interpreter.conversation import conversation_of
from stemma.lang.errors import InvalidArgument, UnsupportedByBackend
from stemma.lang.ops import Chain
from stemma.lang.sampling import SamplingParams, checked_seed

RecordPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What every `run`, `arun`, `stream` and `run_batch` takes besides the program's arguments.

    backend: where to run; None is the default backend.
    sampling: defaults of all generations of the run; what a `gen` says itself goes before.
    seed: of all draws; None takes a random one, which `state.seed` tells. A seed in `sampling`
        counts as this.
    timeout: seconds, after which everything is cancelled and Timeout raised.
    salt: runs with different salts share no cached state.
    stream: return at once and run in the background; read with `text_iter`.
    cache: "read-write"; "read" takes what is cached and leaves nothing there, "off" does neither.
    priority: what the run is worth, the larger the dearer; for backends that look at it.
    adapter: name of the adapter to run with, of those that the backend has; runs with different
        ones share no cached state.
    record: a file to write down what the model is asked and what it answers, with the seed; a
        record that is there is written anew.
    replay: a file that was recorded, to run on instead of a backend, with the seed in it.
    """

    backend: Backend | None = None
    sampling: SamplingParams | None = None
    seed: int | None = None
    timeout: float | None = None
    salt: str = ""
    adapter: str | None = None
    cache: CacheMode = "read-write"
    priority: int = 0
    stream: bool = False
    record: RecordPath | Recording | None = None
    replay: RecordPath | ReplayBackend | None = None

    def __post_init__(self) -> None:
        for name in ("record", "replay"):
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike | Recording | ReplayBackend | None):
                raise InvalidArgument(f"{name}={value!r}: must be the path of a file, or None")
        if self.replay is not None and self.record is not None:
            raise InvalidArgument("record= and replay=: a run is recorded or played back, not both")
        if self.replay is not None and self.backend is not None:
            raise InvalidArgument(
                "replay= and backend=: what plays back a record asks no backend; leave one out"
            )
        if not isinstance(self.backend, Backend | None):
            raise InvalidArgument(f"backend={self.backend!r}: must be a Backend, or None")
        if not isinstance(self.sampling, SamplingParams | None):
            raise InvalidArgument(f"sampling={self.sampling!r}: must be SamplingParams, or None")
        limit = self.timeout
        if limit is not None and not (_is_number(limit) and limit > 0):
            raise InvalidArgument(
                f"timeout={limit!r}: must be above 0 seconds, or None for no limit"
            )
        if not isinstance(self.salt, str):
            raise InvalidArgument(f"salt={self.salt!r}: must be a string")
        if not isinstance(self.adapter, str | None):
            raise InvalidArgument(f"adapter={self.adapter!r}: must be a name, or None")
        if type(self.priority) is not int:
            raise InvalidArgument(f"priority={self.priority!r}: must be an integer")
        if self.cache not in get_args(CacheMode):
            modes = ", ".join(map(repr, get_args(CacheMode)))
            raise InvalidArgument(f"cache={self.cache!r}: must be one of {modes}")
        object.__setattr__(self, "seed", checked_seed(self.seed))


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


RUN_OPTIONS = tuple(field.name for field in fields(RunOptions))

# SGLang's names of sampling parameters that have another here.
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "return_logprob": "logprobs",
    "top_logprobs_num": "top_logprobs",
}
_SAMPLING = {field.name for field in fields(SamplingParams)} - {"seed"}

# SGLang's arguments of `run` that nothing stands for, and what to do instead.
_INSTEAD = {
    "logprob_start_len": "s.score(text) has the log-probabilities of a text, "
    "LocalBackend.generate(prompt_logprobs=True) those of a prompt",
    "return_text_in_logprobs": "backend.decode([token_id]) is a token's text",
    "use_thread": "no thread belongs to a branch, so there is none to leave out: drop the argument",
}


@dataclass(frozen=True, slots=True)
class Call:
    """One call, taken apart: the body's arguments, the run's options, first messages."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: RunOptions
    messages: tuple[Chain, ...] = ()


def refuse_reserved(name: str, parameters: Sequence[str]) -> None:
    """A program's parameter must not have the name of a run option."""
    for parameter in parameters:
        if parameter in RUN_OPTIONS:
            raise InvalidArgument(
                f"program {name}: parameter {parameter!r} has the name of a run option: rename "
                f"it, as to {'my_' + parameter!r}; the options are {', '.join(RUN_OPTIONS)}"
            )


def _take_sampling(sampling: dict[str, Any], key: str, value: Any) -> None:
    """Note a sampling argument by its name here. Raises InvalidArgument for one given twice."""
    name = _RENAMED.get(key, key)
    if value is None:
        return
    if name in sampling:
        other = next(k for k, v in (*_RENAMED.items(), (name, name)) if v == name and k != key)
        raise InvalidArgument(
            f"{key}={value!r} and {other}={sampling[name]!r} are two names of one: give one"
        )
    sampling[name] = value


def _with_near_misses(unknown: Sequence[str], own: Collection[str]) -> str:
    """The arguments, each with the known one that it resembles."""
    known = [*own, *RUN_OPTIONS, *sorted(_SAMPLING), *_RENAMED, "messages"]
    near = [(key, get_close_matches(key, known, n=1)) for key in unknown]
    return ", ".join(
        repr(key) + (f" (did you mean {found[0]!r}?)" if found else "") for key, found in near
    )


def take_apart(
    signature: inspect.Signature, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call:
    """Tell the arguments of a body, whose first parameter is the state, from the options of the
    run.

    Raises TypeError naming every argument that is neither, UnsupportedByBackend for SGLang's that
    have no meaning here.
    """
    parameters = list(signature.parameters.values())[1:]
    named = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    own: dict[str, Any] = {}
    options: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    messages: tuple[Chain, ...] = ()
    unknown: list[str] = []
    for key, value in kwargs.items():
        if key in RUN_OPTIONS:
            options[key] = value
        elif key in named or takes_any:
            own[key] = value
        elif key == "messages":
            messages = conversation_of(value if value is not None else ())
        elif _RENAMED.get(key, key) in _SAMPLING:
            _take_sampling(sampling, key, value)
        elif key in _INSTEAD:
            raise UnsupportedByBackend(f"{name}.run({key}={value!r}): {_INSTEAD[key]}")
        else:
            unknown.append(key)
    if unknown:
        raise TypeError(
            f"{name}.run: unknown argument {_with_near_misses(unknown, named)}; the program takes "
            f"{', '.join(p.name for p in parameters) or 'none'}, the run {', '.join(RUN_OPTIONS)}, "
            "and sampling settings"
        )
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(args) > len(positional) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise TypeError(
            f"{name}.run: {len(args)} positional arguments, and the program takes at most "
            f"{len(positional)}: {', '.join(p.name for p in positional) or 'none'}"
        )
    try:
        signature.bind(None, *args, **own)
    except TypeError as error:
        raise TypeError(f"{name}.run: {error}") from None
    if sampling:
        base = options.get("sampling")
        if not isinstance(base, SamplingParams | None):
            raise InvalidArgument(f"sampling={base!r}: must be SamplingParams, or None")
        base = base or SamplingParams()
        options["sampling"] = base.but(**sampling)
    return Call(args, own, RunOptions(**options), messages)

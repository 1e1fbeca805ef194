"""What is asked of a backend and what it answers, as plain values that JSON can write, and back.

Used by records (`recording.py`, `replay.py`) and by the cache of responses (`caching.py`). What has
its default value is left out.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from stemma.backend.base import ChoiceScore, Completion, ScoredChoices, TokenLogprob, Usage
from stemma.lang import errors
from stemma.lang.sampling import SamplingParams

Plain = dict[str, Any]

# What some errors of the family know besides their sentence.
_KNOWN_TO_ERRORS = ("partial", "needed", "limit", "values")


def _told(value: Any) -> Plain:
    """The fields of a dataclass that say more than their default."""
    return {
        f.name: getattr(value, f.name)
        for f in fields(value)
        if f.default is MISSING or getattr(value, f.name) != f.default
    }


def plain_params(params: SamplingParams) -> Plain:
    """A constraint is what it allows: how the text is read afterwards changes no answer."""
    plain = _told(params)
    if params.constraint is not None:
        plain["constraint"] = params.constraint.compiled
    return plain


def plain_completion(completion: Completion) -> Plain:
    plain = _told(completion)
    if "usage" in plain:
        plain["usage"] = _told(completion.usage)
    for name in ("logprobs", "prompt_logprobs"):
        if name in plain:
            plain[name] = [[p.token_id, p.logprob, p.top] for p in plain[name]]
    return plain


def completion_of(plain: Mapping[str, Any]) -> Completion:
    given = dict(plain)
    given["token_ids"] = tuple(given["token_ids"])
    given["usage"] = Usage(**given.get("usage", {}))
    for name in ("logprobs", "prompt_logprobs"):
        if name in given:
            given[name] = tuple(_logprob(*each) for each in given[name])
    return Completion(**given)


def _logprob(token_id: int, logprob: float, top: Sequence[Sequence[Any]]) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, tuple((i, value) for i, value in top))


def plain_scores(scored: ScoredChoices) -> Plain:
    return {"choices": [_told(choice) for choice in scored.choices], "usage": _told(scored.usage)}


def scores_of(plain: Mapping[str, Any]) -> ScoredChoices:
    choices = []
    for given in plain["choices"]:
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        choices.append(ChoiceScore(**{**given, **lists}))
    return ScoredChoices(tuple(choices), Usage(**plain["usage"]))


def plain_error(error: BaseException) -> Plain:
    known = {name: value for name in _KNOWN_TO_ERRORS if (value := getattr(error, name, None))}
    return {"type": type(error).__name__, "message": str(error), **known}


def error_of(plain: Mapping[str, Any]) -> Exception:
    """An error of the type that was written, where that is one of Stemma's or of Python's."""
    given = dict(plain)
    name, message = given.pop("type"), given.pop("message")
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind, message = errors.StemmaError, f"{name}: {message}"
    taken = {name: given.pop(name) for name in _made_of(kind) & given.keys()}
    try:
        error = kind(message, **taken)
    except TypeError:  # made of more than a sentence
        error = errors.StemmaError(f"{name}: {message}")
    for name, value in given.items():
        setattr(error, name, value)
    return error


def _made_of(kind: type[Exception]) -> set[str]:
    """The names of what an error of Stemma's is made of; of others nothing is known."""
    made = kind.__init__
    return set(inspect.signature(made).parameters) if inspect.isfunction(made) else set()

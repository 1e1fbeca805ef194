"""`gen`, the word that lets the model write, and its short forms.

Written in programs (`s += st.gen("x")`); checks what it is given and builds one operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from stemma.lang.choices import ChoicesMethod, token_length_normalized
from stemma.lang.constraints import Constraint, constraint_of, warn
from stemma.lang.errors import InvalidArgument, UnsupportedByBackend
from stemma.lang.ops import Gen, Select
from stemma.lang.pieces import Piece
from stemma.lang.primitives import check_name, check_timeout, select
from stemma.lang.reasoning import checked_marks
from stemma.lang.sampling import OnLimit, SamplingParams


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Iterable[str] | None = None,
    stop_token_ids: Iterable[int] | None = None,
    stop_regex: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: Any = None,
    choices: Iterable[str] | None = None,
    choices_method: ChoicesMethod | str | None = None,
    regex: str | None = None,
    json_schema: Any = None,
    *,
    grammar: str | Piece | None = None,
    constraint: Constraint | None = None,
    whitespace: str | None = None,
    on_limit: OnLimit | None = None,
    include_stop: bool | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    logprobs: bool | None = None,
    top_logprobs: int | None = None,
    heal: bool = True,
    reasoning: str | None = None,
    reasoning_marks: tuple[str, str] | None = None,
    timeout: float | None = None,
) -> Gen | Select:
    """Let the model write; the text is the variable `name`.

    The sampling parameters are those of `SamplingParams`; None leaves one to the run. `n` draws
    that many samples: `s[name]` is their list and the branch goes on with the first. `heal=False`
    takes the last token of the literal before as it is. `choices` makes it a `select`.
    `return_logprob` and `top_logprobs_num` are SGLang's names of `logprobs` and `top_logprobs`.
    Parameters may be positional in SGLang's order.

    The output can be given a shape, by one of these (see docs/constraints.md); `s[name]` then is a
    value of that kind, and `s.raw(name)` its text:
    regex: all of it matches the regular expression.
    json_schema: JSON that the schema allows, which is an object, a string, or a type such as a
        pydantic model, whose instance is the value. whitespace: between the parts of JSON, as
        "flexible", "spaced" or "compact".
    dtype: int, float, bool, Literal, Enum, date, ... are written bare, list[int] and the like as
        JSON; the value is of that type. `str` is text of any shape.
    grammar: a text of the context-free grammar, in llguidance's dialect of Lark or in GBNF; or of a
        piece, as `st.seq(...)` makes it, whose captures are variables, too (see docs/pieces.md).
    constraint: a `Constraint` that was made before.
    on_limit: what `max_tokens` does to an output that is not complete: "cut" it, and reading the
        value raises Truncated; or "close" it in time, in a short way. Without `max_tokens` there
        is all the room of the context.

    reasoning: a variable for what the model thinks before it answers, everything between its marks;
        `name` then is the rest, and the marks belong to neither. The marks are the model's own, or
        `reasoning_marks`. Where the text before ends inside of them, because the chat template
        opens them, the output begins with reasoning. Stops and `max_tokens` hold for all of the
        output: a reasoning that they cut leaves the answer empty, and `meta` says why.
    timeout: seconds from where it is begun, that is when all before it on its branch is done; then
        it is stopped, and with it its branch, and `s[name]` raises Timeout, whose `partial` is what
        it had written.

    Raises InvalidArgument for a value that cannot be meant, UnsupportedByBackend for what is not
    built yet.

    >>> s += "Capital of France:" + st.gen("capital", max_tokens=8, stop="\\n")  # doctest: +SKIP
    >>> s += st.assistant(st.gen("answer", reasoning="why"))  # doctest: +SKIP
    """
    check_name("gen", name)
    _refuse_both("gen", logprobs=logprobs, return_logprob=return_logprob)
    _refuse_both("gen", top_logprobs=top_logprobs, top_logprobs_num=top_logprobs_num)
    if not isinstance(heal, bool):
        raise InvalidArgument(f"gen(heal={heal!r}): must be True or False")
    settings: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "n": n,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "stop_regex": stop_regex,
        "include_stop": include_stop,
        "ignore_eos": ignore_eos,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "logit_bias": logit_bias,
        "seed": seed,
        "logprobs": logprobs if logprobs is not None else return_logprob,
        "top_logprobs": top_logprobs if top_logprobs is not None else top_logprobs_num,
        "on_limit": on_limit,
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    if reasoning is None and reasoning_marks is not None:
        raise InvalidArgument("gen(reasoning_marks=...) needs reasoning=, a variable's name")
    unbuilt = {
        "logprob_start_len": logprob_start_len,
        "return_text_in_logprobs": return_text_in_logprobs,
    }
    shapes = {
        "regex": regex,
        "json_schema": json_schema,
        "grammar": grammar,
        "dtype": None if dtype in (str, "str") else dtype,
        "constraint": constraint,
        "whitespace": whitespace,
    }
    if choices is not None:
        temperature = settings.pop("temperature", 0.0)
        others = {**unbuilt, **shapes}
        settings |= {key: value for key, value in others.items() if value is not None}
        if not heal:
            settings["heal"] = heal
        if reasoning is not None:
            settings["reasoning"] = reasoning
        if settings:
            said = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            raise InvalidArgument(
                f"gen(choices=...) chooses and draws nothing, so {said} has no meaning: leave it "
                "out, or write a gen without choices"
            )
        method = token_length_normalized if choices_method is None else choices_method
        return select(name, choices, temperature, method, timeout=timeout)
    if choices_method is not None:
        raise InvalidArgument("gen(choices_method=...) needs choices=[...]")
    for key, value in unbuilt.items():
        if value is not None:
            raise UnsupportedByBackend(f"gen({key}=...) is not built yet")
    check_timeout("gen", timeout)
    if (shape := _constraint(shapes)) is not None:
        settings["constraint"] = shape
    elif on_limit is not None:
        raise InvalidArgument(
            f"gen(on_limit={on_limit!r}) needs a shape to close, as json_schema= or dtype="
        )
    params, given = _params(settings)
    if shape is not None:
        check_captures(name, shape)
        _warn_of_idle_stops(params)
    if reasoning is None:
        return Gen(name, params, given, heal, timeout=timeout)
    check_name("gen", reasoning, "reasoning")
    if reasoning == name:
        raise InvalidArgument(f"gen({name!r}, reasoning={reasoning!r}): needs another name")
    marks = None if reasoning_marks is None else checked_marks(reasoning_marks)
    return Gen(name, params, given, heal, reasoning, marks, timeout)


def _constraint(shapes: dict[str, Any]) -> Constraint | None:
    """The one that a `gen` is given, in whatever way."""
    try:
        return constraint_of(**shapes)
    except InvalidArgument as error:
        raise InvalidArgument(f"gen: {error}") from error.__cause__


def check_captures(name: str | None, shape: Constraint) -> None:
    """Raise InvalidArgument where a capture has the name that the whole text is to have."""
    if name in shape.captures:
        raise InvalidArgument(
            f"gen({name!r}) with a capture({name!r}): one of them is the whole text and one a part "
            "of it: give each a name of its own"
        )


@lru_cache(maxsize=256)
def _idle_stops(shape: Constraint, stops: tuple[str, ...]) -> list[str]:
    return [stop for stop in stops if shape.never_contains(stop)]


def _warn_of_idle_stops(params: SamplingParams) -> None:
    if params.constraint is None or not params.stop:
        return
    for stop in _idle_stops(params.constraint, params.stop):
        warn(
            f"gen(stop={stop!r}) with {params.constraint.label}: no text of that shape contains "
            "the stop, so it never comes; the shape alone says where the text ends: leave it out"
        )


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Iterable[str] | None = None,
    **settings: Any,
) -> Gen | Select:
    """`gen(..., dtype=int)`: the variable is an int."""
    return gen(name, max_tokens, n=n, stop=stop, dtype=int, **settings)


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Iterable[str] | None = None,
    **settings: Any,
) -> Gen | Select:
    """`gen(..., dtype=str)`: the variable is a str."""
    return gen(name, max_tokens, n=n, stop=stop, dtype=str, **settings)


def _params(settings: dict[str, Any]) -> tuple[SamplingParams, frozenset[str]]:
    """The parameters, and which of them were given. A program's loops write the same ones again and
    again: they are remembered, unless something among them may change.
    """
    for name in settings.keys() & {"stop", "stop_token_ids"}:
        value = settings[name]
        if isinstance(value, Iterable) and not isinstance(value, str | bytes):
            settings[name] = tuple(value)
    if "logit_bias" in settings:
        return _new_params(**settings)
    try:
        return _remembered_params(**settings)
    except TypeError:  # an unhashable value, which is no proper one either
        return _new_params(**settings)


def _new_params(**settings: Any) -> tuple[SamplingParams, frozenset[str]]:
    params = SamplingParams(**settings)
    return params, frozenset(settings) | ({"logprobs"} if params.top_logprobs else frozenset())


_remembered_params = lru_cache(maxsize=1024, typed=True)(_new_params)


def _refuse_both(what: str, **settings: object) -> None:
    """Two names of one parameter."""
    if all(value is not None for value in settings.values()):
        both = " and ".join(f"{key}={value!r}" for key, value in settings.items())
        raise InvalidArgument(f"{what}({both}): two names of one parameter, give one")

"""The words of the language: `gen`, `select`, `user`, ... Each builds operations and checks what it
is given.

Written in programs (`s += st.gen("x")`); nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn, cast

from stemma.lang.choices import ChoicesMethod, token_length_normalized
from stemma.lang.errors import InvalidArgument, UnsupportedByBackend
from stemma.lang.ops import (
    Chain,
    Expr,
    Gen,
    Operation,
    Role,
    RoleBegin,
    RoleEnd,
    Score,
    Select,
    Text,
    check_text,
    operations,
)
from stemma.lang.reasoning import checked_marks, marks_of_family
from stemma.lang.sampling import SamplingParams


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
    dtype: type | str | None = None,
    choices: Iterable[str] | None = None,
    choices_method: ChoicesMethod | str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    *,
    grammar: str | None = None,
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
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    if reasoning is None and reasoning_marks is not None:
        raise InvalidArgument("gen(reasoning_marks=...) needs reasoning=, a variable's name")
    unbuilt = {
        "regex": regex,
        "json_schema": json_schema,
        "grammar": grammar,
        "dtype": None if dtype in (str, "str") else dtype,
        "logprob_start_len": logprob_start_len,
        "return_text_in_logprobs": return_text_in_logprobs,
    }
    if choices is not None:
        temperature = settings.pop("temperature", 0.0)
        settings |= {key: value for key, value in unbuilt.items() if value is not None}
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
    params, given = _params(settings)
    if reasoning is None:
        return Gen(name, params, given, heal, timeout=timeout)
    check_name("gen", reasoning, "reasoning")
    if reasoning == name:
        raise InvalidArgument(f"gen({name!r}, reasoning={reasoning!r}): needs another name")
    marks = None if reasoning_marks is None else checked_marks(reasoning_marks)
    return Gen(name, params, given, heal, reasoning, marks, timeout)


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Iterable[str] | None = None,
    **settings: Any,
) -> Gen | Select:
    """`gen(..., dtype=int)`: the variable is an int. Not built yet."""
    raise UnsupportedByBackend(
        f"gen_int({name!r}), that is gen(dtype=int), is not built yet: let st.gen write the digits "
        "up to a stop, and read them by int(s[name])"
    )


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Iterable[str] | None = None,
    **settings: Any,
) -> Gen | Select:
    """`gen(..., dtype=str)`: the variable is a str."""
    return gen(name, max_tokens, n=n, stop=stop, dtype=str, **settings)


def separate_reasoning(expr: str | Expr, model_type: str | None = None) -> Chain:
    """SGLang's way to write `reasoning=`: of every named `gen` in `expr` the reasoning becomes the
    variable `<name>_reasoning_content`.

    model_type: one of SGLang's names of model families, which says the marks; None takes the
    model's own. Unlike there, the branch keeps the reasoning in its text.

    >>> s += st.separate_reasoning(st.gen("answer"), "qwen3")  # doctest: +SKIP
    """
    marks = None if model_type is None else marks_of_family(model_type)
    return Chain(
        tuple(
            replace(part, reasoning=f"{part.name}_reasoning_content", marks=marks)
            if isinstance(part, Gen) and part.name and part.reasoning is None
            else part
            for part in operations(expr)
        )
    )


def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | str = token_length_normalized,
    *,
    timeout: float | None = None,
) -> Select:
    """Let the model choose one of `choices`; the variable `name` is the chosen text.

    All choices are scored in one pass; `choices_method` says how the scores decide (see
    `ChoicesMethod`). `state.meta(name)` has the log-probabilities, the scores and the probability
    of each choice. `timeout`: as for `gen`.

    >>> s += "Is water wet? " + st.select("answer", ["yes", "no"])  # doctest: +SKIP
    """
    if isinstance(name, list | tuple):
        raise InvalidArgument(
            f"select({name!r}): the variable's name comes first, then the choices; without a name "
            "write select(choices=[...])"
        )
    check_name("select", name)
    if not isinstance(choices, Iterable) or isinstance(choices, str):
        raise InvalidArgument(f"select(choices={choices!r}): must be a list of strings")
    if isinstance(choices, set | frozenset):
        raise InvalidArgument(
            f"select(choices={choices!r}): a set has no order, so a tie could fall either way: "
            "make a list of it, as by sorted(...)"
        )
    texts = tuple(choices)
    if not texts:
        raise InvalidArgument("select(choices=[]): there is nothing to choose from")
    seen: set[str] = set()
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidArgument(f"select: choice {text!r} must be a non-empty string")
        if text in seen:
            raise InvalidArgument(f"select: choice {text!r} is there twice")
        check_text("select: choice", text)
        seen.add(text)
    if temperature != 0:
        raise InvalidArgument(
            f"select(temperature={temperature!r}): a choice is decided, not drawn; must be 0"
        )
    check_timeout("select", timeout)
    return Select(name, texts, ChoicesMethod(choices_method), timeout)


def score(text: str, name: str | None = None, *, timeout: float | None = None) -> Score:
    """Log-probabilities of `text` as a continuation; the branch stays as it is.

    The variable is a `ChoiceScore`, with `token_ids` and `logprobs`. `s.score(text)` waits for it
    and returns it. `timeout`: as for `gen`.

    >>> s += "The sky is" + st.score(" blue", "blue")  # doctest: +SKIP
    """
    check_name("score", name)
    if not isinstance(text, str) or not text:
        raise InvalidArgument(f"score({text!r}): must be a non-empty string")
    check_text("score", text)
    check_timeout("score", timeout)
    return Score(text, name, timeout)


def control(text: str) -> Text:
    """Text in which control tokens are meant: `st.control("<|im_end|>")` is the token.

    In any other text the same characters stay characters.
    """
    if not isinstance(text, str) or not text:
        raise InvalidArgument(
            f"control({text!r}): must be a non-empty string that spells control tokens"
        )
    return Text(text, control=True)


def system(content: str | Expr = "") -> Chain:
    """A system message, with text or operations as its content."""
    return _message("system", content)


def user(content: str | Expr = "") -> Chain:
    """A user message, with text or operations as its content."""
    return _message("user", content)


def assistant(content: str | Expr = "") -> Chain:
    """An assistant message: usually `st.assistant(st.gen("answer"))`."""
    return _message("assistant", content)


def system_begin() -> RoleBegin:
    """Open a system message; what follows is its content, until `system_end()`."""
    return RoleBegin("system")


def system_end() -> RoleEnd:
    """Close the system message."""
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    """Open a user message; what follows is its content, until `user_end()`."""
    return RoleBegin("user")


def user_end() -> RoleEnd:
    """Close the user message."""
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    """Open an assistant message; what follows is its content, until `assistant_end()`."""
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    """Close the assistant message."""
    return RoleEnd("assistant")


def image(*args: Any, **settings: Any) -> NoReturn:
    """Not there: the local engine reads text only."""
    raise UnsupportedByBackend("st.image: no backend of Stemma reads images")


def video(*args: Any, **settings: Any) -> NoReturn:
    """Not there: the local engine reads text only."""
    raise UnsupportedByBackend("st.video: no backend of Stemma reads videos")


def _message(role: Role, content: str | Expr) -> Chain:
    inner: tuple[Operation, ...] = operations(content)
    return Chain((RoleBegin(role), *inner, RoleEnd(role)))


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


def check_name(what: str, name: object, parameter: str = "name") -> None:
    """Raise InvalidArgument for what is neither a variable's name nor None."""
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidArgument(
            f"{what}({parameter}={name!r}): a variable's name is a non-empty string, or None"
        )


def check_timeout(what: str, seconds: object) -> None:
    """Raise InvalidArgument for what is neither a number of seconds above 0 nor None."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (number and cast(float, seconds) > 0):
        raise InvalidArgument(
            f"{what}(timeout={seconds!r}): must be above 0 seconds, or None for no limit"
        )


def _refuse_both(what: str, **settings: object) -> None:
    """Two names of one parameter."""
    if all(value is not None for value in settings.values()):
        both = " and ".join(f"{key}={value!r}" for key, value in settings.items())
        raise InvalidArgument(f"{what}({both}): two names of one parameter, give one")

"""The words of the language: `gen`, `select`, `user`, ... Each builds operations and checks what it
is given.

Written in programs (`s += st.gen("x")`); nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
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
from stemma.lang.reasoning import marks_of_family


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

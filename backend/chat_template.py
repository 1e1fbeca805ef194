"""A model's chat template: Jinja source in, rendered conversations and what stands around their
contents out.

Owns the Jinja environment, which offers a template what `transformers` offers it. Called by
`chat.py` only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = tuple[str, str]  # role, content


class Refused(Exception):
    """The template raises on a conversation, or does not give each content once and in order. The
    text says which."""


class ChatTemplate:
    """A compiled template. Raises Refused if it is not well-formed Jinja."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise Refused(
                f"it is not well formed (line {error.lineno}: {error.message})"
            ) from error
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: text for name, text in tokens.items() if text is not None}
        self.eos_token = eos_token
        self.frame = lru_cache(maxsize=1024)(self._frame)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The conversation as text. Raises Refused."""
        given = [{"role": role, "content": content} for role, content in messages]
        return self.render_fully(given, add_generation_prompt=add_generation_prompt)

    def render_fully(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """A conversation whose messages have more than a role and a content, tool calls perhaps, of
        a model that has been told of `tools`. Raises Refused."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise Refused(
                f"the template refuses {_listed([m['role'] for m in messages])}: {error}"
            ) from error

    def _frame(
        self, roles: tuple[str, ...], add_generation_prompt: bool = False
    ) -> tuple[str, ...]:
        """What stands before, between and behind the contents of a conversation: one text more than
        roles.

        Raises Refused.
        """
        contents = [f"qzTurn{n:06}zq" for n in range(len(roles))]
        messages = list(zip(roles, contents, strict=True))
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        around, done = [], 0
        for content in contents:
            at = text.find(content)
            if at < done or text.find(content, at + 1) >= 0:
                raise Refused(f"the template does not give {_listed(roles)} once each and in order")
            around.append(text[done:at])
            done = at + len(content)
        return (*around, text[done:])


def _listed(roles: Sequence[str]) -> str:
    shown = [*roles[:2], "...", *roles[-3:]] if len(roles) > 6 else roles
    return "the turns " + ", ".join(shown) if roles else "a conversation without turns"


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment

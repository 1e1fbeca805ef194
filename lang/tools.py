"""Tools: Python functions that a model may call, and the shape of a call to them.

A `Tool` is a function and what a model must know of it; `tools_constraint` is the shape of a call
to any of several, a `ToolCall` what such a call says and has come to. Nothing here runs a tool or
appends anything: that is `interpreter/calling.py`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, NotRequired, get_type_hints
from weakref import WeakKeyDictionary

from stemma.lang.constraints import Constraint, warn
from stemma.lang.constraints_matcher import refusal
from stemma.lang.constraints_schema import compiled_schema, options, prepared_schema
from stemma.lang.constraints_types import Reader, described, name_of
from stemma.lang.errors import InvalidArgument
from stemma.lang.tools_docstrings import told_by

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    name: of the function. description: its docstring, without what that says of parameters.
    parameters: the JSON Schema of its arguments, an object. constraint: that as a `Constraint`, of
    JSON as `json.dumps` writes it, whose value is a dict of typed arguments. function: what is run.

    >>> Tool.of(price).constraint.parse('{"thing": "lamp"}')  # doctest: +SKIP
    {'thing': 'lamp'}
    """

    name: str
    description: str
    parameters: Schema
    constraint: Constraint
    function: Callable[..., Any]

    @staticmethod
    def of(function: Callable[..., Any] | Tool) -> Tool:
        """The tool of a function (or method), whose parameters all have annotations.

        Types are those that pydantic knows; a parameter with a default may be left out. A docstring
        in Google's, NumPy's or Sphinx's style may describe parameters. Raises InvalidArgument for
        what cannot be called by such arguments, with the remedy; warns (ConstraintWarning), the
        first time, of what seems not meant in a type's schema.
        """
        if isinstance(function, Tool):
            return function
        _check_function(function)
        kept, key = _of_functions, function
        if inspect.ismethod(function):
            kept, key = _of_methods, function.__func__
        if (shape := kept.get(key)) is None:
            shape = kept[key] = _shape(function)
            for message in shape.constraint.warnings:
                warn(f"tool {shape.name}: {message}")
        return Tool(shape.name, shape.description, shape.parameters, shape.constraint, function)

    @property
    def is_async(self) -> bool:
        """Whether what it returns has to be awaited."""
        return inspect.iscoroutinefunction(self.function)

    def schema(self) -> Schema:
        """The tool as chat templates and APIs are told of it."""
        told = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": told}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model has written, and what it has come to.

    name: of the tool. arguments: by parameter, typed; one that the model has left out is not there.
    text: as it was written. result: what the function has returned. error: what it has failed by,
    as "ValueError: no such thing", also where its types do not take the arguments, which then are
    as in the JSON. observation: the result or the error as the text that was appended; None where
    nothing was.
    """

    name: str
    arguments: dict[str, Any]
    text: str
    result: Any = None
    error: str | None = None
    observation: str | None = None


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a call is written: before the name, between that and the JSON of the arguments, after.

    before: at the beginning of a message; behind: where text stands before it in the same message.
    whitespace: of the JSON, as for `Constraint.json_schema`.
    """

    before: str = ""
    behind: str = ""
    between: str = "("
    after: str = ")"
    whitespace: str = "spaced"


PLAIN = CallForm()
"""`price({"thing": "lamp"})`, for models whose chat template has no calls, and in plain text."""


def tools_of(tools: object) -> dict[str, Tool]:
    """Tools by name. Raises InvalidArgument for none, for two of one name, and as `Tool.of`."""
    if not isinstance(tools, Iterable) or isinstance(tools, str | bytes | Mapping):
        raise InvalidArgument(
            f"tools={tools!r:.100}: must be a list of functions, as tools=[price, calculate]"
        )
    found: dict[str, Tool] = {}
    for each in tools:
        tool = Tool.of(each)
        if tool.name in found:
            raise InvalidArgument(f"tools: two are named {tool.name!r}; give one another name")
        found[tool.name] = tool
    if not found:
        raise InvalidArgument("tools=[]: there must be at least one")
    return found


def tools_constraint(tools: Iterable[Any], form: CallForm = PLAIN) -> Constraint:
    """The shape of a call to any of the tools; the value is a `ToolCall` that was not run.

    The text begins with the tool's name: what stands `before` in the form does not belong to it.

    >>> tools_constraint([price]).matches('price({"thing": "lamp"})')  # doctest: +SKIP
    True
    """
    known = tools_of(tools).values()
    compiled = _compiled(tuple((t.name, json.dumps(t.parameters)) for t in known), form)
    read = CallReader(tuple((t.name, t.constraint.read) for t in known), form)
    return Constraint(f"tools=[{', '.join(t.name for t in known)}]"[:80], compiled, read)


@lru_cache(maxsize=256)
def _compiled(tools: tuple[tuple[str, str], ...], form: CallForm) -> str:
    from llguidance import LLMatcher

    rules = [f"start: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, (name, parameters) in enumerate(tools):
        prepared, _ = prepared_schema(json.loads(parameters), f"tool {name}")
        assert isinstance(prepared, dict)
        prepared["x-guidance"] = options(form.whitespace, prepared)
        begin, end = _quoted(name + form.between), _quoted(form.after) if form.after else ""
        rules.append(f"call_{i}: {begin} %json {json.dumps(prepared, ensure_ascii=False)} {end}")
    compiled = LLMatcher.grammar_from_lark("\n".join(rules))
    if message := refusal(compiled):
        raise InvalidArgument(f"tools: {message.strip()}")
    return compiled


def _quoted(text: str) -> str:
    """A text as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class CallReader:
    """Reads a call. It holds no function: what is remembered with it keeps none alive."""

    readers: tuple[tuple[str, Reader], ...]
    form: CallForm

    def __call__(self, text: str) -> ToolCall:
        name, read, arguments = self._parts(text)
        try:
            return ToolCall(name, read(arguments), text)
        except Exception as error:  # of a validator, which is the program's
            return ToolCall(name, json.loads(arguments), text, error=told_error(error))

    def arguments(self, text: str) -> Any:
        """The typed arguments of a call alone. Raises what their types raise."""
        _, read, arguments = self._parts(text)
        return read(arguments)

    def _parts(self, text: str) -> tuple[str, Reader, str]:
        between, after = self.form.between, self.form.after
        name, read = max(
            (each for each in self.readers if text.startswith(each[0] + between)),
            key=lambda each: len(each[0]),
        )
        return name, read, text[len(name + between) : len(text) - len(after)]


def told_result(result: Any) -> str | None:
    """What a model is told that a tool has returned: a text as it is, everything else as JSON, with
    NaN and Infinity as Python writes them. None for None.

    Raises InvalidArgument for what cannot be told, as bytes that are no text, or an object that
    Python writes by its address.
    """
    if result is None:
        return None
    try:
        plain = _plain(result, fallback=_as_python_writes_it)
        told = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
        told.encode()  # no text has half of a surrogate pair
    except Exception as error:  # of the program's own serializers, too
        raise InvalidArgument(
            f"its result, a {type(result).__qualname__}, cannot be told as JSON "
            f"({type(error).__name__}: {error}): return a text, or what JSON has a form for"
        ) from error
    return told


def _as_python_writes_it(value: object) -> str:
    told = str(value)
    if re.search(r" at 0x[0-9A-Fa-f]{4}", told):  # an address, which is another one in every run
        raise TypeError(f"JSON has no form for a value of {type(value).__qualname__}")
    return told


def _plain(value: Any, fallback: Callable[[Any], Any] | None = None) -> Any:
    """A value in JSON's types; NaN and infinities as they are. Raises ValueError for what has no
    such form, without a fallback."""
    from pydantic import ConfigDict, TypeAdapter

    constants = ConfigDict(ser_json_inf_nan="constants")
    return TypeAdapter(Any, config=constants).serializer.to_python(
        value, mode="json", by_alias=True, fallback=fallback
    )


def told_error(error: BaseException) -> str:
    """What a model is told that a tool has failed by."""
    from pydantic import ValidationError

    said = str(error)
    if isinstance(error, ValidationError):
        said = "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}".removeprefix(": ")
            for one in error.errors(include_url=False)
        )
    told = f"{type(error).__name__}: {said}".removesuffix(": ")
    return told.encode(errors="replace").decode()  # no text has half of a surrogate pair


# From a function to what a model must know of it


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """All of a tool but its function, so that it can be remembered without keeping that alive."""

    name: str
    description: str
    parameters: Schema
    constraint: Constraint


_of_functions: WeakKeyDictionary[Any, _Shape] = WeakKeyDictionary()
_of_methods: WeakKeyDictionary[Any, _Shape] = WeakKeyDictionary()


def _check_function(function: object) -> None:
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        what = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
        raise InvalidArgument(
            f"tools: {what:.100} is no function: write a `def` with annotations that calls it"
        )
    if function.__name__ == "<lambda>":
        raise InvalidArgument("tools: a lambda has no name and no annotations: write it as a `def`")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidArgument(
            f"tool {function.__name__}: a function with `yield` returns no result: return a list"
        )


def _shape(function: Any) -> _Shape:
    from pydantic import Field
    from typing_extensions import TypedDict

    name = function.__name__
    signature = inspect.signature(function)
    hints = _hints(function)
    description, said = told_by(function.__doc__, signature.parameters)
    types: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        _check_parameter(name, parameter)
        types[parameter.name] = kind = hints[parameter.name]
        if parameter.name in said:
            kind = Annotated[kind, Field(description=said[parameter.name])]
        optional = parameter.default is not parameter.empty
        fields[parameter.name] = NotRequired[kind] if optional else kind
    try:
        schema, read = described(TypedDict(name, fields), name)  # type: ignore[operator]
        compiled, warnings = compiled_schema(schema, "spaced", name)
    except InvalidArgument as error:
        raise _refused(name, types, error) from error
    _check_defaults(name, types, signature)
    _tidy(schema, signature)
    constraint = Constraint(f"arguments of {name}", compiled, read, None, tuple(warnings))
    return _Shape(name, description, schema, constraint)


def _hints(function: Any) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise InvalidArgument(
            f"tool {function.__name__}: {error}: its annotations are read where its module is, so "
            "what they name must be defined or imported there"
        ) from error


def _check_parameter(tool: str, parameter: inspect.Parameter) -> None:
    name = parameter.name
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise InvalidArgument(
            f"tool {tool}: {parameter.name!r} takes any number of arguments, which no schema can "
            "list: take one list or dict instead"
        )
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise InvalidArgument(
            f"tool {tool}: {name!r} is positional only, and arguments come by name: leave out the "
            "`/` behind it"
        )
    if parameter.annotation is parameter.empty and name in ("self", "cls"):
        raise InvalidArgument(
            f"tool {tool}: it is a method without its instance: take that of one, as shop.{tool}"
        )
    if parameter.annotation is parameter.empty:
        raise InvalidArgument(
            f"tool {tool}: {name!r} has no annotation, so nothing says what it may be: write "
            f"`{name}: str`, or whatever it is"
        )


def _refused(tool: str, types: dict[str, Any], error: InvalidArgument) -> InvalidArgument:
    """The error of a parameter that has no schema, by its name."""
    for parameter, kind in types.items():
        try:
            compiled_schema(described(kind, parameter)[0], "spaced", parameter)
        except InvalidArgument as found:
            return InvalidArgument(f"tool {tool}: {found}")
    return InvalidArgument(f"tool {tool}: {error}")


def _check_defaults(tool: str, types: dict[str, Any], signature: inspect.Signature) -> None:
    """Raise InvalidArgument for a default that is not of its parameter's type."""
    from pydantic import TypeAdapter, ValidationError

    for name, kind in types.items():
        default = signature.parameters[name].default
        if default is inspect.Parameter.empty:
            continue
        try:
            read = TypeAdapter(kind).validate_python(default)
        except ValidationError:
            fits = False
        else:  # what pydantic would first make another type of is of the wrong one, too
            fits = type(read) is type(default) or read == default
        if not fits:
            called = name_of(kind)
            remedy = f"{name}: {called} | None = None" if default is None else "another one"
            raise InvalidArgument(
                f"tool {tool}: the default of {name!r}, {default!r:.60}, is no {called}: "
                f"write {remedy}"
            )


def _tidy(schema: Schema, signature: inspect.Signature) -> None:
    """Leave out the titles that pydantic makes of names, and tell the defaults."""
    schema.pop("title", None)
    for name, one in schema["properties"].items():
        one.pop("title", None)
        default = signature.parameters[name].default
        if default is not inspect.Parameter.empty:
            with suppress(ValueError):  # one that JSON cannot tell
                plain = _plain(default)
                json.dumps(plain, allow_nan=False)
                one["default"] = plain

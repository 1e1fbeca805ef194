"""The command line of one program: its parameters as options, next to those of the run.

Made from the program's signature and docstring by `stemma run` and `stemma tree`. A parameter goes
before an option of the run that has its name; that option can still be given before the file.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape

from stemma.commands.command import Command
from stemma.commands.settings import Settings
from stemma.interpreter.program import Program

S = TypeVar("S", bound=Settings)

# The options are the parameters of one function: prefixes keep the program's from the run's.
_OWN, _RUN = "own_", "run_"


def program_command(
    program: Program, settings: S, act: Callable[[dict[str, Any], S], None]
) -> typer.Typer:
    """The command line of `program`.

    settings: what was given before the file. act: called with the arguments that were given, and
    the settings. Raises BadParameter if the program needs an argument that no option can give.
    """
    about, texts = read_docstring(program)
    own = list(_own_options(program, texts))
    names = {option.name.removeprefix(_OWN) for option in own}
    tuples = {
        p.name for p, annotation in typed_parameters(program) if is_tuple(annotation, p.default)
    }
    options = [*own, *_run_options(settings, hidden=names)]

    def command(context: typer.Context, **values: Any) -> None:
        arguments: dict[str, Any] = {}
        changes: dict[str, Any] = {}
        for option, value in values.items():
            source = context.get_parameter_source(option)
            if source is not None and source.name == "COMMANDLINE":
                into = arguments if option.startswith(_OWN) else changes
                into[option.removeprefix(_OWN).removeprefix(_RUN)] = value
        for name in tuples & arguments.keys():
            arguments[name] = tuple(arguments[name])
        act(arguments, replace(settings, **changes))

    # typer reads the options from the signature.
    context = inspect.Parameter("context", _KEYWORD, annotation=typer.Context)
    command.__annotations__ = {p.name: p.annotation for p in (context, *options)}
    vars(command)["__signature__"] = inspect.Signature([context, *options])
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=Command, help=escape(about))(command)
    return app


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _run_options(settings: Settings, *, hidden: set[str]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(type(settings), include_extras=True)
    for field in fields(settings):
        if field.name not in hidden:
            kind, option = get_args(hints[field.name])
            option = copy(option)
            option.rich_help_panel = "Options of the run"
            yield inspect.Parameter(
                _RUN + field.name,
                _KEYWORD,
                annotation=Annotated[kind, option],
                default=getattr(settings, field.name),
            )


def _own_options(program: Program, texts: Mapping[str, str]) -> Iterator[inspect.Parameter]:
    taken = {"--help"}
    for parameter, annotation in typed_parameters(program):
        name, default = parameter.name, parameter.default
        kind = option_type(annotation, default)
        spellings = _spellings(name, flag=kind is bool)
        if obstacle := _obstacle(parameter, annotation, kind, taken & set(spellings)):
            if default is parameter.empty:
                raise typer.BadParameter(
                    f"program {program.name} needs {name!r}, {obstacle}: "
                    "give the parameter a default, or run the program from Python"
                )
            continue
        taken.update(spellings)
        option = typer.Option("/".join(spellings), help=escape(texts.get(name, "")))
        yield inspect.Parameter(
            _OWN + name,
            _KEYWORD,
            annotation=Annotated[kind, option],
            default=default if default is parameter.empty or _is_plain(default) else None,
        )


def _spellings(name: str, *, flag: bool) -> list[str]:
    dashed = name.strip("_").replace("_", "-") or name
    return [f"--{dashed}", f"--no-{dashed}"] if flag else [f"--{dashed}"]


def _obstacle(
    parameter: inspect.Parameter, annotation: Any, kind: Any, taken: set[str]
) -> str | None:
    """Why no option can give the parameter, in words. taken: its spellings that mean another."""
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return "which has no name for callers"
    if kind is None:
        told = annotation.__name__ if isinstance(annotation, type) else annotation
        return f"a {told}, which no option can give"
    if taken:
        return f"and {min(taken)} means something else"
    return None


def typed_parameters(program: Program) -> Iterator[tuple[inspect.Parameter, Any]]:
    """The parameters after the state that have names, what `bind` has fixed as their defaults."""
    try:
        hints = get_type_hints(program.body)
    except Exception:  # names that only a type checker imports, or none of typing's business
        hints = {}
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in list(inspect.signature(program.body).parameters.values())[1:]:
        if parameter.kind not in kinds:
            if parameter.name in program.bound:
                parameter = parameter.replace(default=program.bound[parameter.name])
            annotation = hints.get(parameter.name, parameter.annotation)
            yield parameter, annotation


def option_type(annotation: Any, default: Any = inspect.Parameter.empty) -> Any:
    """The type as typer takes it; None for one that no option can give.

    Without an annotation, or one that cannot be read, the default tells, and what a list has in it
    where its annotation does not.
    """
    if annotation in (inspect.Parameter.empty, Any) or isinstance(annotation, str):
        known = default is not inspect.Parameter.empty and default is not None
        return option_type(type(default), default) if known else str
    if annotation in _LISTS and isinstance(default, list | tuple):
        inner = {type(each) for each in default} or {str}
        return option_type(_list_of(inner.pop())) if len(inner) == 1 else None
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        others = [each for each in arguments if each is not NoneType]
        return option_type(others[0]) if len(others) == 1 else None
    if annotation in _LISTS or origin in _LISTS:
        inner = {each for each in arguments if each is not Ellipsis} or {str}
        kind = option_type(inner.pop()) if len(inner) == 1 else None
        return None if kind is None or get_origin(kind) is list else _list_of(kind)
    if origin is Literal:
        return annotation if all(isinstance(each, str) for each in arguments) else None
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return annotation
    return annotation if annotation in _PLAIN else None


_PLAIN = (str, int, float, bool, Path)
_LISTS = (list, tuple, Sequence)


def _list_of(kind: Any) -> Any:
    return list[kind]


def is_tuple(annotation: Any, default: Any) -> bool:
    """Whether the program expects a tuple where typer makes a list."""
    kinds = (annotation, *get_args(annotation))
    return isinstance(default, tuple) or any(tuple in (kind, get_origin(kind)) for kind in kinds)


def _is_plain(default: Any) -> bool:
    """Whether typer can show the default; if not given the program has its own anyway."""
    if isinstance(default, list | tuple):
        return all(map(_is_plain, default))
    return isinstance(default, (*_PLAIN, Enum))


# Docstrings

_PARAMETER = re.compile(r"^\s*(?::param\s+)?\*{0,2}(\w+)(?:\s*\([^)]*\))?\s*:\s+(\S.*)$")
_SECTION = re.compile(r"^\s*(args|arguments|parameters):\s*$", re.IGNORECASE)


def read_docstring(program: Program) -> tuple[str, dict[str, str]]:
    """What the docstring says of the program, and of each parameter.

    Parameters are described as in `name: text` or `:param name: text`, lines that go on are
    indented deeper. The text on the program ends where that of the parameters begins.
    """
    names = set(inspect.signature(program.body).parameters)
    about: list[str] = []
    texts: dict[str, str] = {}
    current, indent = "", 0
    for line in (inspect.getdoc(program.body) or "").splitlines():
        depth = len(line) - len(line.lstrip())
        found = _PARAMETER.match(line)
        if found is not None and found[1] in names:
            current, indent = found[1], depth
            texts[current] = found[2].strip()
        elif current and line.strip() and depth > indent:
            texts[current] += " " + line.strip()
        else:
            current = ""
            if not texts and not _SECTION.match(line):
                about.append(line)
    return "\n".join(about).strip(), texts

"""The rows of a file as the arguments of a program. Used by `stemma batch`.

Whatever is wrong with them is said with their lines, before a model loads.
"""

from __future__ import annotations

import csv
import inspect
import io
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from stemma.commands.arguments import is_tuple, option_type, typed_parameters
from stemma.commands.table import bad_file, delimiter_of
from stemma.interpreter.options import RUN_OPTIONS
from stemma.interpreter.program import Program

# How many of the things that are wrong with a file are said.
MOST_SAID = 10

_TRUE, _FALSE = ("true", "t", "yes", "y", "on", "1"), ("false", "f", "no", "n", "off", "0")


class Row(NamedTuple):
    """line: where it begins in the file. given: as it stands there. arguments: the program's."""

    line: int
    given: dict[str, Any]
    arguments: dict[str, Any]


def read_rows(
    name: str, program: Program, *, keep: Collection[str], limit: int | None
) -> list[Row]:
    """The rows of a file.

    keep: columns that the program does not take. limit: the first so many. Raises BadParameter
    that names what is wrong, each with its line.
    """
    delimiter = delimiter_of(name, "DATA")
    text = _text_of(name)
    shown = "standard input" if name == "-" else name
    columns = _Columns(program, keep)
    problems: list[str] = []
    rows: list[Row] = []
    lines = _json_lines(text) if delimiter is None else _cells(text, delimiter)
    for line, found in lines:
        if isinstance(found, str):
            problems.append(f"line {line}: {found}")
        elif isinstance(found, list):  # a header, whose columns are those of all rows
            problems += [f"line {line}: {each}" for each in columns.problems(found)]
        elif limit is None or len(rows) < limit:
            wrong = columns.problems(found) if delimiter is None else []
            arguments, wrong_values = columns.arguments(found, from_text=delimiter is not None)
            problems += [f"line {line}: {each}" for each in (*wrong, *wrong_values)]
            rows.append(Row(line, found, arguments))
    if problems:
        more = len(problems) - MOST_SAID
        told = [*problems[:MOST_SAID], *([f"and {more} more"] if more > 0 else [])]
        raise bad_file("DATA", f"{shown}, " + "; ".join(told))
    return rows


# A line of a file, as a row, or why it is none; of a table the names of the columns come first.
Line = tuple[int, dict[str, Any] | list[str] | str]


def _text_of(name: str) -> str:
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise bad_file("DATA", f"{name}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise bad_file("DATA", f"{name}, line {line}: is no UTF-8 text") from None


def _json_lines(text: str) -> Iterator[Line]:
    """Each line that is not blank with its number: an object, or why it is none."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                yield number, f"is no JSON ({error}); a line is one object"
                continue
            yield number, row if isinstance(row, dict) else "is no JSON object"


def _cells(text: str, delimiter: str) -> Iterator[Line]:
    """The header, then each record with its first line: its cells by column."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            if header is None:
                yield 1, "has no header: the first line of a table names its columns"
            return
        except csv.Error as error:
            yield line, f"is no CSV ({error})"
            return
        if not cells:
            continue
        if header is None:
            header = cells
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice:
                yield line, f"has the column {twice[0]!r} twice"
                return
            yield line, header
        elif len(cells) != len(header):
            yield line, f"has {len(cells)} cells, and the header {len(header)}"
        else:
            yield line, dict(zip(header, cells, strict=True))


class _Columns:
    """What the columns of a file mean to a program."""

    def __init__(self, program: Program, keep: Collection[str]) -> None:
        self._program = program.name
        self._keep = set(keep)
        self._parameters: dict[str, tuple[inspect.Parameter, Any]] = {}
        for parameter, annotation in typed_parameters(program):
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                self._parameters[parameter.name] = parameter, annotation
            elif parameter.default is parameter.empty:
                raise bad_file(
                    "FILE", f"program {program.name} needs {parameter.name!r}, which has no name "
                    "for callers: give it a default, or run the program from Python"
                )  # fmt: skip
        kinds = [p.kind for p in inspect.signature(program.body).parameters.values()]
        self._takes_any = inspect.Parameter.VAR_KEYWORD in kinds

    def problems(self, given: Collection[str]) -> list[str]:
        """What is unknown and what is missing among columns."""
        takes = f"program {self._program} takes {', '.join(self._parameters) or 'none'}"
        found = [
            f"the column {name!r} is no argument ({takes}); --keep {name} copies it to the results"
            for name in given
            if name not in self._parameters and name not in self._keep and not self._is_any(name)
        ]
        found += [
            f"there is no column {name!r}, which program {self._program} needs"
            for name, (parameter, _) in self._parameters.items()
            if name not in given and parameter.default is parameter.empty
        ]
        found += [
            f"there is no column {name!r} to keep" for name in sorted(self._keep.difference(given))
        ]
        return found

    def _is_any(self, name: str) -> bool:
        return self._takes_any and name not in RUN_OPTIONS

    def arguments(
        self, given: Mapping[str, Any], *, from_text: bool
    ) -> tuple[dict[str, Any], list[str]]:
        """The program's arguments in a row, and what is wrong with their values."""
        arguments: dict[str, Any] = {}
        found: list[str] = []
        for name, value in given.items():
            if name not in self._parameters:
                if name not in self._keep:
                    arguments[name] = value
                continue
            parameter, annotation = self._parameters[name]
            try:
                if from_text:
                    if value == "" and _is_left_out(parameter, annotation):
                        continue
                    arguments[name] = _from_text(value, parameter, annotation)
                else:
                    arguments[name] = _from_json(value, parameter, annotation)
            except ValueError as error:
                found.append(f"the column {name!r} {error}")
        return arguments, found


def _is_left_out(parameter: inspect.Parameter, annotation: Any) -> bool:
    """Whether an empty cell means the default; for a plain text it is the empty text."""
    if parameter.default is parameter.empty:
        return False
    return parameter.default is None or option_type(annotation, parameter.default) is not str


def _from_text(text: str, parameter: inspect.Parameter, annotation: Any) -> Any:
    kind = option_type(annotation, parameter.default)
    if kind is None:
        told = annotation.__name__ if isinstance(annotation, type) else annotation
        raise ValueError(f"is a {told}, which no cell can hold: write the rows as JSON lines")
    if get_origin(kind) is list:
        try:
            found = json.loads(text)
        except ValueError:
            found = text
        return _from_json(found, parameter, annotation)
    read: Callable[[str], Any] = _READERS[kind] if kind in _READERS else _choice(kind)
    return read(text)


def _from_json(value: Any, parameter: inspect.Parameter, annotation: Any) -> Any:
    """The value as the parameter's type has it; any, where that is none that an option can give."""
    kind = option_type(annotation, parameter.default)
    untold = annotation in (inspect.Parameter.empty, Any)
    if kind is None or (untold and parameter.default in (None, inspect.Parameter.empty)):
        return value
    if value is None and (parameter.default is None or NoneType in get_args(annotation)):
        return value
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise ValueError(f"is {_told(value)}, and must be a list, as in [1, 2]")
        (inner,) = get_args(kind)
        items = [_checked(each, inner) for each in value]
        return tuple(items) if is_tuple(annotation, parameter.default) else items
    return _checked(value, kind)


def _checked(value: Any, kind: Any) -> Any:
    if kind in _JSON_TYPES:
        types, what = _JSON_TYPES[kind]
        if type(value) not in types:
            raise ValueError(f"is {_told(value)}, and must be {what}")
        return kind(value)
    return _choice(kind)(value)


def _number(kind: type[Any], what: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"is {_told(text)}, and must be {what}") from None

    return read


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError(f"is {_told(text)}, and must be true or false")
    return word in _TRUE


_JSON_TYPES: dict[Any, tuple[tuple[type[Any], ...], str]] = {
    str: ((str,), "a text"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    Path: ((str,), "a path"),
}
_READERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: _number(int, "an integer"),
    float: _number(float, "a number"),
    bool: _truth,
    Path: Path,
}


def _choice(kind: Any) -> Callable[[Any], Any]:
    """One of the values of a Literal or an Enum."""
    if get_origin(kind) is Literal:
        values = {each: each for each in get_args(kind)}
    elif isinstance(kind, type) and issubclass(kind, Enum):
        values = {str(each.value): each for each in kind}
    else:  # a list in a list, which option_type does not give
        raise AssertionError(kind)

    def read(value: Any) -> Any:
        if str(value) not in values:
            raise ValueError(f"is {_told(value)}, and must be one of {', '.join(values)}")
        return values[str(value)]

    return read


def _told(value: Any) -> str:
    told = json.dumps(value, ensure_ascii=False)
    return told if len(told) <= 40 else f"{told[:37]}..."

"""The kinds of files that `stemma batch` reads and writes, and results as a table.

CSV or JSON lines, by the end of the file's name; "-" is standard input or output, in JSON lines.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson")


def bad_file(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=option)


def delimiter_of(name: str, option: str) -> str | None:
    """What separates the cells of the file; None for JSON lines. Raises BadParameter."""
    suffix = Path(name).suffix.lower()
    if name == "-" or suffix in _JSON_LINES:
        return None
    if suffix not in _DELIMITERS:
        known = ", ".join((*_JSON_LINES, *_DELIMITERS))
        raise bad_file(option, f"{name}: must end in one of {known}, or be -, which is JSON lines")
    return _DELIMITERS[suffix]


def write_table(file: Path, delimiter: str, results: Sequence[Mapping[str, Any]]) -> None:
    """Results as CSV: the columns of the data, the variables, the value, the error."""
    given = list(dict.fromkeys(name for result in results for name in result["item"]))
    variables = list(dict.fromkeys(name for result in results for name in result["variables"]))
    own = {
        name: name if name not in (*given, "value", "error") else f"variable {name}"
        for name in variables
    }
    header = [*given, *own.values(), "value", "error"]
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, delimiter=delimiter)
        writer.writerow(header)
        for result in results:
            cells = [result["item"].get(name) for name in given]
            cells += [result["variables"].get(name) for name in variables]
            writer.writerow([_cell(each) for each in (*cells, result["value"], result["error"])])


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)

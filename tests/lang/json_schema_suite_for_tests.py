"""The official JSON-Schema-Test-Suite, and how a constraint does on it.

The suite lies in the source distribution of the package `jsonschema` (its wheel is a development
dependency): pip fetches that once, through your own configuration, into the folder of the cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

from stemma.errors import InvalidArgument
from stemma.lang.constraints import Constraint

RELEASE = "4.26.0"  # of the package, and so of the suite


@dataclass
class Row:
    """What came of one file of the suite. schemas: how many; wrong: verdicts that differ."""

    keyword: str
    accepted: int = 0
    refused: int = 0
    tests: int = 0
    wrong: int = 0

    def __str__(self) -> str:
        return (
            f"| {self.keyword} | {self.accepted} | {self.refused} | {self.tests} | {self.wrong} |"
        )


HEAD = "| file | schemas accepted | schemas refused by name | instances tried | wrong |\n" + (
    "| --- | --- | --- | --- | --- |"
)


def suite_folder() -> Path:
    """Where the tests of the suite are; fetched where they are not."""
    given = os.environ.get("STEMMA_CACHE")
    cache = Path(given) if given else Path(platformdirs.user_cache_dir("stemma"))
    folder = cache / f"json-schema-test-suite-{RELEASE}"
    tests = folder / f"jsonschema-{RELEASE}" / "json" / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):  # of several processes one fetches it
        if not tests.is_dir():
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
            command += ["--quiet", "--no-binary", "jsonschema", "--dest", str(folder)]
            subprocess.run([*command, f"jsonschema=={RELEASE}"], check=True)
            with tarfile.open(folder / f"jsonschema-{RELEASE}.tar.gz") as archive:
                archive.extractall(folder, filter="data")
    return tests


def tried(file: Path, keyword: str, wrong: list[str], **settings: Any) -> Row:
    """Try every schema of a file and every instance for it; what is wrong is told in words."""
    row = Row(keyword)
    for case in json.loads(file.read_text(encoding="utf-8")):
        schema = case["schema"]
        constraint: Constraint | None = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of keywords that the suite makes up
                constraint = Constraint.json_schema(schema, **settings)
        except InvalidArgument as error:
            if "admits nothing" not in str(error):
                row.refused += 1
                continue
        row.accepted += 1
        order = names_in_order(schema, {})
        for test in case["tests"]:
            row.tests += 1
            text = written(test["data"], order, compact=settings.get("whitespace") == "compact")
            if (constraint is not None and constraint.matches(text)) != test["valid"]:
                row.wrong += 1
                wrong.append(f"{keyword}: {case['description']}: {test['description']}: {text}")
    return row


def written(value: object, order: dict[str, int], *, compact: bool) -> str:
    """An instance as a constraint writes it: properties in the schema's order, integers as such."""
    separators = (",", ":") if compact else (", ", ": ")
    return json.dumps(_sorted(value, order), ensure_ascii=False, separators=separators)


def names_in_order(schema: object, found: dict[str, int]) -> dict[str, int]:
    """Every key of a schema, by where it is first written."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            found.setdefault(key, len(found))
            names_in_order(value, found)
    elif isinstance(schema, list):
        for value in schema:
            names_in_order(value, found)
    return found


def _sorted(value: Any, order: dict[str, int]) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_sorted(one, order) for one in value]
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: order.get(name, len(order)))
        return {name: _sorted(value[name], order) for name in names}
    return value

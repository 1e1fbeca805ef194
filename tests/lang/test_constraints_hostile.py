"""Schemas that are deep, wide or dear: refused, or compiled at little cost."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


def chain(links: int) -> dict[str, Any]:
    """A schema whose references lead through as many definitions."""
    definitions: dict[str, Any] = {"d0": {"type": "integer"}}
    for i in range(1, links):
        definitions[f"d{i}"] = {"type": "array", "items": {"$ref": f"#/$defs/d{i - 1}"}}
    return {"$defs": definitions, "$ref": f"#/$defs/d{links - 1}"}


def nested(links: int, name: str) -> dict[str, Any]:
    """The same with objects, whose only property has a name."""
    definitions: dict[str, Any] = {"d0": {"type": "null"}}
    for i in range(1, links):
        below = {"$ref": f"#/$defs/d{i - 1}"}
        definitions[f"d{i}"] = {
            "type": "object",
            "properties": {name: below},
            "additionalProperties": False,
        }
    return {"$defs": definitions, "$ref": f"#/$defs/d{links - 1}"}


def doubling(depth: int) -> dict[str, Any]:
    """A schema that is twice as large with every definition, if it is written out."""
    definitions: dict[str, Any] = {"d0": {"type": "object", "properties": {"a": {"type": "null"}}}}
    for i in range(1, depth):
        below = {"$ref": f"#/$defs/d{i - 1}"}
        definitions[f"d{i}"] = {"allOf": [{"properties": {f"p{i}": below, f"q{i}": below}}, below]}
    return {"$defs": definitions, "$ref": f"#/$defs/d{depth - 1}"}


@pytest.mark.parametrize(
    "schema",
    [
        chain(330),
        chain(5_000),
        nested(8_000, "enum"),
        nested(8_000, "$defs"),
        doubling(40),
        {"allOf": [{"anyOf": [{"required": [name + str(i)]} for name in "ab"]} for i in range(40)]},
        {"properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(9_000)}},
        {"enum": [f"value {i}" for i in range(20_000)]},
        {"type": "array", "minItems": 100_000, "items": {"type": "array", "minItems": 100_000}},
        {"type": "integer", "multipleOf": 1_234_567_891},
        {"type": "string", "pattern": "^(a+)+$", "maxLength": 100_000},
        '{"items":' * 20_000 + "{}" + "}" * 20_000,
    ],
    ids=[
        *("chain", "long chain", "enums", "definitions", "doubling", "cases", "wide"),
        *("enum", "long", "multiple", "pattern", "deep"),
    ],
)
def test_a_hostile_schema_is_refused_or_costs_little(schema: Any) -> None:
    # In a process of its own: what recurses too deep would end this one without a word.
    code = (
        "import json, sys, time\n"
        "from stemma.lang.constraints import Constraint\n"
        "from stemma.errors import ConstraintError, InvalidArgument\n"
        "schema = json.load(sys.stdin)\n"
        "begun = time.monotonic()\n"
        "try:\n"
        "    Constraint.json_schema(schema).matches('[[' + '1,' * 5000)\n"
        "except (ConstraintError, InvalidArgument) as error:\n"
        "    assert len(str(error)) < 5000\n"
        "assert time.monotonic() - begun < 20\n"
        "print('alive')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(schema),
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert (done.stdout, done.returncode) == ("alive\n", 0), done.stderr[-2_000:]

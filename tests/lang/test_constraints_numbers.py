"""Numbers in a JSON Schema: held exactly, or refused by name with their place."""

from __future__ import annotations

import json
import math
import operator
import subprocess
import sys
import time
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs
from pydantic import Field

from stemma.errors import InvalidArgument
from stemma.lang.constraints import Constraint
from stemma.lang.tools import Tool

_INT = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({**_INT, "minimum": -(10**20)}, "at #/minimum: -100000000000000000000 is beyond 2**53"),
        (
            {**_INT, "minimum": -(2**63)},
            "at #/minimum: -9223372036854775808 cannot be held exactly: give -9223372036854774784",
        ),
        (
            {**_INT, "maximum": 2**53 + 1},
            "at #/maximum: 9007199254740993 cannot be held exactly: give 9007199254740992",
        ),
        ({**_INT, "maximum": 2**63}, "at #/maximum: 9223372036854775808 is beyond 2**53"),
        ({**_INT, "minimum": 2**54}, "at #/minimum: 18014398509481984 is beyond 2**53"),
        ({**_INT, "maximum": -(2**54)}, "at #/maximum: -18014398509481984 is beyond 2**53"),
        ({"type": "number", "maximum": 2**54}, "at #/maximum: 18014398509481984 is beyond 2**53"),
        ({"maximum": 2**63 - 1}, "at #/maximum: 9223372036854775807 is beyond 2**53"),
        ({**_INT, "exclusiveMaximum": 2**53}, "at #/exclusiveMaximum: 9007199254740992 is beyond"),
        ({"type": "number", "minimum": 1e20}, "at #/minimum: 1e+20 is beyond 2**53"),
        ({"maximum": 10**5_000}, "at #/maximum: an integer of so many digits is beyond 2**53"),
        ({"type": "number", "minimum": 1e-300}, "at #/minimum: 1e-300 is closer to zero than"),
        ({"items": {"minimum": "3"}}, "at #/items/minimum: 'minimum' is a number, not '3'"),
        ({"maximum": True}, "at #/maximum: 'maximum' is a number, not True"),
        (
            {"properties": {"a": {"exclusiveMinimum": True, "minimum": 1}}},
            "at #/properties/a/exclusiveMinimum: True is of draft 4; give the bound itself",
        ),
        ({"allOf": [{"const": 2**53 + 1}]}, "at #/allOf/0/const: 9007199254740993 is beyond 2**53"),
        ({"enum": ["a", [{"b": -(2**60)}]]}, "at #/enum: -1152921504606846976 is beyond 2**53"),
        ({"const": json.loads("[" * 101 + "]" * 101)}, "at #/const: a value nested more than 100"),
        ({"const": {1: 2}}, "at #/const: the name of a property is a string, not 1"),
        ({**_INT, "multipleOf": 0}, "at #/multipleOf: 'multipleOf' is more than 0, not 0"),
        ({**_INT, "multipleOf": -2}, "at #/multipleOf: 'multipleOf' is more than 0, not -2"),
        ({**_INT, "multipleOf": 2**20}, "at #/multipleOf: 1048576 has too many digits; at most"),
        ({**_INT, "multipleOf": 10**5_000}, "at #/multipleOf: an integer of so many digits has"),
        ({"type": "number", "multipleOf": 1.23456}, "at #/multipleOf: 1.23456 has too many digits"),
        ({"type": "number", "multipleOf": 0.07}, "at #/multipleOf: 0.07 cannot be held as a"),
        (
            {**_INT, "allOf": [{"multipleOf": 4999}, {"multipleOf": 4998}]},
            "at #/allOf/1/multipleOf: these may hold together, and cannot be taken so: 4999, 4998",
        ),
        (
            {**_INT, "multipleOf": 97, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 89}}},
            "multipleOf: these may hold together, and cannot be taken so: ",
        ),
        (
            {
                "properties": {"a": {"multipleOf": 97}},
                "$ref": "#/$defs/a",
                "$defs": {"a": {"properties": {"a": {"multipleOf": 89}}}},
            },
            "these may hold together, and cannot be taken so: 97, 89; write one 'multipleOf'",
        ),
        ({"minItems": -1}, "at #/minItems: 'minItems' is a whole number from 0 on, not -1"),
        ({"maxItems": 1.5}, "at #/maxItems: 'maxItems' is a whole number from 0 on, not 1.5"),
        ({"minItems": "1"}, "at #/minItems: 'minItems' is a whole number from 0 on, not '1'"),
        ({"minItems": True}, "at #/minItems: 'minItems' is a whole number from 0 on, not True"),
        ({"minLength": 10**9}, "at #/minLength: 1000000000 is too large; at most 262,144 is taken"),
        ({"maxLength": 2**32}, "at #/maxLength: 4294967296 is too large; at most 2,147,483,648"),
        ({"maxLength": float("inf")}, "at #/maxLength: 'maxLength' is a whole number from 0 on"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name_with_its_place(
    schema: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Constraint.json_schema(schema)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_refusal_reaches_types_tools_and_grammars() -> None:
    wide = Annotated[int, Field(ge=-(10**20), le=-(10**19))]
    with pytest.raises(InvalidArgument, match=r"dtype=.*at #/maximum: -1000.* is beyond 2\*\*53"):
        Constraint.of_type(wide)
    with pytest.raises(InvalidArgument, match=r"at #/items/const: .* is beyond 2\*\*53"):
        Constraint.of_type(list[Literal[1234567890123456789]])
    with pytest.raises(InvalidArgument, match=r"%json in line 1: at #/maximum: .* cannot be held"):
        Constraint.grammar('start: %json {"type": "integer", "maximum": 9007199254740993}')

    def counted(count):  # type: ignore[no-untyped-def]
        return count

    counted.__annotations__ = {"count": wide}
    with pytest.raises(InvalidArgument, match=r"tool counted: count: at #/.* is beyond 2\*\*53"):
        Tool.of(counted)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**_INT, "minimum": 2**53}, [2**53, 2**53 + 1, 10**30], [2**53 - 1, -(2**53)]),
        ({**_INT, "minimum": -(2**53), "maximum": 2**53}, [2**53, -(2**53), 0], [2**53 + 1]),
        ({**_INT, "exclusiveMaximum": 2**53 - 1}, [2**53 - 2, -(10**30)], [2**53 - 1, 2**53]),
        ({"const": 2**53}, [2**53], [2**53 - 1, 2**53 + 1]),
        ({"enum": [-(2**53), 2**53 - 1]}, [-(2**53), 2**53 - 1], [2**53, 2**53 - 2]),
        (
            {**_INT, "multipleOf": 4_999},
            [0, 4_999, -4_999 * 10**20],
            [1, 4_998, 4_999 * 10**20 + 1],
        ),
        ({**_INT, "allOf": [{"multipleOf": 60}, {"multipleOf": 70}]}, [420], [60, 70, 210]),
        ({"type": "number", "allOf": [{"multipleOf": 0.4}, {"multipleOf": 1}]}, [2], [1, 0.4]),
    ],
)
def test_numbers_are_held_exactly(
    schema: dict[str, Any], good: list[float], bad: list[float]
) -> None:
    constraint = Constraint.json_schema(schema)
    assert [number for number in good if not constraint.matches(str(number))] == []
    assert [number for number in bad if constraint.matches(str(number))] == []


def _floats_up_to(bound: int) -> hs.SearchStrategy[int]:
    """Integers above 2**53 that are floats, as llguidance holds bounds."""
    return hs.integers(2**53 + 1, bound).map(float).map(int).filter(lambda n: 2**53 < n <= bound)


@settings(max_examples=150, deadline=None)
@given(hs.data())
def test_bounds_of_integers_in_64_bits_are_those_of_python(data: hs.DataObject) -> None:
    high = data.draw(hs.just(2**63 - 1) | _floats_up_to(2**63 - 1), label="maximum")
    low = data.draw(
        hs.none()
        | hs.integers(-(2**53), 2**53)
        | _floats_up_to(2**63 - 1024).map(operator.neg)
        | hs.just(-(2**63) + 1024),
        label="minimum",
    )
    schema: dict[str, Any] = {**_INT, "maximum": high}
    if low is not None:
        schema["minimum"] = low
    if data.draw(hs.booleans(), label="open") and low is not None and abs(low) < 2**53:
        schema["exclusiveMinimum"] = schema.pop("minimum")
        low += 1
    if data.draw(hs.booleans(), label="apart"):
        schema = {"allOf": [{**_INT, key: schema[key]} for key in schema if key != "type"]}
    constraint = Constraint.json_schema(schema)
    edges = [high, -(2**63), 2**63, 10**18, -(10**18), 10**19] + ([] if low is None else [low])
    tried = [edge + step for edge in edges for step in (-1025, -1024, -1, 0, 1, 1023, 1024)]
    tried += data.draw(hs.lists(hs.integers(-(10**20), 10**20), max_size=10), label="others")
    for number in tried:
        fits = number <= high and (low is None or number >= low)
        assert constraint.matches(str(number)) == fits, number


def test_a_field_may_be_an_integer_of_64_bits() -> None:
    key = Constraint.of_type(list[Annotated[int, Field(ge=0, le=2**63 - 1)]])
    assert key.parse(f"[0, {2**63 - 1}]") == [0, 2**63 - 1]
    assert not key.matches(f"[{2**63}]")
    assert not key.matches("[-1]")


@pytest.mark.parametrize("bound", [10**9, 2**48, 2**50 + 1, 2**52, 2**52 + 1, 2**53 - 1])
def test_an_open_bound_that_is_moved_never_passes_the_next_integer(bound: int) -> None:
    both = [{"exclusiveMinimum": bound}, {"minimum": 0}]
    low = Constraint.json_schema({**_INT, "allOf": both})
    assert [low.matches(str(bound + i)) for i in (-1, 0, 1)] == [False, False, True]
    both = [{"exclusiveMaximum": -bound}, {"maximum": 0}]
    high = Constraint.json_schema({**_INT, "allOf": both})
    assert [high.matches(str(-bound + i)) for i in (-1, 0, 1)] == [True, False, False]
    both = [{"exclusiveMaximum": bound}, {"minimum": 0}]
    under = Constraint.json_schema({**_INT, "allOf": both})
    assert [under.matches(str(bound + i)) for i in (-1, 0, 1)] == [True, False, False]


_DECIMALS = hs.integers(-1_500, 1_500).map(lambda number: number / 1_000)


@settings(max_examples=150, deadline=None)
@given(hs.data())
def test_bounds_with_decimals_take_every_number_between_them(data: hs.DataObject) -> None:
    low, high = sorted(data.draw(hs.tuples(_DECIMALS, _DECIMALS), label="bounds"))
    names = data.draw(hs.sampled_from(_PAIRS), label="names")
    schema: dict[str, Any] = {"type": "number", **dict(zip(names, (low, high), strict=True))}
    if data.draw(hs.booleans(), label="apart"):
        schema = {"type": "number", "allOf": [{k: v} for k, v in schema.items() if k != "type"]}
    known = jsonschema.Draft202012Validator(schema)
    tried = [cut(bound, digits) for bound in (low, high) for digits in (0, 1, 2, 3)]
    tried += data.draw(hs.lists(_DECIMALS, max_size=5), label="others")
    try:
        constraint = Constraint.json_schema(schema)
    except InvalidArgument:  # nothing lies between
        assert not any(map(known.is_valid, tried))
        return
    for number in tried:
        number = int(number) if number == int(number) else number
        assert constraint.matches(str(number)) == known.is_valid(number), number


_PAIRS = [(f"{a}inimum", f"{b}aximum") for a in ("m", "exclusiveM") for b in ("m", "exclusiveM")]


def cut(number: float, digits: int) -> float:
    """A number without the decimals behind so many."""
    return math.trunc(number * 10**digits) / 10**digits


def test_a_number_may_end_before_its_bound_does() -> None:
    fits = {"type": "number", "multipleOf": 0.01, "minimum": 0.015, "maximum": 0.025}
    constraint = Constraint.json_schema(fits)
    assert constraint.matches("0.02")
    assert set(constraint.examples(5)) == {"0.02"}
    field = Constraint.of_type(list[Annotated[float, Field(ge=0, le=0.95)]])
    assert field.parse("[0.9, 0.95, 0]") == [0.9, 0.95, 0.0]
    assert not field.matches("[0.96]")


def test_a_multiple_costs_little() -> None:
    begun = time.monotonic()
    constraint = Constraint.json_schema({**_INT, "multipleOf": 4_999})
    assert not constraint.matches("123456789" * 200)
    assert time.monotonic() - begun < 5


def test_bounds_at_the_edge_of_64_bits_do_not_end_the_process() -> None:
    # In a process of its own: llguidance recurses without end where both bounds are cut to one.
    code = (
        "from stemma.errors import InvalidArgument\n"
        "from stemma.lang.constraints import Constraint\n"
        "edge = -2**63\n"
        "for schema in (\n"
        "    {'minimum': -10**20, 'maximum': -10**19},\n"
        "    {'minimum': edge, 'maximum': edge},\n"
        "    {'allOf': [{'maximum': edge}, {'minimum': -10**30}]},\n"
        "    {'const': edge},\n"
        "    {'minimum': float(edge), 'exclusiveMaximum': float(edge) + 2000},\n"
        "):\n"
        "    try:\n"
        "        Constraint.json_schema({'type': 'integer', **schema})\n"
        "    except InvalidArgument as error:\n"
        "        print('beyond 2**53' in str(error) or 'cannot be held exactly' in str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert (done.stdout.split(), done.returncode) == (["True"] * 5, 0), done.stderr[-2_000:]

"""Numbers in a JSON Schema: what llguidance holds exactly, and what it has to be told otherwise.

It keeps bounds and constants as floats, bounds of integers in 64 bits, and `multipleOf` as a
decimal of 32 bits, and rounds or cuts without a word what does not fit. Used by
`constraints_schema.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeGuard

from stemma.lang.constraints_limits import MOST_LEAST

EXACT = 2**53  # up to here every integer is a float of its own
SMALLEST = 1e-60  # llguidance writes bounds digit by digit, in a regex that nests with each
MOST_COUNT = 2**31  # llguidance's regexes count in 32 bits
MOST_LEVELS = 100  # of a constant; llguidance reads JSON that is 128 deep
MOST_MULTIPLE = 5_000  # each digit of a number leads to one of so many states: half a second
_MOST_STATES = 200_000  # of all multiples of a document
_WORD = 2**32

COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def fault_of_number(key: str, value: object, *, integer: bool) -> str:
    """What is wrong with the value of a key of `NUMBERS`, or cannot be held; empty where nothing
    is. integer: whether the schema says beside it that the number is one."""
    if isinstance(value, bool) and key.startswith("exclusive"):
        closed = "minimum" if key.endswith("Minimum") else "maximum"
        return f"{value} is of draft 4; give the bound itself, in place of {closed!r}"
    if not is_number(value):
        return f"{key!r} is a number, not {value!r:.60}"
    if key == "multipleOf":
        return _fault_of_multiple(value)
    if integer and (away := _held_away_from_zero(key, value)) is not None:
        return "" if away == value else f"{_shown(value)} cannot be held exactly: give {away}"
    if abs(value) > EXACT or (abs(value) == EXACT and key.startswith("exclusive")):
        return f"{_shown(value)} is beyond 2**53, up to which bounds are exact: leave it out"
    if 0 < abs(value) < SMALLEST:
        return f"{value} is closer to zero than {SMALLEST:g}: give zero"
    return ""


def _held_away_from_zero(key: str, value: float) -> int | None:
    """Of an upper bound of integers above `EXACT`, or a lower one below, in 64 bits: the bound next
    to it that is held exactly and allows no more. None for other bounds."""
    if key == "maximum" and EXACT < value < 2**63:
        # llguidance cuts a float to 64 bits: 2**63 to the last integer that these have.
        return 2**63 - 1 if value == 2**63 - 1 else _float_up_to(int(value))
    if key == "minimum" and -(2**63) <= value < -EXACT:
        return -_float_up_to(min(-int(value), 2**63 - 1))
    return None


def _float_up_to(value: int) -> int:
    """The largest integer up to a positive one that is a float."""
    near = float(value)
    return int(near if near <= value else math.nextafter(near, 0))


def fault_of_count(key: str, value: object) -> str:
    """The same of a key of `COUNTS`."""
    if not is_number(value) or value < 0 or value != value // 1:
        return f"{key!r} is a whole number from 0 on, not {_shown(value)}"
    most = MOST_LEAST if key.startswith("min") else MOST_COUNT
    if value > most:
        return f"{_shown(value)} is too large; at most {most:,} is taken: leave it out"
    return ""


def fault_of_constant(value: object) -> str:
    """The same of a value of `const` or `enum`, with all that is in it."""
    waiting, seen = [(value, 1)], set[int]()
    while waiting:
        one, level = waiting.pop()
        if isinstance(one, int) and abs(one) > EXACT:
            return (
                f"{_shown(one)} is beyond 2**53, up to which integers are exact: "
                "write it as a string"
            )
        if not isinstance(one, Mapping | list | tuple) or id(one) in seen:
            continue
        seen.add(id(one))
        if level > MOST_LEVELS:
            return f"a value nested more than {MOST_LEVELS} deep"
        if isinstance(one, Mapping):
            for name in one:
                if not isinstance(name, str):
                    return f"the name of a property is a string, not {name!r:.60}"
        below = one.values() if isinstance(one, Mapping) else one
        waiting += [(each, level + 1) for each in below]
    return ""


def _fault_of_multiple(value: float) -> str:
    if not 0 < value < math.inf:
        return f"'multipleOf' is more than 0, not {value}"
    if value > MOST_MULTIPLE or _decimal(value)[0] > MOST_MULTIPLE:
        return (
            f"{_shown(value)} has too many digits; at most {MOST_MULTIPLE:,} is taken, "
            "with the point anywhere in it"
        )
    scaled = float(value)
    while scaled != int(scaled):  # as llguidance finds the digits
        scaled *= 10
    if scaled != _decimal(value)[0]:
        return f"{value} cannot be held as a decimal: take a bound, or another unit"
    return ""


def fault_of_states(multiples: list[float]) -> str:
    """What is wrong with all multiples of a document; empty where nothing is."""
    states = sum(_decimal(value)[0] for value in multiples)
    if states <= _MOST_STATES:
        return ""
    return (
        f"the digits of all 'multipleOf' come to {states:,}; at most {_MOST_STATES:,} are taken: "
        "leave some out"
    )


def fault_of_multiples(multiples: list[float]) -> str:
    """What is wrong with multiples that may hold together; empty where nothing is."""
    digits = max((_decimal(value)[1] for value in multiples), default=0)
    scaled = {int(Fraction(repr(value)) * 10 ** max(digits, 0)) for value in multiples}
    together = math.lcm(*scaled)
    coefficient, _ = _reduced(together, digits)
    if coefficient <= MOST_MULTIPLE and together * max(scaled, default=1) < _WORD:
        return ""
    listed = ", ".join(str(value) for value in dict.fromkeys(multiples))
    return (
        f"these may hold together, and cannot be taken so: {listed:.100}; write one 'multipleOf' "
        f"with what they have in common, of at most {MOST_MULTIPLE:,}"
    )


def _decimal(value: float) -> tuple[int, int]:
    """A positive number as a coefficient and how many of its digits stand behind the point."""
    _, figures, exponent = Decimal(repr(value)).as_tuple()
    return _reduced(int("".join(map(str, figures))), -int(exponent))


def _reduced(coefficient: int, digits: int) -> tuple[int, int]:
    while digits > 0 and coefficient % 10 == 0:
        coefficient, digits = coefficient // 10, digits - 1
    return (coefficient * 10 ** max(-digits, 0), max(digits, 0))


_ENDS = (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1))
_BOUNDS = {name for open_, closed, _ in _ENDS for name in (open_, closed)}


def bounds_may_meet(root: object) -> bool:
    """Whether several schemas of a document bound numbers, and some hold together."""
    bounded, together, waiting, seen = 0, False, [root], set[int]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping | list) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            bounded += not _BOUNDS.isdisjoint(one)
            together = together or not {"allOf", "anyOf", "oneOf", "$ref"}.isdisjoint(one)
            waiting += one.values()
        else:
            waiting += one
    return together and bounded > 1


def move_open_bounds(out: dict[str, Any], *, everywhere: bool) -> None:
    """Where a bound next to zero is an integer and open, and the other one is less than one away: a
    bound a hair inside. llguidance lets the integer itself in there.

    everywhere: for all open integers, for what else bounds the number may stand somewhere else.
    """
    low, high = (out.get(open_, out.get(closed)) for open_, closed, _ in _ENDS)
    near = None  # the one next to zero, if the other is less than one away
    if is_number(low) and is_number(high) and 0 < high - low < 1 and not low < 0 < high:
        near = low if abs(low) < abs(high) else high
    for (open_, closed, inside), bound in zip(_ENDS, (low, high), strict=True):
        if open_ not in out or not is_number(bound) or bound != int(bound):
            continue
        if everywhere or bound == near:
            del out[open_]
            # Never as far as the next integer, which is the next float where floats are sparse.
            hair = min(max(abs(bound) * _HAIR, SMALLEST), 0.5)
            moved = bound + inside * hair
            if moved == bound:
                moved += inside
            out[closed] = (max if inside > 0 else min)(moved, out.get(closed, moved))


def add_short_forms(out: dict[str, Any]) -> None:
    """Beside the bounds of a number, what llguidance leaves out there: the numbers that end where
    the bound farther from zero goes on, as 0.9 and 0.92 below 0.925."""
    bounds = {key: out[key] for key in out if key in _BOUNDS}
    if out.get("type") == "integer":
        return
    short = dict.fromkeys(
        number
        for key, bound in bounds.items()
        if (bound > 0) == key.endswith("aximum")
        for number in _beginnings(bound)
        if _within(number, bounds)
    )
    if short:
        for key in bounds:
            del out[key]
        cases = [bounds, *({"const": number} for number in short)]
        out["allOf"] = [*out.get("allOf", []), {"anyOf": cases}]


def _beginnings(bound: float) -> list[float]:
    """A number cut off behind each of its decimals but the last."""
    whole, _, decimals = f"{Decimal(repr(bound)):f}".partition(".")
    return [float(f"{whole}.{decimals[:end]}") for end in range(1, len(decimals))]


def _within(number: float, bounds: Mapping[str, float]) -> bool:
    inside = {
        "minimum": operator.ge,
        "maximum": operator.le,
        "exclusiveMinimum": operator.gt,
        "exclusiveMaximum": operator.lt,
    }
    return all(inside[key](number, bound) for key, bound in bounds.items())


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 300:
        return "an integer of so many digits"
    return f"{value!r:.60}"


_HAIR = 2.0**-48

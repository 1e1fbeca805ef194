"""A `Decimal` within JSON: a string, whose digits are all kept, as a JSON Schema with patterns.

A number of JSON is read as a float, which holds 15 digits of it. Used by `constraints_pydantic.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_FRACTION = r"(?:\.[0-9]+)?"


def decimal_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a Decimal as pydantic-core describes it: its bounds, and how many digits
    (`max_digits`, which needs `decimal_places`) it may have."""
    digits, places = schema.get("max_digits"), schema.get("decimal_places")
    whole = "(?:0|[1-9][0-9]*)"
    if digits is not None:
        more = digits - places - 1
        whole = f"(?:0|[1-9][0-9]{{0,{more}}})" if more >= 0 else "0"
    fraction = _FRACTION if places is None else rf"(?:\.[0-9]{{1,{places}}})?" if places else ""
    out: dict[str, Any] = {"type": "string", "pattern": f"^-?{whole}{fraction}$"}
    bounds = [
        {"pattern": f"^(?:{side(Decimal(str(schema[name])), opened=name[1] == 't')})$"}
        for name, side in (("ge", _from), ("gt", _from), ("le", _to), ("lt", _to))
        if schema.get(name) is not None
    ]
    return out | ({"allOf": bounds} if bounds else {})


def _from(bound: Decimal, *, opened: bool) -> str:
    """Numbers from a bound on; as the following ones, of those that JSON could write."""
    if bound < 0:
        return f"[0-9].*|-(?:{_nearer(-bound, opened=opened)})"
    return _farther(bound, opened=opened)


def _to(bound: Decimal, *, opened: bool) -> str:
    if bound < 0 or (bound == 0 and opened):
        return f"-(?:{_farther(-bound, opened=opened)})"
    return f"-.*|{_nearer(bound, opened=opened)}"


def _farther(bound: Decimal, *, opened: bool) -> str:
    """Numbers without a sign that are more than `bound`, or where it is not open, equal to it."""
    whole, fraction = _parts(bound)
    cases = [f"[1-9][0-9]{{{len(whole)},}}{_FRACTION}"]
    for i, digit in enumerate(whole):
        if digit != "9":
            behind = len(whole) - i - 1
            cases.append(f"{whole[:i]}[{int(digit) + 1}-9][0-9]{{{behind}}}{_FRACTION}")
    for i, digit in enumerate(fraction):
        if digit != "9":
            cases.append(rf"{whole}\.{fraction[:i]}[{int(digit) + 1}-9][0-9]*")
    more = "[0-9]*[1-9][0-9]*" if opened else "[0-9]*"
    if fraction or opened:
        cases.append(rf"{whole}\.{fraction}{more}")
    else:
        cases.append(f"{whole}{_FRACTION}")
    return "|".join(cases)


def _nearer(bound: Decimal, *, opened: bool) -> str:
    """Numbers without a sign that are less than `bound`, or where it is not open, equal to it."""
    whole, fraction = _parts(bound)
    cases = [f"[0-9]{{1,{len(whole) - 1}}}{_FRACTION}"] if len(whole) > 1 else []
    for i, digit in enumerate(whole):
        if digit != "0":
            behind = len(whole) - i - 1
            cases.append(f"{whole[:i]}[0-{int(digit) - 1}][0-9]{{{behind}}}{_FRACTION}")
    if fraction:
        cases.append(whole)
    for i, digit in enumerate(fraction):
        if i:
            cases.append(rf"{whole}\.{fraction[:i]}")
        if digit != "0":
            cases.append(rf"{whole}\.{fraction[:i]}[0-{int(digit) - 1}][0-9]*")
    if not opened:
        cases.append(rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(?:\.0+)?")
    return "|".join(cases)


def _parts(bound: Decimal) -> tuple[str, str]:
    """The digits before the point and those behind it, without zeros at the end."""
    whole, _, fraction = f"{abs(bound):f}".partition(".")
    return whole, fraction.rstrip("0")

"""Types as JSON: what of them a schema keeps, and what is refused because none does."""

from __future__ import annotations

import datetime
import enum
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypedDict

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, StringConstraints

from stemma.errors import InvalidArgument
from stemma.lang.constraints import Constraint
from stemma.lang.constraints_types import described
from tests.lang.test_constraints_types import Even, Point


class Color(enum.Enum):
    RED = "red"
    LIGHT_BLUE = "light blue"


Odd = enum.Enum("Odd", {"A": (1, 2)})


class Plain(enum.Enum):
    A = 2.5


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


@dataclass
class Counted:
    a: int
    count: int = field(init=False, default=3)


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (pydantic.PastDate, r"dtype=PastDate: at #: a date with a bound \(the past\)"),
        (
            list[Annotated[datetime.date, Field(ge=datetime.date(2020, 1, 1))]],
            r"at #/items: a date with a bound \(ge=\) is not supported: take any date",
        ),
        (TypedDict("Row", {"a/b": pydantic.Json}), "at #/properties/a~1b: Json, which is JSON"),
        (Annotated[Decimal, Field(max_digits=5)], "max_digits= without decimal_places="),
        (
            dict[Annotated[int, Field(ge=3)], int],
            r"dtype=dict\[Annotated\[int, ...\], int\]: at #: keys with bounds cannot be kept: ",
        ),
        (dict[tuple[int, int], int], "keys of this type cannot be kept: take str"),
        (dict[Optional[str], int], "at #: keys that are None cannot be kept: take str"),  # noqa: UP045
        (dict[Literal[1, 2], int], "at #: a key that is 1 cannot be read: .* Enum of strings"),
        (dict[str, dict[Plain, Plain]], "at #/additionalProperties: a key that is 2.5 cannot be"),
        (
            pydantic.ImportString,
            "at #: ImportString, which runs .*is not supported: take a Literal",
        ),
        (list[pydantic.ImportString[int]], "at #/items: ImportString"),
        (pydantic.ByteSize, "ByteSize is not supported: take int"),
        (list[pydantic.SecretStr], "at #/items: SecretStr is not supported: take str, and convert"),
        (Path, "Path is not supported: take str, and convert it afterwards"),
        (re.Pattern, "Pattern is not supported: take str, and convert it afterwards"),
        (IPv4Network, "a type with the format 'ipv4network' is not supported: take str"),
        (Callable[[int], int], "a Callable is not supported: take a Literal of names"),
        (typing.Callable[[int], int], "a Callable is not supported: take a Literal of names"),
        (list[typing.Never], r"dtype=list\[Never\]: Never has no values, so nothing matches"),
        (typing.NoReturn, "dtype=NoReturn: Never has no values"),
        (Even(number=2), "dtype=Even.*: must be a type, .*not a value of one"),
        (Color.RED, "dtype=<Color.RED: 'red'>: must be a type, .*not a value of one"),
        (Point(1, []), r"dtype=Point\(.*must be a type, as int, list\[str\] or a model"),
        (list[Literal[Color.RED]], "at #/items: Color.RED in a Literal is not .*make Color a StrE"),
        (list[Odd], r"Odd with the member \(1, 2\) is not supported: its members' values must be"),
        (list[enum.Enum("Big", {"A": float("inf")})], "Big with the member inf is not supported"),
        (list[bytes], "at #/items: bytes is not supported: take str"),
        (Iterable[int], "an Iterable, which could be read once, is not supported: take a list"),
        (dict[str, type[int]], "at #/additionalProperties: a type as a value is not supported"),
        (range, "dtype=range: pydantic knows no JSON for it: use a model"),
        (list[range], r"dtype=list\[range\]: pydantic knows no JSON for <class 'range'>"),
    ],
)
def test_what_json_cannot_keep_of_a_type_is_refused_where_it_is(dtype: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        Constraint.of_type(dtype)
    assert "arbitrary_types" not in str(caught.value)


def test_a_field_that_is_not_given_to_a_dataclass_is_not_asked_for() -> None:
    constraint = Constraint.of_type(Counted)
    assert constraint.parse('{"a": 1}') == Counted(1)
    assert not constraint.matches('{"a": 1, "count": 2}')


@pytest.mark.parametrize("text", ["  ", " a", "a\u0085", "a"])
def test_what_is_stripped_does_not_count_for_the_length(text: str) -> None:
    stripped = Annotated[str, StringConstraints(strip_whitespace=True, min_length=2)]
    for dtype in (stripped, Annotated[stripped, StringConstraints(pattern="^.*$")]):
        constraint = Constraint.of_type(list[dtype])  # type: ignore[valid-type]
        assert constraint.parse('["a b"]') == ["a b"]
        assert not constraint.matches(f'["{text}"]')
    class_ = pydantic.create_model(
        "Row", __config__={"str_strip_whitespace": True}, a=(str, Field(min_length=2))
    )
    assert not Constraint.of_type(class_).matches(f'{{"a": "{text}"}}')


ADDRESSES = [pydantic.HttpUrl, pydantic.AnyUrl, pydantic.PostgresDsn, pydantic.WebsocketUrl]
PRICE = Annotated[Decimal, Field(max_digits=5, decimal_places=2, gt=0)]


class Log(BaseModel):
    default: dict[int, Color]  # named as a keyword of JSON Schema
    when: datetime.datetime
    time: datetime.time
    cost: Decimal = Field(max_digits=6, decimal_places=2)


@pytest.mark.parametrize(
    "dtype",
    [
        *ADDRESSES,
        *(datetime.datetime | None, list[datetime.date], list[datetime.time], Log, complex),
        *(list[datetime.timedelta], list[pydantic.NaiveDatetime], list[pydantic.AwareDatetime]),
        *(list[Decimal], Annotated[Decimal, Field(ge=0, le=5)], PRICE, pydantic.condecimal(gt=1)),
        Annotated[Decimal, Field(ge=0, max_digits=18, decimal_places=2)],
        *(list[pydantic.UUID4], list[pydantic.UUID7], list[pydantic.UUID1]),
        *(dict[int, int], dict[float, int], dict[bool, str], dict[Decimal, int], dict[Color, int]),
        *(dict[datetime.date, int], dict[datetime.datetime, int], dict[pydantic.UUID4, int]),
        *(dict[Literal["a|b", "c"], int], dict[str | int, int], dict[Any, int]),
        dict[Annotated[str, Field(pattern="^a+$")], int],
        dict[Annotated[str, Field(min_length=1, max_length=3)], int],
    ],
    ids=str,
)
def test_what_a_schema_of_a_type_allows_the_type_takes(dtype: Any) -> None:
    constraint = Constraint.of_type(dtype)
    for text in constraint.examples(30, seed=2):
        constraint.parse(text)
    end = constraint.closing("")
    assert end is not None
    constraint.parse(end)


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (list[datetime.datetime], "2024-01-01T10:00:00", "2024-01-01T23:59:60Z"),
        (list[datetime.datetime], "2024-01-01T10:00:00+02:00", "0000-01-01T10:00:00Z"),
        (list[pydantic.NaiveDatetime], "2024-01-01T10:00:00", "2024-01-01T10:00:00Z"),
        (list[pydantic.AwareDatetime], "2024-01-01T10:00:00Z", "2024-01-01T10:00:00"),
        (list[datetime.time], "10:00:00", "23:59:60Z"),
        (list[datetime.date], "2000-02-29", "0000-02-29"),
        (list[Decimal], "12345678901234567890.10", "John"),
        (list[pydantic.UUID4], *(f"12345678-1234-4678-{x}234-567812345678" for x in "a1")),
        (list[pydantic.HttpUrl], "https://a.example.com:80/b?c=d#e", "https:///"),
        (list[complex], "1.5-2j", "John"),
    ],
)
def test_a_string_that_the_type_refuses_is_not_allowed(dtype: Any, good: str, bad: str) -> None:
    constraint = Constraint.of_type(dtype)
    constraint.parse(f'["{good}"]')
    assert not constraint.matches(f'["{bad}"]')


def test_the_keys_of_a_dict_are_of_its_type() -> None:
    whole = Constraint.of_type(dict[int, int])
    assert whole.parse('{"-12": 1}') == {-12: 1}
    assert not whole.matches('{"a": 1}')
    assert Constraint.of_type(dict[Color, int]).parse('{"red": 1}') == {Color.RED: 1}
    assert Constraint.of_type(dict[Level, int]).parse('{"10": 1}') == {Level.HIGH: 1}
    assert Constraint.of_type(dict[str, Plain]).parse('{"a": 2.5}') == {"a": Plain.A}
    assert "x-no-key" not in str(described(dict[str, Plain], "dtype")[0])
    assert not Constraint.of_type(dict[Color, int]).matches('{"blue": 1}')


def test_the_digits_of_a_decimal_are_kept() -> None:
    price = Constraint.of_type(PRICE)
    assert price.parse('"999.99"') == Decimal("999.99")
    assert not any(price.matches(f'"{text}"') for text in ("0", "1000", "0.001"))
    free = Constraint.of_type(Annotated[Decimal, Field(max_digits=5, decimal_places=2)])
    assert free.matches('"-999.99"')
    assert not any(free.matches(f'"{text}"') for text in ("-1000", "1000", "0.001"))


@pytest.mark.parametrize("text", ["0.12345678901234567890", "99999999999999.99", "1.10"])
@pytest.mark.parametrize("dtype", [list[Decimal], list[Annotated[Decimal, Field(gt=0)]]], ids=str)
def test_a_decimal_within_json_is_a_string_that_keeps_each_digit(dtype: Any, text: str) -> None:
    constraint = Constraint.of_type(dtype)
    assert str(constraint.parse(f'["{text}"]')[0]) == text
    assert not constraint.matches(f"[{text}]")  # of which a float would be read


finite = st.decimals(-2000, 2000, places=3).map(lambda number: number.normalize() + 0)  # no -0


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["ge", "gt", "le", "lt"]), finite, finite, st.sampled_from(["", "0", "1"]))
def test_a_bound_of_a_decimal_is_kept(
    name: str, bound: Decimal, number: Decimal, more: str
) -> None:
    constraint = Constraint.of_type(Annotated[Decimal, Field(**{name: bound})])  # type: ignore[arg-type]
    for one in (number, bound, -bound):
        text = f"{one:f}" + more * ("." in f"{one:f}")
        inside = getattr(Decimal(text), f"__{name}__")(bound)
        assert constraint.matches(f'"{text}"') == inside


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (Field(multiple_of=3), "multiple_of= of a Decimal is not supported: take decimal_places="),
        (Field(lt=float("inf")), "an infinite bound of a Decimal is not supported: leave it out"),
    ],
    ids=["multiple", "infinite"],
)
def test_a_bound_that_no_pattern_keeps_is_refused(field: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Constraint.of_type(Annotated[Decimal, field])

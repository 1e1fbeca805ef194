"""Types: what text they ask for, and the value that comes back."""

from __future__ import annotations

import datetime
import enum
import re
import sys
import typing
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, StringConstraints, TypeAdapter

from stemma.errors import ConstraintError, InvalidArgument
from stemma.lang.constraints import Constraint
from stemma.lang.constraints_types import described
from stemma.lang.gen import gen


class Color(enum.Enum):
    RED = "red"
    LIGHT_BLUE = "light blue"


Odd = enum.Enum("Odd", {"A": (1, 2)})


class Plain(enum.Enum):
    A = 2.5


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


class Leaf(TypedDict):
    a: int


class Row(Leaf):
    b: NotRequired[list[Leaf]]


class Tree(TypedDict):
    leaves: list[Tree]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Home(BaseModel):
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]


class Person(BaseModel):
    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=150)
    color: Color
    born: datetime.date | None = None
    child: Optional[Person] = None  # noqa: UP045 - as many people write it


class Even(BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def is_even(cls, number: int) -> int:
        if number % 2:
            raise ValueError("must be even")
        return number


@dataclass
class Point:
    x: int
    tags: list[str]
    y: float | None = None


@dataclass
class Counted:
    a: int
    count: int = field(init=False, default=3)


class Movie(TypedDict):
    title: str
    year: typing.NotRequired[int]


class Shelf(TypedDict):
    movies: list[Movie]
    best: Movie | None


UTC = datetime.UTC


@pytest.mark.parametrize(
    ("dtype", "text", "value"),
    [
        (int, "-12", -12),
        (int, "0", 0),
        (float, "-1.5e3", -1500.0),
        (float, "7", 7.0),
        (bool, "true", True),
        (bool, "False", False),
        (str, "any\ntext", "any\ntext"),
        ("int", "3", 3),
        (Decimal, "0.10", Decimal("0.10")),
        (datetime.date, "2024-02-29", datetime.date(2024, 2, 29)),
        (datetime.time, "23:59:01.5", datetime.time(23, 59, 1, 500_000)),
        (datetime.datetime, "2024-02-29T10:00:00Z", datetime.datetime(2024, 2, 29, 10, tzinfo=UTC)),
        (
            uuid.UUID,
            "12345678-1234-5678-1234-567812345678",
            uuid.UUID(int=0x12345678123456781234567812345678),
        ),
        (Literal["a b", 3, True, None], "a b", "a b"),
        (Literal["a b", 3, True, None], "3", 3),
        (Literal["a b", 3, True, None], "true", True),
        (Literal["a b", 3, True, None], "null", None),
        (Color, "light blue", Color.LIGHT_BLUE),
        (Level, "10", Level.HIGH),
        (list[int], "[1, 2]", [1, 2]),
        (int | None, "null", None),
        (int | None, "5", 5),
        (dict[str, bool], '{"é": true}', {"é": True}),
        (tuple[int, str], '[1, "a"]', (1, "a")),
        (int | str, '"5"', "5"),
        (list[Color], '["red"]', [Color.RED]),
        (list[datetime.date], '["2024-01-31"]', [datetime.date(2024, 1, 31)]),
        (Annotated[int, Field(ge=3, le=9)], "9", 9),
        (Point, '{"x": 1, "tags": ["a"]}', Point(1, ["a"])),
        (Movie, '{"title": "M"}', {"title": "M"}),
        (list[Movie], '[{"title": "M", "year": 1931}]', [{"title": "M", "year": 1931}]),
        (
            Shelf,
            '{"movies": [{"title": "M"}], "best": null}',
            {"movies": [{"title": "M"}], "best": None},
        ),
        (TypeAdapter(list[Point]), '[{"x": 1, "tags": [], "y": 0.5}]', [Point(1, [], 0.5)]),
        (
            Home,
            '{"pets": [{"kind": "dog", "good": true}]}',
            Home(pets=[Dog(kind="dog", good=True)]),
        ),
    ],
)
def test_a_text_becomes_a_value_of_the_type(dtype: Any, text: str, value: object) -> None:
    constraint = Constraint.of_type(dtype)
    read = constraint.parse(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (int, "012"),
        (int, "1.0"),
        (int, "-0"),
        (int, "1 "),
        (float, ".5"),
        (float, "nan"),
        (bool, "TRUE"),
        (datetime.date, "2023-02-29"),
        (datetime.date, "1900-02-29"),
        (datetime.time, "24:00:00"),
        (Literal["a", "b"], "ab"),
        (Color, "RED"),
        (list[int], "[1.5]"),
        (int | None, "None"),
        (Annotated[int, Field(ge=3, le=9)], "10"),
        (Point, '{"tags": [], "x": 1}'),  # the order of the fields
        (Point, '{"x": 1, "tags": [], "z": 1}'),  # no other fields
        (Home, '{"pets": [{"kind": "dog", "lives": 1}]}'),
    ],
)
def test_a_text_of_another_shape_is_not_taken(dtype: Any, text: str) -> None:
    assert not Constraint.of_type(dtype).matches(text)


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (None, "dtype=None: must be a type"),
        (3, "dtype=3: must be a type"),
        ([int], r"dtype=\[<class 'int'>\]: must be a type"),
        (lambda x: x, "must be a type"),
        ("foo", "dtype='foo': as a string it is one of int, float, bool, str"),
        (Literal["1", 1], r"dtype=Literal\['1', 1\]: '1' and 1 are both written '1'"),
        (enum.Enum("Empty", []), "dtype=Empty: it has no members"),
        (Odd, r"dtype=Odd: \(1, 2\) cannot be written bare"),
        (set[int], r"dtype=set\[int\]: at #/uniqueItems: 'uniqueItems' is not supported"),
        (object(), "dtype=<object"),
    ],
)
def test_a_type_that_cannot_be_is_refused_by_name(dtype: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Constraint.of_type(dtype)


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


def test_what_a_validator_refuses_is_an_error_with_its_words() -> None:
    constraint = Constraint.json_schema(Even)
    assert constraint.parse('{"number": 2}') == Even(number=2)
    with pytest.raises(ConstraintError, match="must be even"):
        constraint.parse('{"number": 3}')


@pytest.mark.parametrize("error", [KeyError("a"), TypeError("a"), RuntimeError("a")], ids=repr)
def test_whatever_a_validator_raises_is_told_where_the_value_is_read(error: Exception) -> None:
    def fail(_: int) -> int:
        raise error

    constraint = Constraint.of_type(list[Annotated[int, pydantic.AfterValidator(fail)]])
    with pytest.raises(ConstraintError, match=f"is not taken: {type(error).__name__}: ") as caught:
        constraint.parse("[1]")
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("dtype", "text", "value"),
    [
        (Optional[Row], '{"a":1}', {"a": 1}),  # noqa: UP045 - as many people write it
        (list[Row | None], '[null,{"a":1,"b":[]}]', [None, {"a": 1, "b": []}]),
        (Annotated[Row, "noted"], '{"a":1}', {"a": 1}),
        (Row, '{"a":1,"b":[{"a":2}]}', {"a": 1, "b": [{"a": 2}]}),
    ],
)
def test_a_typed_dict_of_typing_may_be_within_others(dtype: Any, text: str, value: Any) -> None:
    constraint = Constraint.of_type(dtype)
    assert constraint.parse(text) == value
    assert not constraint.matches('{"a":1,"c":2}')


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


def test_an_annotated_type_is_called_by_what_it_annotates() -> None:
    small = Annotated[int, Field(ge=1, le=5), pydantic.AfterValidator(lambda number: number)]
    assert Constraint.of_type(small).label == "dtype=Annotated[int, ...]"
    label = Constraint.of_type(list[small] | None).label  # type: ignore[valid-type]
    assert label == "dtype=list[Annotated[int, ...]] | None"
    with pytest.raises(ConstraintError, match=r"dtype=Annotated\[int, ...\]: '7' does not match"):
        Constraint.of_type(small).parse("7")


def test_constraints_of_one_type_are_equal() -> None:
    one = Annotated[int, Field(ge=1)]
    for dtype in (int, list[int], list[one], Person, Color, Literal["a", "b"], dict[str, Any]):  # type: ignore[valid-type]
        assert Constraint.of_type(dtype) == Constraint.of_type(dtype)
        assert hash(Constraint.of_type(dtype)) == hash(Constraint.of_type(dtype))
    other = enum.Enum("Color", {"RED": "red", "LIGHT_BLUE": "light blue"})
    assert Constraint.of_type(Color) != Constraint.of_type(other)
    assert Constraint.of_type(list[Color]) != Constraint.of_type(list[other])  # type: ignore[valid-type]


def test_white_space_that_means_nothing_is_refused_of_types_without_any_too() -> None:
    for dtype in (int, list[int]):
        with pytest.raises(InvalidArgument, match="whitespace='none': must be one of flexible"):
            Constraint.of_type(dtype, whitespace="none")
    for dtype in (int, Color, Literal["a", "b"], datetime.date):
        said = "whitespace='compact' is that of JSON, and this is written bare: leave it out"
        with pytest.raises(InvalidArgument, match=said):
            Constraint.of_type(dtype, whitespace="compact")
        with pytest.raises(InvalidArgument, match=f"gen: dtype=.*: {said}"):
            gen("x", dtype=dtype, whitespace="compact")
    with pytest.raises(InvalidArgument, match="whitespace='compact' is that of JSON: it needs"):
        gen("x", dtype=str, whitespace="compact")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there pydantic takes it")
def test_a_typed_dict_of_typing_that_contains_itself_is_refused_with_a_remedy() -> None:
    with pytest.raises(InvalidArgument, match=r"dtype=Tree: .*must be one of typing_ext"):
        Constraint.of_type(list[Tree])


def test_a_number_that_python_cannot_hold_is_an_error() -> None:
    with pytest.raises(ConstraintError, match="larger than a float can be"):
        Constraint.of_type(float).parse("99e307")
    most = sys.get_int_max_str_digits()
    whole = Constraint.of_type(int)
    assert whole.parse("-" + "9" * most) < 0
    assert not whole.matches("9" * (most + 1))
    for dtype in (list[float], list[Any], dict[str, float | None]):
        text = '{"a": 1e999}' if dtype == dict[str, float | None] else "[1e999]"
        with pytest.raises(ConstraintError, match="1e999 is larger than a float can be"):
            Constraint.of_type(dtype).parse(text)
    with pytest.raises(ConstraintError, match="1e999 is larger than a float can be"):
        Constraint.json_schema({"type": "number"}).parse("1e999")


def test_a_model_is_a_schema_too_and_may_refer_to_itself() -> None:
    constraint = Constraint.json_schema(Person, whitespace="compact")
    text = (
        '{"name":"Ada","age":36,"color":"red","child":{"name":"B","age":1,"color":"light blue",'
        '"born":"2024-02-29"}}'
    )
    child = Person(name="B", age=1, color=Color.LIGHT_BLUE, born=datetime.date(2024, 2, 29))
    assert constraint.parse(text) == Person(name="Ada", age=36, color=Color.RED, child=child)
    assert constraint.forced_prefix() == '{"name":"'
    for one in constraint.examples(10):
        assert isinstance(constraint.parse(one), Person)


@pytest.mark.parametrize(
    "dtype", [datetime.date, datetime.datetime, datetime.time, uuid.UUID, Decimal, float, Level]
)
def test_every_example_can_be_read(dtype: type) -> None:
    constraint = Constraint.of_type(dtype)
    for text in constraint.examples(40, seed=1):
        assert isinstance(constraint.parse(text), dtype)


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


@settings(max_examples=200, deadline=None)
@given(st.dates())
def test_every_date_is_taken(date: datetime.date) -> None:
    assert Constraint.of_type(datetime.date).parse(date.isoformat()) == date


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False, max_value=1e307, min_value=-1e307))
def test_every_float_is_taken_as_python_writes_it(number: float) -> None:
    assert Constraint.of_type(float).parse(repr(number)) == number
    assert Constraint.of_type(list[float]).parse(f"[{number!r}]") == [number]

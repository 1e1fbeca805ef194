"""Types: what text they ask for, and the value that comes back."""

from __future__ import annotations

import datetime
import enum
import sys
import typing
import uuid
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter

from stemma.errors import ConstraintError, InvalidArgument
from stemma.lang.constraints import Constraint
from stemma.lang.gen import gen


class Color(enum.Enum):
    RED = "red"
    LIGHT_BLUE = "light blue"


Odd = enum.Enum("Odd", {"A": (1, 2)})


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


@settings(max_examples=200, deadline=None)
@given(st.dates())
def test_every_date_is_taken(date: datetime.date) -> None:
    assert Constraint.of_type(datetime.date).parse(date.isoformat()) == date


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False, max_value=1e307, min_value=-1e307))
def test_every_float_is_taken_as_python_writes_it(number: float) -> None:
    assert Constraint.of_type(float).parse(repr(number)) == number
    assert Constraint.of_type(list[float]).parse(f"[{number!r}]") == [number]

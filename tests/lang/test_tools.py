"""Tools: what is told of a function, what a call to it may be, what is refused."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as hs
from pydantic import AfterValidator, BaseModel, Field

import stemma as st
from stemma.lang.tools import CallForm, Tool, ToolCall, told_error, told_result, tools_constraint
from stemma.lang.tools_docstrings import told_by


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Place(BaseModel):
    city: str
    floor: int = 0


def price(thing: Literal["lamp", "chair"], count: int = 1, colour: Colour = Colour.RED) -> int:
    """What a thing costs.

    In euros.

    Args:
        thing: which one
            of ours
        count (int): how many
    """
    return 34 * count


def send(place: Place, words: list[str], urgent: bool | None = None) -> None:
    """Send some words."""


# A function as a tool


def test_a_tool_tells_name_description_and_parameters() -> None:
    tool = Tool.of(price)
    assert (tool.name, tool.description) == ("price", "What a thing costs.\n\nIn euros.")
    assert tool.parameters["properties"] == {
        "thing": {"type": "string", "enum": ["lamp", "chair"], "description": "which one of ours"},
        "count": {"type": "integer", "description": "how many", "default": 1},
        "colour": {"$ref": "#/$defs/Colour", "default": "red"},
    }
    assert tool.parameters["required"] == ["thing"]
    assert tool.parameters["additionalProperties"] is False
    assert tool.schema()["function"]["parameters"] is tool.parameters
    assert Tool.of(tool) is tool


def test_arguments_come_typed_and_those_left_out_stay_out() -> None:
    arguments = Tool.of(price).constraint.parse('{"thing": "lamp", "colour": "blue"}')
    assert arguments == {"thing": "lamp", "colour": Colour.BLUE}
    text = '{"place": {"city": "Ur"}, "words": ["a", "b"], "urgent": null}'
    arguments = Tool.of(send).constraint.parse(text)
    assert arguments == {"place": Place(city="Ur"), "words": ["a", "b"], "urgent": None}


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"thing": "desk"}',
        '{"thing": "lamp", "count": "2"}',
        '{"thing": "lamp", "more": 1}',
        '{"thing":"lamp"}',
        '{"thing": "lamp"} ',
    ],
)
def test_arguments_that_do_not_fit_are_no_text_of_it(text: str) -> None:
    assert not Tool.of(price).constraint.matches(text)


def test_a_function_without_parameters_is_called_with_none() -> None:
    def now() -> str:
        return "noon"

    constraint = tools_constraint([now])
    assert constraint.forced_prefix() == "now({})"
    assert constraint.parse("now({})").arguments == {}


def test_a_method_is_a_tool_without_its_instance() -> None:
    class Shop:
        def sell(self, thing: str) -> str:
            return f"{id(self)} {thing}"

    first, second = Shop(), Shop()
    for shop in (first, second):
        tool = Tool.of(shop.sell)
        assert list(tool.parameters["properties"]) == ["thing"]
        assert tool.function(thing="x") == f"{id(shop)} x"
    said = "tool sell: it is a method without its instance: take that of one, as shop.sell"
    with pytest.raises(st.errors.InvalidArgument, match=said):
        Tool.of(Shop.sell)


def test_annotations_may_say_more() -> None:
    def grade(
        points: Annotated[int, Field(ge=0, le=10, description="out of ten")], note: str = "none"
    ) -> None:
        """:param points: not this one
        :param note: a remark"""

    schema = Tool.of(grade).parameters["properties"]
    assert schema["note"]["description"] == "a remark"
    assert schema["points"]["maximum"] == 10
    assert Tool.of(grade).constraint.matches('{"points": 10}')
    assert not Tool.of(grade).constraint.matches('{"points": 11}')


def test_a_tool_is_made_once_and_keeps_no_function_alive() -> None:
    def make() -> Callable[[int], int]:
        def double(x: int) -> int:
            return 2 * x

        return double

    function = make()
    assert Tool.of(function).constraint is Tool.of(function).constraint
    shape = tools_constraint([function])
    assert shape == tools_constraint([function])
    st.gen("x", constraint=shape)  # which is remembered
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None


def test_a_decimal_comes_with_each_of_its_digits() -> None:
    def pay(amount: Decimal) -> None: ...

    call = tools_constraint([pay]).parse('pay({"amount": "99999999999999.990"})')
    assert str(call.arguments["amount"]) == "99999999999999.990"


def test_a_default_of_the_type_is_taken() -> None:
    def many(
        a: float = 1,
        b: Decimal = Decimal(0),
        c: Colour | None = None,
        d: Place = Place(city="Ur"),  # noqa: B008
        e: float = float("nan"),
        f: Any = "x",
        g: Annotated[str, Field(max_length=3)] = "abc",
    ) -> None: ...

    assert "required" not in Tool.of(many).parameters


# What is refused


def of_any_number(*things: int) -> None: ...
def of_any_names(**things: int) -> None: ...
def of_no_type(thing) -> None: ...  # type: ignore[no-untyped-def]
def by_position(thing: int, /) -> None: ...
def of_unknown(thing: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def of_time(when: time.struct_time) -> None: ...
def of_set(things: set[int]) -> None: ...
def one_by_one() -> Iterator[int]:
    yield 1


def of_word(a: int = "x") -> None: ...  # type: ignore[assignment]
def of_digit(a: int = "3") -> None: ...  # type: ignore[assignment]
def of_none(a: list[int] = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013
def of_value(a: Colour = "red") -> None: ...  # type: ignore[assignment]


async def one_after_the_other() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (of_any_number, "of_any_number: 'things' takes any number .* take one list"),
        (of_any_names, "of_any_names: 'things' takes any number .* list or dict instead"),
        (of_no_type, "of_no_type: 'thing' has no annotation.*`thing: str`"),
        (by_position, "by_position: 'thing' is positional only.*leave out the `/`"),
        (of_unknown, "of_unknown: name 'Nowhere' is not defined.*imported there"),
        (of_time, "of_time: when=struct_time: pydantic knows no JSON for it"),
        (of_set, "of_set: things: at #/uniqueItems"),
        (of_word, "of_word: the default of 'a', 'x', is no int: write another one"),
        (of_digit, "of_digit: the default of 'a', '3', is no int"),
        (of_none, r"the default of 'a', None, is no list.int.: write a: list.int. \| None = None"),
        (of_value, "of_value: the default of 'a', 'red', is no Colour"),
        (one_by_one, "one_by_one: .*`yield`.*return a list"),
        (one_after_the_other, "one_after_the_other: .*`yield`"),
        (lambda x: x, "lambda has no name.*`def`"),
        (Place, "the class Place is no function"),
        (functools.partial(price, "lamp"), "partial.* is no function: write a `def`"),
        (print, "print.* is no function"),
        ("price", "'price' is no function"),
    ],
)
def test_what_no_schema_can_tell_is_refused_with_the_remedy(function: Any, said: str) -> None:
    with pytest.raises(st.errors.InvalidArgument, match=said):
        Tool.of(function)


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([], "at least one"),
        (price, "must be a list of functions"),
        ("price", "must be a list of functions"),
        ([price, price], "two are named 'price'"),
    ],
)
def test_what_is_no_list_of_tools_is_refused(tools: Any, said: str) -> None:
    with pytest.raises(st.errors.InvalidArgument, match=said):
        tools_constraint(tools)


# A call


def test_the_value_of_a_call_is_its_tool_and_its_arguments() -> None:
    constraint = tools_constraint([price, send])
    assert constraint.label == "tools=[price, send]"
    text = 'price({"thing": "chair", "count": 3})'
    assert constraint.parse(text) == ToolCall("price", {"thing": "chair", "count": 3}, text)
    assert not constraint.matches('prize({"thing": "chair"})')
    assert not constraint.matches('send({"thing": "chair"})')
    assert constraint.prefix_ok("pri")


def test_of_names_that_begin_alike_the_right_one_is_found() -> None:
    def pay(x: int) -> None: ...
    def pay_back(x: str) -> None: ...

    constraint = tools_constraint([pay, pay_back])
    assert constraint.parse('pay_back({"x": "1"})').name == "pay_back"
    assert constraint.parse('pay({"x": 1})').name == "pay"


forms = hs.builds(
    CallForm,
    between=hs.sampled_from(["(", '", "arguments": ', "\n```json\n"]),
    after=hs.sampled_from(["", ")", '}\n</tool_call>"\\']),
    whitespace=hs.sampled_from(["spaced", "compact", "flexible"]),
)


@given(forms, hs.integers(0, 20))
def test_every_example_of_a_form_is_a_call(form: CallForm, seed: int) -> None:
    constraint = tools_constraint([price, send], form)
    for text in constraint.examples(2, seed=seed):
        call = constraint.parse(text)
        assert call.name in ("price", "send")
        assert call.text == text
        assert text.startswith(call.name + form.between)
        assert text.endswith(form.after)


def even(x: int) -> int:
    if x % 2:
        raise ValueError("odd")
    return x


def test_arguments_that_a_validator_refuses_are_an_error_of_the_call() -> None:
    def half(x: Annotated[int, AfterValidator(even)]) -> int:
        return x // 2

    constraint = tools_constraint([half])
    assert constraint.parse('half({"x": 4})').error is None
    call = constraint.parse('half({"x": 3})')
    assert call.arguments == {"x": 3}
    assert call.error == "ValidationError: x: Value error, odd"


# What a model is told


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("a b", "a b"),
        ("", ""),
        (None, None),
        (34, "34"),
        (True, "true"),
        ([1, {"ä": 2}], '[1, {"ä": 2}]'),
        (Place(city="Ur"), '{"city": "Ur", "floor": 0}'),
        (Point(1), '{"x": 1}'),
        (Colour.RED, "red"),
        (Decimal("1.50"), "1.50"),
        (float("nan"), "NaN"),
        ([float("inf"), {"x": -float("inf")}], '[Infinity, {"x": -Infinity}]'),
    ],
)
def test_a_result_is_told_as_text_or_as_json(result: Any, told: str | None) -> None:
    assert told_result(result) == told


def test_what_json_cannot_tell_is_told_as_python_writes_it() -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd one"

    assert told_result([Odd()]) == '["odd one"]'


@pytest.mark.parametrize(
    ("result", "kind"),
    [(object(), "object"), ([{"a": price}], "function"), ((object().__str__,), "method-wrapper")],
    ids=["object", "within", "method"],
)
def test_what_python_writes_by_its_address_cannot_be_told(result: Any, kind: str) -> None:
    said = f"JSON has no form for a value of {kind}"
    with pytest.raises(st.errors.InvalidArgument, match=said) as caught:
        told_result(result)
    assert "0x" not in str(caught.value)


def test_a_default_that_json_does_not_have_is_not_told() -> None:
    def wait(seconds: float = float("inf")) -> None:
        """A tool."""

    assert "default" not in Tool.of(wait).parameters["properties"]["seconds"]
    assert tools_constraint([wait]).matches("wait({})")


def test_what_seems_not_meant_in_a_schema_is_warned_of_once() -> None:
    def most(x: int) -> None:
        """A tool."""

    odd = Field(json_schema_extra={"exclusiveMinimun": 3})
    most.__annotations__["x"] = Annotated[int, odd]
    with pytest.warns(st.ConstraintWarning, match=r"tool most.*exclusiveMinimun") as warned:
        [tools_constraint([most]) for _ in "ab"]
    assert [Path(each.filename).name for each in warned] == ["test_tools.py"]


def test_an_error_is_told_by_its_type_and_text() -> None:
    assert (
        told_error(ZeroDivisionError("division by zero")) == "ZeroDivisionError: division by zero"
    )
    assert told_error(KeyError()) == "KeyError"
    assert told_error(ValueError("half \ud800")) == "ValueError: half ?"


# Docstrings

GOOGLE = """Do it.

Twice: once now.

Args:
    a: the first
        of them
    b (int, optional): the second

Returns:
    a: nothing
"""
NUMPY = """Do it.

Twice: once now.

Parameters
----------
a : str
    the first
    of them
b : int, optional
    the second

Returns
-------
a : str
"""
SPHINX = """Do it.

Twice: once now.

:param a: the first
    of them
:param int b: the second
:returns: a
"""
PLAIN = """Do it.

Twice: once now.

a: the first
    of them
b: the second
"""


@pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, SPHINX, PLAIN])
def test_a_docstring_describes_parameters_in_the_usual_ways(docstring: str) -> None:
    description, parameters = told_by(docstring, ["a", "b"])
    assert description == "Do it.\n\nTwice: once now."
    assert parameters == {"a": "the first of them", "b": "the second"}


@pytest.mark.parametrize("docstring", [None, "", "Do it."])
def test_a_docstring_may_say_little(docstring: str | None) -> None:
    assert told_by(docstring, ["a"]) == (docstring or "", {})

"""What a checkpoint keeps of values of a program's own classes, and of dates and the like."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
import sys
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, RootModel
from pydantic.dataclasses import dataclass as pydantic_dataclass

import stemma as st
from stemma.interpreter.json_values import decode, encode
from stemma.lang.errors import InvalidArgument

T = TypeVar("T")


class Colour(Enum):
    RED = "r"
    BLUE = "b"


class Right(Flag):
    READ = 1
    WRITE = 2


class Size(IntEnum):
    SMALL = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: float
    near: list[Point]
    colour: Colour = Colour.RED


@dataclasses.dataclass
class Counted:
    x: int
    after: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.after = self.x + 1

    @cached_property
    def double(self) -> int:
        return 2 * self.x


class Pair(NamedTuple):
    left: int
    right: str = "r"


Loose = collections.namedtuple("Loose", "a b")


class Event(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    when: datetime.datetime
    sizes: tuple[int, ...]
    named: int = Field(alias="other")
    at: Point | None = None
    colour: Colour = Colour.BLUE
    _told: int = PrivateAttr(default=3)


class Numbers(RootModel[list[int]]):
    pass


class Doubled(BaseModel):
    x: Annotated[int, AfterValidator(lambda x: 2 * x)]


class Box(BaseModel, Generic[T]):
    content: T


class Outer:
    class Inner(BaseModel):
        x: int


@pydantic_dataclass(config=ConfigDict(strict=True))
class Strict:
    x: int
    named: int = Field(alias="other", default=2)


UTC = datetime.UTC
EVENT = Event(
    when=datetime.datetime(2020, 1, 1, tzinfo=UTC),
    sizes=(1, 2),
    other=3,
    more=[Colour.RED],  # type: ignore[call-arg]
    at=Point(1, [Point(2.5, [])]),
)
READ = Event.model_validate_json('{"when": "2020-01-01T00:00:00Z", "sizes": [], "other": 2}')

VALUES = [
    Colour.RED,
    Right.READ,
    Right.READ | Right.WRITE,
    Right(0),
    Size.SMALL,
    Point(1, [Point(float("inf"), [], Colour.BLUE)]),
    Counted(4),
    Pair(1),
    Loose(1, [2]),
    EVENT,
    READ,
    Numbers([1]),
    Doubled(x=2),
    Box(content=1),
    Box[int](content=1),
    Outer.Inner(x=1),
    Strict(x=1),
    datetime.date(2020, 1, 2),
    datetime.time(1, 2, 3, 4),
    datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=-3))),
    READ.when.timetz(),
    Decimal("1.20"),
    Decimal("-Infinity"),
    UUID(int=5),
    {Colour.RED: [Pair(1)], "$": {datetime.date(2020, 1, 2)}},
]


def written(value: Any) -> Any:
    return json.loads(json.dumps(encode(value, "it"), allow_nan=False))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    back = decode(written(value))
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value)
    assert written(back) == written(value)


def test_what_is_beside_the_fields_of_a_model_comes_back() -> None:
    model = EVENT.model_copy()
    object.__setattr__(model, "__pydantic_private__", {"_told": 7})
    back = decode(written(model))
    assert back._told == 7
    assert back.model_extra == {"more": [Colour.RED]}
    assert back.model_fields_set == {"when", "sizes", "named", "at", "more"}


def test_a_cached_property_is_computed_anew() -> None:
    value = Counted(2)
    assert value.double == 4
    assert vars(decode(written(value))) == {"x": 2, "after": 3}


def in_a_function() -> Any:
    class Local(BaseModel):
        x: int

    return Local(x=1)


def with_more() -> Counted:
    value = Counted(1)
    value.more = 1  # type: ignore[attr-defined]
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (in_a_function(), r"it: .*in_a_function.<locals>.Local is .*find again.*top of a module"),
        (with_more(), r"it is a .*Counted with 'more', which is no field"),
        (Point("a", []), r"it is a .*Point, which its class would not make again(?s:.*)x\b"),  # type: ignore[arg-type]
        (Box(content=b"bytes"), r"it is a builtins.bytes"),
        (datetime.datetime(2020, 1, 1, tzinfo=ZoneInfo("UTC")), r"fixed offset"),
        (datetime.time(1, fold=1), r"fold=1"),
    ],
    ids=["local", "more", "refused", "inside", "zone", "fold"],
)
def test_what_would_not_come_back_is_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        encode([value], "it")


@pytest.mark.parametrize(
    ("name", "now", "said"),
    [
        ("Pair", None, "no enum, pydantic model, dataclass or named tuple any more"),
        ("Pair", Path, "no enum, pydantic model, dataclass or named tuple any more"),
        ("Colour", Enum("Colour", ["GREEN"]), "KeyError: 'RED'"),
        ("Counted", Strict, "no field 'after'"),
        ("Pair", Loose, "no field 'left'"),
    ],
)
def test_a_class_that_has_changed_is_named(
    name: str, now: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"Pair": Pair(1), "Colour": Colour.RED, "Counted": Counted(1)}
    line = written(kept[name])
    monkeypatch.setattr(sys.modules[__name__], name, now)
    with pytest.raises(ValueError, match=said):
        decode(line)


def test_nothing_is_imported_for_a_value() -> None:
    line = {"$": "object", "class": ["antigravity", "Any"], "of": "x"}
    with pytest.raises(ValueError, match=r"antigravity .*not imported"):
        decode(line)
    assert "antigravity" not in sys.modules


def find(x: Point) -> Pair:
    """A tool."""
    return Pair(int(x.x))


@st.function
def typed(s: st.ProgramState, number: int) -> Any:
    s += f"{number}: " + st.gen("event", dtype=Outer.Inner) + st.gen("colour", dtype=Colour)
    s += st.gen("several", dtype=list[Strict]) + st.gen("day", dtype=datetime.date)
    s.call([find])
    return s["event"], s["colour"]


ANSWERS = [
    '{"x":1}',
    "b",
    '[{"x":1,"other":3}]',
    "2020-02-03",
    'find({"x": {"x": 2.5, "near": [], "colour": "b"}})',
]


def test_typed_variables_of_a_batch_are_read_from_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    backend = st.MockBackend(ANSWERS)
    (first,) = typed.run_batch([(1,)], backend=backend, checkpoint=path)
    (again,) = typed.run_batch([(1,)], backend=st.MockBackend([]), checkpoint=path)
    assert again.value == first.value == (Outer.Inner(x=1), Colour.BLUE)
    for name in ("event", "colour", "several", "day", "call"):
        assert again[name] == first[name]
        assert again.raw(name) == first.raw(name)
    assert again["call"].result == Pair(2)
    assert type(again["call"].arguments["x"]) is Point


def test_the_values_of_samples_that_were_not_cut_off_are_kept(tmp_path: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x", dtype=Outer.Inner, n=2, max_tokens=1)

    def read(state: st.ProgramState) -> Any:
        with pytest.raises(st.errors.Truncated) as caught:
            state["x"]
        return caught.value.values, caught.value.partial

    texts = iter(['{"x":1}', '{"x": 1 }'])
    path = tmp_path / "run.jsonl"
    states = [
        program.run_batch(
            [{}], backend=st.MockBackend(lambda prompt, params: next(texts)), checkpoint=path
        )[0]
        for _ in "ab"
    ]
    assert read(states[0]) == read(states[1])
    assert read(states[1])[0] == (Outer.Inner(x=1), None)


def local_types() -> dict[str, Any]:
    class Model(BaseModel):
        x: int

    class Choice(Enum):
        A = "a"

    class Letter(StrEnum):
        A = "a"

    class Two(NamedTuple):
        one: int

    def use(it: Choice) -> None:
        """A tool."""

    use.__annotations__["it"] = Choice  # which its module does not know
    return {
        "Model": st.gen("it", dtype=Model),
        "Choice": st.gen("it", dtype=Choice),
        "Two": st.gen("it", dtype=dict[str, list[Two]]),
        "n": st.gen("it", dtype=Model, n=2),
        "Literal": st.gen("it", dtype=list[Literal[Letter.A]]),
        "capture": st.gen(
            grammar=st.seq("so: ", st.capture("it", st.Constraint.json_schema(Model)))
        ),
        "tool": [use],
    }


@pytest.mark.parametrize("which", list(local_types()))
def test_a_class_inside_of_a_function_is_refused_before_the_model_writes(
    which: str, tmp_path: Path
) -> None:
    wanted = local_types()[which]

    @st.function
    def program(s: st.ProgramState) -> None:
        if which == "tool":
            s.call(wanted, "it")
        else:
            s += "say " + wanted

    backend = st.MockBackend([])
    with pytest.raises(InvalidArgument, match=r"variable .* of program: .*<locals>.* find again"):
        program.run_batch([{}], backend=backend, checkpoint=tmp_path / "run.jsonl")
    assert backend.calls == []


def test_what_is_not_kept_may_be_of_any_class(tmp_path: Path) -> None:
    model = local_types()["Model"]

    @st.function
    def program(s: st.ProgramState) -> Any:
        branch = s.fork(1)[0]
        branch += model
        return branch["it"].x

    path = tmp_path / "run.jsonl"
    texts = st.MockBackend(['{"x":7}'])
    for _ in "ab":
        assert program.run_batch([{}], backend=texts, checkpoint=path)[0].value == 7


def test_dicts_take_the_place_of_a_class_as_the_remedy_says(tmp_path: Path) -> None:
    class Model(BaseModel):
        x: int

    @st.function
    def program(s: st.ProgramState) -> Any:
        s += st.gen("it", json_schema=Model.model_json_schema())
        return Model.model_validate(s["it"]).x

    path = tmp_path / "run.jsonl"
    texts = st.MockBackend(['{"x":7}'])
    for _ in "ab":
        (state,) = program.run_batch([{}], backend=texts, checkpoint=path)
        assert (state["it"], state.value) == ({"x": 7}, 7)


def test_an_answer_without_a_name_is_no_matter_of_the_checkpoint(tmp_path: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen(reasoning="why", reasoning_marks=("<t>", "</t>"))

    backend = st.MockBackend(["<t>so</t>yes"])
    (state,) = program.run_batch([{}], backend=backend, checkpoint=tmp_path / "run.jsonl")
    assert state["why"] == "so"

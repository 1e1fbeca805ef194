"""What a Python type asks of a text, and how the text becomes a value of it.

Used by `constraints.py`. A number, a truth value, a date, a `Literal` and an `Enum` are written
bare, as people write them; everything else is JSON, described and read by pydantic.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from decimal import Decimal
from enum import Enum
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)
from uuid import UUID

from stemma.lang.constraints_formats import FORMATS, INTEGER, NUMBER
from stemma.lang.constraints_regex import any_of
from stemma.lang.errors import InvalidArgument

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

Reader = Callable[[str], Any]

_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_ZONE = r"(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"


def _truth(text: str) -> bool:
    return text in ("true", "True")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is larger than a float can be")
    return value


def loads(text: str) -> Any:
    """What JSON says. Raises ValueError also for numbers and nesting that Python cannot hold."""
    try:
        return json.loads(text, parse_float=_float)
    except RecursionError as error:
        raise ValueError("it is nested deeper than Python reads JSON") from error


@dataclass(frozen=True)
class _Read:
    """Reads JSON as a type. Numbers that are larger than a float can be are an error, not inf. Two
    of one type are equal."""

    dtype: object = field(hash=False)
    adapter: TypeAdapter[Any] = field(compare=False)

    def __call__(self, text: str) -> Any:
        value = self.adapter.validate_json(text)
        loads(text)
        return value


@dataclass(frozen=True)
class _Member:
    """Reads what is written bare as the member of a Literal or an Enum."""

    values: dict[str, Any] = field(hash=False)

    def __call__(self, text: str) -> Any:
        return self.values[text]


_BARE: dict[object, tuple[str, Reader]] = {
    int: (INTEGER, int),
    float: (NUMBER, _float),
    bool: (r"(?:true|false|True|False)", _truth),
    str: (r"(?s:.*)", str),
    Decimal: (r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?", Decimal),
    datetime.date: (FORMATS["date"], datetime.date.fromisoformat),
    datetime.time: (rf"{_CLOCK}{_ZONE}", datetime.time.fromisoformat),
    datetime.datetime: (
        rf"{FORMATS['date']}[T ]{_CLOCK}{_ZONE}",
        datetime.datetime.fromisoformat,
    ),
    UUID: (FORMATS["uuid"], UUID),
}
_NO_TYPES = (int, float, str, bytes, list, tuple, set, dict, types.FunctionType, types.MethodType)
_NAMES = {"int": int, "float": float, "bool": bool, "str": str}


def bare(dtype: object) -> tuple[str, Reader] | None:
    """The regular expression and the reader of a type that is written bare; None for the others.

    Raises InvalidArgument for a Literal or an Enum whose members cannot be told apart in text.
    """
    if isinstance(dtype, str):
        if dtype not in _NAMES:
            raise InvalidArgument(f"dtype={dtype!r}: as a string it is one of {', '.join(_NAMES)}")
        dtype = _NAMES[dtype]
    if isinstance(dtype, type) and dtype in _BARE:
        return _BARE[dtype]
    if get_origin(dtype) is Literal:
        return _one_of(dtype, [(_written(dtype, value), value) for value in get_args(dtype)])
    if isinstance(dtype, type) and issubclass(dtype, Enum):
        return _one_of(dtype, [(_written(dtype, member.value), member) for member in dtype])
    return None


def _written(dtype: object, value: object) -> str:
    if isinstance(value, Enum):  # in a Literal
        value = value.value
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str | int | float):
        return str(value)
    raise InvalidArgument(
        f"dtype={name_of(dtype)}: {value!r} cannot be written bare; "
        "its members are strings and numbers"
    )


def _one_of(dtype: object, members: list[tuple[str, Any]]) -> tuple[str, Reader]:
    values: dict[str, Any] = {}
    for text, value in members:
        if text in values:
            raise InvalidArgument(
                f"dtype={name_of(dtype)}: {values[text]!r} and {value!r} are both written {text!r}"
            )
        values[text] = value
    if not values:
        raise InvalidArgument(f"dtype={name_of(dtype)}: it has no members, so nothing matches")
    return any_of(values), _Member(values)


def described(dtype: object, named: str) -> tuple[dict[str, Any], Reader]:
    """The JSON Schema and the reader of a type, or of a TypeAdapter, that is written as JSON.

    Objects with fields take no others, unless the type says so. Raises InvalidArgument for what
    pydantic cannot describe.
    """
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    from stemma.lang.constraints_pydantic import Narrow, finished

    is_value = isinstance(dtype, _NO_TYPES) or (is_dataclass(dtype) and not isinstance(dtype, type))
    if dtype is None or is_value:
        raise InvalidArgument(
            f"{named}={dtype!r:.100}: must be a type, as int, list[str] or a model"
        )
    try:
        adapter = (
            dtype if isinstance(dtype, TypeAdapter) else TypeAdapter(_known_to_pydantic(dtype))
        )
        schema = adapter.json_schema(schema_generator=Narrow)
    except PydanticUserError as error:
        raise InvalidArgument(_unknown(dtype, named, error)) from error
    except (NameError, TypeError, RecursionError) as error:
        raise InvalidArgument(f"{named}={name_of(dtype)}: {error}") from error
    finished(schema, f"{named}={name_of(dtype)}")
    return schema, _Read(dtype, adapter)


def _unknown(dtype: object, named: str, error: PydanticUserError) -> str:
    """Why pydantic has no schema of a type, or of what is none."""
    said = str(error).split("\n")[0]
    if "typing.Never" in said or "typing.NoReturn" in said:
        return f"{named}={name_of(dtype)}: Never has no values, so nothing matches"
    if error.code != "schema-for-unknown-type":
        return f"{named}={name_of(dtype)}: {said}"
    if not isinstance(dtype, type) and get_origin(dtype) is None:
        return f"{named}={dtype!r:.100}: must be a type, as int or a model, not a value of one"
    found = re.search(r"schema for (.*?)\. Set", said)
    what = "it" if found is None or isinstance(dtype, type) else found[1]
    return (
        f"{named}={name_of(dtype)}: pydantic knows no JSON for {what}: use a model, a dataclass or "
        "types as int and list[str]"
    )


def _known_to_pydantic(dtype: Any, within: tuple[object, ...] = ()) -> Any:
    """A TypedDict of `typing` as one of `typing_extensions`, which pydantic asks for before Python
    3.12; also within list[...] and the like, and in the fields of another one.

    within: those that it is in.
    """
    if sys.version_info >= (3, 12):
        return dtype
    if is_typeddict(dtype) and type(dtype).__module__ == "typing":
        from typing_extensions import TypedDict

        if dtype in within:
            raise InvalidArgument(
                f"dtype={name_of(dtype)}: a TypedDict that contains itself must be one of "
                "typing_extensions before Python 3.12"
            )
        hints = get_type_hints(dtype, include_extras=True)
        fields = {key: _known_to_pydantic(hint, (*within, dtype)) for key, hint in hints.items()}
        return TypedDict(dtype.__name__, fields, total=dtype.__total__)  # type: ignore[operator]

    def known(inside: object) -> Any:
        return _known_to_pydantic(inside, within)

    if isinstance(dtype, types.UnionType):
        return functools.reduce(operator.or_, map(known, dtype.__args__))
    if type(dtype) is types.GenericAlias:
        origin: Any = dtype.__origin__
        return origin[tuple(map(known, dtype.__args__))]
    if get_origin(dtype) is not None and hasattr(dtype, "copy_with"):  # of typing, as Optional[...]
        return dtype.copy_with(tuple(map(known, dtype.__args__)))
    return dtype


def is_type(value: object) -> bool:
    """Whether `json_schema=` was given a type rather than a schema."""
    if isinstance(value, type) or get_origin(value) is not None:
        return True
    return isinstance(value, types.UnionType) or (
        not isinstance(value, Mapping | str | bool) and type(value).__name__ == "TypeAdapter"
    )


def name_of(dtype: object) -> str:
    """A type as it is written: `int`, `list[int]`, `Person`."""
    if get_origin(dtype) is None and isinstance(dtype, type):
        return dtype.__qualname__.split("<locals>.")[-1]
    if get_origin(dtype) is Annotated:  # what it is annotated with may be of any length
        return f"Annotated[{name_of(get_args(dtype)[0])}, ...]"
    told = repr(dtype)
    for inside in get_args(dtype):
        told = told.replace(repr(inside), name_of(inside))
    return told.replace("typing.", "")

"""Python values as JSON and back again, exactly: what a checkpoint holds of a finished state.

Used by `finished.py` and `checkpoint.py`; values of a program's own classes are taken apart by
`json_objects.py`. What would come back as something else is refused.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import fields
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

from stemma.backend.base import ChoiceScore, TokenLogprob, Usage
from stemma.interpreter.json_objects import (
    class_named,
    is_taken_apart,
    put_together,
    taken_apart,
)
from stemma.interpreter.meta import ChoiceMeta, Meta, ScoreMeta, SelectMeta
from stemma.lang.choices import ChoicesMethod
from stemma.lang.errors import InvalidArgument
from stemma.lang.tools import ToolCall

# Our own values that variables and their meta consist of.
_RECORDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (ChoiceMeta, ChoiceScore, Meta, ScoreMeta, SelectMeta, TokenLogprob, Usage)
}
_COLLECTIONS: dict[str, type[Any]] = {each.__name__: each for each in (tuple, set, frozenset)}
# Written as text: how that is read.
_TEXTS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "Decimal": Decimal,
    "UUID": UUID,
}
_PYDANTIC = {"pydantic time": datetime.time, "pydantic datetime": datetime.datetime}
_TEXT_KINDS = (datetime.date, datetime.time, datetime.datetime, Decimal, UUID)
# Stands for what JSON has no form for: {"$": kind, "of": content}; a value of a program's own class
# as {"$": "object", "class": [module, name], "of": content}.
_KIND, _CONTENT, _CLASS = "$", "of", "class"


def encode(value: Any, what: str) -> Any:
    """The value in JSON's types. Raises InvalidArgument where it could not come back as it is.

    what: names the value in the error.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", repr(value))
    if kind is list:
        return [encode(each, what) for each in value]
    if kind is dict:
        if _KIND not in value and all(type(key) is str for key in value):
            return {key: encode(each, what) for key, each in value.items()}
        pairs = [[encode(key, what), encode(each, what)] for key, each in value.items()]
        return _tagged("dict", pairs)
    if kind.__name__ in _COLLECTIONS and kind is _COLLECTIONS[kind.__name__]:
        members = [encode(each, what) for each in value]
        return _tagged(kind.__name__, members if kind is tuple else sorted(members, key=repr))
    if kind is _RECORDS.get(kind.__name__):
        content = {f.name: _encode_field(getattr(value, f.name), what) for f in fields(kind)}
        return _tagged(kind.__name__, content)
    if kind is ChoicesMethod:
        return _tagged("ChoicesMethod", value.value)
    if kind is ToolCall:  # its lists are lists
        content = {f.name: encode(getattr(value, f.name), what) for f in fields(kind)}
        return _tagged("ToolCall", content)
    if kind in _TEXT_KINDS:
        return _written(value, what)
    if is_taken_apart(kind):
        content = encode(taken_apart(value, what), what)
        return {**_tagged("object", content), _CLASS: [kind.__module__, kind.__qualname__]}
    raise InvalidArgument(
        f"{what} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot give back "
        "as it was: make it of dicts, lists, tuples, sets, strings, numbers, dates, enums, "
        "dataclasses and pydantic models"
    )


def decode(value: Any) -> Any:
    """What `encode` was given. Raises KeyError, TypeError or ValueError for what it never made."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(each) for key, each in value.items()}
    kind, content = value[_KIND], value[_CONTENT]
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {decode(key): decode(each) for key, each in content}
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](decode(each) for each in content)
    if kind == "object":
        return put_together(class_named(*value[_CLASS]), decode(content))
    if kind in _TEXTS:
        return _TEXTS[kind](content)
    if kind in _PYDANTIC:
        return _of_pydantic(kind)(content)
    if kind == "ChoicesMethod":
        return ChoicesMethod(content)
    if kind == "ToolCall":
        return ToolCall(**{name: decode(each) for name, each in content.items()})
    return _RECORDS[kind](**{name: _decode_field(each) for name, each in content.items()})


# Times that pydantic has read have zones of a class of its own.


def _written(value: Any, what: str) -> dict[str, Any]:
    kind, text = type(value).__name__, str(value)
    read = _TEXTS[kind]
    if isinstance(value, datetime.date | datetime.time):
        text = value.isoformat()
        if type(getattr(value, "tzinfo", None)).__module__.startswith("pydantic"):
            kind = f"pydantic {kind}"
            read = _of_pydantic(kind)
    if repr(read(text)) != repr(value):
        raise InvalidArgument(
            f"{what} is {value!r}, which a checkpoint cannot give back as it was: keep times "
            "without a zone, or in one of a fixed offset, as by "
            "value.astimezone(datetime.timezone.utc)"
        )
    return _tagged(kind, text)


@lru_cache(maxsize=2)
def _of_pydantic(kind: str) -> Callable[[str], Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(_PYDANTIC[kind]).validate_python


# Our own values have tuples for lists, always.


def _encode_field(value: Any, what: str) -> Any:
    if type(value) is tuple:
        return [_encode_field(each, what) for each in value]
    return encode(value, what)


def _decode_field(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode_field(each) for each in value)
    return decode(value)


def _tagged(kind: str, content: Any) -> dict[str, Any]:
    return {_KIND: kind, _CONTENT: content}

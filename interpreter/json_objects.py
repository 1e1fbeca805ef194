"""Values of a program's own classes, taken apart and put together again: members of enums, pydantic
models, dataclasses and named tuples.

Used by `json_values.py`. The class is known by its module and qualified name; what is put together
is checked by the class that stands there now, and nothing is imported for it.
"""

from __future__ import annotations

import dataclasses
import sys
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

from stemma.lang.errors import InvalidArgument

Content = dict[str, Any]

_REMEDY = (
    "define the class at the top of a module, or have dicts in its place, as by "
    "gen(json_schema=Model.model_json_schema()), model_dump or dataclasses.asdict"
)
# What these hold is no field.
_HOLDERS = (BaseException, bytes, dict, float, frozenset, int, list, set, str)


def is_taken_apart(kind: type[Any]) -> bool:
    """Whether values of the class are of one of the four sorts."""
    if issubclass(kind, Enum) or _is_named_tuple(kind):
        return True
    if issubclass(kind, (*_HOLDERS, tuple)):
        return False
    return dataclasses.is_dataclass(kind) or _is_model(kind)


def refuse_lost(kind: type[Any], what: str) -> None:
    """Raise InvalidArgument for a class that its name does not lead to, as one in a function."""
    try:
        found = class_named(kind.__module__, kind.__qualname__)
    except ValueError:
        found = None
    if found is not kind:
        raise InvalidArgument(
            f"{what}: {kind.__module__}.{kind.__qualname__} is a class that a checkpoint cannot "
            f"find again by its name: {_REMEDY}"
        )


def class_named(module: str, name: str) -> type[Any]:
    """The class of that name in a module that is imported. Raises ValueError where there is none
    whose values are taken apart."""
    found: Any = sys.modules.get(module)
    if found is None:
        raise ValueError(f"module {module} of class {name} is not imported: import it before")
    if (whole := vars(found).get(name)) is not None:  # of generics the name may have dots
        found = whole
    else:
        for part in name.split("."):
            found = getattr(found, part, None)
    if not isinstance(found, type) or not is_taken_apart(found):
        raise ValueError(
            f"{module}.{name} is no enum, pydantic model, dataclass or named tuple any more"
        )
    return found


def taken_apart(value: Any, what: str) -> Any:
    """What the value consists of, from which its class makes it again.

    Raises InvalidArgument for what the class does not take, or has besides its fields.
    """
    kind = type(value)
    refuse_lost(kind, what)
    if isinstance(value, Enum):
        content: Any = value.name if kind.__members__.get(value.name) is value else value.value
    else:
        content = _fields_of(value, what)
    try:
        put_together(kind, content)
    except ValueError as error:
        raise InvalidArgument(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, which its class would not make "
            f"again of its own fields, as a checkpoint must: {error}"
        ) from error
    return content


def _fields_of(value: Any, what: str) -> Content:
    kind = type(value)
    known = _names(kind)
    held = getattr(value, "__dict__", {})
    others = [
        name
        for name in held
        if name not in known
        and not name.startswith("__pydantic_")  # of root models
        and not isinstance(getattr(kind, name, None), cached_property)
    ]
    if others:
        raise InvalidArgument(
            f"{what} is a {kind.__module__}.{kind.__qualname__} with {others[0]!r}, which is no "
            "field, so a checkpoint would lose it: make it one, or leave it out"
        )
    missing = object()
    found = {name: getattr(value, name, missing) for name in known}
    content: Content = {"fields": {k: v for k, v in found.items() if v is not missing}}
    if _is_model(kind):
        content["set"] = set(value.model_fields_set)
        content["extra"] = value.__pydantic_extra__
        content["private"] = value.__pydantic_private__
    return content


def put_together(kind: type[Any], content: Any) -> Any:
    """A value of the class as it was. Raises ValueError where the class does not take it."""
    try:
        if issubclass(kind, Enum):
            return kind[content] if isinstance(content, str) else kind(content)
        return _made(kind, content)
    except Exception as error:  # of a validator, which is the program's
        raise ValueError(f"{kind.__qualname__}: {type(error).__name__}: {error}") from error


def _made(kind: Any, content: Content) -> Any:
    values: Content = content["fields"]
    if gone := values.keys() - _names(kind):
        raise ValueError(f"it has no field {min(gone)!r}")
    given: Any = dict(values)
    if _is_model(kind):
        given.update(content["extra"] or {})
        if _is_root_model(kind):
            given = values["root"]
    elif dataclasses.is_dataclass(kind):
        given = {f.name: values[f.name] for f in dataclasses.fields(kind) if f.init}
    made = _adapter(kind).validate_python(given, strict=False, by_alias=False, by_name=True)
    if type(made) is not kind:
        raise TypeError(f"its validators make a {type(made).__qualname__}")
    # The class has taken the values. What it would make of them a second time does not count.
    if _is_named_tuple(kind):
        return tuple.__new__(kind, [values[name] for name in _names(kind)])
    for name, value in values.items():
        object.__setattr__(made, name, value)
    if _is_model(kind):
        object.__setattr__(made, "__pydantic_fields_set__", set(content["set"]))
        object.__setattr__(made, "__pydantic_extra__", content["extra"])
        object.__setattr__(made, "__pydantic_private__", content["private"])
    return made


def _names(kind: Any) -> tuple[str, ...]:
    """The fields of a class."""
    if _is_named_tuple(kind):
        return tuple(kind._fields)
    if _is_model(kind):
        return tuple(kind.model_fields)
    return tuple(f.name for f in dataclasses.fields(kind))


@lru_cache(maxsize=256)
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _is_named_tuple(kind: type[Any]) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_model(kind: type[Any]) -> bool:
    from pydantic import BaseModel

    return issubclass(kind, BaseModel)


def _is_root_model(kind: type[Any]) -> bool:
    from pydantic import RootModel

    return issubclass(kind, RootModel)

"""The JSON Schema of a type as pydantic describes it, narrowed to what pydantic also takes.

Used by `constraints_types.py`, which alone imports it, for it needs pydantic. A schema of pydantic
says less than the type does: a time zone, the keys of a dict, a bound of a date are not in it. What
can be written as a pattern is; what cannot is refused, by name and place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import ByteSize
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import SchemaValidator

from stemma.lang.constraints_decimals import decimal_of
from stemma.lang.constraints_formats import FORMATS, INTEGER, NUMBER, ZONE
from stemma.lang.errors import InvalidArgument

Schema = dict[str, Any]

_REFUSED = "x-refused"  # stands in a schema until its place is known
_NO_KEY = "x-no-key"  # the same, of a value of an enum that a type does not read from a key
_OF_FORMATS = {
    "base64": "Base64Str",
    "directory-path": "DirectoryPath",
    "file-path": "FilePath",
    "ipvanyaddress": "IPvAnyAddress",
    "name-email": "NameEmail",
    "password": "SecretStr",
    "path": "Path",
    "regex": "Pattern",
}
_MAPS = ("properties", "patternProperties", "$defs")
_DATA = ("default", "examples", "const", "enum")
_BOUNDS = ("ge", "gt", "le", "lt")
_NO_LEAP_SECOND = {"date-time": "^.{17}[0-5]", "time": "^.{6}[0-5]"}  # Python has none
_KEYS = {"integer": INTEGER, "number": NUMBER, "boolean": "true|false"}
_STRIPPED = r"^(?:[^\s\x85](?:[\s\S]*[^\s\x85])?)?$"
_PART = r"(?:0|[1-9][0-9]{0,15})(?:\.[0-9]{1,16})?"
_COMPLEX = rf"^-?{_PART}(?:[+-]{_PART}j)?$"
# Of an address: together less than the 2,083 characters that some types take.
_NAME = "[a-z0-9]{1,20}(?:-[a-z0-9]{1,20}){0,2}"
_HOST = rf"{_NAME}(?:\.{_NAME}){{0,3}}\.[a-z]{{2,12}}"
_REST = r"[a-zA-Z0-9\-._~!$&'()*+,;=:@/%s]{0,%d}"
_BEHIND_HOST = (
    rf"(?::[1-9][0-9]{{0,3}})?(?:/{_REST % ('', 1000)})?"
    rf"(?:\?{_REST % ('?', 500)})?(?:#{_REST % ('?', 200)})?"
)


def finished(schema: Schema, named: str) -> None:
    """Make a schema that `Narrow` has generated ready: its objects take no fields that the type
    does not name, for it would drop them, and the names of their keys are patterns.

    Raises InvalidArgument, with the place, for what the schema cannot say.
    """
    no_keys: list[Schema] = []
    waiting: list[tuple[Any, str, bool]] = [(schema, "#", False)]
    while waiting:
        one, place, is_map = waiting.pop()
        if isinstance(one, list):
            waiting += [(each, f"{place}/{i}", False) for i, each in enumerate(one)]
        elif isinstance(one, dict):
            if not is_map:
                _finish(one, schema, f"{named}: at {place}")
                no_keys += [one] if _NO_KEY in one else []
            waiting += [
                (value, f"{place}/{_escaped(key)}", not is_map and key in _MAPS)
                for key, value in one.items()
                if is_map or key not in _DATA
            ]
    for one in no_keys:
        one.pop(_NO_KEY, None)


def _finish(one: Schema, root: Schema, at: str) -> None:
    if _REFUSED in one:
        raise InvalidArgument(f"{at}: {one[_REFUSED]}")
    if isinstance(form := one.get("format"), str) and form not in FORMATS:
        what = _OF_FORMATS.get(form, f"a type with the format {form!r}")
        raise InvalidArgument(f"{at}: {what} is not supported: take str, and convert it afterwards")
    if isinstance(one.get("properties"), dict) and one.get("type") == "object":
        one.setdefault("additionalProperties", False)
    if "propertyNames" in one:
        keys = one.pop("propertyNames")
        pattern = keys["pattern"] if keys.keys() == {"type", "pattern"} else None
        pattern = pattern or f"^(?:{_pattern_of_keys(keys, root, at)})$"
        one["patternProperties"] = {pattern: one.get("additionalProperties", True)}
        one["additionalProperties"] = False


def _pattern_of_keys(keys: Schema, root: Schema, at: str) -> str:
    """The regular expression of what the keys of a dict may be."""
    if _REFUSED in keys:
        raise InvalidArgument(f"{at}: {keys[_REFUSED]}")
    if "$ref" in keys:
        return _pattern_of_keys(root["$defs"][keys["$ref"].rpartition("/")[2]], root, at)
    if "anyOf" in keys:
        return "|".join(_pattern_of_keys(each, root, at) for each in keys["anyOf"])
    if _NO_KEY in keys:
        raise InvalidArgument(
            f"{at}: a key that is {keys[_NO_KEY]} cannot be read: in JSON keys are strings: take a "
            "Literal or an Enum of strings"
        )
    if isinstance(names := keys.get("enum", [keys.get("const")]), list) and names != [None]:
        return "|".join(re.escape(str(name)) for name in names)
    said = {key: value for key, value in keys.items() if key not in ("title", "description")}
    kind, form = said.pop("type", None), said.get("format")
    if kind in _KEYS and not said:
        return _KEYS[kind]
    if kind == "string" and form in FORMATS and len(said) == 1:
        return FORMATS[form]
    if form in _NO_LEAP_SECOND and said.get("pattern") == _NO_LEAP_SECOND[form]:
        return FORMATS[f"{form}-local"] + ZONE
    if kind == "string" and said.keys() <= {"minLength", "maxLength"}:
        return f".{{{said.get('minLength', 0)},{said.get('maxLength', '')}}}"
    what = "of this type" if kind != "null" else "that are None"
    if kind in (*_KEYS, "string"):
        what = "with bounds"
    raise InvalidArgument(f"{at}: keys {what} cannot be kept: take str, and check them afterwards")


def _escaped(key: object) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")


def _refused(what: str, remedy: str) -> Schema:
    return {_REFUSED: f"{what} is not supported: {remedy}"}


def _bounded(schema: Mapping[str, Any], what: str) -> Schema | None:
    bounds = [*_BOUNDS, "now_op"]
    found = [bound for bound in bounds if schema.get(bound) is not None]
    if not found:
        return None
    bound = f"the {schema['now_op']}" if found == ["now_op"] else f"{found[0]}="
    return _refused(f"a {what} with a bound ({bound})", f"take any {what}, and check it afterwards")


class Narrow(GenerateJsonSchema):
    """Schemas as pydantic makes them, but for the types whose JSON it would not take back."""

    def date_schema(self, schema: Any) -> Schema:
        return _bounded(schema, "date") or {"type": "string", "format": "date"}

    def time_schema(self, schema: Any) -> Schema:
        return _bounded(schema, "time") or _with_zone(schema, "time")

    def datetime_schema(self, schema: Any) -> Schema:
        return _bounded(schema, "datetime") or _with_zone(schema, "date-time")

    def timedelta_schema(self, schema: Any) -> Schema:
        short = r"^[^0-9]*(?:[0-9]{1,6}[^0-9]+)*$"  # more digits can be more days than fit
        plain = {"type": "string", "format": "duration", "pattern": short}
        return _bounded(schema, "timedelta") or plain

    def field_is_present(self, field: Any) -> bool:
        """Not one that pydantic would throw away."""
        return field.get("init", True) is not False and super().field_is_present(field)

    def generate_inner(self, schema: Any) -> Schema:
        """Also of types that are known by their validators alone."""
        told = schema.get("function")
        function = told.get("function") if isinstance(told, dict) else None
        if getattr(function, "__name__", "") == "import_string":
            return _refused("ImportString, which runs the code of a module,", "take a Literal")
        if getattr(function, "__self__", None) is ByteSize:
            return _refused("ByteSize", "take int, and say the unit in the field's name")
        return super().generate_inner(schema)

    def str_schema(self, schema: Any) -> Schema:
        out = super().str_schema(schema)
        stripped = schema.get("strip_whitespace", self._config.str_strip_whitespace)
        if stripped and not out.keys().isdisjoint(("minLength", "pattern")):
            out["allOf"] = [{"pattern": _STRIPPED}]  # what is stripped counts for neither
        return out

    def callable_schema(self, schema: Any) -> Schema:
        return _refused("a Callable", "take a Literal of names")

    def enum_schema(self, schema: Any) -> Schema:
        kinds = str | int | float | None
        for member in schema["members"]:
            value = member.value
            if not isinstance(value, kinds) or value in (math.inf, -math.inf) or value != value:
                return _refused(
                    f"{schema['cls'].__name__} with the member {value!r:.40}",
                    "its members' values must be strings, numbers, true, false or null",
                )
        return _with_keys(super().enum_schema(schema), schema, schema["members"])

    def literal_schema(self, schema: Any) -> Schema:
        for value in schema["expected"]:
            if isinstance(value, Enum) and not isinstance(value, str | int):
                kind = type(value).__name__
                return _refused(
                    f"{value} in a Literal",
                    f"make {kind} a StrEnum or an IntEnum, or write the value, {value.value!r:.40}",
                )
        return _with_keys(super().literal_schema(schema), schema, schema["expected"])

    def bytes_schema(self, schema: Any) -> Schema:
        return _refused("bytes", "take str, and encode it afterwards")

    def generator_schema(self, schema: Any) -> Schema:
        return _refused("an Iterable, which could be read once,", "take a list")

    def is_subclass_schema(self, schema: Any) -> Schema:
        return _refused("a type as a value", "take a Literal of names")

    def complex_schema(self, schema: Any) -> Schema:
        return {"type": "string", "pattern": _COMPLEX}

    def json_schema(self, schema: Any) -> Schema:
        return _refused("Json, which is JSON within a string,", "take the type that it holds")

    def url_schema(self, schema: Any) -> Schema:
        return _url(schema)

    def multi_host_url_schema(self, schema: Any) -> Schema:
        return _url(schema)

    def dict_schema(self, schema: Any) -> Schema:
        out = super().dict_schema(schema)
        values = [*out.pop("patternProperties", {}).values(), out.get("additionalProperties", True)]
        keys = self.generate_inner(schema["keys_schema"]) if "keys_schema" in schema else {}
        if keys and keys != {"type": "string"}:
            out |= {"propertyNames": keys, "additionalProperties": values[0]}
        return out

    def decimal_schema(self, schema: Any) -> Schema:
        """A string with a number: of a number of JSON a float is read, which can lose digits."""
        if schema.get("multiple_of") is not None:
            return _refused("multiple_of= of a Decimal", "take decimal_places=")
        if schema.get("max_digits") is not None and schema.get("decimal_places") is None:
            return _refused("max_digits= without decimal_places=", "say both")
        if any(not math.isfinite(schema[bound]) for bound in _BOUNDS if schema.get(bound)):
            return _refused("an infinite bound of a Decimal", "leave it out")
        return decimal_of(schema)


def _with_keys(out: Schema, schema: Any, values: list[Any]) -> Schema:
    """Note a value of an enum or Literal that pydantic does not read from the key of a dict."""
    reader = SchemaValidator({"type": "dict", "keys_schema": schema})
    for value in values:
        plain = value.value if isinstance(value, Enum) else value
        try:
            reader.validate_json(json.dumps({str(plain): None}))
        except Exception:  # also of the enum's own `_missing_`
            out[_NO_KEY] = repr(plain)[:40]
            break
    return out


def _with_zone(schema: Mapping[str, Any], format_: str) -> Schema:
    zoned = {"type": "string", "format": format_, "pattern": _NO_LEAP_SECOND[format_]}
    local = {"type": "string", "format": f"{format_}-local"}
    match schema.get("tz_constraint"):
        case None:
            return {"anyOf": [zoned, local]}
        case "aware":
            return zoned
        case "naive":
            return local
        case offset:
            return _refused(f"a {format_} in one zone ({offset!r} seconds)", "take one in any zone")


def _url(schema: Mapping[str, Any]) -> Schema:
    """Addresses with a host by name, which is what all kinds of them take."""
    schemes = schema.get("allowed_schemes") or ["http", "https", "ftp", "ws", "wss"]
    scheme = "|".join(re.escape(scheme) for scheme in schemes)
    return {"type": "string", "pattern": rf"^(?:{scheme})://{_HOST}{_BEHIND_HOST}$"}

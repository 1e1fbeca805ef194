"""JSON Schema as llguidance takes it: checked keyword by keyword, refused by name with its place.

Used by `constraints.py`. llguidance compiles most of draft 2020-12 and refuses what it cannot; what
is done here is what it does not do: name the place, bound white space and nesting, read formats and
patterns as the standards do, and warn of keywords that nobody knows.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeGuard

from stemma.lang.constraints_formats import FORMATS, pattern_of
from stemma.lang.constraints_matcher import emptiness, refusal
from stemma.lang.constraints_references import endless, exclusive, levels_followed
from stemma.lang.errors import InvalidArgument

# A space or two, or one line break and its indentation, where JSON allows white space.
FLEXIBLE = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"
WHITESPACE = ("flexible", "spaced", "compact")
MOST_CHARACTERS = 1024 * 1024  # of a schema, with its formats written out
MOST_PROPERTIES = 1_000  # of one object
MOST_OPTIONAL = 400
MOST_NESTED = 100  # schemas within schemas as written
MOST_LEVELS = 1_000  # the same with references followed; llguidance recurses into both

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_PLAIN = (
    *("$ref", "const", "enum", "type", "minItems", "maxItems", "required"),
    *("minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
_IDENTITY = ("$id", "$anchor", "$schema")
_NOTES = (
    *("$comment", "title", "description", "default", "examples", "deprecated", "readOnly"),
    *("writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "discriminator"),
)
_REFUSED = {
    "not": "say what is allowed instead",
    "if": "use anyOf with one schema per case",
    "then": "use anyOf with one schema per case",
    "else": "use anyOf with one schema per case",
    "contains": "use prefixItems or items",
    "minContains": "use prefixItems or items",
    "maxContains": "use prefixItems or items",
    "uniqueItems": "use a list, and take doubles out afterwards",
    "propertyNames": "use patternProperties with additionalProperties: false",
    "dependentRequired": "use anyOf with one schema per case",
    "dependentSchemas": "use anyOf with one schema per case",
    "dependencies": "use anyOf with one schema per case",
    "unevaluatedItems": "use items: false where the items are listed",
    "unevaluatedProperties": "use additionalProperties: false where the properties are listed",
    "$dynamicRef": "use $ref",
    "$dynamicAnchor": "use $anchor or $defs",
    "$recursiveRef": "use $ref",
    "$recursiveAnchor": "use $anchor or $defs",
    "$vocabulary": "it belongs to metaschemas",
    "nullable": 'it is of OpenAPI; write "type": ["string", "null"]',
    "x-guidance": "white space is set by whitespace=",
}
_KNOWN = {*_MAPS, *_LISTS, *_SINGLE, *_PLAIN, *_IDENTITY, *_NOTES, *_REFUSED}
_DRAFTS = (
    "json-schema.org/draft/2020-12/schema",
    "json-schema.org/draft/2019-09/schema",
    "json-schema.org/draft-07/schema",
)


def compiled_schema(schema: object, whitespace: str, named: str) -> tuple[str, list[str]]:
    """The grammar of a schema (an object or a boolean), and what to warn of.

    named: what to call it in errors, as "json_schema". Raises InvalidArgument for what is not
    supported, what is malformed and what admits nothing, naming the place as a JSON pointer.
    """
    if whitespace not in WHITESPACE:
        raise InvalidArgument(f"whitespace={whitespace!r}: must be one of {', '.join(WHITESPACE)}")
    from llguidance import LLMatcher

    prepared, warnings = prepared_schema(schema, named)
    if prepared is False:
        raise InvalidArgument(f"{named}: the schema admits nothing: it is false")
    text = _dumps({} if prepared is True else prepared, named)
    compiled = LLMatcher.grammar_from_json_schema(text, overrides=options(whitespace, prepared))
    if message := refusal(compiled):
        raise InvalidArgument(f"{named}: {_in_our_words(message)}")
    if reason := emptiness(compiled):
        admits = "admits nothing" if reason == "nothing" else f"is too complex: {reason}"
        raise InvalidArgument(f"{named}: the schema {admits}")
    return compiled, warnings


def options(whitespace: str, prepared: object) -> Any:
    """llguidance's settings for a prepared schema: its white space, and one spelling of a character
    where names of properties meet.
    """
    spelling = {"json_allowed_escapes": 'nrbtf\\"'} if _names_meet(prepared) else {}
    if whitespace == "compact":
        return {**spelling, "whitespace_flexible": False}
    if whitespace == "spaced":
        separators = {"item_separator": ", ", "key_separator": ": "}
        return {**spelling, "whitespace_flexible": False, **separators}
    return {**spelling, "whitespace_pattern": FLEXIBLE}


def _names_meet(prepared: object) -> bool:
    """Whether an object has properties of its own and takes others, which must not have the same
    name in another spelling. llguidance would let \\u0061 pass for another name than a.
    """
    waiting = [prepared]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if one.get("properties") and one.get("additionalProperties") is not False:
                return True
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return False


def prepared_schema(schema: object, named: str) -> tuple[object, list[str]]:
    """A schema in the words of llguidance, and what to warn of."""
    preparation = _Preparation(named, schema)
    prepared = preparation.schema(schema, "#", 0)
    if levels_followed(prepared) > MOST_LEVELS:
        preparation.refuse("#", f"more than {MOST_LEVELS:,} levels with all references followed")
    if (reference := endless(prepared)) is not None:
        preparation.refuse(reference, "it admits nothing: each value would need another one inside")
    return prepared, preparation.warnings


class _Preparation:
    """One walk over a schema: checks it and makes the copy that is compiled."""

    def __init__(self, named: str, root: object) -> None:
        self.named = named
        self.root = root
        self.bounds_meet = _bounds_may_meet(root)
        self.warnings: list[str] = []
        draft = root.get("$schema") if isinstance(root, Mapping) else None
        self.draft7 = "draft-07" in str(draft)

    def refuse(self, place: str, message: str) -> NoReturn:
        raise InvalidArgument(f"{self.named}: at {place}: {message}")

    def schema(self, schema: object, place: str, level: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self.refuse(place, f"a schema is an object, true or false, not {schema!r:.60}")
        if level > MOST_NESTED:
            self.refuse(place, f"nested more than {MOST_NESTED} deep; use $ref")
        if self.draft7 and "$ref" in schema:  # where `$ref` hides what stands beside it
            schema = {k: v for k, v in schema.items() if k in ("$ref", "$schema", "definitions")}
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if not isinstance(key, str):
                self.refuse(place, f"a keyword is a string, not {key!r}")
            here = f"{place}/{key}"
            if key == "uniqueItems" and value is False:
                continue
            if key in _REFUSED:
                self.refuse(here, f"{key!r} is not supported: {_REFUSED[key]}")
            if key in _MAPS:
                out[key] = self._map(key, value, here, level)
            elif key in _LISTS or (key == "items" and isinstance(value, list)):
                if not isinstance(value, list | tuple):
                    self.refuse(here, f"{key!r} is a list of schemas, not {value!r:.60}")
                out[key] = [
                    self.schema(one, f"{here}/{i}", level + 1) for i, one in enumerate(value)
                ]
            elif key in _SINGLE:
                out[key] = self.schema(value, here, level + 1)
            elif key in _NOTES:
                continue
            elif key not in _KNOWN:
                self._unknown(key, here)
            elif key in _COUNTS and isinstance(value, float) and value.is_integer():
                out[key] = int(value)
            else:
                out[key] = value
        if "oneOf" in out and exclusive(schema["oneOf"], self.root):
            options = out.pop("oneOf")  # of which no two can hold at once
            if "anyOf" in out:
                out["allOf"] = [*out.get("allOf", []), {"anyOf": options}]
            else:
                out["anyOf"] = options
        self._check_width(out, f"{place}/properties")
        self._strings(out, place)
        _move_open_bounds(out, everywhere=self.bounds_meet)
        if "$schema" in out and not str(out["$schema"]).rstrip("#").endswith(_DRAFTS):
            known = ", ".join(draft.removeprefix("json-schema.org/") for draft in _DRAFTS)
            self.refuse(
                f"{place}/$schema", f"{out['$schema']!r} is not supported; these are: {known}"
            )
        return out

    def _map(self, key: str, value: object, here: str, level: int) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self.refuse(here, f"{key!r} is an object of schemas, not {value!r:.60}")
        out = {}
        for name, one in value.items():
            pattern = name
            if key == "patternProperties":
                pattern = self._pattern(name, here)
            out[pattern] = self.schema(one, f"{here}/{_escaped(name)}", level + 1)
        return out

    def _check_width(self, out: dict[str, Any], here: str) -> None:
        """llguidance's parser has a row of so many items, and takes squared time to build."""
        names = out.get("properties", {})
        if len(names) > MOST_PROPERTIES:
            self.refuse(here, f"{len(names):,} properties; at most {MOST_PROPERTIES:,} are taken")
        required = out.get("required", ())
        listed = required if isinstance(required, list | tuple) else ()
        loose = sum(name not in listed for name in names)
        if loose > MOST_OPTIONAL:
            self.refuse(
                here,
                f"{loose:,} properties that may be left out; at most {MOST_OPTIONAL:,} can be told "
                "apart: require some, or nest them",
            )

    def _strings(self, out: dict[str, Any], place: str) -> None:
        """`pattern` in the words of llguidance, `format` as a pattern."""
        if "pattern" in out:
            out["pattern"] = self._pattern(out["pattern"], f"{place}/pattern")
        if "format" not in out:
            return
        name = out.pop("format")
        if not isinstance(name, str) or name not in FORMATS:
            self.refuse(
                f"{place}/format",
                f"{name!r} is not supported; these are: {', '.join(FORMATS)}",
            )
        pattern = f"^(?:{FORMATS[name]})$"
        if "pattern" in out:
            out["allOf"] = [*out.get("allOf", []), {"pattern": pattern}]
        else:
            out["pattern"] = pattern

    def _pattern(self, pattern: object, here: str) -> str:
        if not isinstance(pattern, str):
            self.refuse(here, f"a pattern is a string, not {pattern!r:.60}")
        from llguidance import LLMatcher

        translated = pattern_of(pattern)
        alone = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": translated})
        if message := refusal(alone):
            self.refuse(here, f"the pattern {pattern!r:.200}: {_in_our_words(message)}")
        return translated

    def _unknown(self, key: str, here: str) -> None:
        if key.startswith("x-"):
            return
        near = difflib.get_close_matches(key, _KNOWN - set(_REFUSED), n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        self.warnings.append(
            f"at {here}: nobody knows the keyword {key!r}, it has no effect{meant}"
        )


_ENDS = (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1))
_BOUNDS = {name for open_, closed, _ in _ENDS for name in (open_, closed)}


def _bounds_may_meet(root: object) -> bool:
    """Whether several schemas of a document bound numbers, and some hold together."""
    bounded, together, waiting, seen = 0, False, [root], set[int]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping | list) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            bounded += not _BOUNDS.isdisjoint(one)
            together = together or not {"allOf", "anyOf", "oneOf", "$ref"}.isdisjoint(one)
            waiting += one.values()
        else:
            waiting += one
    return together and bounded > 1


def _move_open_bounds(out: dict[str, Any], *, everywhere: bool) -> None:
    """Where a bound next to zero is an integer and open, and the other one is less than one away: a
    bound a hair inside. llguidance lets the integer itself in there.

    everywhere: for all open integers, for what else bounds the number may stand somewhere else.
    """
    low, high = (out.get(open_, out.get(closed)) for open_, closed, _ in _ENDS)
    near = None  # the one next to zero, if the other is less than one away
    if _is_number(low) and _is_number(high) and 0 < high - low < 1 and not low < 0 < high:
        near = low if abs(low) < abs(high) else high
    for (open_, closed, inside), bound in zip(_ENDS, (low, high), strict=True):
        if open_ not in out or not _is_number(bound) or bound != int(bound):
            continue
        if everywhere or bound == near:
            del out[open_]
            moved = bound + inside * max(abs(bound) * _HAIR, _LEAST)
            out[closed] = (max if inside > 0 else min)(moved, out.get(closed, moved))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


_HAIR, _LEAST = 2.0**-48, 1e-60


def _escaped(name: object) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


def _dumps(schema: object, named: str) -> str:
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{named}: the schema is no JSON: {error}") from error
    if len(text) > MOST_CHARACTERS:
        raise InvalidArgument(
            f"{named}: the schema has {len(text):,} characters; "
            f"at most {MOST_CHARACTERS:,} are taken"
        )
    return text


def _in_our_words(message: str) -> str:
    """llguidance's message without its own options, with the remedy."""
    if message.startswith("oneOf constraints"):
        return (
            "'oneOf' is supported only where its schemas evidently exclude each other (by type, or "
            "by a constant property): use anyOf"
        )
    if message.startswith("Unsatisfiable schema: "):
        return f"the schema admits nothing: {message.removeprefix('Unsatisfiable schema: ')}"
    if found := re.match(r"Resource '([^']*)' is not present", message):
        return f"'$ref' to another document ({found[1]}) is not supported: put it into $defs"
    if found := re.match(r"Pointer '([^']*)' does not exist", message):
        return f"'$ref' leads nowhere: there is no {found[1]}"
    return message.strip()

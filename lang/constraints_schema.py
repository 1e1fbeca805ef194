"""JSON Schema as llguidance takes it: checked keyword by keyword, refused by name with its place.

Used by `constraints.py`. llguidance compiles most of draft 2020-12 and refuses what it cannot; what
is done here is what it does not do: name the place, bound white space and nesting, read formats and
patterns as the standards do, and warn of keywords that nobody knows.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from stemma.lang.constraints_formats import FORMATS, pattern_of
from stemma.lang.constraints_limits import MOST_MEETING
from stemma.lang.constraints_matcher import emptiness, refusal
from stemma.lang.constraints_numbers import (
    COUNTS,
    NUMBERS,
    add_short_forms,
    bounds_may_meet,
    fault_of_constant,
    fault_of_count,
    fault_of_multiples,
    fault_of_number,
    fault_of_states,
    move_open_bounds,
)
from stemma.lang.constraints_references import (
    LISTS,
    MAPS,
    SINGLE,
    endless,
    escaped,
    exclusive,
    leads_nowhere,
    levels_followed,
    meets,
    patterns_that_meet,
)
from stemma.lang.constraints_refusals import in_our_words, refuse_compiled
from stemma.lang.constraints_regex import too_long
from stemma.lang.errors import InvalidArgument

# What is between the parts of JSON, as settings of llguidance. "flexible" is a space or two, or one
# line break and its indentation, where JSON allows white space.
WHITESPACE: dict[str, dict[str, Any]] = {
    "flexible": {"whitespace_pattern": r"[ \t]{1,2}|\r?\n[ \t]{0,40}"},
    "spaced": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "compact": {"whitespace_flexible": False},
}
MOST_CHARACTERS = 1024 * 1024  # of a schema, with its formats written out
MOST_PROPERTIES = 1_000  # of one object
MOST_OPTIONAL = 400
MOST_PATTERNS = 100  # of names of one object; each is compared with each
MOST_NESTED = 100  # schemas within schemas as written
MOST_LEVELS = 1_000  # the same with references followed; llguidance recurses into both

_PLAIN = ("$ref", "const", "enum", "type", "required", "pattern", "format", *COUNTS, *NUMBERS)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
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
_KNOWN = {*MAPS, *LISTS, *SINGLE, *_PLAIN, *_IDENTITY, *_NOTES, *_REFUSED}
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
    check_whitespace(whitespace)
    prepared, warnings = prepared_schema(schema, named)
    return compiled_prepared(prepared, whitespace, named), warnings


def check_whitespace(whitespace: object) -> None:
    """Raises InvalidArgument for what is no name of white space."""
    if not isinstance(whitespace, str) or whitespace not in WHITESPACE:
        raise InvalidArgument(f"whitespace={whitespace!r}: must be one of {', '.join(WHITESPACE)}")


def compiled_prepared(prepared: object, whitespace: str, named: str) -> str:
    """The grammar of what `prepared_schema` gives; raises the same."""
    from llguidance import LLMatcher

    if prepared is False:
        raise InvalidArgument(f"{named}: at #: the schema admits nothing: it is false")
    text = _dumps({} if prepared is True else prepared, named)
    try:
        compiled = LLMatcher.grammar_from_json_schema(text, overrides=options(whitespace, prepared))
    except ValueError as error:  # it reads JSON that is 128 deep
        raise InvalidArgument(f"{named}: the schema is nested too deep; use $ref") from error
    if message := refusal(compiled) or emptiness(compiled):
        refuse_compiled(message, prepared, named, lambda changed: _admits(changed, whitespace))
    return compiled


def _admits(prepared: object, whitespace: str) -> bool:
    from llguidance import LLMatcher

    settings = options(whitespace, prepared)
    compiled = LLMatcher.grammar_from_json_schema(json.dumps(prepared), overrides=settings)
    return not refusal(compiled) and not emptiness(compiled)


def options(whitespace: str, prepared: object) -> Any:
    """llguidance's settings for a prepared schema: its white space, and one spelling of a character
    where names of properties meet.
    """
    spelling = {"json_allowed_escapes": 'nrbtf\\"'} if _names_meet(prepared) else {}
    return {**spelling, **WHITESPACE[whitespace]}


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
    if fault := fault_of_states([value for value, _ in preparation.multiples]):
        preparation.refuse(preparation.multiples[-1][1], fault)
    if preparation.multiples_meet:
        values = [value for value, _ in preparation.multiples]
        if fault := fault_of_multiples(values):
            preparation.refuse(preparation.multiples[-1][1], fault)
    for reference, place in () if preparation.identities else preparation.references:
        if fault := leads_nowhere(reference, prepared):
            preparation.refuse(place, fault)
    if (crowded := patterns_that_meet(prepared, MOST_MEETING)) is not None:
        said = f"more than {MOST_MEETING} patterns have to fit at once: write one for some of them"
        preparation.refuse(crowded, said)
    if levels_followed(prepared) > MOST_LEVELS:
        preparation.refuse("#", f"more than {MOST_LEVELS:,} levels with all references followed")
    if (looping := endless(prepared)) is not None:
        preparation.refuse(looping, "it admits nothing: each value would need another one inside")
    return prepared, preparation.warnings


class _Preparation:
    """One walk over a schema: checks it and makes the copy that is compiled."""

    def __init__(self, named: str, root: object) -> None:
        self.named = named
        self.root = root
        self.bounds_meet = bounds_may_meet(root)
        self.multiples: list[tuple[float, str]] = []  # with their places
        self.multiples_meet = False
        self.references: list[tuple[str, str]] = []
        self.identities = False  # by which references may go
        self.warnings: list[str] = []
        draft = root.get("$schema") if isinstance(root, Mapping) else None
        self.draft7 = "draft-07" in str(draft)
        self.tuples = self.draft7 or "2019-09" in str(draft)  # `items` may be a list

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
            if key in MAPS:
                out[key] = self._map(key, value, here, level)
            elif key in LISTS or (key == "items" and isinstance(value, list | tuple)):
                if key == "items" and not self.tuples:
                    self.refuse(here, "a list of schemas is of earlier drafts: use prefixItems")
                if not isinstance(value, list | tuple):
                    self.refuse(here, f"{key!r} is a list of schemas, not {value!r:.60}")
                out[key] = [
                    self.schema(one, f"{here}/{i}", level + 1) for i, one in enumerate(value)
                ]
            elif key in SINGLE:
                out[key] = self.schema(value, here, level + 1)
            elif key in _NOTES:
                continue
            elif key not in _KNOWN:
                self._unknown(key, here)
            else:
                out[key] = self._plain(key, value, here, schema.get("type") == "integer")
        self.multiples_meet |= "allOf" in out or meets(out)
        if "oneOf" in out and exclusive(schema["oneOf"], self.root):
            options = out.pop("oneOf")  # of which no two can hold at once
            if "anyOf" in out:
                out["allOf"] = [*out.get("allOf", []), {"anyOf": options}]
            else:
                out["anyOf"] = options
        self._check_width(out, f"{place}/properties")
        self._strings(out, place)
        move_open_bounds(out, everywhere=self.bounds_meet)
        add_short_forms(out)
        if "$schema" in out and not str(out["$schema"]).rstrip("#").endswith(_DRAFTS):
            known = ", ".join(draft.removeprefix("json-schema.org/") for draft in _DRAFTS)
            self.refuse(
                f"{place}/$schema", f"{out['$schema']!r} is not supported; these are: {known}"
            )
        return out

    def _plain(self, key: str, value: Any, here: str, integer: bool) -> Any:
        """The value of a keyword that has no schemas in it. integer: that is the schema's type."""
        fault = ""
        if key in NUMBERS:
            fault = fault_of_number(key, value, integer=integer)
        elif key in COUNTS:
            fault = fault_of_count(key, value)
        elif key in ("const", "enum"):
            fault = fault_of_constant(value)
            if key == "enum" and not isinstance(value, list | tuple):
                fault = f"'enum' is a list of values, not {value!r:.60}"
        elif key == "type":
            fault = _fault_of_type(value)
        elif key == "required":
            listed = isinstance(value, list | tuple)
            if not listed or not all(isinstance(name, str) for name in value):
                fault = f"'required' is a list of names, not {value!r:.60}"
        elif key == "$ref":
            if isinstance(value, str):
                self.references.append((value, here))
            else:
                fault = f"'$ref' is a string, not {value!r:.60}"
        elif key == "$id":
            self.identities = True
        if fault:
            self.refuse(here, fault)
        if key == "multipleOf":
            self.multiples.append((value, here))
        return int(value) if key in COUNTS else value

    def _map(self, key: str, value: object, here: str, level: int) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self.refuse(here, f"{key!r} is an object of schemas, not {value!r:.60}")
        if key == "patternProperties" and len(value) > MOST_PATTERNS:
            self.refuse(here, f"{len(value):,} patterns; at most {MOST_PATTERNS} can be told apart")
        out = {}
        for name, one in value.items():
            if not isinstance(name, str):
                self.refuse(here, f"a name is a string, not {name!r:.60}")
            pattern = name
            if key == "patternProperties":
                pattern = self._pattern(name, here)
            out[pattern] = self.schema(one, f"{here}/{escaped(name)}", level + 1)
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
            known = ", ".join(FORMATS)
            self.refuse(f"{place}/format", f"{name!r} is not supported; these are: {known}")
        pattern = f"^(?:{FORMATS[name]})$"
        if "pattern" in out:
            out["allOf"] = [*out.get("allOf", []), {"pattern": pattern}]
        else:
            out["pattern"] = pattern

    def _pattern(self, pattern: object, here: str) -> str:
        if not isinstance(pattern, str):
            self.refuse(here, f"a pattern is a string, not {pattern!r:.60}")
        from llguidance import LLMatcher

        if large := too_long(pattern):
            self.refuse(here, f"the pattern {pattern!r:.200}: {large[1]}")
        translated = pattern_of(pattern)
        alone = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": translated})
        if message := refusal(alone):
            self.refuse(here, f"the pattern {pattern!r:.200}: {in_our_words(message)}")
        return translated

    def _unknown(self, key: str, here: str) -> None:
        if key.startswith("x-"):
            return
        meant = _meant(key, _KNOWN - set(_REFUSED))
        self.warnings.append(
            f"at {here}: nobody knows the keyword {key!r}, it has no effect{meant}"
        )


def _fault_of_type(value: object) -> str:
    names = value if isinstance(value, list | tuple) else [value]
    for name in names:
        if name not in _TYPES:
            known = ", ".join(_TYPES)
            return f"{name!r:.60} is no type; these are: {known}{_meant(str(name), _TYPES)}"
    return ""


def _meant(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


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

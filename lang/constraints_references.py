"""Where the references of a JSON Schema lead: how deep it is with them, and which schemas exclude
each other.

Used by `constraints_schema.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from stemma.lang.constraints_limits import gathered

MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalItems", "additionalProperties")


def levels_followed(schema: object) -> int:
    """How many schemas can lie within each other with all references followed, at most.

    Every place that is referred to counts with the levels below it, once, for the order in which
    references lead there is not known.
    """
    total = levels = _levels(schema)
    seen: set[str] = set()
    for reference in _references(schema):
        if reference not in seen:
            seen.add(reference)
            target = _target(schema, reference)
            total += levels if target is None else _levels(target)
    return total


def endless(schema: object) -> str | None:
    """A reference to a schema that no value can satisfy, since each would need another one of it
    inside, as a model with a required field of itself; None where there is none."""
    references = dict.fromkeys(_references(schema))
    ending: set[str] = set()
    grown = True
    while grown:
        grown = False
        for reference in references:
            if reference not in ending and _ends(_target(schema, reference), ending):
                ending.add(reference)
                grown = True
    return next((reference for reference in references if reference not in ending), None)


def _ends(schema: object, ending: set[str]) -> bool:
    """Whether some value of a schema needs no more than values of the references in `ending`."""
    if not isinstance(schema, Mapping):
        return True
    if "$ref" in schema and schema["$ref"] not in ending:
        return False
    if not all(_ends(one, ending) for one in schema.get("allOf", ())):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(_ends(one, ending) for one in schema[key]):
            return False
    if schema.get("type") == "array":
        first = schema.get("prefixItems", [])
        count = schema.get("minItems", 0)
        needed = [*first, schema.get("items")][:count] if isinstance(count, int) else []
        return all(_ends(one, ending) for one in needed)
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        return all(_ends(properties.get(name), ending) for name in _names(schema, "required"))
    return True


def meets(schema: Mapping[str, Any]) -> bool:
    """Whether a schema holds together with one that it refers to or has among its cases."""
    others = {"$ref", "anyOf", "oneOf"} & schema.keys()
    own = {"multipleOf", "properties", "patternProperties", *SINGLE, "prefixItems"} & schema.keys()
    return len(others) > 1 or bool(others and own)


def exclusive(options: object, root: object) -> bool:
    """Whether no value can satisfy two of the schemas, as far as is evident: by their types, by
    their constants, or by the constants of a property that both require."""
    if not isinstance(options, list | tuple):
        return False
    seen = [_resolved(option, root) for option in options]
    return all(_apart(a, b, root) for i, a in enumerate(seen) for b in seen[i + 1 :])


def _apart(a: Mapping[str, Any], b: Mapping[str, Any], root: object) -> bool:
    mine, yours = _types(a), _types(b)
    if mine and yours and not mine & yours:
        return True
    if _constants(a).isdisjoint(_constants(b)) and _constants(a) and _constants(b):
        return True
    if mine != {"object"} or yours != {"object"}:
        return False
    for name in _names(a, "required") & _names(b, "required"):
        first, second = (
            _constants(_resolved(one.get("properties", {}).get(name), root)) for one in (a, b)
        )
        if first and second and first.isdisjoint(second):
            return True
    return False


def _types(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type")
    found = {types} if isinstance(types, str) else _names(schema, "type")
    return found | {"integer"} if "number" in found else found


def _constants(schema: Mapping[str, Any]) -> set[str]:
    """The values of a schema that allows some strings only; else nothing."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return set(values)
    return set()


def _names(schema: Mapping[str, Any], key: str) -> set[str]:
    values = schema.get(key)
    return {v for v in values if isinstance(v, str)} if isinstance(values, list | tuple) else set()


def _resolved(schema: object, root: object) -> Mapping[str, Any]:
    """A schema, or what it refers to; an empty one where that is not plain to see."""
    for _ in range(10):
        if not isinstance(schema, Mapping) or "$id" in schema:
            break
        if "$ref" not in schema:
            return schema if isinstance(schema.get("properties", {}), Mapping) else {}
        schema = _target(root, str(schema["$ref"]))
    return {}


def _levels(schema: object) -> int:
    """How many schemas and maps of schemas lie within each other, the outermost included."""
    deepest, stack = 0, [(schema, 1)]
    while stack:
        one, level = stack.pop()
        deepest = max(deepest, level)
        # Definitions lie beside a schema and are counted where something refers to them.
        stack += [
            (below, level + (2 if key in MAPS else 1))
            for key, _, below in _schemas_in(one)
            if key not in ("$defs", "definitions")
        ]
    return deepest


def _references(schema: object) -> Iterator[str]:
    for _, one in placed_schemas(schema):
        if isinstance(one.get("$ref"), str):
            yield one["$ref"]


def placed_schemas(schema: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All schemas of a document but true and false, each with its place as a JSON pointer."""
    stack = [("#", schema)]
    while stack:
        place, one = stack.pop()
        if isinstance(one, Mapping):
            yield place, one
            stack += [(f"{place}/{under}", below) for _, under, below in _schemas_in(one)][::-1]


def _schemas_in(schema: object) -> Iterator[tuple[str, str, object]]:
    """The schemas right within one: the keyword that each stands under, the pointer from here."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in MAPS and isinstance(value, Mapping):
            yield from ((key, f"{key}/{escaped(name)}", one) for name, one in value.items())
        elif key in (*LISTS, *SINGLE) and isinstance(value, list | tuple):
            yield from ((key, f"{key}/{i}", one) for i, one in enumerate(value))
        elif key in SINGLE:
            yield key, key, value


def patterns_that_meet(root: object, most: int) -> str | None:
    """Where a string is to fit more than so many patterns at once, through allOf and `$ref`."""
    schemas = dict(placed_schemas(root))
    places = {id(one): place for place, one in schemas.items()}

    def together(place: str) -> Iterator[str]:
        one = schemas[place]
        yield from (
            f"{place}/{under}"
            for key, under, below in _schemas_in(one)
            if key == "allOf" and isinstance(below, Mapping)
        )
        target = _target(root, one["$ref"]) if isinstance(one.get("$ref"), str) else None
        if id(target) in places:
            yield places[id(target)]

    return gathered(schemas, lambda place: "pattern" in schemas[place], together, most)


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def leads_nowhere(reference: str, root: object) -> str:
    """What is wrong with a `$ref` of a document in which no schema has an `$id`, as far as is plain
    to see; empty where nothing is."""
    if not reference.startswith("#"):
        return f"'$ref' to another document ({reference:.200}) is not supported: put it into $defs"
    if reference.startswith("#/") and _target(root, reference) is None:
        return f"'$ref' leads nowhere: there is no {reference[1:]:.200}"
    return ""


def _unquoted(part: str) -> str:
    """A part of an address with its `%41` as the bytes that they stand for."""
    plain = re.sub(
        rb"%([0-9a-fA-F]{2})", lambda m: bytes([int(m[1], 16)]), part.encode(errors="surrogatepass")
    )
    return plain.decode(errors="replace")


def _target(schema: object, reference: str) -> object | None:
    """What a JSON pointer leads to; None where it is none, or leads nowhere."""
    if not reference.startswith("#/"):
        return schema if reference == "#" else None
    for part in reference[2:].split("/"):
        name = _unquoted(part).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping) and name in schema:
            schema = schema[name]
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return None
    return schema

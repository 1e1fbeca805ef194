"""JSON Schema: what is taken, what is refused and where, white space, formats, order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stemma.errors import InvalidArgument
from stemma.lang.constraints import Constraint, ConstraintWarning
from tests.lang.json_schema_suite_for_tests import names_in_order, written

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_schema_is_an_object_a_boolean_or_a_string_with_one() -> None:
    for schema in (PERSON, json.dumps(PERSON)):
        constraint = Constraint.json_schema(schema)
        assert constraint.parse('{"name": "A", "age": 3}') == {"name": "A", "age": 3}
        assert not constraint.matches('{"name": "A", "age": -3}')
        assert not constraint.matches('{"age": 3, "name": "A"}')  # the order of the properties
    assert Constraint.json_schema(True).parse("[null]") == [None]


@pytest.mark.parametrize(
    "text",
    ['{"name":"A","age":1}', '{"name": "A", "age": 1}', '{\n    "name": "A",\n    "age": 1\n}'],
)
def test_flexible_white_space_is_what_people_write(text: str) -> None:
    assert Constraint.json_schema(PERSON).matches(text)


def test_white_space_is_bounded() -> None:
    constraint = Constraint.json_schema(PERSON)
    assert not constraint.prefix_ok("{" + " " * 3)
    assert not constraint.prefix_ok("{\n\n")
    assert constraint.prefix_ok("{\n" + " " * 40)
    assert not constraint.prefix_ok("{\n" + " " * 41)
    assert not constraint.prefix_ok(" {")


def test_compact_has_none() -> None:
    constraint = Constraint.json_schema(PERSON, whitespace="compact")
    assert constraint.matches('{"name":"A","age":1}')
    assert not constraint.matches('{"name": "A","age":1}')
    assert constraint.forced_prefix() == '{"name":"'
    with pytest.raises(
        InvalidArgument, match="whitespace='none': must be one of flexible, spaced, compact"
    ):
        Constraint.json_schema(PERSON, whitespace="none")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {}}, "at #/not: 'not' is not supported: say what is allowed instead"),
        (
            {"properties": {"a/b": {"items": {"uniqueItems": True}}}},
            "at #/properties/a~1b/items/uniqueItems: 'uniqueItems' is not supported",
        ),
        ({"anyOf": [True, {"if": {}}]}, "at #/anyOf/1/if: 'if' is not supported"),
        ({"nullable": True}, 'write "type": ["string", "null"]'),
        ({"x-guidance": {}}, "white space is set by whitespace="),
        ({"type": "string", "format": "iri"}, "at #/format: 'iri' is not supported; these are:"),
        ({"pattern": "a(?=b)"}, "at #/pattern: the pattern 'a(?=b)': "),
        ({"patternProperties": {"(": {}}}, "at #/patternProperties: the pattern '(': "),
        ({"pattern": 3}, "at #/pattern: a pattern is a string, not 3"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "at #/$schema: "),
        ({"$ref": "#/$defs/nope"}, "at #/$ref: '$ref' leads nowhere: there is no /$defs/nope"),
        (
            {"items": {"$ref": "https://example.org/a.json"}},
            "at #/items/$ref: '$ref' to another document (https://example.org",
        ),
        ({"items": {"$ref": 3}}, "at #/items/$ref: '$ref' is a string, not 3"),
        ({"type": "objct"}, "at #/type: 'objct' is no type; these are: null, boolean, integer"),
        ({"type": ["null", "strng"]}, "number, string, array, object; did you mean 'string'?"),
        ({"anyOf": [{"required": "a"}]}, "at #/anyOf/0/required: 'required' is a list of names"),
        ({"required": [1]}, "at #/required: 'required' is a list of names, not [1]"),
        ({"enum": 3}, "at #/enum: 'enum' is a list of values, not 3"),
        ({"items": [{}]}, "at #/items: a list of schemas is of earlier drafts: use prefixItems"),
        ({"properties": {1: {}}}, "at #/properties: a name is a string, not 1"),
        (
            {"items": {"patternProperties": {"^a": {}, "b$": {}}}},
            "at #/items/patternProperties: 'patternProperties' is supported only where no name",
        ),
        (
            {"type": "string", "pattern": "^a$", "minLength": 3},
            "the schema admits nothing: what it says of a string or a number has no text in common",
        ),
        ({"items": 3}, "at #/items: a schema is an object, true or false, not 3"),
        ({"anyOf": {}}, "at #/anyOf: 'anyOf' is a list of schemas, not {}"),
        ({"properties": []}, "at #/properties: 'properties' is an object of schemas, not []"),
        ({3: 4}, "at #: a keyword is a string, not 3"),
        ({"const": {1, 2}}, "the schema is no JSON"),
        ({"const": float("nan")}, "the schema is no JSON"),
        (json.loads('{"properties":{"a":' * 99 + "{}" + "}}" * 99), "is nested too deep; use $ref"),
        (False, "json_schema: at #: the schema admits nothing: it is false"),
        ({"enum": []}, "at #: the schema admits nothing"),
        (
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "code": {"type": "string", "pattern": "^a$", "minLength": 3},
                },
                "required": ["name", "code"],
            },
            "at #/properties/code: the schema admits nothing",
        ),
        (
            {
                "items": {"$ref": "#/$defs/price"},
                "type": "array",
                "minItems": 1,
                "$defs": {"price": {"type": "integer", "minimum": 5, "maximum": 3}},
            },
            "at #/$defs/price: the schema admits nothing",
        ),
        (
            {
                "prefixItems": [{"allOf": [{"type": "integer"}, {"type": "string"}]}],
                "type": "array",
                "minItems": 1,
            },
            "at #/prefixItems/0: the schema admits nothing",
        ),
        (
            {"type": "object", "properties": {"a": False}, "required": ["a"]},
            "at #: the schema admits nothing",
        ),
        (
            {"items": {"type": "string", "pattern": "^(ab){1000000}$"}},
            "at #/items/pattern: the pattern '^(ab){1000000}$': {1000000} stands for at least "
            "2,000,000 characters; at most 262,144 are taken",
        ),
        (
            {"items": {"allOf": [{"pattern": f"a{i}b"} for i in range(40)]}},
            "at #/items: more than 12 patterns have to fit at once",
        ),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum"),
        (
            {"properties": {f"p{i}": {} for i in range(401)}},
            "at #/properties: 401 properties that may be left out; at most 400 can be told apart",
        ),
        ({"properties": {f"p{i}": {} for i in range(1_001)}}, "1,001 properties; at most 1,000"),
        ({"required": ["a"], "properties": {"a": False}, "type": "object"}, "'a' is unsatisfiable"),
        (
            {"type": "object", "required": ["const"], "properties": {"const": {"$ref": "#"}}},
            "at #: it admits nothing: each value would need another one inside",
        ),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "at #: it admits nothing: each"),
        (
            {
                "anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}],
                "$defs": {
                    "node": {
                        "type": "object",
                        "required": ["next"],
                        "properties": {"next": {"allOf": [{"$ref": "#/$defs/node"}]}},
                    }
                },
            },
            "at #/$defs/node: it admits nothing: each value would need another one inside",
        ),
        (
            {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
            "at #/oneOf: 'oneOf' is supported only where",
        ),
        (
            '{"type":\n "obj',
            'the string is no JSON: Unterminated string starting at\n   2 |  "obj\n',
        ),
        ([], "json_schema=[]: must be a schema"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_with_its_place(schema: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Constraint.json_schema(schema)
    assert str(caught.value).startswith("json_schema")
    assert said in str(caught.value)


def test_a_keyword_that_nobody_knows_is_warned_of() -> None:
    with pytest.warns(ConstraintWarning, match=r"'minLenght'.*did you mean 'minLength'\?") as told:
        constraint = Constraint.json_schema({"properties": {"a": {"minLenght": 3}}})
    assert constraint.warnings[0].startswith("at #/properties/a/minLenght")
    assert told[0].filename == __file__


def test_notes_and_extensions_are_let_be(recwarn: pytest.WarningsRecorder) -> None:
    schema = {"title": "t", "description": "d", "default": 1, "examples": [1], "x-mine": 1}
    assert Constraint.json_schema({**schema, "uniqueItems": False}).warnings == ()
    assert list(recwarn) == []


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": ["null", "array"]}]},
            ["1", '"a"', "null", "[]"],
            ["1.5", "{}"],
        ),
        (
            {
                "anyOf": [{"type": "integer"}, {"type": "string"}],
                "oneOf": [{"const": "a"}, {"enum": ["b"]}],
            },
            ['"a"', '"b"'],
            ["1", '"c"'],
        ),
        ({"type": "string", "format": "date", "pattern": "^2"}, ['"2024-01-01"'], ['"1999-01-01"']),
        ({"pattern": r"^\S+\s\S+$"}, ['"a\u3000b"', "3"], ['"a\u200bb"', '"a\u0085b"']),
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, ["[1]", "[1, 2]"], ["[]", "[1,2,3]"]),
        ({"type": "string", "maxLength": 2}, ['"😀é"', '""'], ['"abc"']),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "$ref": "#/definitions/a",
                "maxItems": 1,
                "definitions": {"a": {"type": "array"}},
            },
            ["[1, 2]"],
            ["1"],
        ),
        (
            {"type": "string", "format": "uuid4"},
            ['"00000000-0000-4000-8000-000000000000"'],
            ['"00000000-0000-1000-8000-000000000000"'],
        ),
        (
            {"type": "string", "format": "date-time"},
            ['"2016-12-31T23:59:60Z"', '"2016-12-31T15:59:60-08:00"'],
            ['"2016-12-31T22:59:60Z"', '"2023-02-29T00:00:00Z"'],
        ),
        ({"type": "string", "format": "ipv4"}, ['"255.0.0.1"'], ['"256.0.0.1"', '"01.2.3.4"']),
    ],
)
def test_a_schema_means_what_it_says(schema: Any, good: list[str], bad: list[str]) -> None:
    constraint = Constraint.json_schema(schema)
    assert [text for text in good if not constraint.matches(text)] == []
    assert [text for text in bad if constraint.matches(text)] == []


_SCALARS = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("integer")},
        optional={"minimum": st.integers(-50, 0), "maximum": st.integers(0, 50)},
    ),
    st.fixed_dictionaries({"type": st.just("integer"), "multipleOf": st.sampled_from([2, 5])}),
    st.fixed_dictionaries(
        {"type": st.just("number")},
        optional={"exclusiveMinimum": st.integers(-5, 0), "maximum": st.just(7.5)},
    ),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"minLength": st.integers(0, 2), "maxLength": st.integers(2, 5)},
    ),
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["é", 1, None, "日本"]},
            {"const": [1, {"a": 2}]},
            {"type": "string", "pattern": "^[a-c]+é?$"},
            {"type": ["integer", "string"]},
            {"type": "string", "format": "date"},
        ]
    ),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from(["a", "b", "ç"]), inner, max_size=3)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner},
            optional={"minItems": st.integers(0, 1), "maxItems": st.integers(1, 3)},
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "prefixItems": st.lists(inner, min_size=1, max_size=2)},
            optional={"items": st.just(False)},
        ),
        properties.flatmap(
            lambda found: st.fixed_dictionaries(
                {
                    "type": st.just("object"),
                    "properties": st.just(found),
                    "required": st.lists(st.sampled_from(sorted(found)), unique=True)
                    if found
                    else st.just([]),
                    "additionalProperties": st.sampled_from([False, {"type": "integer"}]),
                }
            )
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    )


_SCHEMAS = st.recursive(_SCALARS, _nested, max_leaves=5)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-60, 60), st.text("abé日", max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "b", "ç"]), inner)
    ),
    max_leaves=5,
)


def _of_schema(schema: Any) -> st.SearchStrategy[Any]:
    """Values that a schema of `_SCHEMAS` allows, mostly."""
    if "anyOf" in schema:
        return st.one_of(*map(_of_schema, schema["anyOf"]))
    if schema.get("type") == "array" and "prefixItems" in schema:
        return st.tuples(*map(_of_schema, schema["prefixItems"])).map(list)
    if schema.get("type") == "array":
        most = schema.get("maxItems", 3)
        return st.lists(
            _of_schema(schema["items"]), min_size=schema.get("minItems", 0), max_size=most
        )
    if schema.get("type") == "object":
        parts = {name: _of_schema(one) for name, one in schema["properties"].items()}
        return st.fixed_dictionaries(
            {name: parts[name] for name in schema["required"]},
            optional={name: part for name, part in parts.items() if name not in schema["required"]},
        )
    known = {
        "integer": st.integers(-60, 60),
        "number": st.floats(-10, 10).map(lambda number: round(number, 3)),
        "string": st.text('abcé日😀\n"', max_size=5),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return st.sampled_from(values)
    if schema.get("format") == "date":
        return st.dates().map(str)
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return st.one_of(*(known[name] for name in types))


def _orders(schema: Any) -> Iterator[tuple[str, ...]]:
    """The order of the properties of each object."""
    if isinstance(schema, dict):
        if schema.get("properties"):
            yield tuple(schema["properties"])
        schema = list(schema.values())
    if isinstance(schema, list):
        for one in schema:
            yield from _orders(one)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_schema_takes_what_a_validator_takes(data: st.DataObject) -> None:
    schema = data.draw(_SCHEMAS, label="schema")
    assume(len(set(_orders(schema))) < 2)  # else an object may be written in that of another
    constraint = Constraint.json_schema(schema)
    known = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    order = names_in_order(schema, {})
    for value in (data.draw(_of_schema(schema), label="good"), data.draw(_VALUES, label="any")):
        text = written(value, order, compact=data.draw(st.booleans()))
        assert constraint.matches(text) == known.is_valid(value), text
    for text in constraint.examples(2, seed=data.draw(st.integers(0, 99))):
        assert known.is_valid(json.loads(text)), text  # may be more than a float can be


@pytest.mark.parametrize(
    "schema",
    [
        {"minimum": -3.5, "exclusiveMaximum": -3},
        {"allOf": [{"minimum": -3.5}, {"exclusiveMaximum": -3}]},
        {"minimum": -3.5, "allOf": [{"exclusiveMaximum": -3}]},
        {"minimum": -3.5, "$ref": "#/$defs/a", "$defs": {"a": {"exclusiveMaximum": -3}}},
        {"minimum": -3.5, "anyOf": [{"exclusiveMaximum": -3}, {"exclusiveMinimum": 5}]},
    ],
)
def test_an_open_bound_stays_out_wherever_the_other_one_stands(schema: dict[str, Any]) -> None:
    constraint = Constraint.json_schema({"type": "number", **schema})
    assert [constraint.matches(text) for text in ("-3", "-3.0", "-3.1", "-3.5", "-3.6")] == [
        False,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("whitespace", ["flexible", "spaced", "compact"])
def test_a_name_has_one_spelling(whitespace: str) -> None:
    """Else an additional property could have the name of one that has a schema of its own."""
    names = ["a", "\n", '"', "\\", "/", "\t"]
    constraint = Constraint.json_schema(
        {
            "properties": {name: {"type": "integer"} for name in names},
            "additionalProperties": {"type": "string"},
            "type": "object",
        },
        whitespace=whitespace,
    )
    separator = ":" if whitespace == "compact" else ": "
    for name in names:
        plain, spelt = json.dumps(name), f'"\\u{ord(name):04x}"'
        assert constraint.matches(f"{{{plain}{separator}1}}")
        for text in (plain, spelt, '"\\/"' if name == "/" else spelt):
            assert not constraint.matches(f'{{{text}{separator}"x"}}')
    assert constraint.matches(f'{{"b\\n"{separator}"\\"\\\\\\n\\t\\b\\f\\r/"}}')


@pytest.mark.parametrize("name", ["const", "enum", "$ref", "$defs", "properties", "items", "not"])
def test_a_property_may_have_the_name_of_a_keyword(name: str) -> None:
    inner = {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}
    outer = {"type": "object", "required": [name], "properties": {name: {"$ref": "#/$defs/inner"}}}
    constraint = Constraint.json_schema(
        {"$ref": "#/$defs/outer", "$defs": {"inner": inner, "outer": outer}}
    )
    assert constraint.matches(json.dumps({name: {"x": 1}}))
    assert not constraint.matches(json.dumps({name: {"x": "1"}}))
    assert not constraint.matches(json.dumps({name: 1}))


def test_a_reference_may_be_percent_encoded() -> None:
    schema = {"$ref": "#/$defs/a%25~1b", "$defs": {"a%/b": {"type": "null"}}}
    assert Constraint.json_schema(schema).matches("null")


def test_a_list_of_items_is_a_tuple_where_the_draft_says_so() -> None:
    draft = "http://json-schema.org/draft-07/schema#"
    constraint = Constraint.json_schema(
        {"$schema": draft, "type": "array", "items": [{"type": "null"}], "additionalItems": False}
    )
    assert constraint.matches("[null]")
    assert not constraint.matches("[1]")

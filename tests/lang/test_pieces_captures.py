"""What the captures of grammar pieces are in a text."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import stemma as st
from stemma.errors import ConstraintError
from stemma.lang import pieces, pieces_captures
from tests.lang.test_pieces import INT, PERSON, POINT, WORD, values

# Captures


def test_captures_are_of_their_constraints_type_and_texts_otherwise() -> None:
    piece = st.seq(
        st.capture("literal", "a"),
        st.capture("word", WORD),
        " ",
        st.capture("number", INT),
        " ",
        st.capture("truth", st.Constraint.of_type(bool)),
        " ",
        st.capture("point", POINT),
        " ",
        st.capture("list", st.Constraint.of_type(list[int])),
        " ",
        st.capture("choice", st.Constraint.choices(["x", "xy"])),
        " ",
        st.capture("pair", st.seq("<", INT, ">")),
    )
    assert values(piece, 'abc -12 True {"x": 3} [1, 2] xy <7>') == {
        "literal": "a",
        "word": "bc",
        "number": -12,
        "truth": True,
        "point": {"x": 3},
        "list": [1, 2],
        "choice": "xy",
        "pair": "<7>",
    }


def test_a_capture_within_a_capture() -> None:
    piece = st.capture("all", st.seq("<", st.capture("in", INT), ">"))
    assert values(piece, "<12>") == {"all": "<12>", "in": 12}


def test_captures_that_take_no_part_are_none() -> None:
    piece = st.seq(
        st.one_of(st.capture("number", INT), st.capture("word", WORD)),
        st.optional(st.seq("=", st.capture("value", INT))),
    )
    assert values(piece, "12") == {"number": 12, "word": None, "value": None}
    assert values(piece, "ab=3") == {"number": None, "word": "ab", "value": 3}


def test_alternatives_may_have_captures_of_one_name() -> None:
    days = st.one_of(
        st.seq("in ", st.capture("days", INT), " days"), st.seq(st.capture("days", WORD), "!")
    )
    assert values(days, "in 3 days") == {"days": 3}
    assert values(days, "tomorrow!") == {"days": "tomorrow"}


ITEMS = st.optional(
    st.seq(st.capture("item", WORD), st.repeat(st.seq(", ", st.capture("item", WORD))))
)


@pytest.mark.parametrize(
    ("text", "items"), [("", []), ("a", ["a"]), ("a, bc, d", ["a", "bc", "d"])]
)
def test_captures_within_a_repeat_are_a_list(text: str, items: list[str]) -> None:
    assert values(ITEMS, text) == {"item": items}
    assert values(st.seq("[", ITEMS, "]"), f"[{text}]") == {"item": items}


def test_a_turn_in_which_a_capture_takes_no_part_is_none_in_the_list() -> None:
    pair = st.seq(st.capture("key", WORD), st.optional(st.seq("=", st.capture("value", INT))), ";")
    piece = st.repeat(pair)
    assert values(piece, "a=1;b;c=33;") == {"key": ["a", "b", "c"], "value": [1, None, 33]}
    assert values(piece, "") == {"key": [], "value": []}


def test_lists_of_one_sequence_fit_each_other() -> None:
    item = st.seq(st.capture("item", WORD), st.optional(st.seq(" x", st.capture("times", INT))))
    piece = st.seq("[", st.optional(st.seq(item, st.repeat(st.seq(", ", item)))), "]")
    assert values(piece, "[a, b x2, c]") == {"item": ["a", "b", "c"], "times": [None, 2, None]}
    assert values(piece, "[a x1, b]") == {"item": ["a", "b"], "times": [1, None]}
    assert values(piece, "[]") == {"item": [], "times": []}


def test_lists_of_repeats_within_repeats_are_flat() -> None:
    row = st.seq(st.capture("head", WORD), st.repeat(st.seq(" ", st.capture("cell", INT))), "\n")
    assert values(st.repeat(row), "a 1 2\nb\nc 3\n") == {"head": ["a", "b", "c"], "cell": [1, 2, 3]}


def test_a_turn_may_have_captures_of_one_name() -> None:
    piece = st.repeat(st.seq(st.capture("end", INT), "-", st.capture("end", INT), ";"))
    assert values(piece, "1-2;3-4;") == {"end": [1, 2, 3, 4]}


def test_each_piece_takes_as_much_as_it_can_with_the_rest_still_matching() -> None:
    letters = st.Constraint.regex("[a-z]*")
    piece = st.seq(st.capture("one", letters), st.capture("other", letters), st.capture("b", "b"))
    assert values(piece, "abab") == {"one": "aba", "other": "", "b": "b"}
    longest = st.seq(st.capture("unit", st.one_of("in", "inch")), st.capture("rest", letters))
    assert values(longest, "inches") == {"unit": "inch", "rest": "es"}
    assert values(st.seq(longest, "ch"), "inch") == {"unit": "in", "rest": ""}
    few = st.seq(st.repeat(st.capture("a", "a"), at_most=2), st.capture("rest", letters))
    assert values(few, "aaa") == {"a": ["a", "a"], "rest": "a"}


def test_turns_without_text_are_taken_only_where_turns_are_missing() -> None:
    maybe = st.capture("a", st.optional("a"))
    assert values(st.repeat(maybe), "aa") == {"a": ["a", "a"]}
    assert values(st.repeat(maybe, 3), "a") == {"a": ["a", "", ""]}
    assert values(st.repeat(maybe, at_most=2), "") == {"a": []}


def test_the_captures_of_a_constraint_that_is_a_part_are_kept() -> None:
    person = st.Constraint.grammar(PERSON)
    assert person.captures == ("name", "age")
    piece = st.seq(st.repeat(st.seq(person, "\n")), person)
    found = values(piece, "Name: Ada, age 36\nName: Bob, age 7")
    assert found == {"name": ["Ada", "Bob"], "age": [36, 7]}


def test_other_constraints_have_no_captures() -> None:
    assert INT.captures == ()
    assert INT.captured("12") == {}
    with pytest.raises(ConstraintError, match="dtype=int: 'x' does not match"):
        INT.captured("x")


def test_a_text_that_is_not_allowed_has_no_captures() -> None:
    with pytest.raises(ConstraintError, match=r"'ada, age 3' cannot follow 'Name: '"):
        st.Constraint.grammar(PERSON).captured("Name: ada, age 3")


def test_a_value_that_its_type_does_not_take_is_an_error_of_that_capture() -> None:
    piece = st.seq(st.capture("big", st.Constraint.of_type(float)), " ", st.capture("small", INT))
    found = st.Constraint.grammar(piece).captured("9" + "0" * 400 + " 1")
    assert isinstance(found["big"].error, ConstraintError)
    assert found["big"].text == "9" + "0" * 400
    assert found["small"].value == 1
    assert found["small"].error is None


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (st.one_of(POINT, st.seq(POINT, "|", st.capture("p", POINT))), 'me: \n{"x":1}|{"x":2}.'),
        (st.seq(POINT, st.capture("p", POINT)), 'me: {"x":1}\n{"x":2}.'),
        (st.seq(st.repeat(st.capture("p", POINT))), 'me: {"x":2}\n.'),
    ],
    ids=["alternatives", "neighbours", "turns"],
)
def test_white_space_where_json_meets_json_is_read(piece: st.Piece, text: str) -> None:
    found = values(st.seq("me: ", piece, "."), text)
    assert found in ({"p": {"x": 2}}, {"p": [{"x": 2}]})


def test_places_are_found_in_texts_of_any_letters() -> None:
    word = st.Constraint.regex(r"\w+")
    piece = st.seq("é", st.capture("x", word), "→", st.capture("y", word))
    assert values(piece, "éñandú→東京") == {"x": "ñandú", "y": "東京"}


def test_long_texts_and_many_turns_are_read() -> None:
    piece = st.repeat(st.seq(st.capture("x", INT), st.optional(","), st.optional(" ")))
    text = ", ".join(map(str, range(3_000)))
    assert values(piece, text) == {"x": list(range(3_000))}


def test_a_text_that_is_too_ambiguous_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_captures, "MOST_SECONDS", -1.0)
    with pytest.raises(ConstraintError, match="the captures are too ambiguous"):
        values(PERSON, "Name: Ada, age 36")


def test_what_fails_in_one_place_is_not_tried_again() -> None:
    some_a = st.repeat(st.one_of("a", "aa", st.capture("x", "aaa")))
    piece = st.seq(some_a, some_a, some_a, "b")
    assert pieces_captures.captured(piece, "a" * 300) is None


# Against Python's regular expressions, which read from left to right and greedily, too


@some.composite
def both(
    draw: some.DrawFn, depth: int = 3, empty: bool = True
) -> tuple[st.Piece | st.Constraint, str]:
    """A piece and a regular expression that are the same; captures are named (?P<..>) later."""
    kind = draw(
        some.sampled_from(["leaf", "leaf", "seq", "one_of", "optional", "repeat", "capture"])
    )
    if depth == 0 or kind == "leaf" or (not empty and kind in ("optional", "one_of")):
        patterns = ["a", "b", "[ab]", "[ab]+", "ab", "a+"] + (
            ["a*", "[ab]*", "b?"] if empty else []
        )
        pattern = draw(some.sampled_from(patterns))
        return st.Constraint.regex(pattern), f"(?:{pattern})"
    if kind == "seq":
        parts = draw(some.lists(both(depth - 1, empty), min_size=1, max_size=3))
        return st.seq(*(part for part, _ in parts)), "".join(pattern for _, pattern in parts)
    if kind == "one_of":  # alternatives of one length: Python takes the first, we take the longest
        parts = draw(some.permutations(["a", "b"]))
        return st.one_of(*parts), f"(?:{'|'.join(parts)})"
    if kind == "repeat":
        part, pattern = draw(both(depth - 1, False))
        least = draw(some.integers(0 if empty else 1, 2))
        most = draw(some.none() | some.integers(max(1, least), 3))
        told = f"{{{least},{'' if most is None else most}}}"
        return st.repeat(part, least, most), f"(?:{pattern}){told}"
    part, pattern = draw(both(depth - 1, empty))
    if kind == "optional":
        return st.optional(part), f"(?:{pattern})?"
    return st.capture("?", part), f"(?P<?>{pattern})"


def named(piece: st.Piece, pattern: str) -> tuple[st.Piece, str]:
    """Both with a name of its own for each capture."""
    numbers, places = count(), count()

    def renamed(part: Any) -> Any:
        match part:
            case pieces.Capture():
                name = f"x{next(numbers)}"
                return st.capture(name, renamed(part.part))
            case pieces.Seq():
                return st.seq(*map(renamed, part.parts))
            case pieces.OneOf():
                return st.one_of(*map(renamed, part.parts))
            case pieces.Optional():
                return st.optional(renamed(part.part))
            case pieces.Repeat():
                return st.repeat(renamed(part.part), part.at_least, part.at_most)
        return part

    return renamed(piece), re.sub(r"\(\?P<\?>", lambda _: f"(?P<x{next(places)}>", pattern)


@given(both(), some.lists(some.text("ab", max_size=7), min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_texts_and_captures_are_those_of_a_regular_expression(
    made: tuple[Any, str], texts: list[str]
) -> None:
    piece, pattern = named(st.seq(made[0]), made[1])
    constraint, expression = st.Constraint.grammar(piece), re.compile(pattern)
    lists = dict(piece.captures)
    for text in texts:
        expected = expression.fullmatch(text)
        assert constraint.matches(text) == (expected is not None)
        if expected is None:
            continue
        found = constraint.captured(text)
        for name, value in expected.groupdict().items():
            if not lists[name]:
                assert found[name].value == value
            elif value is not None:  # of a repeat Python tells the last turn
                assert [each for each in found[name].value if each is not None][-1] == value


@given(both(), some.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_every_example_can_be_read_with_json_between(made: tuple[Any, str], seed: int) -> None:
    piece, _ = named(st.seq(made[0]), made[1])
    whole = st.seq(st.capture("first", piece), ";", st.capture("point", POINT), ";", "end")
    constraint = st.Constraint.grammar(whole)
    for text in constraint.examples(3, seed=seed):
        found = constraint.captured(text)
        assert f"{found['first'].text};{found['point'].text};end" == text
        point = found["point"]
        if point.error is not None:  # of some numbers that JSON can write there is no float
            assert "is larger than a float can be" in str(point.error)
            assert "Infinity" in json.dumps(json.loads(point.text))
        else:
            assert point.value == json.loads(point.text)

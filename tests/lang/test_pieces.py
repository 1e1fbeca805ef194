"""Grammar pieces: what they allow, what their captures are, and what is refused where written."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import stemma as st
from stemma.errors import ConstraintError, InvalidArgument
from stemma.lang import pieces, pieces_captures

WORD = st.Constraint.regex("[a-z]+")
INT = st.Constraint.of_type(int)
PERSON = st.seq(
    "Name: ",
    st.capture("name", st.Constraint.regex("[A-Z][a-z]+")),
    ", age ",
    st.capture("age", INT),
)
POINT = st.Constraint.json_schema(
    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
)


def values(piece: st.Piece, text: str) -> dict[str, Any]:
    found = st.Constraint.grammar(piece).captured(text)
    return {name: each.value for name, each in found.items()}


def matches(piece: st.Piece, text: str) -> bool:
    return st.Constraint.grammar(piece).matches(text)


# Values


def test_a_piece_is_a_value_that_reads_as_it_was_written() -> None:
    again = st.seq(
        "Name: ",
        st.capture("name", st.Constraint.regex("[A-Z][a-z]+")),
        ", age ",
        st.capture("age", INT),
    )
    assert again == PERSON
    assert hash(again) == hash(PERSON)
    assert repr(PERSON) == (
        "seq('Name: ', capture('name', regex='[A-Z][a-z]+'), ', age ', capture('age', dtype=int))"
    )
    assert repr(st.repeat(st.one_of("a", st.optional("b")), 1, 3)) == (
        "repeat(one_of('a', optional('b')), at_least=1, at_most=3)"
    )
    with pytest.raises(FrozenInstanceError):
        PERSON.size = 1  # type: ignore[misc]


def test_pieces_of_other_parts_or_counts_are_other_values() -> None:
    assert (
        len({st.seq("a"), st.one_of("a"), st.optional("a"), st.repeat("a"), st.capture("a", "a")})
        == 5
    )
    assert st.repeat("a", 1) != st.repeat("a", 2) != st.repeat("a", 2, 3)
    assert st.capture("a", "x") != st.capture("b", "x")


# Texts


@pytest.mark.parametrize(
    ("piece", "good", "bad"),
    [
        (st.seq("a", "b", WORD), ["abc", "abxyz"], ["ab", "a", "abC", "xabc"]),
        (st.one_of("a", "ab", INT), ["a", "ab", "-3"], ["", "b", "a3", "abab"]),
        (st.optional("a"), ["", "a"], ["aa", "b"]),
        (st.seq(st.optional("-"), INT), ["-1", "1", "--1"], ["", "-"]),
        (st.repeat("ab"), ["", "ab", "ababab"], ["a", "aba"]),
        (st.repeat("ab", 2), ["abab", "ababab"], ["", "ab"]),
        (st.repeat("ab", 1, 2), ["ab", "abab"], ["", "ababab"]),
        (st.repeat("ab", at_most=1), ["", "ab"], ["abab"]),
        (st.repeat(st.seq(WORD, ";"), 1, 2), ["a;", "ab;c;"], ["", "a", "a;b;c;"]),
        (st.seq("x", st.capture("w", WORD)), ["xa"], ["x", "xA"]),
        (st.seq(""), [""], ["a"]),
        (st.seq(st.Constraint.regex(""), "a"), ["a"], [""]),
    ],
    ids=repr,
)
def test_what_pieces_allow(piece: st.Piece, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not matches(piece, text)] == []
    assert [text for text in bad if matches(piece, text)] == []


def test_a_part_may_run_into_the_next_one_where_all_is_regular() -> None:
    piece = st.seq(st.capture("all", st.Constraint.regex(".*")), st.capture("end", "end"))
    assert values(piece, "the end end") == {"all": "the end ", "end": "end"}
    assert not matches(piece, "the en")


@given(some.text(max_size=12), some.text(max_size=12))
@settings(max_examples=30, deadline=None)
def test_a_literal_is_itself_whatever_it_spells(one: str, other: str) -> None:
    piece = st.seq(one, "|", POINT, "|", st.capture("x", other))
    text = f'{one}|{{"x":1}}|{other}'
    assert values(piece, text) == {"x": other}
    assert not matches(piece, text + "!")


@pytest.mark.parametrize(
    "text", ['a"b\\', "\x00\x7f\n\t", "é😀\u2028", "{@n} %json /x/ # <|im_end|>"]
)
def test_signs_that_mean_something_in_a_grammar_are_signs(text: str) -> None:
    assert matches(st.seq(text), text)
    assert matches(st.seq(text, POINT), text + '{"x":1}')


def test_grammars_keep_their_own_rules_and_json_its_own_white_space() -> None:
    ones = st.Constraint.grammar('start: item+\nitem: "1"\n')
    twos = st.Constraint.grammar('start: item+\nitem: "2"\n%ignore / +/')
    gbnf = st.Constraint.grammar('root ::= item "!"\nitem ::= "3" | "4"')
    compact = st.Constraint.json_schema({"type": "array"}, whitespace="compact")
    piece = st.seq(ones, twos, gbnf, compact, st.Constraint.of_type(list[int]))
    assert matches(piece, "112 23![1,2][1, 2]")
    assert not matches(piece, "112 23![1, 2][1, 2]")
    assert not matches(piece, "2113![][]")


def test_equal_parts_are_compiled_once() -> None:
    piece = st.seq(POINT, "\n", POINT, "\n", st.repeat(st.seq(POINT, ";")))
    compiled = json.loads(st.Constraint.grammar(piece).compiled)["grammars"]
    assert [each["name"] for each in compiled] == ["pieces", "piece0"]


def test_what_is_common_to_all_texts_is_known_and_examples_are_made() -> None:
    constraint = st.Constraint.grammar(PERSON)
    assert constraint.forced_prefix() == "Name: "
    assert constraint.prefix_ok("Name: A")
    assert not constraint.prefix_ok("Name: a")
    for text in constraint.examples(5):
        assert re.fullmatch("Name: [A-Z][a-z]+, age (0|-?[1-9][0-9]*)", text)


@pytest.mark.parametrize(
    "piece",
    [
        st.seq("e: ", st.Constraint.regex("[A-Z][a-z]+"), "\n", st.Constraint.of_type(list[int])),
        st.seq(st.Constraint.regex("[^\n]+"), "\n", st.repeat(st.seq("- ", WORD, "\n"), 2)),
        st.seq(st.Constraint.regex("[^{]*"), POINT),
    ],
    ids=repr,
)
def test_a_shape_of_lines_can_be_closed(piece: st.Piece) -> None:
    constraint = st.Constraint.grammar(piece)
    end = constraint.closing("")
    assert end is not None
    assert constraint.matches(end)
    assert len(end) < 30


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
        assert found["point"].value == json.loads(found["point"].text)


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: st.seq(), r"seq\(\): there must be at least one part"),
        (lambda: st.one_of(), r"one_of\(\): there must be at least one part"),
        (lambda: st.seq(int), r"seq: <class 'int'> is no part.*st\.Constraint\.of_type\(int\)"),
        (lambda: st.one_of(["a", "b"]), r"one_of: .* give them one by one, as one_of\(\*parts\)"),
        (lambda: st.optional(None), "optional: None is no part, which is a text, a piece"),
        (lambda: st.repeat(3), "repeat: 3 is no part.*write it as a text, '3'"),
        (lambda: st.seq(re.compile("a+")), r"st\.Constraint\.regex\('a\+'\)"),
        (lambda: st.seq(lambda: PERSON), "what contains itself is written as a grammar"),
        (lambda: st.seq(st.gen("x")), r"seq: Gen\(.* is no part"),
        (lambda: st.seq("a\ud800"), "seq: .* half of a surrogate pair"),
        (lambda: st.repeat("a", -1), r"repeat\(at_least=-1\): must be a number of times, from 0"),
        (lambda: st.repeat("a", 0, -1), r"repeat\(at_most=-1\): must be a number of times"),
        (lambda: st.repeat("a", True), r"repeat\(at_least=True\)"),
        (lambda: st.repeat("a", 1.5), r"repeat\(at_least=1.5\)"),
        (lambda: st.repeat("a", None), r"repeat\(at_least=None\)"),
        (lambda: st.repeat("a", 0, 1001), r"repeat\(at_most=1001\): .*1,000; without at_most"),
        (lambda: st.repeat("a", 3, 2), r"repeat\(at_most=2\): must be at least at_least=3"),
        (lambda: st.repeat("a", 0, 0), r"repeat\(at_most=0\): must be at least 1; leave the piece"),
        (lambda: st.capture("", "a"), r"capture\(''\): the variable's name comes first"),
        (lambda: st.capture(WORD, "a"), r"capture\(Constraint.*the variable's name comes first"),
        (lambda: st.capture("a", 1), r"capture\('a'\): 1 is no part"),
    ],
)
def test_a_piece_that_cannot_be_meant_is_refused_where_it_is_written(
    make: Any, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_only_the_words_make_pieces() -> None:
    with pytest.raises(TypeError, match="abstract"):
        st.Piece()  # type: ignore[abstract]


@pytest.mark.parametrize(
    "piece",
    [
        st.seq(st.capture("x", "a"), st.capture("x", "b")),
        st.capture("x", st.seq("a", st.capture("x", "b"))),
        st.seq(st.one_of(st.capture("x", "a"), "c"), st.optional(st.capture("x", "b"))),
        st.optional(st.seq(st.capture("x", "a"), st.capture("x", "b"))),
    ],
    ids=repr,
)
def test_a_name_twice_outside_of_a_repeat_is_refused(piece: st.Piece) -> None:
    with pytest.raises(InvalidArgument, match=r"capture\('x'\): the name is there twice"):
        st.Constraint.grammar(piece)
    assert st.Constraint.grammar(st.repeat(piece, at_most=2)).captures == ("x",)


@pytest.mark.parametrize(
    "piece",
    [
        st.seq(st.Constraint.regex(".*"), POINT),
        st.seq(st.Constraint.grammar("start: W\nW: /.+/\n"), "end"),
        st.seq(st.Constraint.json_schema({"type": "integer"}), st.Constraint.regex("[0-9]")),
        st.repeat(st.one_of(POINT, st.Constraint.regex("[^;]+")), 2, 2),
        st.seq(st.one_of(INT, st.seq(st.Constraint.regex("[0-9a-z]+"), "|", POINT)), "|"),
    ],
    ids=repr,
)
def test_parts_that_run_into_each_other_are_refused_with_such_a_text(piece: st.Piece) -> None:
    with pytest.raises(InvalidArgument, match=r"its parts run into each other: .* put a text betw"):
        st.Constraint.grammar(piece)


def test_pieces_are_bounded() -> None:
    deep: st.Piece = st.seq("a")
    for _ in range(pieces.MOST_DEPTH - 3):
        deep = st.optional(deep)
    assert matches(deep, "a")
    assert values(st.capture("x", deep), "a") == {"x": "a"}
    deepest = st.optional(deep)
    with pytest.raises(InvalidArgument, match=r"101 of them within each other; at most .* 100"):
        st.seq(deepest)
    wide: st.Piece = st.seq("a")
    for _ in range(9):
        wide = st.seq(wide, wide)
    with pytest.raises(InvalidArgument, match=r"seq: 3,071 pieces.* at most 2,000.*use repeat"):
        st.seq(wide, wide)


def test_many_pieces_compile_and_match_quickly() -> None:
    lines = [st.seq(f"{i}: ", st.capture(f"x{i}", WORD), "\n", POINT, "\n") for i in range(200)]
    text = "".join(f'{i}: abc\n{{"x":{i}}}\n' for i in range(200))
    assert values(st.seq(*lines), text) == {f"x{i}": "abc" for i in range(200)}


def test_a_large_count_is_no_burden() -> None:
    many = st.repeat(st.seq(st.repeat(WORD, 1_000), POINT, ";"), 1_000)
    assert st.Constraint.grammar(many).prefix_ok("a")


def test_gen_takes_pieces_as_a_grammar_and_no_other_way() -> None:
    operation = st.gen("all", grammar=PERSON)
    assert isinstance(operation, st.gen("x").__class__)
    assert st.gen("all", constraint=st.Constraint.grammar(PERSON)) == operation
    with pytest.raises(InvalidArgument, match=r"gen\('age'\) with a capture\('age'\)"):
        st.gen("age", grammar=PERSON)
    with pytest.raises(InvalidArgument, match="grammar=3: must be a string or a piece"):
        st.gen("x", grammar=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"gen: capture\('x'\): the name is there twice"):
        st.gen("y", grammar=st.seq(st.capture("x", "a"), st.capture("x", "b")))


def test_a_piece_is_not_appended() -> None:
    with pytest.raises(
        TypeError, match=r"not the piece seq\('Name: '.*st\.gen\(\"x\", grammar=piece\)"
    ):
        "Who? " + st.gen("x") + PERSON  # type: ignore[operator]

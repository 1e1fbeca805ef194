"""Grammar pieces: what they allow, and what is refused where it is written."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import stemma as st
from stemma.errors import InvalidArgument
from stemma.lang import pieces

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
        (lambda: st.capture(WORD, "a"), r"capture\(<Constraint.*the variable's name comes first"),
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

"""Splitting an output into reasoning and answer: nothing is lost, whatever the pieces."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stemma.lang import reasoning
from stemma.lang.errors import InvalidArgument, UnsupportedByBackend
from stemma.lang.reasoning import THINK, Marks, Part, ReasoningSplit, is_open, marks_of_family

OVERLAPPING: Marks = ("aab", "aba")


def split(pieces: list[str], marks: Marks = THINK, *, inside: bool = False) -> list[Part]:
    splitter = ReasoningSplit(marks, inside=inside)
    return [part for piece in pieces for part in splitter.feed(piece)] + splitter.end()


def joined(parts: list[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def test_what_stands_between_the_marks_is_reasoning_and_the_rest_the_answer() -> None:
    parts = split(["<think>\nwhy\n</think>\n\nso"])
    assert [(part.kind, part.text) for part in parts] == [
        ("mark", "<think>"),
        ("reasoning", "\nwhy\n"),
        ("mark", "</think>"),
        ("answer", "\n\nso"),
    ]


def test_an_output_without_marks_is_all_answer() -> None:
    assert joined(split(["a < b ", "and c"]), "answer") == "a < b and c"


def test_an_output_that_begins_inside_needs_no_opening_mark() -> None:
    parts = split(["why</think>so"], inside=True)
    assert [part.kind for part in parts] == ["reasoning", "mark", "answer"]


@pytest.mark.parametrize("end", ["", "<", "</think", "</thin"])
def test_reasoning_that_is_never_closed_is_reasoning_to_the_end(end: str) -> None:
    parts = split(["<think>why" + end])
    assert joined(parts, "reasoning") == "why" + end
    assert joined(parts, "answer") == ""


def test_reasoning_may_come_in_several_stretches_and_after_other_text() -> None:
    parts = split(["Well. <think>a</think>x<think>b</think>y"])
    assert joined(parts, "reasoning") == "ab"
    assert joined(parts, "answer") == "Well. xy"


def test_only_what_may_become_a_mark_is_held_back() -> None:
    splitter = ReasoningSplit(THINK, inside=True)
    assert splitter.feed("one") == [Part("reasoning", "one")]
    assert splitter.feed(" two</th") == [Part("reasoning", " two")]
    assert splitter.feed("e end") == [Part("reasoning", "</the end")]


texts = st.lists(st.sampled_from([*"ab<>/", "aab", "aba", "<think>", "</think>"]), max_size=12)


@given(texts, st.sampled_from([THINK, OVERLAPPING]), st.booleans())
@example(["a", "aab"], OVERLAPPING, False)
def test_the_parts_are_the_same_however_the_text_is_cut(
    words: list[str], marks: Marks, inside: bool
) -> None:
    text = "".join(words)
    whole, letters = split([text], marks, inside=inside), split(list(text), marks, inside=inside)
    for kind in ("mark", "reasoning", "answer"):
        assert joined(whole, kind) == joined(letters, kind)
    assert "".join(part.text for part in letters) == text


@pytest.mark.parametrize(
    ("text", "is_inside"),
    [
        ("", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("<think>a</think><think>", True),
        ("a</think>", False),
    ],
)
def test_a_text_tells_whether_it_leaves_the_reasoning_open(text: str, is_inside: bool) -> None:
    assert is_open(text, THINK) is is_inside


@pytest.mark.parametrize(
    "marks", [(), ("<a>",), ("<a>", ""), "ab", ("<a>", 3), ("a", "b", "c"), None]
)
def test_marks_that_cannot_be_meant_are_refused(marks: object) -> None:
    with pytest.raises(InvalidArgument, match="reasoning_marks"):
        reasoning.checked_marks(marks)
    assert reasoning.checked_marks(["<a>", "</a>"]) == ("<a>", "</a>")


def test_families_of_models_are_known_by_sglangs_names() -> None:
    assert marks_of_family("Qwen3") == THINK
    assert marks_of_family("mistral") == ("[THINK]", "[/THINK]")
    with pytest.raises(UnsupportedByBackend, match="gpt-oss"):
        marks_of_family("gpt-oss")
    with pytest.raises(InvalidArgument, match="deepseek-r1, "):
        marks_of_family("gpt-2")


def test_the_example_is_true() -> None:
    result = doctest.testmod(reasoning)
    assert (result.attempted > 0, result.failed) == (True, 0)

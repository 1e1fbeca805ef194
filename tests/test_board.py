"""The texts of a run while they grow."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

import stemma as st
from stemma.backend.base import Usage
from stemma.board import Board, show_events, told, visible
from stemma.interpreter.events import (
    Event,
    Failed,
    Forked,
    Selected,
    Stopped,
    TextAdded,
    VariableFinished,
    VariableStarted,
)


def board_after(*events: Event) -> Board:
    board = Board()
    for event in events:
        board.take(event)
    return board


def lines(board: Board) -> list[str]:
    return [row.line().plain for row in board.rows]


def shown(events: Sequence[Event], *, terminal: bool = False, height: int = 50) -> str:
    console = Console(
        file=io.StringIO(), width=80, height=height, force_terminal=terminal, color_system=None
    )
    show_events(events, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_an_operation_writes_grows_in_a_row_of_its_own() -> None:
    board = board_after(
        Forked("p", ("p/a", "p/b")),
        VariableStarted("p/b", "x"),
        TextAdded("p/b", "a literal"),
        TextAdded("p/b", " one", "x"),
        TextAdded("p/a", "other", "x"),
        TextAdded("p/b", " two", "x"),
        VariableFinished("p/b", "x", " one two"),
        TextAdded("p/b", "three", "y"),
    )
    assert lines(board) == ["p/b  x  one two", "p/a  x  other", "p/b  y  three"]


def test_a_variable_that_is_written_again_gets_another_row() -> None:
    board = board_after(
        TextAdded("p", "one", "x"),
        VariableFinished("p", "x", "one"),
        TextAdded("p", "two", "x"),
    )
    assert lines(board) == ["p  x  one", "p  x  two"]


def test_a_choice_is_told_with_its_probability_with_and_without_a_name() -> None:
    board = board_after(
        TextAdded("p", "yes", "good"),
        Selected("p", "good", "yes", {"yes": 0.75, "no": 0.25}),
        VariableFinished("p", "good", "yes"),
        TextAdded("p", "no"),
        Selected("p", None, "no", {"yes": 0.25, "no": 0.5, "or": 0.25}),
    )
    assert lines(board) == ["p  good  yes  75% of 2 choices", "p  no  50% of 3 choices"]


def test_all_samples_are_told_when_the_variable_is_finished() -> None:
    board = board_after(
        TextAdded("p", " red\n", "color"),
        VariableFinished("p", "color", [" red\n", " blue\n", "a\nb"]),
    )
    assert lines(board) == ["p  color  1: red\n2: blue\n3: a b"]


def test_a_list_that_was_written_as_one_text_is_told_as_it_was_written() -> None:
    board = board_after(
        TextAdded("p", '["a", "b"]', "names"), VariableFinished("p", "names", ["a", "b"])
    )
    assert lines(board) == ['p  names  ["a", "b"]']


def test_a_failed_branch_says_so() -> None:
    board = board_after(
        TextAdded("p/a", "half", "x"), TextAdded("p/b", "fine", "x"), Failed("p/a", ValueError())
    )
    assert lines(board) == ["p/a  x  half failed", "p/b  x  fine"]


def test_a_branch_that_was_cancelled_says_so() -> None:
    board = board_after(TextAdded("p/a", "half", "x"), Stopped("p/a"))
    assert lines(board) == ["p/a  x  half stopped"]


def test_a_model_cannot_steer_the_terminal() -> None:
    assert visible("a\x1b[2J\x07b\x7f\tc\n") == "a␛[2J␇b␡\tc\n"
    assert lines(board_after(TextAdded("p", "x\x1b]0;title\x07", "x"))) == ["p  x  x␛]0;title␇"]


def test_off_the_terminal_a_line_comes_when_it_is_finished() -> None:
    events = [
        TextAdded("p/a", "one", "x"),
        TextAdded("p/b", "two " * 40 + "end", "x"),
        VariableFinished("p/b", "x", ""),
        VariableFinished("p/a", "x", "one"),
        TextAdded("p", "never", "y"),
    ]
    assert shown(events) == "p/b  x  " + "two " * 40 + "end\np/a  x  one\n"


def test_on_a_terminal_every_text_is_there_at_the_end_in_order() -> None:
    many = 30
    events: list[Event] = [VariableStarted(f"p/{i}", "x") for i in range(many)]
    for i in reversed(range(many)):
        events.append(TextAdded(f"p/{i}", f"text {i}.", "x"))
        events.append(VariableFinished(f"p/{i}", "x", f"text {i}."))
    text = shown(events, terminal=True, height=10)
    places = [text.rindex(f"text {i}.") for i in range(many)]
    assert places == sorted(places)


def test_finished_rows_leave_a_full_board_from_the_top_only() -> None:
    board = board_after(*(VariableStarted("p", name) for name in "abcd"))
    board.take(VariableFinished("p", "c", ""))
    assert board.take_finished_head(3) == []
    board.take(VariableFinished("p", "a", ""))
    board.take(VariableFinished("p", "b", ""))
    assert board.take_finished_head(4) == []
    assert [row.variable for row in board.take_finished_head(3)] == ["a", "b", "c"]
    assert [row.variable for row in board.rows] == ["d"]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_error_of_a_run_comes_after_what_it_has_written(terminal: bool) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x")
        s += st.gen("y")

    backend = st.MockBackend(["written", ValueError("broken")])
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None)
    with pytest.raises(ValueError, match="broken"):
        show_events(program.stream(backend=backend), console)
    assert isinstance(console.file, io.StringIO)
    assert "written" in console.file.getvalue()


def test_what_a_run_took_is_told_in_words() -> None:
    usage = Usage(prompt_tokens=2000, cached_tokens=500, computed_tokens=1500, output_tokens=7)
    assert told(usage, 1.26).plain == (
        "2,000 prompt tokens: 500 came from the cache (25%), 1,500 were computed. "
        "7 tokens were written in 1.3 s."
    )
    assert "(0%)" in told(Usage(), 0).plain

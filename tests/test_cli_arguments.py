"""From a program's signature to options."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
import typer
from typer.testing import CliRunner, Result

import stemma as st
from stemma.commands.arguments import option_type, program_command, read_docstring
from stemma.commands.settings import RunSettings


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    ("annotation", "taken_as"),
    [
        (str, str),
        (int, int),
        (float, float),
        (bool, bool),
        (Path, Path),
        (Color, Color),
        (Literal["a", "b"], Literal["a", "b"]),
        (Literal[1, 2], None),
        (int | None, int),
        (Optional[str], str),  # noqa: UP045 - the old spelling is what is tested
        (int | str, None),
        (list, list[str]),
        (list[int], list[int]),
        (Sequence[float], list[float]),
        (tuple[int, ...], list[int]),
        (tuple[int, str], None),
        (list[list[int]], None),
        (list[str] | None, list[str]),
        (dict, None),
        (dict[str, int], None),
        (object, None),
        (Any, str),
    ],
    ids=str,
)
def test_an_annotation_says_what_an_option_takes(annotation: Any, taken_as: Any) -> None:
    assert option_type(annotation) == taken_as


@pytest.mark.parametrize(
    ("default", "taken_as"),
    [
        ("a", str),
        (3, int),
        (0.5, float),
        (True, bool),
        (None, str),
        ([1, 2], list[int]),
        (("a",), list[str]),
        ([], list[str]),
        ((), list[str]),
        ([1, "a"], None),
        ({}, None),
    ],
    ids=str,
)
def test_without_an_annotation_the_default_says_it(default: Any, taken_as: Any) -> None:
    assert option_type(Any, default) == taken_as
    assert option_type("NotImported", default) == taken_as


@pytest.mark.parametrize("annotation", [list, tuple, Sequence])
def test_what_a_bare_list_has_in_it_its_default_says(annotation: Any) -> None:
    assert option_type(annotation, (1, 2)) == list[int]
    assert option_type(annotation, ()) == list[str]
    assert option_type(annotation, None) == list[str]
    assert option_type(annotation, (1, "a")) is None


Taken = list[tuple[dict[str, Any], RunSettings]]


def call(
    program: st.Program, *words: str, settings: RunSettings | None = None
) -> tuple[Result, Taken]:
    taken: Taken = []
    before = settings or RunSettings()
    command = program_command(program, before, lambda *given: taken.append(given))
    return CliRunner().invoke(command, list(words)), taken


@st.function
def everything(
    s: st.ProgramState,
    topic: str,
    count: int = 3,
    loud: bool = False,
    words: list[str] | None = None,
    numbers: tuple[int, ...] = (1, 2),
    max_words: float = 1.5,
    style: Annotated[Literal["dry", "funny"], "kept for others"] = "dry",
    color: Color = Color.RED,
    helper: object = len,
    *rest: str,
    **more: str,
) -> None:
    pass


def test_only_what_was_given_is_handed_on_so_that_the_programs_own_defaults_hold() -> None:
    result, taken = call(everything, "--topic", "sleep")
    assert result.exit_code == 0, result.output
    assert taken == [({"topic": "sleep"}, RunSettings())]


def test_arguments_arrive_with_their_types() -> None:
    words = "--topic x --count 4 --loud --words a --words b --numbers 7 --max-words 2 "
    words += "--style funny --color blue"
    result, taken = call(everything, *words.split())
    assert result.exit_code == 0, result.output
    assert taken[0][0] == {
        "topic": "x",
        "count": 4,
        "loud": True,
        "words": ["a", "b"],
        "numbers": (7,),
        "max_words": 2.0,
        "style": "funny",
        "color": Color.BLUE,
    }


def test_options_of_the_run_are_taken_after_the_file_too_and_go_before_those_given_earlier() -> (
    None
):
    earlier = RunSettings(seed=1, timeout=5.0)
    result, taken = call(everything, "--topic", "x", "--seed", "2", "--json", settings=earlier)
    assert result.exit_code == 0, result.output
    assert taken == [({"topic": "x"}, RunSettings(seed=2, timeout=5.0, json=True))]


def test_a_parameter_goes_before_an_option_of_the_run_with_its_name() -> None:
    @st.function
    def program(s: st.ProgramState, model: str, json: int = 0) -> None:
        pass

    earlier = RunSettings(model="m", json=True)
    result, taken = call(program, "--model", "T", "--json", "3", "--tree", settings=earlier)
    assert result.exit_code == 0, result.output
    assert taken == [({"model": "T", "json": 3}, RunSettings(model="m", json=True, tree=True))]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "--topic"),
        ("--topic x --count two", "--count"),
        ("--topic x --style blue", "funny"),
        ("--topic x --color green", "red"),
        ("--topic x --cuont 2", "--count"),
        ("--topic x --helper y", "--helper"),
        ("--topic x stray", "stray"),
        ("--topic x --temperature -1", "--temperature"),
        (f"--topic x --seed {2**63}", "--seed"),
    ],
)
def test_a_wrong_argument_is_named_and_ends_with_status_2(words: str, named: str) -> None:
    result, taken = call(everything, *words.split())
    assert result.exit_code == 2
    assert named in result.output
    assert taken == []


def test_help_tells_types_defaults_and_the_docstring() -> None:
    @st.function
    def tips(s: st.ProgramState, topic: str, count: int = 3) -> None:
        """Give tips about a [topic].

        Over
        two lines.

        topic: what they are about, [bold]any[/] text
        count: how many
        """

    result, _ = call(tips, "--help")
    assert result.exit_code == 0
    for told in (
        "Give tips about a [topic].",
        "Over two lines.",
        "what they are about, [bold]any[/] text",
        "how many [default: 3]",
        "[required]",
        "--temperature",
    ):
        assert told in " ".join(result.output.split())


def test_help_has_no_type_next_to_a_flag_and_keeps_lists_and_indented_lines() -> None:
    @st.function
    def program(s: st.ProgramState, loud: bool = False, count: int = 1) -> None:
        """Speaks.

        A text whose lines
        are one:

        - the first
          item
        - the second

            code
            more code
        """

    output = call(program, "--help")[0].output
    assert "<bool>" not in output
    assert "--no-loud" in output
    assert "<int>" in output
    lines = [line.rstrip() for line in output.splitlines()]
    for line in ("A text whose lines are one:", "- the first item", "- the second"):
        assert f" {line}" in lines
    assert "     code" in lines
    assert "     more code" in lines


def test_an_argument_that_no_option_can_give_is_named_with_the_remedy() -> None:
    @st.function
    def program(s: st.ProgramState, document: dict[str, str]) -> None:
        pass

    with pytest.raises(typer.BadParameter, match=r"'document'.*dict.*default"):
        program_command(program, RunSettings(), lambda *given: None)


def test_a_tuple_arrives_as_one() -> None:
    @st.function
    def program(
        s: st.ProgramState,
        bare: tuple,  # type: ignore[type-arg]
        maybe: tuple[int, ...] | None = None,
        told=("a",),  # type: ignore[no-untyped-def]
        words: Sequence[str] = (),
    ) -> None:
        pass

    result, taken = call(program, *["--bare", "x", "--maybe", "1", "--maybe", "2", "--told", "b"])
    assert result.exit_code == 0, result.output
    assert taken[0][0] == {"bare": ("x",), "maybe": (1, 2), "told": ("b",)}


def test_a_parameter_whose_option_means_something_else_is_named_unless_it_has_a_default() -> None:
    @st.function
    def needs(s: st.ProgramState, help: str) -> None:
        pass

    with pytest.raises(typer.BadParameter, match=r"'help', and --help means something else.*def"):
        program_command(needs, RunSettings(), lambda *given: None)

    @st.function
    def twice(s: st.ProgramState, loud: bool, no_loud: str) -> None:
        pass

    with pytest.raises(typer.BadParameter, match=r"'no_loud', and --no-loud means"):
        program_command(twice, RunSettings(), lambda *given: None)

    @st.function
    def can_do_without(s: st.ProgramState, help: str = "") -> None:
        """What it does."""

    result, taken = call(can_do_without, "--help")
    assert "What it does." in result.output
    assert (result.exit_code, taken) == (0, [])
    assert call(can_do_without)[1] == [({}, RunSettings())]


def test_a_parameter_without_a_name_for_callers_cannot_be_given() -> None:
    @st.function
    def program(s: st.ProgramState, x: str, /) -> None:
        pass

    with pytest.raises(typer.BadParameter, match="'x', which has no name for callers"):
        program_command(program, RunSettings(), lambda *given: None)


def test_an_underscore_in_front_is_not_part_of_the_option() -> None:
    @st.function
    def program(s: st.ProgramState, _count: int = 1) -> None:
        pass

    _, taken = call(program, "--count", "2")
    assert taken[0][0] == {"_count": 2}


def test_what_was_bound_is_a_default() -> None:
    result, taken = call(everything.bind(topic="sleep"), "--count", "1")
    assert result.exit_code == 0, result.output
    assert taken[0][0] == {"count": 1}


def test_names_that_only_a_type_checker_knows_do_not_matter() -> None:
    @st.function
    def program(s: st.ProgramState, count: int = 3) -> None:
        pass

    program.body.__annotations__["s"] = "NotImported"
    result, taken = call(program, "--count", "4")
    assert result.exit_code == 0, result.output
    assert taken[0][0] == {"count": 4}


@pytest.mark.parametrize(
    "text",
    [
        "About.\n\ntopic: the\n    topic\ncount: how many\n",
        "About.\n\nArgs:\n    topic (str): the\n        topic\n    count: how many\n",
        "About.\n\n:param topic: the topic\n:param count: how many\n",
        "About.\n\ntopic: the topic\ncount: how many\n\nReturns: nothing: at all\n",
    ],
)
def test_parameters_are_described_in_the_usual_ways(text: str) -> None:
    def body(s: st.ProgramState, topic: str, count: int) -> None:
        pass

    body.__doc__ = text
    about, texts = read_docstring(st.function(body))
    assert about == "About."
    assert texts == {"topic": "the topic", "count": "how many"}


def test_a_line_with_a_colon_that_names_no_parameter_belongs_to_the_text() -> None:
    def body(s: st.ProgramState) -> None:
        """Note: this is one.

        Another: too.
        """

    assert read_docstring(st.function(body)) == ("Note: this is one.\n\nAnother: too.", {})


@pytest.mark.parametrize(
    "settings",
    [
        RunSettings(timeout=0),
        RunSettings(timeout=float("nan")),
        RunSettings(temperature=float("nan")),
        RunSettings(json=True, tree=True),
        RunSettings(json=True, show=True),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: RunSettings) -> None:
    with pytest.raises(typer.BadParameter):
        settings.check()


def test_sampling_is_left_to_the_program_unless_it_is_given() -> None:
    assert RunSettings().sampling() is None
    assert RunSettings(max_tokens=5).sampling() == st.SamplingParams(max_tokens=5)
    assert RunSettings(temperature=0).sampling() == st.SamplingParams(temperature=0)

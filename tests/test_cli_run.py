"""`stemma run`: a program from a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from stemma.backend.mock import MockBackend
from tests.cli_for_tests import PROGRAM, run, run_stemma, scripted_backend, write


@pytest.fixture(autouse=True)
def same_path_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's folder goes on the path: only for one test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> MockBackend:
    return scripted_backend(monkeypatch)


def told(result: Result) -> str:
    """The message in the box that a wrong call gets, on one line."""
    return " ".join(result.output.replace("│", "").split())


def test_texts_value_and_counts_are_shown(tmp_path: Path, backend: MockBackend) -> None:
    result = run(write(tmp_path, PROGRAM), "--topic", "sleep", "--seed", "7")
    assert result.exit_code == 0, result.output
    assert "tips/0  tip  reply to" in result.stdout
    assert "tips/1  tip  reply to" in result.stdout
    assert "[' reply to " in result.stdout
    assert "Seed 7." in result.stdout
    assert "run as a script" not in result.output
    assert "Tips about sleep." in backend.prompts[0]


def test_options_reach_the_run(tmp_path: Path, backend: MockBackend) -> None:
    target = write(tmp_path, PROGRAM)
    words = ["--topic", "x", "--max-tokens", "3", "--temperature", "0", "--seed", "3"]
    assert run(target, *words).exit_code == 0
    params = backend.calls[0].params
    assert params is not None
    assert (params.max_tokens, params.temperature) == (3, 0)
    again = [call.params for call in backend.calls]
    backend.calls.clear()
    assert run(*words[2:], target, *words[:2]).exit_code == 0
    assert [call.params for call in backend.calls] == again


def test_an_async_program_runs_too(tmp_path: Path, backend: MockBackend) -> None:
    program = """
import stemma as st
@st.function
async def program(s):
    s += st.gen("x")
    return await s.get("x")
"""
    output = json.loads(run("--json", write(tmp_path, program)).stdout)
    assert output["value"] == output["variables"]["x"] != ""


def test_a_program_that_names_nothing_shows_its_text(tmp_path: Path, backend: MockBackend) -> None:
    program = """
import stemma as st
@st.function
def program(s):
    s += "Once" + st.gen()
"""
    assert "Once reply to 4\n" in run(write(tmp_path, program)).stdout


def test_show_tells_what_ran_branch_by_branch(tmp_path: Path, backend: MockBackend) -> None:
    result = run("--show", write(tmp_path, PROGRAM), "--topic", "sleep")
    assert result.exit_code == 0, result.output
    picture = result.stdout.partition("Seed")[2]
    assert "Tips about sleep." in picture
    assert "tips/1" in picture


def test_show_tells_what_ran_before_a_failure_too(tmp_path: Path, backend: MockBackend) -> None:
    result = run("--show", write(tmp_path, FAILING), "--how", "zero")
    assert result.exit_code == 1
    assert "Once" in result.stdout
    assert "ZeroDivisionError" in result.stderr


# Which program


TWO = """
import stemma as st
@st.function
def first(s):
    return 1
@st.function
def second(s):
    return 2
@st.function
def _part(s):
    return 3
"""


@pytest.mark.parametrize(("name", "value"), [("first", 1), ("second", 2), ("_part", 3)])
def test_a_program_is_named_after_a_colon(
    name: str, value: int, tmp_path: Path, backend: MockBackend
) -> None:
    output = json.loads(run("--json", f"{write(tmp_path, TWO)}:{name}").stdout)
    assert output["value"] == value


def test_of_several_programs_the_choices_are_named(tmp_path: Path) -> None:
    result = run(write(tmp_path, TWO))
    assert result.exit_code == 2
    assert "program.py:first or program.py:second" in told(result)


def test_a_program_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    result = run(write(tmp_path, TWO) + ":third")
    assert result.exit_code == 2
    assert "program.py has no program 'third'; it has first, second, _part" in told(result)


def test_programs_that_are_only_imported_do_not_count(tmp_path: Path, backend: MockBackend) -> None:
    write(tmp_path, TWO, "two.py")
    program = "from two import first, second\n" + TWO.replace("first", "own").split("@")[0]
    program += "@st.function\ndef own(s):\n    return first(s) + second(s)\n"
    output = json.loads(run("--json", write(tmp_path, program)).stdout)
    assert output["value"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1\n", "no program"), (None, "is not there"), ("", "@stemma.function")],
)
def test_a_file_without_a_program_is_told_with_the_remedy(
    text: str | None, message: str, tmp_path: Path
) -> None:
    target = str(tmp_path / "gone.py") if text is None else write(tmp_path, text)
    result = run(target)
    assert result.exit_code == 2
    assert message in told(result)


def test_a_folder_is_no_program(tmp_path: Path) -> None:
    result = run(str(tmp_path))
    assert result.exit_code == 2
    assert "is a folder" in told(result)


def test_help_of_a_file_loads_no_model(tmp_path: Path) -> None:
    result = run("--model", "/not/there", write(tmp_path, PROGRAM), "--help")
    assert result.exit_code == 0
    assert "what they are about" in result.output


# How it fails


FAILING = """
import stemma as st
@st.function
def program(s, how: str):
    s += "Once" + st.gen("x")
    if how == "unknown":
        return s["y"]
    if how == "value":
        s += st.gen("z", temperature=-1)
    if how == "zero":
        helper(s)
    if how == "scripted":
        s += st.gen("z")
        return s["z"]
def helper(s):
    return 1 / len([])
"""


@pytest.mark.parametrize(
    ("how", "line", "told"),
    [
        ("unknown", 7, "no variable 'y'"),
        ("value", 9, "temperature=-1"),
        ("scripted", 13, "the script has no reply number 2"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_error_of_ours_is_its_message_with_file_and_line(
    how: str,
    line: int,
    told: str,
    options: list[str],
    tmp_path: Path,
    backend: MockBackend,
) -> None:
    backend._reply = MockBackend(["one"])._reply
    result = run(*options, write(tmp_path, FAILING), "--how", how)
    assert result.exit_code == 1
    assert f"program.py:{line} in program: " in result.stderr
    assert told in result.stderr
    assert f"    {line} | " in result.stderr
    assert "Traceback" not in result.stderr
    if options:
        assert result.stdout == ""


def test_an_error_of_the_program_keeps_the_traceback_of_its_own_lines(
    tmp_path: Path, backend: MockBackend
) -> None:
    result = run(write(tmp_path, FAILING), "--how", "zero")
    assert result.exit_code == 1
    assert result.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    frames = [line for line in result.stderr.splitlines() if line.startswith("  File")]
    assert [frame.rpartition("in ")[2] for frame in frames] == ["program", "helper"]


def test_the_end_of_the_time_is_an_error(tmp_path: Path, backend: MockBackend) -> None:
    backend.delay = 30
    result = run("--timeout", "0.05", write(tmp_path, PROGRAM), "--topic", "x")
    assert result.exit_code == 1
    assert "timeout of 0.05 s" in result.stderr


def test_an_error_in_the_file_itself_is_told_from_its_line_on(tmp_path: Path) -> None:
    result = run(write(tmp_path, "import json\njson.loads('{')\n"))
    assert result.exit_code == 1
    frames = [line for line in result.stderr.splitlines() if line.startswith("  File")]
    assert 'program.py", line 2' in frames[0]
    assert result.stderr.rstrip().splitlines()[-1].startswith("json.decoder.JSONDecodeError")


def test_a_syntax_error_shows_the_line(tmp_path: Path) -> None:
    result = run(write(tmp_path, "x = 1\ndef (:\n"))
    assert result.exit_code == 1
    assert "line 2" in result.stderr
    assert "def (:" in result.stderr
    assert "stemma" not in result.stderr


def test_a_reserved_parameter_is_told_with_the_line_that_declares_it(tmp_path: Path) -> None:
    program = "import stemma as st\n\n@st.function\ndef f(s, seed):\n    pass\n"
    result = run(write(tmp_path, program))
    assert result.exit_code == 1
    assert "program.py:3" in result.stderr
    assert "'seed'" in result.stderr


def test_a_missing_model_is_told_after_the_arguments_were_checked(tmp_path: Path) -> None:
    target = write(tmp_path, PROGRAM)
    wrong = run("--model", "/not/there", target)
    assert (wrong.exit_code, "--topic" in wrong.stderr) == (2, True)
    right = run("--model", "/not/there", target, "--topic", "x")
    assert (right.exit_code, right.stderr.startswith("error: there is no model")) == (1, True)


# On a model


def test_a_program_runs_on_a_model_and_shows_the_tree(tiny_model: Any, tmp_path: Path) -> None:
    target = write(tmp_path, PROGRAM)
    done = run_stemma(
        "run",
        "program.py",
        "--topic",
        "sleep",
        "--tree",
        "--max-tokens",
        "8",
        cwd=tmp_path,
        STEMMA_MODEL=str(tiny_model()),
    )
    assert done.returncode == 0, done.stderr
    assert "tips/1  tip  " in done.stdout
    assert "radix tree" in done.stdout
    assert "came from the cache" in done.stdout
    assert target.endswith("program.py")


def test_the_same_seed_writes_the_same(tiny_model: Any, tmp_path: Path) -> None:
    target = write(tmp_path, PROGRAM)
    words = ["run", "--json", "--model", str(tiny_model()), target, "--topic", "x", "--seed"]
    one, same, other = (json.loads(run_stemma(*words, seed).stdout) for seed in ("5", "5", "6"))
    assert one["value"] == same["value"] != other["value"]


@pytest.mark.slow
def test_the_default_model_runs_a_program(default_model_folder: Path, tmp_path: Path) -> None:
    program = """
import stemma as st
@st.function
def capital(s, country: str):
    s += f"The capital of {country} is" + st.gen("name", max_tokens=8, stop=".")
    return s["name"].strip()
"""
    done = run_stemma(
        "run", "--json", write(tmp_path, program), "--country", "France", "--temperature", "0"
    )
    assert json.loads(done.stdout)["value"].startswith("Paris")

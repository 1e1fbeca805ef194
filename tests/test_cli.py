"""How commands end: what they print and their exit status."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stemma.commands.app import app
from stemma.commands.endings import errors_told
from stemma.lang.errors import ModelLoadError, Site, UnknownVariable
from tests.cli_for_tests import run_stemma


def test_version_is_the_installed_one() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"stemma {version('stemma-lm')}\n"


def test_help_is_one_screen_with_a_line_for_each_command_and_examples() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert len(result.output.strip().splitlines()) < 40
    for name in ("run", "tree", "chat", "demo", "doctor"):
        assert len(re.findall(rf"^│ {name} .*\. *│$", result.output, re.MULTILINE)) == 1
        assert re.search(rf"^ +stemma {name}\b", result.output, re.MULTILINE)


@pytest.mark.parametrize("command", ["run", "tree", "chat", "demo", "doctor"])
def test_help_of_a_command_needs_no_model_library(command: str) -> None:
    code = f"""
import sys
from stemma.commands.app import app
try:
    app([{command!r}, "--help"])
except SystemExit as end:
    print(end.code, sorted({{"torch", "transformers", "asyncio"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize("command", ["run", "tree", "chat", "demo", "doctor"])
def test_help_of_a_command_tells_how_it_is_called_and_no_type_of_a_flag(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], prog_name="stemma").output
    usage = next(line.strip() for line in shown.splitlines() if "Usage" in line)
    file = " FILE.py[:PROGRAM] [--ARGUMENT VALUE]..." if command in ("run", "tree") else ""
    assert usage == f"Usage: stemma {command} [OPTIONS]{file}"
    assert "<bool>" not in shown


def test_the_command_has_one_name_however_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("import stemma as st\n@st.function\ndef p(s): pass\n")
    for words, usage in (
        (["--help"], "stemma [OPTIONS] COMMAND"),
        (["run", "--help"], "stemma run [OPTIONS] FILE.py"),
        (["run", "p.py", "--help"], "stemma run p.py [OPTIONS]"),
        (["run", "--json", "p.py", "--help"], "stemma run p.py [OPTIONS]"),
        (["tree", "p.py:p", "--help"], "stemma tree p.py:p [OPTIONS]"),
    ):
        assert f"Usage: {usage}" in run_stemma(*words, cwd=tmp_path).stdout


@pytest.mark.parametrize("command", ["demo", "chat"])
def test_a_seed_that_is_none_is_refused_before_anything_is_done(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--seed", str(2**63), "--model", "/not/there"])
    assert result.exit_code == 2
    assert "must be a signed integer of 64 bits" in " ".join(result.output.replace("│", "").split())
    assert result.stdout == ""


def test_an_unknown_option_is_a_usage_error() -> None:
    assert CliRunner().invoke(app, ["demo", "--modell", "x"]).exit_code == 2


def test_a_missing_model_is_one_message_without_a_traceback() -> None:
    result = run_stemma("demo", "--model", "/not/there")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: there is no model at /not/there: ")
    assert "Traceback" not in result.stderr


def test_the_model_of_the_environment_is_taken() -> None:
    result = run_stemma("demo", STEMMA_MODEL="/nor/here")
    assert result.returncode == 1
    assert "/nor/here" in result.stderr


def test_an_error_of_a_program_is_told_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = UnknownVariable("no variable named 'x'")
    error.site = Site("not/there.py", 7, "main")
    with pytest.raises(typer.Exit) as ended, errors_told():
        raise error
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "error: not/there.py:7 in main: no variable named 'x'\n"


def test_an_error_of_ours_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), errors_told():
        raise ModelLoadError("the model is broken")
    assert capsys.readouterr().err == "error: the model is broken\n"


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), errors_told():
        raise ZeroDivisionError

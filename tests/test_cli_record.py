"""`stemma run --record` and `--replay`: what a model has answered, written down and played back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from stemma.commands import run as run_module
from tests.cli_for_tests import PROGRAM, run, scripted_backend, write


@pytest.fixture(autouse=True)
def same_path_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(model: str | None, console: Console) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(run_module, "opened_backend", opened)


def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, str]:
    """A program, its record, and what it printed with --json."""
    target, file = write(folder, PROGRAM), str(folder / "run.jsonl")
    scripted_backend(monkeypatch)
    result = run("--record", file, "--json", target, "--topic", "sleep", "--seed", "7")
    assert result.exit_code == 0, result.output
    return target, file, result.stdout


def test_a_replay_prints_what_was_recorded_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, file, printed = recorded(tmp_path, monkeypatch)
    monkeypatch.setattr(run_module, "opened_backend", None)
    result = run(target, "--topic", "sleep", "--replay", file, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(printed)
    assert json.loads(result.stdout)["seed"] == 7
    result = run(target, "--topic", "sleep", "--replay", file)
    assert "tips/0  tip  reply to" in result.stdout
    assert "Seed 7." in result.stdout


def test_what_is_not_in_the_record_is_told_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, file, _ = recorded(tmp_path, monkeypatch)
    monkeypatch.setattr(run_module, "opened_backend", None)
    result = run("--replay", file, target, "--topic", "tea")
    assert result.exit_code == 1
    assert "-Tips about sleep." in result.stderr
    assert "+Tips about tea." in result.stderr
    assert f"{Path(target).name}:" in result.stderr


def test_a_run_that_fails_leaves_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import stemma as st
@st.function
def program(s):
    s += "Once" + st.gen("x")
    return int(s["x"])
"""
    scripted_backend(monkeypatch)
    target, file = write(tmp_path, program), str(tmp_path / "run.jsonl")
    assert run("--record", file, target).exit_code == 1
    monkeypatch.setattr(run_module, "opened_backend", None)
    result = run("--replay", file, target)
    assert result.exit_code == 1
    assert "invalid literal for int() with base 10: ' reply to 4'" in result.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--record", "a.jsonl", "--replay", "record.jsonl"], "leave out --replay"),
        (["--replay", "record.jsonl", "--model", "other"], "leave out --model and --tree"),
        (["--replay", "record.jsonl", "--tree"], "leave out --model and --tree"),
        (["--replay", "absent.jsonl"], "there is no such file"),
        (["--record", "."], "must be a file in a folder that is there"),
        (["--record", "absent/run.jsonl"], "must be a file in a folder that is there"),
        (["--record", "program.py"], "is there and no record: name another file"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_wrong_calls_are_refused_before_a_model_is_loaded(
    options: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = write(tmp_path, PROGRAM)
    (tmp_path / "record.jsonl").write_text("")
    for words in ([*options, target], [target, *options]):
        result = run(*words, "--topic", "sleep")
        assert result.exit_code == 2, result.output
        assert told in " ".join(result.output.replace("│", "").split())
    assert (tmp_path / "program.py").read_text() == PROGRAM


@pytest.mark.usefixtures("no_model")
def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    target = write(tmp_path, PROGRAM)
    result = run("--replay", target, target, "--topic", "sleep")
    assert result.exit_code == 1
    assert "error:" in result.stderr
    assert "replay=" in result.stderr

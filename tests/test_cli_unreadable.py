"""The command line says of each variable that has a text and no value why, and what the text is."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from stemma.backend.mock import MockBackend
from stemma.commands import batch as batch_module
from stemma.commands.app import app
from tests.cli_for_tests import run, scripted_backend, write

PROGRAM = """
import pydantic
import stemma as st


class Small(pydantic.BaseModel):
    x: int

    @pydantic.field_validator("x")
    @classmethod
    def small(cls, x):
        if x > 9:
            raise ValueError("too large")
        return x


@st.function
def program(s, limit: int = 2):
    s += st.gen("cut", dtype=list[int], max_tokens=limit) + "." + st.gen("refused", dtype=Small)
    branch = s.copy()
    branch += st.gen("samples", n=2, dtype=list[int], max_tokens=limit)
    return "done"
"""
REPLIES = ["[1, 2, 3]", '{"x": 10}', "[5]", "[1, 2, 3]"]


@pytest.fixture(autouse=True)
def same_path_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def scripted(monkeypatch: pytest.MonkeyPatch, times: int = 1) -> MockBackend:
    backend = scripted_backend(monkeypatch)
    backend._reply = MockBackend(REPLIES * times)._reply

    @contextmanager
    def opened(model: str | None, console: Console) -> Iterator[MockBackend]:
        yield backend

    monkeypatch.setattr(batch_module, "opened_backend", opened)
    return backend


def check_cut(told: dict[str, Any]) -> None:
    assert told["error"].startswith("Truncated: max_tokens ended the text before")
    assert (told["text"], told["values"]) == ("[1, 2,", [])


def test_the_json_says_it_by_branch_and_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch)
    result = run("--json", write(tmp_path, PROGRAM))
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    assert output["value"] == "done"
    assert output["variables"] == {"cut": None, "refused": None}
    assert output["branches"]["program/0"]["variables"] == {"samples": None}
    assert output["errors"] == {}
    assert set(output["unreadable"]) == {"program", "program/0"}
    own = output["unreadable"]["program"]
    assert set(own) == {"cut", "refused"}
    check_cut(own["cut"])
    assert own["refused"]["error"].startswith("ConstraintError: ")
    assert "too large" in own["refused"]["error"]
    assert own["refused"]["text"] == '{"x": 10}'
    samples = output["unreadable"]["program/0"]["samples"]
    assert (samples["text"], samples["values"]) == ("[1, 2,", [[5], None])


def test_a_row_of_a_batch_says_it_in_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = scripted(monkeypatch, times=2)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, PROGRAM)
    Path("data.csv").write_text("limit\n2\n100\n")
    words = ["batch", "program.py", "data.csv", "--concurrency", "1", "--out"]
    result = CliRunner().invoke(app, [*words, "out.jsonl"])
    assert result.exit_code == 1
    cut, whole = (json.loads(line) for line in Path("out.jsonl").read_text().splitlines())
    check_cut(cut["unreadable"]["cut"])
    first, second = cut["error"].split("; refused: ")
    assert first.startswith("cut: Truncated: max_tokens ended the text")
    assert second.startswith("ConstraintError: ")
    assert (cut["value"], cut["variables"]) == ("done", {"cut": None, "refused": None})
    assert whole["variables"]["cut"] == [1, 2, 3]
    assert whole["error"].startswith("refused: ")
    said = "2 of 2 rows have variables that cannot be read, as that of line 2: see `error` there"
    assert said in result.stderr
    assert not Path("out.jsonl.checkpoint").exists()  # the same command would do the same
    backend._reply = MockBackend(REPLIES * 2)._reply
    assert CliRunner().invoke(app, [*words, "out.csv"]).exit_code == 1
    with open("out.csv", newline="") as file:
        assert next(csv.DictReader(file))["error"] == cut["error"]


def test_for_people_a_text_without_a_value_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch)
    lines = run(write(tmp_path, PROGRAM)).stdout.splitlines()
    (cut,) = (line for line in lines if "  cut  " in line)
    assert "[1, 2,  no value: Truncated: max_tokens ended the text" in cut
    (refused,) = (line for line in lines if "  refused  " in line)
    assert '{"x": 10}  no value: ConstraintError: ' in refused

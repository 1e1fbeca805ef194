"""The command line is as docs/language.md tells it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli_for_tests import run_stemma
from tests.markdown_for_tests import fenced, table_rows

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "language.md"


def commands() -> list[list[str]]:
    """The lines of the document that call the command, block by block."""
    blocks = [block.code.splitlines() for block in fenced(DOCUMENT) if block.language == "console"]
    assert all(line.startswith("$ stemma ") for lines in blocks for line in lines)
    return [[line.removeprefix("$ stemma ") for line in lines] for lines in blocks]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One with the program that the commands run, and its rows."""
    blocks = list(fenced(DOCUMENT))
    (program,) = (block.code for block in blocks if block.code.startswith("# motto.py\n"))
    (tmp_path / "motto.py").write_text(program)
    (table,) = (block.code for block in blocks if block.language == "csv")
    (tmp_path / "trades.csv").write_text(table)
    return tmp_path


@pytest.mark.parametrize("lines", commands(), ids=lambda lines: lines[0])
def test_the_commands_of_the_document_run(lines: list[str], folder: Path, tiny_model: Any) -> None:
    for words in lines:
        done = run_stemma(*shlex.split(words), cwd=folder, STEMMA_MODEL=str(tiny_model()))
        assert done.returncode == 0, done.stderr
        assert done.stdout or "--out" in words


def test_the_json_has_the_keys_that_the_document_names(folder: Path, tiny_model: Any) -> None:
    words = ["run", "motto.py", "--trade", "bakers", "--json"]
    done = run_stemma(*words, cwd=folder, STEMMA_MODEL=str(tiny_model()))
    lines = DOCUMENT.read_text().splitlines()
    start = lines.index("| key | value |") + 1
    named = [row[0].strip("`") for number, row in table_rows(DOCUMENT) if number > start][:8]
    assert named == list(json.loads(done.stdout))

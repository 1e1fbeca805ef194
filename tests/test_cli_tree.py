"""`stemma tree`: a run as a recording, printed, as a page and as a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cli_for_tests import run_stemma

PROGRAM = """
import stemma as st

@st.function
def letters(s, topic="bread", count: int = 2, fails: bool = False):
    s += f"A letter about {topic}. " * 3
    for branch in s.fork(count):
        branch += "Dear friend," + st.gen("text", max_tokens=6, min_tokens=6)
        branch["text"]
    if fails:
        raise ValueError("out of ink")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "letters.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model())


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found is not None
    data = json.loads(found[1])
    assert isinstance(data, dict)
    return data


def marks(data: dict[str, Any], number: int) -> list[str]:
    return [row[data["fields"].index("mark")] for row in data["moments"][number]["nodes"]]


def test_run_is_printed_moment_by_moment(folder: Path, model: str) -> None:
    result = run_stemma("tree", "letters.py:letters", "--model", model, "--count", "3", cwd=folder)
    assert result.returncode == 0, result.stderr
    titles = re.findall(r"^\d+\. (.*)$", result.stdout, re.MULTILINE)
    assert titles[:4] == [
        "Before the run",
        "letters/0: text",
        "letters/1: text",
        "letters/2: text",
    ]
    assert "tokens computed" in result.stdout


def test_run_is_written_as_page_and_picture(folder: Path, model: str) -> None:
    # The options stand before the file or behind it.
    result = run_stemma(
        *("tree", "--svg", "out.svg", "letters.py", "--html", "out.html", "--model", model),
        *("--topic", "stamps", "--seed", "3"),
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == ["written: out.html", "written: out.svg"]
    data = data_of(folder / "out.html")
    assert [m["title"] for m in data["moments"]][:2] == ["Before the run", "letters/0: text"]
    assert marks(data, 0) == []
    assert set(marks(data, 1)) == {"new"}
    assert set(marks(data, 2)) == {"hit", "kept", "new"}
    assert any("stamps" in text for text in data["texts"])
    assert "stamps" in "".join(ElementTree.parse(folder / "out.svg").getroot().itertext())


def test_small_cache_shows_what_had_to_go(folder: Path, model: str) -> None:
    arguments = ("--kv-tokens", "80", "--count", "8", "--html", "out.html", "--model", model)
    result = run_stemma("tree", "letters.py", *arguments, cwd=folder)
    assert result.returncode == 0, result.stderr
    data = data_of(folder / "out.html")
    assert {moment["pool"] for moment in data["moments"]} == {80}
    assert any("evicted" in marks(data, n) for n in range(len(data["moments"])))


def test_what_came_before_an_error_is_written(folder: Path, model: str) -> None:
    arguments = ("--fails", "--html", "out.html", "--model", model)
    result = run_stemma("tree", "letters.py", *arguments, cwd=folder)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "ValueError: out of ink"
    assert len(data_of(folder / "out.html")["moments"]) >= 3


@pytest.mark.parametrize("path", [".", "not/there.html"])
def test_page_that_cannot_be_written_is_refused_before_the_run(folder: Path, path: str) -> None:
    result = run_stemma("tree", "letters.py", "--html", path, "--model", "/not/there", cwd=folder)
    assert result.returncode == 2
    assert "must be a file in a folder that is there" in " ".join(
        re.split(r"[\s│]+", result.stderr)
    )

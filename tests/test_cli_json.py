"""`stemma run --json`: one object, whatever the program prints."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pydantic.dataclasses
import pytest
from pydantic import BaseModel, ConfigDict, Field

from stemma.backend.mock import MockBackend
from stemma.commands.outcome import as_json
from tests.cli_for_tests import PROGRAM, run, run_stemma, scripted_backend, write

KEYS = {"value", "variables", "text", "branches", "errors", "unreadable", "usage", "seed"}


@pytest.fixture(autouse=True)
def same_path_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's folder goes on the path: only for one test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> MockBackend:
    return scripted_backend(monkeypatch)


def test_json_is_one_object_and_nothing_else(tmp_path: Path, backend: MockBackend) -> None:
    result = run(write(tmp_path, PROGRAM), "--topic", "sleep", "--seed", "7", "--json")
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    assert set(output) == KEYS
    assert output["seed"] == 7
    assert [tip[:9] for tip in output["value"]] == [" reply to", " reply to"]
    assert "Tips about sleep." in output["text"]
    assert output["usage"]["output_tokens"] == 6
    assert result.stderr.split() == ["loading", "running"]


def test_variables_are_part_of_the_json(tmp_path: Path, backend: MockBackend) -> None:
    program = """
import stemma as st
@st.function
def program(s):
    s += st.gen("x") + st.select("y", ["a", "bé"])
    s["z"] = (1, {"k": 2.5})
    lost = s.fork(1)[0]
    lost += st.gen("w")
    lost.cancel()
"""
    output = json.loads(run("--json", write(tmp_path, program)).stdout)
    assert output["variables"]["x"].startswith(" reply")
    assert output["variables"]["y"] in ("a", "bé")
    assert output["variables"]["z"] == [1, {"k": 2.5}]
    assert output["value"] is None
    assert output["errors"] == {}  # it was told to stop


BRANCHES = """
import stemma as st
@st.function
def program(s):
    s += "Go." + st.gen("first")
    for branch in s.fork(["pro", "con"]):
        branch += " I say" + st.gen("says") + "!" + st.select("sure", ["yes", "no"])
        for deeper in branch.fork(1):
            deeper += "Why?" + st.gen("n", n=2)
    s += " End."
"""


def test_the_json_has_what_each_branch_has_written_itself(
    tmp_path: Path, backend: MockBackend
) -> None:
    backend._reply = MockBackend(lambda prompt, params: f" {prompt[-3:]}")._reply
    output = json.loads(run("--json", write(tmp_path, BRANCHES)).stdout)
    assert output["text"] == "Go. Go. End."
    branches = output["branches"]
    assert set(branches) == {f"program/{label}" for label in ("pro", "con", "pro/0", "con/0")}
    chosen = branches["program/pro"]["variables"].pop("sure")
    assert chosen in ("yes", "no")
    assert branches["program/pro"] == {
        "variables": {"says": " say"},
        "text": f" I say say!{chosen}",
    }
    assert branches["program/con/0"] == {"variables": {"n": [" hy?"] * 2}, "text": "Why? hy?"}
    assert output["variables"] == {"first": " Go."}


def test_the_json_has_the_variables_that_a_branch_was_given_and_an_enum_as_its_option_takes_it(
    tmp_path: Path, backend: MockBackend
) -> None:
    program = """
import enum
import stemma as st
class Colour(enum.Enum):
    BLUE = "blue"
@st.function
def program(s, colour: Colour):
    branch = s.copy()
    branch["colour"] = colour
    with branch.var_scope("scope"):
        branch += "a"
    return {"colour": colour}
"""
    path = write(tmp_path, program)
    output = json.loads(run("--json", path, "--colour", "blue").stdout)
    assert output["value"] == {"colour": "blue"}
    assert output["branches"]["program/0"]["variables"] == {"colour": "blue", "scope": "a"}


def test_the_json_has_the_error_of_a_branch_that_the_program_went_on_without(
    tmp_path: Path, backend: MockBackend
) -> None:
    program = """
import stemma as st
@st.function
def program(s):
    s += st.gen("x")
    s["x"]
    risky = s.copy()
    risky += "Then" + st.gen("y")
    try:
        risky["y"]
    except LookupError:
        return "went on"
"""
    backend._reply = MockBackend(["one", LookupError("gone")])._reply
    output = json.loads(run("--json", write(tmp_path, program)).stdout)
    assert output["value"] == "went on"
    assert output["errors"] == {"program/0": "gone"}
    assert output["branches"]["program/0"] == {"variables": {}, "text": "Then"}


def test_a_program_that_cancels_itself_has_what_it_wrote_and_an_error_for_the_rest(
    tmp_path: Path, backend: MockBackend
) -> None:
    program = """
import stemma as st
@st.function
def program(s):
    s += "Once" + st.gen("x")
    s["x"]
    s += st.gen("y")
    s.cancel()
"""
    backend.delay = 0.5
    result = run("--json", write(tmp_path, program))
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    assert output["variables"] == {"x": " reply to 4", "y": None}
    assert output["errors"] == {"program": "branch program was cancelled"}
    assert output["text"].startswith("Once reply to 4")


NOISY = """
import os
import subprocess
import sys
import stemma as st
print("printed at the top")
os.system("echo child at the top")
@st.function
def program(s, how: str = "well"):
    print("printed")
    subprocess.run(["echo", "child"])
    s += "Once" + st.gen("x", max_tokens=2)
    s["x"]
    if how == "badly":
        raise ValueError("no")
    if how == "exit":
        sys.exit(3)
    if how == "wrongly":
        s += st.gen("y", temperature=-1)
"""


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ([], 0),
        (["--how", "badly"], 1),
        (["--how", "wrongly"], 1),
        (["--how", "exit"], 3),
        (["--model", "/not/there"], 1),
        (["--timeout", "0"], 2),
        (["--hwo", "x"], 2),
    ],
)
def test_stdout_has_the_one_object_or_nothing_whatever_the_program_prints_or_starts(
    words: list[str], status: int, tiny_model: Any, tmp_path: Path
) -> None:
    target = write(tmp_path, NOISY)
    done = run_stemma("run", target, "--json", *words, STEMMA_MODEL=str(tiny_model()))
    assert done.returncode == status, done.stderr
    if status == 0:
        assert set(json.loads(done.stdout)) == KEYS
    else:
        assert done.stdout == ""
        assert "rror" in done.stderr or status == 3
    assert done.stderr.startswith("printed at the top\nchild at the top\n")


# Values as JSON


@dataclass(frozen=True)
class Point:
    x: int
    label: Any


class Colour(Enum):
    RED = 1


class Event(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    begin: datetime = Field(alias="from")
    colours: dict[Colour, Any] = {Colour.RED: Path("a")}
    other: complex | None = None
    share: float = math.nan


@pydantic.dataclasses.dataclass
class Holder:
    event: Event = Field(alias="it")


NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
EVENT = Event(**{"from": NOON})
TOLD_EVENT = {"from": "2024-01-01T12:00:00Z", "colours": {"1": "a"}, "other": None, "share": "nan"}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, None),
        (True, True),
        (1.5, 1.5),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        ((1, "a"), [1, "a"]),
        ({1: {"a": [2]}}, {"1": {"a": [2]}}),
        (Point(1, None), {"x": 1, "label": None}),
        (EVENT, TOLD_EVENT),
        ([Point(1, EVENT)], [{"x": 1, "label": TOLD_EVENT}]),
        (Holder(it=EVENT), {"it": TOLD_EVENT}),
        (NOON, TOLD_EVENT["from"]),
        ({NOON.date(): NOON.time()}, {"2024-01-01": "12:00:00"}),
        (timedelta(hours=1), "PT1H"),
        ({Colour.RED: 1, True: None}, {"1": 1, "True": None}),
        (Path("a"), "a"),
        ({3}, [3]),
    ],
    ids=str,
)
def test_values_become_json(value: Any, told: Any) -> None:
    assert as_json(value) == told
    json.dumps(as_json(value), allow_nan=False)

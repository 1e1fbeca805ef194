"""`stemma batch`: rows in, results out, and whatever is wrong with them said with its line."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from stemma.backend.mock import MockBackend
from stemma.commands import batch as batch_module
from stemma.commands.app import app
from tests.cli_for_tests import PATIENCE, Piped, Typed, run_stemma

PROGRAM = """
from enum import Enum
from pathlib import Path
from typing import Literal

import stemma as st


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


@st.function
def tips(s, topic: str, count: int = 2, loud: bool = False):
    print("printed by the program")
    s += f"{count} tips about {topic}:" + st.gen("tip", stop="|")
    if topic == "bad":
        raise ValueError("a bad topic")
    return [topic, count, loud]


@st.function
def typed(
    s,
    a: int,
    b: float = 0.5,
    c: bool = True,
    d: Literal["x", "y"] = "x",
    e: Size = Size.SMALL,
    f: list[int] = [],
    g: tuple[str, ...] = (),
    h: Path = Path("h"),
    i: int | None = None,
    j: str = "j",
    k={},
):
    return repr((a, b, c, d, e, f, g, h, i, j, k))


@st.function
def anything(s, first, **others):
    return [first, others]


@st.function
def nameless(s, first, /):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> MockBackend:
    """What `batch` runs on, in place of a model."""
    mock = MockBackend(lambda prompt, params: f" tip {params.seed} of {prompt}|")

    @contextmanager
    def opened(model: str | None, console: Console) -> Iterator[MockBackend]:
        yield mock

    monkeypatch.setattr(batch_module, "opened_backend", opened)
    return mock


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(batch_module, "opened_backend", opened)


def batch(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["batch", *words], input=stdin)


def rows(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def refusal(result: Result) -> str:
    """The message of a call that was refused, on one line."""
    assert result.exit_code == 2, result.output
    return " ".join(line.strip("│ ") for line in result.stderr.splitlines())


# Rows in and out


@pytest.mark.usefixtures("folder")
def test_a_row_is_a_run_and_results_are_in_the_order_of_the_rows(backend: MockBackend) -> None:
    topics = ["tea", "sleep", "tea", "rain"]
    Path("data.csv").write_text("topic,count\n" + "".join(f"{topic},3\n" for topic in topics))
    result = batch("program.py:tips", "data.csv", "--out", "out.jsonl", "--seed", "1")
    assert result.exit_code == 0, result.output
    found = rows("out.jsonl")
    assert [row["item"] for row in found] == [{"topic": topic, "count": "3"} for topic in topics]
    assert [row["value"] for row in found] == [[topic, 3, False] for topic in topics]
    for row in found:
        prompt = f"3 tips about {row['item']['topic']}:"
        assert row["variables"] == {"tip": f" tip {row['variables']['tip'].split()[1]} of {prompt}"}
        assert row["text"] == prompt + row["variables"]["tip"]
        assert row["error"] is None
        keys = ["item", "value", "variables", "unreadable", "text", "seed", "error"]
        assert list(row) == keys
    assert len({row["seed"] for row in found}) == 4
    assert result.stdout == ""
    assert "4 rows written to out.jsonl" in result.stderr
    assert "printed by the program" in result.stderr
    assert not Path("out.jsonl.checkpoint").exists()


@pytest.mark.usefixtures("folder", "backend")
def test_tables_come_out_with_the_columns_of_the_data_and_of_the_variables() -> None:
    Path("data.tsv").write_text('id\ttopic\tcount\n1\t"tea\tand ""milk"""\t2\n2\tbad\t\n')
    result = batch("program.py:tips", "data.tsv", "--keep", "id", "-o", "out.csv")
    assert result.exit_code == 1
    with Path("out.csv").open(newline="", encoding="utf-8") as file:
        header, first, second = csv.reader(file)
    assert header == ["id", "topic", "count", "tip", "value", "error"]
    assert first[:3] == ["1", 'tea\tand "milk"', "2"]
    assert first[3].startswith(" tip ")
    assert first[4:] == ['["tea\\tand \\"milk\\"", 2, false]', ""]
    assert second == ["2", "bad", "", "", "", "ValueError: a bad topic"]


@pytest.mark.usefixtures("folder", "backend")
def test_a_variable_that_has_the_name_of_a_column_gets_a_column_of_its_own() -> None:
    Path("p.py").write_text(
        "import stemma as st\n@st.function\ndef p(s, tip):\n    s += 'a' + st.gen('tip')\n"
    )
    Path("data.csv").write_text("tip\nmine\n")
    assert batch("p.py", "data.csv", "-o", "out.csv").exit_code == 0
    header = Path("out.csv").read_text().splitlines()[0]
    assert header == "tip,variable tip,value,error"


@pytest.mark.usefixtures("folder")
def test_dashes_are_json_lines_on_standard_input_and_output(
    backend: MockBackend, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = '{"topic": "tea"}\n\n{"topic": "ä\u2028b", "count": 1, "loud": true}\n'
    result = batch("program.py:tips", "-", stdin=lines)
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in capfd.readouterr().out.strip().split("\n")]
    assert [row["value"] for row in found] == [["tea", 2, False], ["ä\u2028b", 1, True]]
    assert list(Path().glob("*checkpoint*")) == []


@pytest.mark.usefixtures("folder")
def test_a_limit_takes_the_first_rows_and_what_it_did_is_kept(backend: MockBackend) -> None:
    Path("data.csv").write_text("topic\n" + "tea\n" * 6)
    words = ("program.py:tips", "data.csv", "-o", "out.jsonl")
    assert batch(*words, "--limit", "2").exit_code == 0
    assert len(rows("out.jsonl")) == len(backend.calls) == 2
    first = Path("out.jsonl").read_text()
    result = batch(*words)
    assert result.exit_code == 0
    assert "2 of them are in out.jsonl.checkpoint" in result.stderr
    assert len(rows("out.jsonl")) == len(backend.calls) == 6
    assert Path("out.jsonl").read_text().startswith(first)
    assert not Path("out.jsonl.checkpoint").exists()


@pytest.mark.usefixtures("folder", "backend")
def test_no_rows_give_no_results() -> None:
    for name, content in (("data.csv", "topic\n"), ("data.jsonl", "\n")):
        Path(name).write_text(content)
        result = batch("program.py:tips", name, "-o", "out.jsonl")
        assert (result.exit_code, Path("out.jsonl").read_text()) == (0, ""), result.output


@pytest.mark.usefixtures("folder", "backend")
@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_table_without_a_header_is_refused(content: str) -> None:
    Path("empty.csv").write_text(content)
    result = batch("program.py:tips", "empty.csv", "-o", "out.jsonl")
    assert result.exit_code == 2
    assert "has no header" in result.output


@pytest.mark.usefixtures("folder")
def test_options_reach_the_runs(backend: MockBackend) -> None:
    Path("data.csv").write_text("topic\n" + "tea\n" * 9)
    backend.delay = 0.05
    words = ["--concurrency", "3", "--temperature", "0.5", "--max-tokens", "4"]
    assert batch("program.py:tips", "data.csv", "-o", "out.jsonl", *words).exit_code == 0
    assert backend.most_running == 3
    assert {(c.params.temperature, c.params.max_tokens) for c in backend.calls if c.params} == {
        (0.5, 4)
    }


@pytest.mark.usefixtures("folder")
def test_the_timeout_is_each_rows_own_and_retries_are_made(backend: MockBackend) -> None:
    Path("data.csv").write_text("topic\n" + "tea\n" * 3)
    backend.delay = 0.2
    words = ("program.py:tips", "data.csv", "-o", "out.jsonl", "--concurrency", "1")
    assert batch(*words, "--timeout", "0.4").exit_code == 0
    backend._fail = {5: ConnectionError("gone")}
    assert batch(*words, "--retries", "1").exit_code == 0
    assert len(backend.calls) == 3 + 4
    backend.delay = 5
    assert batch(*words, "--timeout", "0.1", "--limit", "1").exit_code == 1
    assert rows("out.jsonl")[0]["error"].startswith("Timeout: ")


# Failures


@pytest.mark.usefixtures("folder")
def test_a_row_that_fails_has_its_error_and_is_run_again_by_the_same_command(
    backend: MockBackend,
) -> None:
    Path("data.csv").write_text("topic\ntea\nbad\nrain\n")
    words = ("program.py:tips", "data.csv", "-o", "out.jsonl")
    result = batch(*words)
    assert result.exit_code == 1
    first, failed, last = rows("out.jsonl")
    assert failed["error"] == "ValueError: a bad topic"
    assert (failed["value"], failed["variables"], failed["text"]) == (None, {}, None)
    assert isinstance(failed["seed"], int)
    assert (first["error"], last["error"]) == (None, None)
    assert "data.csv, line 3: ValueError: a bad topic (program.py:19 in tips)" in result.stderr
    assert "1 of 3 rows failed; the same command runs only these again" in result.stderr
    asked = len(backend.calls)
    before = Path("out.jsonl").read_text()
    assert batch(*words).exit_code == 1
    assert len(backend.calls) == asked + 1
    assert Path("out.jsonl").read_text() == before


@pytest.mark.usefixtures("folder")
def test_a_program_that_cancels_itself_has_no_text_and_is_no_failure(backend: MockBackend) -> None:
    backend.delay = 0.2
    Path("p.py").write_text(
        "import stemma as st\n@st.function\ndef p(s, a: str):\n    s += a + st.gen('x')\n"
        "    s['x']\n    s += st.gen('y')\n    s.cancel()\n    return {1: (s['x'],)}\n"
    )
    Path("data.csv").write_text("a\nb\n")
    result = batch("p.py", "data.csv", "-o", "out.jsonl")
    assert result.exit_code == 0, result.output
    (row,) = rows("out.jsonl")
    assert list(row["variables"]) == ["x", "y"]
    assert row["value"] == {"1": [row["variables"]["x"]]}
    assert (row["text"], row["variables"]["y"], row["error"]) == (None, None, None)


@pytest.mark.usefixtures("folder", "backend")
def test_of_many_failures_a_few_are_told() -> None:
    Path("data.csv").write_text("topic\n" + "bad\n" * 9)
    result = batch("program.py:tips", "data.csv", "-o", "out.jsonl")
    assert result.stderr.count("ValueError: a bad topic") == 5
    assert "and 4 more" in result.stderr
    assert "9 of 9 rows failed" in result.stderr


@pytest.mark.usefixtures("folder", "backend")
def test_the_checkpoint_of_another_batch_is_refused_and_fresh_forgets_it() -> None:
    Path("data.csv").write_text("topic\ntea\nbad\n")
    words = ("program.py:tips", "data.csv", "-o", "out.jsonl")
    assert batch(*words, "--seed", "1").exit_code == 1
    before = Path("out.jsonl").read_text()
    result = batch(*words, "--seed", "2")
    assert result.exit_code == 1
    assert "belongs to a batch with seed 1, and now it is 2" in result.stderr
    assert Path("out.jsonl").read_text() == before
    assert "seed 2" in batch(*words, "--seed", "2", "--fresh").stderr
    assert Path("out.jsonl").read_text() != before


# What is wrong with a call


@pytest.mark.usefixtures("folder", "no_model")
@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("d.csv", "topic,colour\ntea,red\n", ["line 1: the column 'colour' is no argument"]),
        ("d.csv", "count\n3\n", ["line 1: there is no column 'topic', which program tips needs"]),
        ("d.csv", "topic,topic\na,b\n", ["line 1: has the column 'topic' twice"]),
        ("d.csv", "topic\ntea\n\na,b\n", ["line 4: has 2 cells, and the header 1"]),
        ("d.csv", 'topic\n"a\nb"\n"c', ["line 4: is no CSV"]),
        (
            "d.csv",
            'topic,count\n"te\na",x\ntea,1.5\ntea,2\n',
            [
                "line 2: the column 'count' is \"x\", and must be an integer",
                "line 4: the column 'count' is \"1.5\", and must be an integer",
            ],
        ),
        ("d.csv", "topic,loud\na,maybe\n", ['"maybe", and must be true or false']),
        ("d.jsonl", '{"topic": "a"}\nnonsense\n', ["line 2: is no JSON"]),
        ("d.jsonl", '{"topic": "a"}\n[1]\n', ["line 2: is no JSON object"]),
        ("d.jsonl", '{"topic": "a"}\n\n{"count": 1}\n', ["line 3: there is no column 'topic'"]),
        ("d.jsonl", '{"topic": 5}\n', ["line 1: the column 'topic' is 5, and must be a text"]),
        ("d.jsonl", '{"topic": "a", "count": true}', ["'count' is true, and must be an integer"]),
        ("d.jsonl", '{"topic": null}', ["'topic' is null, and must be a text"]),
        ("d.jsonl", '{"topik": "a"}', ["'topik' is no argument", "no column 'topic'"]),
    ],
)
def test_what_is_wrong_with_the_rows_is_said_with_their_lines(
    name: str, content: str, named: list[str]
) -> None:
    Path(name).write_text(content)
    message = refusal(batch("program.py:tips", name))
    assert name in message
    for each in named:
        assert each in message


@pytest.mark.usefixtures("folder", "no_model")
def test_of_much_that_is_wrong_some_is_said() -> None:
    Path("d.csv").write_text("topic,count\n" + "tea,x\n" * 25)
    message = refusal(batch("program.py:tips", "d.csv"))
    assert message.count("must be an integer") == 10
    assert "and 15 more" in message


@pytest.mark.usefixtures("folder", "no_model")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["program.py:tips", "no.csv"], "no.csv: No such file"),
        (["program.py:tips", "."], "must end in one of .jsonl, .ndjson, .csv, .tsv"),
        (["program.py:tips", "data.txt"], "data.txt: must end in one of"),
        (["program.py:tips", "data.csv", "-o", "out.txt"], "out.txt: must end in one of"),
        (["program.py:tips", "data.csv", "-o", "no/out.csv"], "a folder that is there"),
        (["program.py:tips", "data.csv", "-o", "data.csv"], "another file of this command"),
        (["program.py:tips", "data.csv", "-o", "./data.csv"], "another file of this command"),
        (
            ["program.py:tips", "data.csv", "-o", "o.csv", "--checkpoint", "o.csv"],
            "another file of this command",
        ),
        (["program.py:tips", "data.csv", "--concurrency", "0"], "must be at least 1, or auto"),
        (["program.py:tips", "data.csv", "--concurrency", "x"], "must be at least 1, or auto"),
        (["program.py:tips", "data.csv", "--retries", "-1"], "--retries"),
        (["program.py:tips", "data.csv", "--limit", "0"], "--limit"),
        (["program.py:tips", "data.csv", "--timeout", "0"], "must be above 0"),
        (["program.py:tips", "data.csv", "--keep", "id"], "there is no column 'id' to keep"),
        (["program.py:nameless", "data.csv"], "which has no name for callers"),
        (["program.py", "data.csv"], "say which"),
        (["program.py:tips"], "DATA"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(words: list[str], named: str) -> None:
    Path("data.csv").write_text("topic\ntea\n")
    Path("data.txt").write_text("topic\ntea\n")
    assert named in refusal(batch(*words))


@pytest.mark.usefixtures("folder", "no_model")
def test_bytes_that_are_no_text_are_named_with_their_line() -> None:
    Path("d.csv").write_bytes(b"topic\ntea\nt\xff\n")
    assert "d.csv, line 3: is no UTF-8 text" in refusal(batch("program.py:tips", "d.csv"))


# Types


def values(data: str) -> list[str]:
    result = batch("program.py:typed", data, "-o", "out.jsonl")
    assert result.exit_code == 0, result.output
    return [row["value"] for row in rows("out.jsonl")]


@pytest.mark.usefixtures("folder", "backend")
def test_cells_become_what_the_program_annotates() -> None:
    Path("d.csv").write_text(
        'a,b,c,d,e,f,g,h,i,j\n-3,2,no,y,large,"[1, 2]","[""p"", ""q""]",p/q,7,text\n1,,,,,,,,,\n'
    )
    assert values("d.csv") == [
        "(-3, 2.0, False, 'y', <Size.LARGE: 'large'>, [1, 2], ('p', 'q'), PosixPath('p/q'), 7, "
        "'text', {})",
        "(1, 0.5, True, 'x', <Size.SMALL: 'small'>, [], (), PosixPath('h'), None, '', {})",
    ]


@pytest.mark.usefixtures("folder", "backend")
def test_json_values_become_what_the_program_annotates() -> None:
    row = {"a": 1, "b": 2, "c": False, "d": "y", "e": "large", "f": [1], "g": ["p"], "h": "p"}
    lines = [{**row, "i": None, "k": {"any": [1]}}, {"a": 2}]
    Path("d.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert values("d.jsonl") == [
        "(1, 2.0, False, 'y', <Size.LARGE: 'large'>, [1], ('p',), PosixPath('p'), None, 'j', "
        "{'any': [1]})",
        "(2, 0.5, True, 'x', <Size.SMALL: 'small'>, [], (), PosixPath('h'), None, 'j', {})",
    ]


@pytest.mark.usefixtures("folder", "no_model")
@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("d.csv", "a,d\n1,z\n", '"z", and must be one of x, y'),
        ("d.csv", "a,e\n1,huge\n", '"huge", and must be one of small, large'),
        ("d.csv", "a,f\n1,5\n", "5, and must be a list"),
        ("d.csv", 'a,f\n1,"[""x""]"\n', '"x", and must be an integer'),
        ("d.csv", "a,b\n1,x\n", '"x", and must be a number'),
        ("d.csv", "a\n\n''\n", "must be an integer"),
        ("d.csv", "a,k\n1,2\n", "write the rows as JSON lines"),
        ("d.jsonl", '{"a": 1.5}', "1.5, and must be an integer"),
        ("d.jsonl", '{"a": 1, "f": "x"}', '"x", and must be a list'),
        ("d.jsonl", '{"a": 1, "e": 3}', "3, and must be one of small, large"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, content: str, named: str) -> None:
    Path(name).write_text(content)
    assert named in refusal(batch("program.py:typed", name))


@pytest.mark.usefixtures("folder", "backend")
def test_a_program_that_takes_any_argument_gets_every_column_but_the_runs_own() -> None:
    Path("d.jsonl").write_text('{"first": [1], "second": {"a": null}}\n')
    assert batch("program.py:anything", "d.jsonl", "-o", "out.jsonl").exit_code == 0
    assert rows("out.jsonl")[0]["value"] == [[1], {"second": {"a": None}}]
    Path("d.jsonl").write_text('{"first": 1, "seed": 3}\n')
    assert "'seed' is no argument" in refusal(batch("program.py:anything", "d.jsonl"))


# In a process of its own

HELD = """
from pathlib import Path
import time
import stemma as st

@st.function
def held(s, word: str):
    s += f"The word {word}" + st.gen("x", max_tokens=4, ignore_eos=True)
    s["x"]
    while word >= "w10" and Path("hold").exists():
        beside = s.copy()
        beside += st.gen("y", max_tokens=1)
        beside["y"]
        time.sleep(0.05)
"""
ROWS = "word\n" + "".join(f"w{i:02}\n" for i in range(30))


@pytest.mark.parametrize(
    ("out", "number"), [("out.jsonl", signal.SIGKILL), ("out.csv", signal.SIGINT)]
)
def test_the_same_command_after_an_interruption_yields_the_same_file(
    out: str, number: int, tmp_path: Path, tiny_model: Any
) -> None:
    model = str(tiny_model())
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "held.py").write_text(HELD)
        (tmp_path / name / "data.csv").write_text(ROWS)
    words = ["batch", "held.py", "data.csv", "-o", out, "--seed", "5", "--model", model]
    words += ["--concurrency", "2"]
    whole = run_stemma(*words, cwd=tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    cut, kept = tmp_path / "cut", tmp_path / "cut" / f"{out}.checkpoint"
    (cut / "hold").touch()
    command = Piped(*words, cwd=cut)
    end = time.monotonic() + PATIENCE
    while not kept.exists() or kept.read_bytes().count(b"\n") < 11:
        assert time.monotonic() < end
        time.sleep(0.01)
    started = time.monotonic()
    os.kill(command.process.pid, number)
    status, _, errors = command.end()
    assert status == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in errors
    assert time.monotonic() - started < 15
    assert kept.read_bytes().count(b"\n") == 11  # a first line, and one for each row
    if number == signal.SIGINT:
        assert f"interrupted; {out}.checkpoint keeps 10 of 30 rows; the same" in errors
        assert "failed" not in errors
    (cut / "hold").unlink()
    again = run_stemma(*words, cwd=cut)
    assert again.returncode == 0, again.stderr
    assert f"10 of them are in {out}.checkpoint" in again.stderr
    assert "10 resumed" in again.stderr
    assert (cut / out).read_bytes() == (tmp_path / "whole" / out).read_bytes()
    assert not kept.exists()


def test_on_a_terminal_there_is_a_bar_and_the_cursor_comes_back(
    tmp_path: Path, tiny_model: Any
) -> None:
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    (tmp_path / "data.csv").write_text(ROWS)
    words = ["held.py", "data.csv", "-o", "out.jsonl", "--concurrency", "2"]
    command = Typed("batch", *words, "--model", str(tiny_model()), cwd=tmp_path)
    text = command.screen.read_until("tok/s")
    assert "/30" in text
    command.interrupt()
    status, rest = command.end()
    assert status == 130
    assert "Traceback" not in rest
    text += rest
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_nothing_but_results_comes_on_standard_output(tmp_path: Path, tiny_model: Any) -> None:
    (tmp_path / "p.py").write_text(
        "import os, stemma as st\n@st.function\ndef p(s, i: int):\n"
        "    print('noise'); os.system('echo noise')\n"
        "    s += 'a' + st.gen('x', max_tokens=2)\n"
    )
    lines = "".join(json.dumps({"i": i}) + "\n" for i in range(3))
    done = run_stemma("batch", "p.py", "-", "--model", str(tiny_model()), cwd=tmp_path, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["item"]["i"] for line in done.stdout.splitlines()] == [0, 1, 2]
    assert done.stderr.count("noise") == 6

"""The demo and the examples: what a newcomer runs first."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from stemma.demo import QUESTIONS, TITLES, run_demo

ROOT = Path(__file__).parent.parent


def demo_output(model: Path, *, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=terminal, color_system=None)
    run_demo(str(model), console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_demo_shows_every_branch_the_tree_and_what_was_cached(tiny_model, terminal) -> None:
    output = demo_output(tiny_model(), terminal=terminal)
    for branch in (*QUESTIONS, *TITLES):
        assert re.search(rf"lighthouse/(2:)?{branch}\b", output)
    assert "of 2 choices" in output
    assert "radix tree" in output
    found = re.search(r"([\d,]+) prompt tokens: ([\d,]+) came from the cache", output)
    assert found is not None
    prompt, cached = (int(number.replace(",", "")) for number in found.groups())
    # Nine requests share the story: all but one take at least half of their prompt from the cache.
    assert prompt / 2 < cached < prompt


@pytest.mark.slow
def test_the_default_model_answers_the_demo_questions(default_model_folder: Path) -> None:
    output = demo_output(default_model_folder)
    assert "lighthouse/dog  answer  Biscuit" in output
    assert "Mara, a retired ship's carpenter" in output.rpartition("lighthouse/who")[2]
    assert re.search(r"lighthouse  ending  The story ends happily\.  (8|9)\d% of 2 choices", output)


@pytest.mark.slow
def test_the_first_example_runs_as_a_script(default_model_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "fork_and_select.py")],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "STEMMA_MODEL": str(default_model_folder)},
    )
    assert done.returncode == 0, done.stderr
    assert "radix tree" in done.stdout


@pytest.mark.slow
def test_the_program_of_the_readme_runs(default_model_folder: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    program, *_ = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    printed, *_ = re.findall(r"```text\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "program.py").write_text(program)
    in_fp32 = (
        "import runpy, stemma as st\n"
        "st.set_default_backend(st.LocalBackend(quantization=None))\n"
        "runpy.run_path('program.py', run_name='__main__')\n"
    )
    for command, expected in ((["program.py"], None), (["-c", in_fp32], printed)):
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "STEMMA_MODEL": str(default_model_folder)},
        )
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 3
        assert expected in (None, done.stdout)


def test_an_example_tells_an_error_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "fork_and_select.py"), "/not/there"],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no model at /not/there")
    assert "Traceback" not in done.stderr

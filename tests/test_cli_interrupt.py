"""Ctrl-C ends a command at once: status 130, no traceback, the terminal as it was."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli_for_tests import Piped, Typed

# A machine at rest needs far less; a busy one must still not wait for what takes a minute.
AT_ONCE = 15.0

PROGRAM = """
import time
import stemma as st

print("loaded", flush=True)

@st.function
def program(s, how: str):
    s += "Once upon a time"
    if how == "asleep":
        print("asleep", flush=True)
        time.sleep(600)
    for _ in range(1000):
        s += st.gen("x", max_tokens=5, ignore_eos=True)
        s["x"]
"""


def end_in_time(command: Piped) -> None:
    started = time.monotonic()
    command.interrupt()
    status, _, errors = command.end()
    assert (status, errors) == (130, "")
    assert time.monotonic() - started < AT_ONCE


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> str:
    return str(tiny_model(max_position_embeddings=16384))


@pytest.mark.parametrize("pause", [0.0, 0.2, 0.8])
def test_while_libraries_and_model_are_loaded(pause: float, program: str, model: str) -> None:
    command = Piped("run", "--model", model, program, "--how", "awake")
    command.out.read_until("loaded")
    time.sleep(pause)
    end_in_time(command)


def test_while_the_model_writes(program: str, model: str) -> None:
    command = Piped("run", "--model", model, program, "--how", "awake")
    command.out.read_until("program  x  ")
    end_in_time(command)


def test_while_the_program_does_something_else(program: str, model: str) -> None:
    command = Piped("run", "--model", model, program, "--how", "asleep")
    command.out.read_until("asleep")
    end_in_time(command)


def test_with_json(program: str, model: str) -> None:
    command = Piped("run", "--json", "--model", model, program, "--how", "asleep")
    command.err.read_until("asleep\n")
    started = time.monotonic()
    command.interrupt()
    assert command.end() == (130, "", "")
    assert time.monotonic() - started < AT_ONCE


def test_on_a_terminal_the_cursor_comes_back(program: str, model: str) -> None:
    command = Typed("run", "--model", model, program, "--how", "awake")
    text = command.screen.read_until("program\x1b[0m\x1b[36m")
    command.interrupt()
    status, rest = command.end()
    assert status == 130
    assert "Traceback" not in rest
    text += rest
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_program_that_swallows_the_first_is_ended_by_the_second(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(
        "import time\n"
        "try:\n"
        "    print('loaded', flush=True)\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    print('no', flush=True)\n"
        "time.sleep(600)\n"
    )
    command = Piped("run", "stubborn.py", cwd=tmp_path)
    command.out.read_until("loaded")
    command.interrupt()
    command.out.read_until("no")
    end_in_time(command)


def test_a_forward_pass_under_way_is_not_waited_for(tiny_model: Any, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(
        "import stemma as st\n"
        "@st.function\n"
        "def program(s):\n"
        "    print('begun', flush=True)\n"
        "    s += 'word ' * 200_000 + st.gen('x', max_tokens=1)\n"
    )
    model = tiny_model(max_position_embeddings=1 << 20)
    command = Piped("run", "--model", str(model), "long.py", cwd=tmp_path)
    command.out.read_until("begun")
    time.sleep(1)
    end_in_time(command)


# What the process does around a command; `command` is its body in Python.


def process_around(command: str) -> list[str]:
    lines = [
        "import atexit, os, signal, sys, types, stemma.cli",
        "interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)",
        "commands = sys.modules['stemma.commands.app'] = types.ModuleType('stemma.commands.app')",
        "def app(prog_name):",
        *(f"    {line}" for line in command.splitlines()),
        "    print('went on')",
        "commands.app = app",
        "print('begun', flush=True)",
        "stemma.cli.main()",
    ]
    return [sys.executable, "-c", "\n".join(lines)]


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("interrupt()", 130),
        ("try: interrupt()\nexcept KeyboardInterrupt: raise ImportError('half loaded')", 130),
        ("try: interrupt()\nexcept KeyboardInterrupt: sys.exit(3)", 130),
        ("try: interrupt()\nexcept KeyboardInterrupt: interrupt()", 130),
        ("raise KeyboardInterrupt", 130),
        ("atexit.register(lambda: [interrupt(), print('went on')])\nsys.exit(0)", 130),
    ],
)
def test_however_it_surfaces_it_is_status_130_and_no_traceback(command: str, status: int) -> None:
    done = subprocess.run(process_around(command), capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (status, "begun\n", "")


@pytest.mark.parametrize(
    ("command", "status", "errors"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('a reason')", 1, "a reason\n"),
    ],
)
def test_without_an_interrupt_the_status_is_the_commands(
    command: str, status: int, errors: str
) -> None:
    done = subprocess.run(process_around(command), capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (status, "begun\n", errors)


def test_what_others_do_at_the_end_is_done_before_the_process_ends() -> None:
    command = (
        "import threading, time\n"
        "atexit.register(print, 'at the end')\n"
        "threading.Thread(target=lambda: [time.sleep(0.2), print('thread')]).start()\n"
        "sys.exit(4)"
    )
    done = subprocess.run(process_around(command), capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout) == (4, "begun\nthread\nat the end\n")


def test_libraries_are_not_taken_down() -> None:
    command = (
        "class Dear:\n    def __del__(self):\n        os.write(1, b'taken down')\n"
        "sys.dear = Dear()\nsys.exit(0)"
    )
    done = subprocess.run(process_around(command), capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout) == (0, "begun\n")


def test_a_defect_that_no_interrupt_has_caused_keeps_its_traceback() -> None:
    done = subprocess.run(process_around("1 / 0"), capture_output=True, text=True, cwd="/")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_where_interrupts_are_ignored_they_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup does; a child inherits it
    try:
        done = subprocess.run(
            process_around("interrupt()"), capture_output=True, text=True, cwd="/"
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout, done.stderr) == (0, "begun\nwent on\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["Grey Point", "lighthouse/dog"])
def test_the_demo(seen: str, default_model_folder: Path) -> None:
    command = Piped("demo", "--model", str(default_model_folder))
    command.out.read_until(seen)
    end_in_time(command)


@pytest.mark.slow
def test_the_doctor(default_model_folder: Path) -> None:
    command = Piped("doctor", "--load")
    time.sleep(2)
    end_in_time(command)

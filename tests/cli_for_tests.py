"""The command line: on a scripted backend, or in a process of its own, with pipes or on a
pseudo-terminal.
"""

from __future__ import annotations

import codecs
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from stemma.backend.mock import MockBackend
from stemma.commands import run as run_module
from stemma.commands.app import app

PATIENCE = 120.0  # seconds until something is called hanging; machines may be busy


PROGRAM = '''
from __future__ import annotations

import stemma as st

print("loading")


@st.function
def tips(s, topic: str, count: int = 2):
    """Give tips.

    topic: what they are about
    """
    print("running")
    s += st.user(f"Tips about {topic}.")
    for i, branch in enumerate(branches := s.fork(count)):
        branch += st.assistant(f"{i}: " + st.gen("tip"))
    return branches["tip"]


if __name__ == "__main__":
    raise SystemExit("run as a script")
'''


def write(folder: Path, text: str, name: str = "program.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def run(*words: str) -> Result:
    """`stemma run` in this process."""
    return CliRunner().invoke(app, ["run", *words])


def scripted_backend(monkeypatch: pytest.MonkeyPatch) -> MockBackend:
    """What `run` runs on from here on, in place of a model."""
    mock = MockBackend(lambda prompt, params: f" reply to {len(prompt)}", delay=0.01, pieces=3)

    @contextmanager
    def opened(model: str | None, console: Console) -> Iterator[MockBackend]:
        yield mock

    monkeypatch.setattr(run_module, "opened_backend", opened)
    return mock


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "stemma", *arguments]


def run_stemma(
    *arguments: str, stdin: str = "", cwd: Path | str = "/", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    return subprocess.run(
        command(*arguments),
        input=stdin,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=PATIENCE,
    )


class Reader:
    """What comes from a file, read as far as it is wanted."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.waiting = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def read_until(self, wanted: str | None) -> str:
        """What comes up to and with `wanted`; None: up to the end."""
        limit = time.monotonic() + PATIENCE
        while wanted is None or wanted not in self.waiting:
            ready, _, _ = select.select([self.file], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"nothing more after {self.waiting[-2000:]!r}"
            try:
                more = os.read(self.file, 4096)
            except OSError:  # a terminal whose other side is closed
                more = b""
            if not more:
                assert wanted is None, f"it ended after {self.waiting[-2000:]!r}"
                break
            self.waiting += self._decode(more)
        end = len(self.waiting)
        if wanted is not None:
            end = self.waiting.index(wanted) + len(wanted)
        found, self.waiting = self.waiting[:end], self.waiting[end:]
        return found


class Piped:
    """A command that is under way, its three streams pipes."""

    def __init__(self, *arguments: str, cwd: Path | str = "/") -> None:
        self.process = subprocess.Popen(
            command(*arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.out = Reader(self.process.stdout.fileno())
        self.err = Reader(self.process.stderr.fileno())

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        """Exit status and the rest of both outputs; standard input ends."""
        out, err = self.process.communicate(timeout=PATIENCE)
        out_rest, err_rest = out.decode(errors="replace"), err.decode(errors="replace")
        return self.process.returncode, self.out.waiting + out_rest, self.err.waiting + err_rest


class Typed:
    """A command that is under way on a terminal: what is typed, and what comes on the screen."""

    def __init__(self, *arguments: str, cwd: Path | str = "/") -> None:
        # Here, because not every system that can collect these tests has them.
        import fcntl
        import pty
        import struct
        import termios

        self.terminal, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.process = subprocess.Popen(
            command(*arguments),
            stdin=inside,
            stdout=inside,
            stderr=inside,
            cwd=cwd,
            env={**os.environ, "TERM": "xterm", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inside)
        self.screen = Reader(self.terminal)

    def type(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C, as late after a prompt as people do.

        Python hears a signal that comes while `input` shows its prompt only at the next key.
        """
        time.sleep(0.5)
        self.type("\x03")

    def end(self) -> tuple[int, str]:
        """Exit status and the rest of what comes on the screen."""
        rest = self.screen.read_until(None)
        os.close(self.terminal)
        return self.process.wait(timeout=PATIENCE), rest

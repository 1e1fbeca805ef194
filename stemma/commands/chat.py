"""`stemma chat`: a conversation at the terminal, itself a Stemma program.

Every turn goes on on a branch of its own. A turn that fails leaves the branch before it as it was,
and the conversation goes on from there.
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from dataclasses import fields
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

import stemma as st
from stemma.backend.local.backend import LocalBackend
from stemma.board import visible
from stemma.commands.loading import opened_backend
from stemma.interpreter.meta import Meta
from stemma.lang.errors import ContextOverflow, OutOfCacheMemory, StemmaError
from stemma.lang.sampling import SamplingParams

COMMANDS = {
    "/reset": "begin a new conversation",
    "/tree": "show the tree of cached prefixes",
    "/stats": "show what the engine has counted",
    "/help": "show this list",
    "/quit": "end, as Ctrl-D does",
}


class Screen(Protocol):
    """Where a conversation takes place."""

    def ask(self) -> str | None:
        """The next message; None ends the conversation."""

    def write(self, piece: str) -> None:
        """More of the answer."""

    def finish(self, how: Meta | str) -> None:
        """The answer has ended, as it should or for the reason given."""


@st.function
def conversation(s: st.ProgramState, screen: Screen, instructions: str, max_tokens: int) -> None:
    """Answer what `screen` asks until it asks nothing more."""
    if instructions:
        s += st.system(instructions)
    while (message := screen.ask()) is not None:
        s = answered(s, message, screen, max_tokens)


def answered(s: st.ProgramState, message: str, screen: Screen, max_tokens: int) -> st.ProgramState:
    """The branch after one more turn; `s` itself if the turn failed."""
    turn = s.copy()
    answer = f"answer {len(s.variables()) + 1}"  # its own name: a branch has its parent's answers
    turn += st.user(message) + st.assistant(st.gen(answer, max_tokens=max_tokens))
    said: list[str] = []
    try:
        for piece in turn.text_iter(answer):
            said.append(piece)
            screen.write(piece)
        screen.finish(turn.meta(answer))
    except KeyboardInterrupt:
        screen.finish("stopped")
        turn.cancel()
        # What was said stays said: the next turn knows as much of the answer as the person.
        turn = s.copy()
        turn += st.user(message) + st.assistant("".join(said))
    except (ContextOverflow, OutOfCacheMemory) as error:
        room = max_tokens - (error.needed - error.limit)
        if room > 0:  # the last answer before the end may be shorter
            return answered(s, message, screen, room)
        screen.finish(f"this no longer fits {error.limit:,} tokens: /reset begins anew")
        return s
    except StemmaError as error:
        screen.finish(str(error))
        return s
    return turn


def chat(
    model: str | None,
    instructions: str,
    *,
    sampling: SamplingParams,
    max_tokens: int,
    seed: int | None,
) -> None:
    """Hold conversations until the person ends. Raises ModelLoadError, UnsupportedByBackend."""
    console = Console()
    with opened_backend(model, Console(stderr=True)) as backend:
        backend.chat.begin("user", ["system"] if instructions else [])  # refused now or never
        # From here on Ctrl-C stops an answer. Where none is being written it ends the command.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        screen = Terminal(console, backend)
        screen.greet()
        while screen.again:
            screen.again = False
            conversation.run(
                screen, instructions, max_tokens, backend=backend, sampling=sampling, seed=seed
            )


class Terminal:
    """Standard input and a console. Works without a terminal, too: lines in, texts out.

    again: the person wants another conversation.
    """

    def __init__(self, console: Console, backend: LocalBackend) -> None:
        self.console = console
        self.backend = backend
        self.again = True
        self.prompt = ""
        if sys.stdin.isatty() and console.is_terminal:
            self.prompt = "> "
            with suppress(ImportError):  # not everywhere; a line editor and a history for `input`
                import readline  # noqa: F401

    def greet(self) -> None:
        if self.prompt:
            self._say(
                f"{self.backend.model_name}. /help lists the commands, Ctrl-C stops an answer, "
                "Ctrl-D ends."
            )

    def ask(self) -> str | None:
        warned = False
        while True:
            try:
                line = input(self.prompt).strip()
            except EOFError:
                if self.prompt:
                    self.console.print()
                return None
            except KeyboardInterrupt:
                if warned or not self.prompt:
                    raise
                warned = True
                self.console.print()
                self._say("Ctrl-C again or Ctrl-D ends.")
                continue
            warned = False
            if line.startswith("/"):
                if line in ("/quit", "/reset"):
                    self.again = line == "/reset"
                    return None
                self._obey(line)
            elif line:
                # A terminal's bytes may be no text at all.
                return line.encode(errors="replace").decode()

    def write(self, piece: str) -> None:
        self.console.out(visible(piece), end="", highlight=False)

    def finish(self, how: Meta | str) -> None:
        self.console.print()
        if isinstance(how, str):
            self._say(f"({how})")
            return
        usage = how.usage
        told = f"{usage.prompt_tokens:,} prompt tokens: {usage.cached_tokens:,} cached, "
        told += f"{usage.computed_tokens:,} computed; {usage.output_tokens:,} written"
        told += f" in {usage.total_s:.1f} s"
        if how.finish_reason == "length":
            told += ", which is the most: --max-tokens allows more"
        self._say(f"({told})")

    def _obey(self, command: str) -> None:
        if command == "/tree":
            self.console.print(self.backend.tree(), highlight=False)
        elif command == "/stats":
            stats = self.backend.stats()
            self._table({f.name.replace("_", " "): getattr(stats, f.name) for f in fields(stats)})
        else:
            if command != "/help":
                self._say(f"there is no {command}")
            self._table(COMMANDS)

    def _table(self, rows: dict[str, object] | dict[str, str]) -> None:
        table = Table.grid(padding=(0, 2))
        for name, value in rows.items():
            table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
        self.console.print(table)

    def _say(self, text: str) -> None:
        self.console.print(Text(text, style="dim"), soft_wrap=True)

"""`stemma run`: a program from a file, run with arguments from the command line."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Any

import typer
from rich.console import Console
from rich.pretty import Pretty
from rich.text import Text

from stemma.board import show_events, told, visible
from stemma.commands.arguments import program_command
from stemma.commands.endings import errors_told
from stemma.commands.loading import opened_backend
from stemma.commands.outcome import outcome
from stemma.commands.program_file import choose_program, load_file, split_target
from stemma.commands.settings import RunSettings
from stemma.interpreter.program import Program
from stemma.interpreter.stream import Stream


def run_target(target: str, arguments: Sequence[str], settings: RunSettings) -> None:
    """Run the program that `target` means; `arguments` are the words after it.

    Ends by SystemExit, as a command line does.
    """
    path, name = split_target(target)
    quiet = settings.json or "--json" in arguments
    with errors_told(path), stdout_on_stderr() if quiet else nullcontext():
        program = choose_program(load_file(path), path, name)

    def act(given: dict[str, Any], settings: RunSettings) -> None:
        settings.check()
        with errors_told(path):
            _run(program, given, settings)

    command = program_command(program, settings, act)
    command(args=list(arguments), prog_name=f"stemma run {target}")


def _run(program: Program, arguments: Mapping[str, Any], settings: RunSettings) -> None:
    with (
        nullcontext()  # its answers are in the record
        if settings.replay is not None
        else opened_backend(settings.model, Console(stderr=True))
    ) as backend:
        stream = partial(
            program.stream,
            **arguments,
            backend=backend,
            sampling=settings.sampling(),
            seed=settings.seed,
            timeout=settings.timeout,
            record=settings.record,
            replay=settings.replay,
        )
        if settings.json:
            with stdout_on_stderr():
                result = outcome(stream())
            typer.echo(json.dumps(result, ensure_ascii=False).encode())
            return
        console = Console()
        tell(stream(), console, show=settings.show)
        if settings.tree and backend is not None:
            console.print()
            console.print(backend.tree(), highlight=False)


@contextmanager
def stdout_on_stderr() -> Iterator[int]:
    """What is printed goes to standard error, also by the processes that a program starts.

    Nothing of it must get between the braces of --json. Gives the descriptor of standard output.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield kept
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def tell(stream: Stream, console: Console, *, show: bool) -> None:
    """Show a run while it goes, then its value and what it took; with `show`, all that it did."""
    started = time.perf_counter()
    state = stream.state
    try:
        board = show_events(stream, console)
        seconds = time.perf_counter() - started
        if board.empty:
            console.print(Text(visible(state.text())), soft_wrap=True)
        if state.value is not None:
            console.print()
            value = state.value
            shown = Text(visible(value)) if isinstance(value, str) else Pretty(value)
            console.print(shown, soft_wrap=True)
        summary = told(state.usage, seconds).append(f" Seed {state.seed}.")
        console.print()
        console.print(summary, style="dim", soft_wrap=True)
    finally:
        if show and not isinstance(sys.exception(), KeyboardInterrupt):
            console.print()
            console.print(state.picture(children=True))

"""`stemma run`: a program from a file, run with arguments from the command line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, fields, is_dataclass
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
from stemma.commands.program_file import choose_program, load_file, split_target
from stemma.commands.settings import RunSettings
from stemma.interpreter.program import Program
from stemma.interpreter.state import ProgramState
from stemma.interpreter.stream import Stream
from stemma.lang.errors import StemmaError


def run_target(target: str, arguments: Sequence[str], settings: RunSettings) -> None:
    """Run the program that `target` means; `arguments` are the words after it.

    Ends by SystemExit, as a command line does.
    """
    path, name = split_target(target)
    # What the file prints must not get between the braces of --json.
    quiet = settings.json or "--json" in arguments
    with errors_told(path), redirect_stdout(sys.stderr) if quiet else nullcontext():
        program = choose_program(load_file(path), path, name)

    def act(given: dict[str, Any], settings: RunSettings) -> None:
        settings.check()
        with errors_told(path):
            _run(program, given, settings)

    command = program_command(program, settings, act)
    command(args=list(arguments), prog_name=f"stemma run {target}")


def _run(program: Program, arguments: Mapping[str, Any], settings: RunSettings) -> None:
    with opened_backend(settings.model, Console(stderr=True)) as backend:
        stream = partial(
            program.stream,
            **arguments,
            backend=backend,
            sampling=settings.sampling(),
            seed=settings.seed,
            timeout=settings.timeout,
        )
        if settings.json:
            with redirect_stdout(sys.stderr):
                result = outcome(finished(stream()))
            typer.echo(json.dumps(result, ensure_ascii=False).encode())
            return
        console = Console()
        tell(stream(), console, show=settings.show)
        if settings.tree:
            console.print()
            console.print(backend.tree(), highlight=False)


def finished(stream: Stream) -> ProgramState:
    """The state at the end. Waits here, and not in a read, so that Ctrl-C cancels the run."""
    for _ in stream:
        pass
    return stream.state


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


def outcome(state: ProgramState) -> dict[str, Any]:
    """A finished run as JSON has it. `errors` is there only if a variable cannot be read."""
    variables: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name in state.variables():
        try:
            variables[name] = as_json(state[name])
        except StemmaError as error:
            variables[name], errors[name] = None, str(error)
    result = {
        "variables": variables,
        "value": as_json(state.value),
        "usage": asdict(state.usage),
        "seed": state.seed,
        "text": state.text(),
    }
    return {**result, "errors": errors} if errors else result


def as_json(value: Any) -> Any:
    """The value in JSON's types; what has no such form becomes text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(each) for each in value]
    if hasattr(value, "model_dump"):  # a pydantic model
        return as_json(value.model_dump(mode="json"))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    return str(value)

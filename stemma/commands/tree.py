"""`stemma tree`: a run of a program as a recording of the radix tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console

from stemma.commands.arguments import program_command
from stemma.commands.endings import errors_told
from stemma.commands.loading import opened_backend
from stemma.commands.program_file import choose_program, load_file, split_target
from stemma.commands.settings import TreeSettings
from stemma.interpreter.program import Program
from stemma.treeview import Recorder, save_page, save_svg
from stemma.treeview.run import record_run


def record_target(target: str, arguments: Sequence[str], settings: TreeSettings) -> None:
    """Record the program that `target` means; `arguments` are the words after it.

    Ends by SystemExit, as a command line does.
    """
    path, name = split_target(target)
    with errors_told(path):
        program = choose_program(load_file(path), path, name)

    def act(given: dict[str, Any], settings: TreeSettings) -> None:
        settings.check()
        with errors_told(path):
            _record(program, given, settings)

    command = program_command(program, settings, act)
    command(args=list(arguments), prog_name=f"stemma tree {target}")


def _record(program: Program, arguments: Mapping[str, Any], settings: TreeSettings) -> None:
    console = Console(highlight=False)
    writes = settings.html is not None or settings.svg is not None
    with opened_backend(
        settings.model, Console(stderr=True), kv_tokens=settings.kv_tokens
    ) as backend:
        recorder = Recorder(backend)
        stream = program.stream(
            **arguments,
            backend=backend,
            sampling=settings.sampling(),
            seed=settings.seed,
            timeout=settings.timeout,
        )
        try:
            for moment in record_run(stream, recorder):
                if not writes:
                    console.print(moment)
        finally:  # what came before an error is often what is looked for
            if writes:
                console.print(recorder.moments[-1])
                console.print()
            if settings.html is not None:
                save_page(recorder.moments, settings.html, title=f"A run of {program.name}")
                typer.echo(f"written: {settings.html}")
            if settings.svg is not None:
                save_svg(recorder.moments[-1].tree, settings.svg)
                typer.echo(f"written: {settings.svg}")

"""`stemma batch`: a program over the rows of a file, many at a time, its results in another."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from stemma.commands.endings import errors_told, shown, site_of
from stemma.commands.loading import opened_backend
from stemma.commands.outcome import as_json, read_variables
from stemma.commands.program_file import choose_program, load_file, split_target
from stemma.commands.rows import Row, read_rows
from stemma.commands.run import stdout_on_stderr
from stemma.commands.settings import BatchSettings
from stemma.commands.table import delimiter_of, write_table
from stemma.interpreter.checkpoint import Checkpoint
from stemma.interpreter.program import Program
from stemma.interpreter.state import ProgramState
from stemma.lang.errors import StemmaError

# How many failures are told one by one.
MOST_TOLD = 5

Failure = tuple[Row, BaseException]


def run_rows(target: str, data: str, settings: BatchSettings) -> None:
    """Run the program that `target` means once for each row of the file `data`.

    Raises BadParameter for what is wrong with the call, the program or the rows, before a model is
    loaded; typer.Exit where a row has failed.
    """
    settings.check()
    settings.check_files(data)
    path, name = split_target(target)
    with errors_told(path), stdout_on_stderr() as stdout:
        program = choose_program(load_file(path), path, name)
        rows = read_rows(data, program, keep=settings.keep, limit=settings.limit)
        checkpoint = _checkpoint(settings)
        try:
            failures, unreadable = _run(program, rows, settings, checkpoint, stdout)
        except KeyboardInterrupt:
            if checkpoint is not None:
                kept = f"{checkpoint.path} keeps {len(checkpoint)} of {len(rows)} rows"
                typer.echo(f"interrupted; {kept}; the same command goes on from there", err=True)
            raise
        where = "standard output" if settings.out == "-" else settings.out
        typer.echo(f"{len(rows)} rows written to {where}", err=True)
        if failures:
            _tell(failures, len(rows), data, path, checkpoint)
        # Of a file that was cut off by --limit the rest may follow.
        elif checkpoint is not None and (settings.limit is None or len(rows) < settings.limit):
            checkpoint.path.unlink()
        if unreadable:
            what = f"{len(unreadable)} of {len(rows)} rows have variables that cannot be read"
            typer.echo(f"{what}, as that of line {unreadable[0].line}: see `error` there", err=True)
        if failures or unreadable:
            raise typer.Exit(1)


def _checkpoint(settings: BatchSettings) -> Checkpoint | None:
    path = settings.checkpoint_path()
    if path is None:
        return None
    if settings.fresh:
        path.unlink(missing_ok=True)
    return Checkpoint(path, encode=_record, decode=lambda state, record: record)


def _run(
    program: Program,
    rows: Sequence[Row],
    settings: BatchSettings,
    checkpoint: Checkpoint | None,
    stdout: int,
) -> tuple[list[Failure], list[Row]]:
    """Run all rows and write what they come to; those that failed, and those that ended well with
    variables that cannot be read."""
    failures: list[Failure] = []
    unreadable: list[Row] = []
    seed = settings.seed
    if seed is None and checkpoint is None:
        seed = secrets.randbits(63)
    with opened_backend(settings.model, Console(stderr=True)) as backend:
        results = program.iter_batch(
            [row.arguments for row in rows],
            backend=backend,
            sampling=settings.sampling(),
            seed=seed,
            timeout=settings.timeout,
            concurrency=settings.threads(),
            retries=settings.retries,
            progress=True,
            return_exceptions=True,
            checkpoint=checkpoint,
        )
        used = seed if checkpoint is None else checkpoint.seed
        typer.echo(f"{len(rows)} rows, seed {used}", err=True)
        if checkpoint is not None and len(checkpoint):
            typer.echo(f"{len(checkpoint)} of them are in {checkpoint.path}", err=True)
        with closing(_in_order(results)) as ordered, _writer(settings.out, stdout) as write:
            for row, result in zip(rows, ordered, strict=True):
                line = _line(row, result)
                if isinstance(result, BaseException):
                    failures.append((row, result))
                elif line["error"] is not None:
                    unreadable.append(row)
                write(line)
    return failures, unreadable


def _in_order(results: Iterator[tuple[int, Any]]) -> Generator[Any, None, None]:
    """Results by their places, each as soon as those before it are there."""
    waiting: dict[int, Any] = {}
    given = 0
    for index, result in results:
        waiting[index] = result
        while given in waiting:
            yield waiting.pop(given)
            given += 1


def _record(state: ProgramState) -> dict[str, Any]:
    """What a row came to. Nothing that another run with the same seed would have otherwise."""
    try:
        text: str | None = state.text()
    except StemmaError:  # the program has cancelled its own branch
        text = None
    variables, unreadable, _ = read_variables(state)
    return {
        "value": as_json(state.value),
        "variables": variables,
        "unreadable": unreadable,
        "text": text,
        "seed": state.seed,
    }


_NOTHING: Mapping[str, Any] = {"value": None, "variables": {}, "unreadable": {}, "text": None}


def _line(row: Row, result: Any) -> dict[str, Any]:
    """A row and what it came to; the same keys always."""
    if isinstance(result, BaseException):
        seed = getattr(getattr(result, "state", None), "seed", None)
        error = f"{type(result).__name__}: {result}"
        return {"item": row.given, **_NOTHING, "seed": seed, "error": error}
    record = _record(result) if isinstance(result, ProgramState) else result
    record = {**_NOTHING, **record}  # of a file of another version
    told = [f"{name}: {each['error']}" for name, each in record["unreadable"].items()]
    return {"item": row.given, **record, "error": "; ".join(told) or None}


@contextmanager
def _writer(out: str, stdout: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that writes a line; a table is written at the end, when its columns are known."""
    delimiter = delimiter_of(out, "--out")
    if delimiter is not None:
        lines: list[Mapping[str, Any]] = []
        yield lines.append
        write_table(Path(out), delimiter, lines)
        return
    with os.fdopen(os.dup(stdout), "wb") if out == "-" else Path(out).open("wb") as file:

        def write(line: Mapping[str, Any]) -> None:
            # Half of a surrogate pair becomes what JSON writes for it.
            text = json.dumps(line, ensure_ascii=False)
            file.write(text.encode("utf-8", "backslashreplace") + b"\n")
            file.flush()

        yield write


def _tell(
    failures: Sequence[Failure], total: int, data: str, path: Path, checkpoint: Checkpoint | None
) -> None:
    """Say what has failed and where."""
    name = "standard input" if data == "-" else data
    for row, error in failures[:MOST_TOLD]:
        site = site_of(path, error)
        place = f" ({shown(site)})" if site is not None else ""
        typer.echo(f"{name}, line {row.line}: {type(error).__name__}: {error}{place}", err=True)
    if len(failures) > MOST_TOLD:
        typer.echo(f"and {len(failures) - MOST_TOLD} more", err=True)
    again = "" if checkpoint is None else "; the same command runs only these again"
    typer.echo(f"{len(failures)} of {total} rows failed{again}", err=True)

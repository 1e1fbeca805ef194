"""How a command ends that fails: an error is one message and exit status 1."""

from __future__ import annotations

import linecache
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from stemma.lang.errors import Site, StemmaError


@contextmanager
def errors_told(program: Path | None = None) -> Iterator[None]:
    """End the command as a person expects: a message for our errors, a traceback for none of them.

    program: the user's file that is being run. Other exceptions from it are told with a traceback
    of its own lines. All others are defects of Stemma and keep their whole traceback.
    """
    try:
        yield
    except StemmaError as error:
        site = site_of(program, error)
        place = f"{shown(site)}: " if site is not None else ""
        typer.echo(f"{_red('error:')} {place}{error}", err=True)
        if site is not None and (line := linecache.getline(site.file, site.line).strip()):
            typer.echo(f"    {site.line} | {line}", err=True)
        raise typer.Exit(1) from None
    except Exception as error:
        if program is None or not _cut_to(program, error):
            raise
        typer.echo("".join(traceback.format_exception(error)), err=True, nl=False)
        raise typer.Exit(1) from None


def _red(text: str) -> str:
    return typer.style(text, fg="red", bold=True)


def site_of(program: Path | None, error: BaseException) -> Site | None:
    """Where its operation was queued, else the innermost line of the user's file that the error
    came through.
    """
    if isinstance(site := getattr(error, "site", None), Site):
        return site
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if program is not None and f.filename == str(program)]
    return Site(ours[-1].filename, ours[-1].lineno or 0, ours[-1].name) if ours else None


def shown(site: Site) -> str:
    """The place, with its path as short as it can be said from here."""
    with suppress(ValueError):  # another drive than the current folder's
        relative = os.path.relpath(site.file)
        if not relative.startswith(os.pardir):
            return str(Site(relative, site.line, site.function))
    return str(site)


def _cut_to(program: Path, error: BaseException) -> bool:
    """Cut the frames above the user's file off the traceback; False if it is not in there."""
    if isinstance(error, SyntaxError) and error.filename == str(program):
        error.__traceback__ = None  # it has a place of its own, and no line of the file has run
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(program):
        trace = trace.tb_next
    error.__traceback__ = trace or error.__traceback__
    return trace is not None

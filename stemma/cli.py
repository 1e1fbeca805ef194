"""The command line: `stemma demo`, `stemma --version`.

Owns how a command ends: an error of ours is one message and exit status 1, Ctrl-C is status 130.
Heavy imports happen inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated

import typer

from stemma.lang.errors import StemmaError

app = typer.Typer(
    name="stemma",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A language for structured LLM programs, and a local engine that computes every shared "
    "prefix once.",
    epilog="STEMMA_MODEL names the model where --model does not; STEMMA_CACHE is where the default "
    "model is kept.",
)

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A model folder, a GGUF file or a hub id. Without it: STEMMA_MODEL, else the default "
        "model, fetched once (93 MB).",
        show_default=False,
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stemma {version('stemma-lm')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    model: Model = None,
    seed: Annotated[int, typer.Option(help="Another seed draws other samples.")] = 0,
) -> None:
    """Run an example program that forks, samples and selects; then show what was computed once."""
    with errors_told():
        from stemma.demo import run_demo

        run_demo(model, seed=seed)


@contextmanager
def errors_told() -> Iterator[None]:
    """End the command as a person expects: a message for our errors, a traceback for none of them.

    Other exceptions are defects and keep their traceback.
    """
    try:
        yield
    except StemmaError as error:
        place = f"{error.site}: " if error.site is not None else ""
        typer.echo(f"error: {place}{error}", err=True)
        raise typer.Exit(1) from None


def main() -> None:
    """The console script. Typer turns Ctrl-C into exit status 130."""
    app()

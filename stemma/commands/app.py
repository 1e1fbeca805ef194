"""The commands that `stemma` takes: their options, their help, and where they go.

Run by `stemma/cli.py`. What a command does is in a module of its own, imported when it is called,
so that `--help` is quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

from stemma.commands.command import Command, Group
from stemma.commands.endings import errors_told
from stemma.commands.settings import (
    BatchSettings,
    CheckpointFile,
    Concurrency,
    Fresh,
    Html,
    Json,
    Keep,
    KvTokens,
    Limit,
    MaxTokens,
    Model,
    Out,
    Record,
    Replay,
    Retries,
    RunSettings,
    Seed,
    Show,
    Svg,
    Temperature,
    Timeout,
    Tree,
    TreeSettings,
    checked_seed,
)

app = typer.Typer(
    name="stemma",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="A language for structured LLM programs, and a local engine that computes every shared "
    "prefix once.",
    epilog="""[bold]Examples[/]
  stemma demo                          [dim]see what it is about[/]
  stemma run tips.py --topic sleep     [dim]run a program with an argument[/]
  stemma run tips.py --help            [dim]see the arguments it takes[/]
  stemma batch tips.py topics.csv      [dim]run it for each row of a file[/]
  stemma tree tips.py --html out.html  [dim]see what the cache kept and reused[/]
  stemma chat -m path/or/hub-id        [dim]talk to a model[/]
  stemma doctor --load                 [dim]try whether all is well[/]

STEMMA_MODEL names the model where --model does not.
Without both it is a small one, kept in STEMMA_CACHE.""",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

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


Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py[:PROGRAM]",
        help="The file, and which of its programs where it has several.",
        show_default=False,
    ),
]
# What comes after the file is the program's.
BEFORE_A_PROGRAM = {"allow_extra_args": True, "allow_interspersed_args": False}


@app.command(cls=Command, options_metavar="[OPTIONS]", context_settings=BEFORE_A_PROGRAM)
def run(
    context: typer.Context,
    target: Target,
    model: Model = None,
    seed: Seed = None,
    timeout: Timeout = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    json: Json = False,
    show: Show = False,
    tree: Tree = False,
    record: Record = None,
    replay: Replay = None,
) -> None:
    """Run a program from a file and show its texts as they grow.

    The program's own arguments come after the file, as options; [bold]stemma run FILE.py --help[/]
    lists them. The options below may come there, too.
    """
    settings = RunSettings(
        model, seed, timeout, temperature, max_tokens, json, show, tree, record, replay
    )
    from stemma.commands.run import run_target

    run_target(target, context.args, settings)


@app.command(cls=Command)
def batch(
    target: Target,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="The rows: a .csv or .jsonl file, or - for JSON lines on standard input. Its "
            "columns are the program's arguments.",
            show_default=False,
        ),
    ],
    out: Out = "-",
    concurrency: Concurrency = "auto",
    retries: Retries = 0,
    limit: Limit = None,
    keep: Keep = None,
    checkpoint: CheckpointFile = None,
    fresh: Fresh = False,
    model: Model = None,
    seed: Seed = None,
    timeout: Timeout = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Run a program once for each row of a file, many at a time.

    The results are in the order of the rows. A batch that was interrupted goes on where it was when
    the same command is given again; the timeout is each row's own.
    """
    settings = BatchSettings(
        model,
        seed,
        timeout,
        temperature,
        max_tokens,
        out,
        concurrency,
        retries,
        limit,
        tuple(keep or ()),
        checkpoint,
        fresh,
    )
    from stemma.commands.batch import run_rows

    run_rows(target, data, settings)


@app.command(cls=Command, options_metavar="[OPTIONS]", context_settings=BEFORE_A_PROGRAM)
def tree(
    context: typer.Context,
    target: Target,
    html: Html = None,
    svg: Svg = None,
    kv_tokens: KvTokens = None,
    model: Model = None,
    seed: Seed = None,
    timeout: Timeout = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Run a program and show, moment by moment, what the cache keeps.

    There is a moment for every variable: what was hit, what is new, what had to go.

    The program's own arguments come after the file, as options. The options below may come there,
    too.
    """
    settings = TreeSettings(
        model, seed, timeout, temperature, max_tokens, html=html, svg=svg, kv_tokens=kv_tokens
    )
    from stemma.commands.tree import record_target

    record_target(target, context.args, settings)


@app.command(cls=Command)
def chat(
    model: Model = None,
    system: Annotated[
        str, typer.Option(help="What the model is told before the conversation.")
    ] = "",
    temperature: Annotated[float, typer.Option(min=0)] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 512,
    seed: Seed = None,
) -> None:
    """Talk to a model; earlier turns are never computed again.

    A line is a message; /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends. Without a
    terminal the messages are the lines of standard input.
    """
    with errors_told():
        from stemma.commands.chat import chat
        from stemma.lang.sampling import SamplingParams

        sampling = SamplingParams(temperature=temperature)
        chat(model, system, sampling=sampling, max_tokens=max_tokens, seed=seed)


@app.command(cls=Command)
def demo(
    model: Model = None,
    seed: Annotated[
        int,
        typer.Option(help="Another seed draws other samples.", callback=checked_seed),
    ] = 0,
) -> None:
    """Run an example program that forks, samples and selects.

    At the end comes the tree of what was computed, each prefix once.
    """
    with errors_told():
        from stemma.demo import run_demo

        run_demo(model, seed=seed)


@app.command(cls=Command)
def doctor(
    model: Model = None,
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Load the model, fetching it if need be.")
    ] = False,
) -> None:
    """Tell what is installed, where a model would run, what is missing.

    The exit status is 1 if something is.
    """
    with errors_told():
        from stemma.commands.doctor import examine

        if not examine(model, load=load):
            raise typer.Exit(1)

"""The options that commands share, and those of the commands that run a program as one value.

Declared once, for the command line of `app.py` and for that of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from stemma.commands.table import delimiter_of
from stemma.lang.errors import InvalidArgument
from stemma.lang.sampling import SamplingParams

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


def checked_seed(seed: int | None) -> int | None:
    """Raises BadParameter for one that is no seed."""
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise typer.BadParameter(f"{seed}: must be a signed integer of 64 bits")
    return seed


Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        callback=checked_seed,
        help="Of all draws; the same seed draws the same.",
        show_default=False,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="<float>",
        min=0,
        help="Of generations that say none themselves; 0 takes the most probable token.",
        show_default=False,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="<int>",
        min=0,
        help="Of generations that say none themselves.",
        show_default=False,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", help="Seconds, then the run is ended.", show_default=False),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object (value, variables, text, branches, errors, usage, seed) and no "
        "more.",
    ),
]
Show = Annotated[bool, typer.Option("--show", help="Show at the end what ran, branch by branch.")]
Tree = Annotated[bool, typer.Option("--tree", help="Show at the end the tree of cached prefixes.")]
Record = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="<file>",
        help="Write down what the model is asked and what it answers.",
        show_default=False,
    ),
]
Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="<file>",
        help="Run on what --record has written, without a model.",
        show_default=False,
    ),
]


Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="<file>",
        help="Write a page to step through the run.",
        show_default=False,
    ),
]
Svg = Annotated[
    Path | None,
    typer.Option(
        "--svg", metavar="<file>", help="Write a picture of the last tree.", show_default=False
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        "--kv-tokens",
        metavar="<int>",
        min=1,
        help="How many tokens the cache holds: few, and some of them have to go.",
        show_default=False,
    ),
]


Out = Annotated[
    str,
    typer.Option(
        "--out",
        "-o",
        metavar="<file>",
        help="Where the results go: a .jsonl or .csv file, or - for standard output.",
    ),
]
Concurrency = Annotated[
    str,
    typer.Option(
        "--concurrency",
        metavar="<int>",
        help="The most rows at work at once; auto is as many as the engine runs requests.",
    ),
]
Retries = Annotated[
    int,
    typer.Option(
        "--retries",
        metavar="<int>",
        min=0,
        help="How often a row is tried again after a timeout, a lost connection and the like.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit", metavar="<int>", min=1, help="Only the first so many rows.", show_default=False
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        "--keep",
        metavar="<column>",
        help="A column that the program does not take, copied to the results.",
        show_default=False,
    ),
]
CheckpointFile = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="<file>",
        help="What is finished is kept here until all is. Without it: the file of --out with "
        ".checkpoint behind.",
        show_default=False,
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin anew, whatever the checkpoint has.")]


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a command that runs a program which are not the program's."""

    model: Model = None
    seed: Seed = None
    timeout: Timeout = None
    temperature: Temperature = None
    max_tokens: MaxTokens = None

    def check(self) -> None:
        """Raise BadParameter for what cannot be meant, before anything is loaded."""
        if self.timeout is not None and not self.timeout > 0:
            raise _bad("--timeout", f"{self.timeout:g} s: must be above 0")
        self.sampling()

    def sampling(self) -> SamplingParams | None:
        """The defaults of the run's generations."""
        if self.temperature is None and self.max_tokens is None:
            return None
        temperature = 1.0 if self.temperature is None else self.temperature
        try:
            return SamplingParams(temperature=temperature, max_tokens=self.max_tokens)
        except InvalidArgument as error:  # nan, for one, is no less than the least
            raise _bad("--temperature", str(error)) from error


@dataclass(frozen=True, slots=True)
class RunSettings(Settings):
    """Those of `stemma run`."""

    json: Json = False
    show: Show = False
    tree: Tree = False
    record: Record = None
    replay: Replay = None

    def check(self) -> None:
        Settings.check(self)
        if self.json and (self.show or self.tree):
            raise _bad("--json", "prints nothing else: leave out --show and --tree")
        if self.record is not None:
            if self.replay is not None:
                raise _bad("--record", "a run is recorded or played back: leave out --replay")
            _check_writable("--record", self.record)
            from stemma.backend.record_file import may_be_written

            if not may_be_written(self.record):
                raise _bad("--record", f"{self.record}: is there and no record: name another file")
        if self.replay is not None:
            if self.model is not None or self.tree:
                raise _bad("--replay", "runs without a model: leave out --model and --tree")
            if not self.replay.is_file():
                raise _bad("--replay", f"{self.replay}: there is no such file")


@dataclass(frozen=True, slots=True)
class TreeSettings(Settings):
    """Those of `stemma tree`."""

    html: Html = None
    svg: Svg = None
    kv_tokens: KvTokens = None

    def check(self) -> None:
        Settings.check(self)
        for option, path in (("--html", self.html), ("--svg", self.svg)):
            if path is not None:
                _check_writable(option, path)


@dataclass(frozen=True, slots=True)
class BatchSettings(Settings):
    """Those of `stemma batch`."""

    out: Out = "-"
    concurrency: Concurrency = "auto"
    retries: Retries = 0
    limit: Limit = None
    keep: Sequence[str] = ()
    checkpoint: CheckpointFile = None
    fresh: Fresh = False

    def check(self) -> None:
        Settings.check(self)
        self.threads()

    def threads(self) -> int | Literal["auto"]:
        """How many rows are at work at once."""
        if self.concurrency == "auto":
            return "auto"
        if not self.concurrency.isdecimal() or int(self.concurrency) < 1:
            raise _bad("--concurrency", f"{self.concurrency}: must be at least 1, or auto")
        return int(self.concurrency)

    def checkpoint_path(self) -> Path | None:
        """None where nothing is kept: with results on standard output, unless it says where."""
        if self.checkpoint is not None or self.out == "-":
            return self.checkpoint
        return Path(f"{self.out}.checkpoint")

    def check_files(self, data: str) -> None:
        """Raise BadParameter for files that cannot be written, or are the data itself."""
        delimiter_of(data, "DATA")
        delimiter_of(self.out, "--out")
        out = None if self.out == "-" else Path(self.out)
        written = (("--out", out), ("--checkpoint", self.checkpoint_path()))
        for option, path in written:
            if path is None:
                continue
            _check_writable(option, path)
            if path.resolve() == Path(data).resolve() or (option != "--out" and path == out):
                raise _bad(
                    option, f"{path}: is another file of this command; give a path of its own"
                )


def _check_writable(option: str, path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise _bad(option, f"{path}: must be a file in a folder that is there")


def _bad(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=option)

"""The texts of a run while they grow, as lines for people.

Fed with the events of a `Stream` by `stemma run` and `stemma demo`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stemma.backend.base import Usage
from stemma.interpreter.events import (
    Event,
    Failed,
    Selected,
    Stopped,
    TextAdded,
    VariableFinished,
    VariableStarted,
)
from stemma.lang.errors import StemmaError

REFRESHES_PER_SECOND = 10

# What a model writes must not steer the terminal: control characters, but for tab and newline,
# are shown as their pictures.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}


def visible(text: str) -> str:
    """The text without characters that a terminal would obey."""
    return text.translate(_CONTROLS)


class Row:
    """What one operation of a branch has written."""

    __slots__ = ("branch", "finished", "text", "variable")

    def __init__(self, branch: str, variable: str | None) -> None:
        self.branch = branch
        self.variable = variable or ""
        self.text = Text()
        self.finished = False

    def line(self) -> Text:
        line = Text(self.branch, style="cyan")
        if self.variable:
            line.append(f"  {self.variable}", style="magenta")
        return Text.assemble(line, "  ", self.text)


class Board:
    """One row for each thing that a run writes or chooses, in the order in which they began.

    rows: those not given up. empty: there never was one.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.empty = True
        self._growing: dict[tuple[str, str | None], Row] = {}
        self._lock = threading.Lock()  # a Live draws in a thread of its own

    def take(self, event: Event) -> Row | None:
        """Let an event change its row; the row, if this has finished it."""
        with self._lock:
            match event:
                case VariableStarted(branch=branch, variable=variable):
                    self._row(branch, variable)
                case TextAdded(branch=branch, text=text, variable=str() as variable):
                    row = self._row(branch, variable)
                    row.text.append(visible(text if row.text else text.lstrip()))
                case VariableFinished(branch=branch, variable=variable, value=value):
                    if (branch, variable) in self._growing:  # a choice is finished by Selected
                        row = self._finish(branch, variable)
                        _show_samples(row, value)
                        if isinstance(value, StemmaError):  # the text was cut off, or refused
                            told = f"  no value: {type(value).__name__}: {visible(str(value))}"
                            row.text.append(told, "red")
                        return row
                case Selected(branch=branch, variable=variable, choice=choice) as chosen:
                    row = self._row(branch, variable)
                    share = chosen.probabilities[choice]
                    told = f"  {share:.0%} of {len(chosen.probabilities)} choices"
                    row.text = Text(visible(choice.strip())).append(told, style="dim")
                    return self._finish(branch, variable)
                case Failed(branch=branch) | Stopped(branch=branch):
                    end = (" failed", "red") if isinstance(event, Failed) else (" stopped", "dim")
                    for key in [key for key in self._growing if key[0] == branch]:
                        self._finish(*key).text.append(*end)
        return None

    def _row(self, branch: str, variable: str | None) -> Row:
        row = self._growing.get((branch, variable))
        if row is None:
            row = self._growing[branch, variable] = Row(branch, variable)
            self.rows.append(row)
            self.empty = False
        return row

    def _finish(self, branch: str, variable: str | None) -> Row:
        row = self._growing.pop((branch, variable))
        row.finished = True
        row.text.rstrip()
        return row

    def take_finished_head(self, most: int) -> list[Row]:
        """Give up the finished rows at the top, if there are more than `most` rows.

        All of them, not only as many as are too many: printing one is as dear as printing many.
        """
        with self._lock:
            count = 0
            if len(self.rows) > most:
                while count < len(self.rows) and self.rows[count].finished:
                    count += 1
            head, self.rows = self.rows[:count], self.rows[count:]
        return head

    def __rich__(self) -> Table:
        with self._lock:
            return _table([(row.branch, row.variable, row.text.copy()) for row in self.rows])


def _table(rows: Iterable[tuple[str, str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(style="magenta", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _show_samples(row: Row, value: object) -> None:
    """Of `gen(n=4)` only the first sample was streamed: show all four, a line each."""
    if isinstance(value, list) and len(value) > 1 and str(value[0]).strip() == row.text.plain:
        lines = (visible(str(sample)).strip().replace("\n", " ") for sample in value)
        row.text = Text("\n".join(f"{number}: {line}" for number, line in enumerate(lines, 1)))


def show_events(events: Iterable[Event], console: Console) -> Board:
    """Show a run: on a terminal all texts grow side by side, elsewhere each comes when finished.

    Raises what the run raises, after what it has written was shown.
    """
    board = Board()
    if not console.is_terminal:
        for event in events:
            row = board.take(event)
            if row is not None:
                console.print(row.line(), highlight=False, soft_wrap=True)
        return board
    with Live(board, console=console, refresh_per_second=REFRESHES_PER_SECOND):
        for event in events:
            if board.take(event) is not None:
                # What no longer fits the screen is printed for good, above what still grows.
                head = board.take_finished_head(console.height - 2)
                if head:
                    console.print(Text("\n").join(row.line() for row in head), highlight=False)
    return board


def told(usage: Usage, seconds: float) -> Text:
    """What a run took, in words."""
    share = usage.cached_tokens / usage.prompt_tokens if usage.prompt_tokens else 0.0
    return Text(
        f"{usage.prompt_tokens:,} prompt tokens: {usage.cached_tokens:,} came from the cache "
        f"({share:.0%}), {usage.computed_tokens:,} were computed. {usage.output_tokens:,} tokens "
        f"were written in {seconds:.1f} s."
    )

"""Progress of slow steps before a model runs: one value per report, and one line on the terminal.

Used by whatever fetches or converts models; a caller who shows progress another way passes a
callable instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a slow step is: `done` of `total` bytes, or both None where no number can be told."""

    step: str
    done: int | None = None
    total: int | None = None


class _Megabytes(ProgressColumn):
    """Done and total in MB; for a step without numbers the seconds it has taken."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(f"{task.elapsed or 0:.0f} s", style="progress.elapsed")
        return Text(
            f"{task.completed / 1e6:.1f} / {task.total / 1e6:.1f} MB", style="progress.download"
        )


@contextmanager
def show_progress(console: Console | None = None) -> Iterator[Callable[[Progress], None]]:
    """A callable that draws the reports it gets on standard error: one moving line.

    Gone at the end. Off the terminal nothing moves: each step prints a line as it begins.
    """
    console = console or Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _Megabytes())
    with RichProgress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        task: TaskID | None = None
        step = ""

        def report(progress: Progress) -> None:
            nonlocal task, step
            if progress.step != step:
                step = progress.step
                if task is not None:
                    bars.remove_task(task)
                task = bars.add_task(step, total=progress.total)
                if not console.is_terminal:
                    console.print(f"{step} ...", highlight=False)
            if task is not None and progress.done is not None:
                bars.update(task, completed=progress.done)

        yield report

"""What `run_batch(progress=True)` shows: a bar in a terminal, a line now and then elsewhere.

Used by `batch.py`; called from its threads, one at a time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from stemma.backend.base import Usage
from stemma.interpreter.state import ProgramState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# Seconds between the lines where there is no terminal.
LINE_EVERY_S = 10.0


class BatchProgress:
    """Counts finished items, and shows them on standard error; `with` makes it visible."""

    def __init__(self, total: int | None, *, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console if console is not None else Console(stderr=True)
        self._total = total
        self._done = self._failed = self._resumed = self._stopped = 0
        self._usage = Usage()
        self._started = self._told = time.monotonic()
        self._bar = self._make_bar()

    def __enter__(self) -> BatchProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            self._print_line()

    def advance(self, result: object, *, resumed: bool = False, stopped: bool = False) -> None:
        """An item has ended, with its state or its error.

        resumed: it had ended before this batch began; what it took is not counted. stopped: it was
        begun, and the batch ended before it did; it is neither done nor failed.
        """
        if stopped:
            self._stopped += 1
            return
        self._done += 1
        self._resumed += resumed
        self._failed += isinstance(result, BaseException)
        state = getattr(result, "state", None) if isinstance(result, BaseException) else result
        if isinstance(state, ProgramState) and not resumed:
            self._usage += state.usage
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, told=self.rates())
        elif time.monotonic() - self._told >= LINE_EVERY_S:
            self._print_line()

    def rates(self) -> str:
        """How fast, in words: items and written tokens per second, and the share of the prompt
        tokens that came from the cache.
        """
        seconds = max(time.monotonic() - self._started, 1e-9)
        usage = self._usage
        words = [
            f"{(self._done - self._resumed) / seconds:.1f} items/s",
            f"{usage.output_tokens / seconds:.0f} tok/s",
        ]
        if usage.prompt_tokens:
            words.append(f"{usage.cached_tokens / usage.prompt_tokens:.0%} cached")
        if self._resumed:
            words.append(f"{self._resumed} resumed")
        if self._failed:
            words.append(f"{self._failed} failed")
        if self._stopped:
            words.append(f"{self._stopped} stopped")
        return ", ".join(words)

    def _print_line(self) -> None:
        self._told = time.monotonic()
        of = f"/{self._total}" if self._total is not None else ""
        line = f"run_batch: {self._done}{of} items, {self.rates()}"
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _make_bar(self) -> Progress | None:
        if not (self._console.is_terminal or self._console.is_jupyter):
            return None
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Left

        columns: list[Any] = [BarColumn(), MofNCompleteColumn(), Left()]
        bar = Progress(*columns, TextColumn("{task.fields[told]}"), console=self._console)
        bar.add_task("run_batch", total=self._total, told="")
        return bar

"""`run_batch`: one program over many items, so many at a time, results in order.

Used by `Program.run_batch`. A thread per item at work, because a plain body blocks while it reads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

from stemma.interpreter.run import SETTLE_S, Run
from stemma.interpreter.state import ProgramState
from stemma.lang.errors import Cancelled, InvalidArgument
from stemma.lang.sampling import derive_seed

if TYPE_CHECKING:
    from rich.progress import Progress

BatchItem = Mapping[str, Any] | tuple[Any, ...]
Prepare = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Run, Callable[[], ProgramState]]]

# Threads that mostly wait; enough to fill the engine's steps.
AUTO_THREADS = 64


class Batch:
    """`prepare(args, kwargs)` makes the run of one item and a function that runs it to the end."""

    def __init__(
        self, prepare: Prepare, items: Sequence[BatchItem], options: Mapping[str, Any]
    ) -> None:
        self._prepare = prepare
        self._items = items
        self._options = options
        self._todo = deque(range(len(items)))
        self._results: list[ProgramState | BaseException] = [Cancelled("not started")] * len(items)
        self._running: dict[int, Run] = {}
        self._first_error: BaseException | None = None
        self._stopped = False

    def run(
        self, num_threads: int | Literal["auto"], *, progress: bool, stop_at_error: bool
    ) -> list[ProgramState | BaseException]:
        """Everything, to the end; with `stop_at_error`, to the first error."""
        count = AUTO_THREADS if num_threads == "auto" else num_threads
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidArgument(f"num_threads={num_threads!r}: must be at least 1, or 'auto'")
        with _bar(progress) as bar:
            task = bar.add_task("run_batch", total=len(self._items)) if bar is not None else None

            def work() -> None:
                while (index := self._next()) is not None:
                    try:
                        self._results[index] = self._run_item(index)
                    except BaseException as error:
                        self._results[index] = error
                        if stop_at_error:
                            self._stop(error)
                    if bar is not None and task is not None:
                        bar.advance(task)

            threads = [
                threading.Thread(target=work, name=f"stemma-batch-{i}", daemon=True)
                for i in range(min(count, len(self._items)))
            ]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            except BaseException as error:  # Ctrl-C
                self._stop(error)
                for thread in threads:
                    thread.join(SETTLE_S)
                raise
        if self._first_error is not None:
            raise self._first_error
        return self._results

    def _next(self) -> int | None:
        try:
            return None if self._stopped else self._todo.popleft()
        except IndexError:
            return None

    def _run_item(self, index: int) -> ProgramState:
        item = self._items[index]
        options = dict(self._options)
        if options.get("seed") is not None:
            options["seed"] = derive_seed(options["seed"], index)
        if isinstance(item, Mapping):
            run, execute = self._prepare((), {**options, **item})
        elif isinstance(item, tuple):
            run, execute = self._prepare(item, options)
        else:
            raise InvalidArgument(
                f"run_batch: item {index} must be a dict or a tuple, not {item!r}"
            )
        self._running[index] = run
        try:
            if self._stopped:
                run.cancel()
            return execute()
        finally:
            del self._running[index]

    def _stop(self, error: BaseException) -> None:
        if not self._stopped:
            self._first_error, self._stopped = error, True
        for run in tuple(self._running.values()):
            run.cancel()


def _bar(wanted: bool) -> Progress | nullcontext[None]:
    if not wanted:
        return nullcontext()
    from rich.progress import Progress

    return Progress(transient=True)

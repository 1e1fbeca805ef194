"""`run_batch`: one program over many items, so many at a time, results in order.

Used by `Program.run_batch`. A thread per item at work, because a plain body blocks while it reads.
"""

from __future__ import annotations

import contextvars
import reprlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from typing import Any, Literal

from stemma.interpreter.progress import BatchProgress
from stemma.interpreter.run import SETTLE_S, Run
from stemma.interpreter.state import ProgramState
from stemma.lang.errors import InvalidArgument
from stemma.lang.sampling import checked_seed, derive_seed

BatchItem = Mapping[str, Any] | tuple[Any, ...] | list[Any]
Result = ProgramState | BaseException
Prepare = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Run, Callable[[], ProgramState]]]

# Threads that mostly wait; enough to fill the engine's steps.
AUTO_THREADS = 64

# How an error names its item.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxdict = 8


class Batch:
    """Runs the items while it is iterated; gives their results in order.

    prepare: `prepare(args, kwargs)` makes the run of one item and a function that runs it to the
        end.
    items: taken one by one, when there is a thread for the next; those that share arguments one
        after the other, unless there is one thread only.
    lazy: work only a little ahead of the reader, as far as two items per thread; in the order
        given.
    stop_at_error: raise the first error, after the rest has stopped; otherwise errors are results.
    """

    def __init__(
        self,
        prepare: Prepare,
        items: Iterable[BatchItem],
        options: Mapping[str, Any],
        *,
        num_threads: int | Literal["auto"],
        progress: bool,
        stop_at_error: bool,
        lazy: bool = False,
    ) -> None:
        count = AUTO_THREADS if num_threads == "auto" else num_threads
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidArgument(f"num_threads={num_threads!r}: must be at least 1, or 'auto'")
        self._total = len(items) if isinstance(items, Sized) else None
        self._threads = count if self._total is None else max(1, min(count, self._total))
        self._prepare = prepare
        self._items: Iterator[tuple[int, BatchItem]] = enumerate(items)
        if isinstance(items, Sequence) and not lazy and self._threads > 1:
            self._items = depth_first(items)
        self._seed = checked_seed(options.get("seed"))
        self._options = options
        self._progress = BatchProgress(self._total) if progress else None
        self._stop_at_error = stop_at_error
        self._ahead = 2 * self._threads if lazy else None
        # What follows changes under the condition only.
        self._changed = threading.Condition()
        self._results: dict[int, Result] = {}
        self._running: dict[int, Run] = {}
        self._begun = self._given = 0
        self._exhausted = False
        self._stopped: BaseException | None = None

    def __iter__(self) -> Iterator[Result]:
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._work,),
                name=f"stemma-batch-{i}",
                daemon=True,
            )
            for i in range(self._threads)
        ]
        with self._progress or nullcontext():
            try:
                for thread in threads:
                    thread.start()
                while (result := self._take()) is not None:
                    yield result
            except BaseException as error:  # Ctrl-C, or the reader has had enough
                self._stop(error)
                for thread in threads:
                    thread.join(0 if isinstance(error, GeneratorExit) else SETTLE_S)
                raise
            for thread in threads:
                thread.join()
        if self._stopped is not None:
            raise self._stopped

    def _take(self) -> Result | None:
        """The next result in order; None at the end, or where an error ends all."""
        with self._changed:
            self._changed.wait_for(self._has_next)
            result = self._results.pop(self._given, None)
            if result is None or (isinstance(result, BaseException) and self._stop_at_error):
                return None
            self._given += 1
            self._changed.notify_all()
            return result

    def _has_next(self) -> bool:
        all_given = self._exhausted and self._given == self._begun
        return self._given in self._results or self._stopped is not None or all_given

    def _work(self) -> None:
        """A thread's life."""
        while (begun := self._begin()) is not None:
            index, item = begun
            try:
                result: Result = self._run_item(index, item)
            except BaseException as error:
                _note_item(error, index, item)
                result = error
                if self._stop_at_error:
                    self._stop(error)
            with self._changed:
                self._results[index] = result
                if self._progress is not None:
                    self._progress.advance(result)
                self._changed.notify_all()

    def _begin(self) -> tuple[int, BatchItem] | None:
        with self._changed:
            self._changed.wait_for(self._may_begin)
            if self._stopped is not None or self._exhausted:
                return None
            try:
                index, item = next(self._items)
            except StopIteration:
                self._exhausted = True
                self._changed.notify_all()
                return None
            except BaseException as error:  # of the program's own iterator: there are no more items
                self._stop(error)
                return None
            self._begun += 1
            return index, item

    def _may_begin(self) -> bool:
        over = self._stopped is not None or self._exhausted
        return over or self._ahead is None or self._begun < self._given + self._ahead

    def _run_item(self, index: int, item: BatchItem) -> ProgramState:
        options = dict(self._options)
        if self._seed is not None:
            options["seed"] = derive_seed(self._seed, index)
        if isinstance(item, Mapping):
            run, execute = self._prepare((), {**options, **item})
        elif isinstance(item, tuple | list):
            run, execute = self._prepare(tuple(item), options)
        else:
            raise InvalidArgument(
                f"run_batch: item {index} must be a dict, a tuple or a list, not {item!r}"
            )
        with self._changed:
            self._running[index] = run
            if self._stopped is not None:
                run.cancel()
        try:
            return execute()
        finally:
            with self._changed:
                del self._running[index]

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            if self._stopped is None:
                self._stopped = error
            for run in self._running.values():
                run.cancel()
            self._changed.notify_all()


def _note_item(error: BaseException, index: int, item: object) -> None:
    """Say which item it was; of an error that several items share, the first that came by."""
    notes: list[str] = getattr(error, "__notes__", [])
    if not any(note.startswith("run_batch: item ") for note in notes):
        error.add_note(f"run_batch: item {index}, {_SHORT.repr(item)}")


def depth_first(items: Sequence[BatchItem]) -> Iterator[tuple[int, BatchItem]]:
    """The items and their places in the batch, those with equal arguments one after the other.

    So what their prompts share is computed once and used while it is still cached; the prompts
    themselves are not known before the bodies run. Arguments are compared in the order of how much
    text is repeated in them, so a long document that many items share goes before a question that
    is asked of each. On the prompts themselves this is the order that hits most, see `depth_first`
    of the local engine.
    """
    rows = [_arguments(item) for item in items]
    values: dict[int | str, Counter[str]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, Counter())[value] += 1
    repeated = {
        name: sum(len(value) * (times - 1) for value, times in found.items())
        for name, found in values.items()
    }
    names = sorted(repeated, key=lambda name: -repeated[name])
    places = sorted(range(len(items)), key=lambda i: [rows[i].get(name, "") for name in names])
    return ((place, items[place]) for place in places)


def _arguments(item: object) -> dict[int | str, str]:
    """The arguments of an item as texts, by name or place; none of what cannot be an item."""
    if isinstance(item, Mapping):
        given: Iterable[tuple[Any, Any]] = item.items()
    else:
        given = enumerate(item) if isinstance(item, tuple | list) else ()
    return {name: value if isinstance(value, str) else repr(value) for name, value in given}

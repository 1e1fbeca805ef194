"""One program over many items, so many at a time: what `run_batch` and its kin do.

Used by `batches.py`. A thread per item at work, because a plain body blocks while it reads; the
body of an async program runs in its caller's event loop where there is one.
"""

from __future__ import annotations

import contextvars
import itertools
import secrets
import threading
import time
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from stemma.backend.record_file import Recording
from stemma.interpreter.batch_failures import hand_on_all, may_pass, note_item
from stemma.interpreter.batch_order import BatchItem, depth_first
from stemma.interpreter.checkpoint import Checkpoint, item_key
from stemma.interpreter.default import default_backend
from stemma.interpreter.progress import BatchProgress
from stemma.interpreter.recorded import options_of_batch
from stemma.interpreter.run import SETTLE_S
from stemma.interpreter.running import in_own_thread
from stemma.interpreter.state import ProgramState
from stemma.interpreter.variable import async_waker
from stemma.lang.errors import Cancelled, InvalidArgument
from stemma.lang.sampling import SamplingParams, checked_seed, derive_seed

Concurrency = int | Literal["auto"]
Result = Any  # a state, or an exception; of a checkpoint with records of its own what it decodes

# Threads that mostly wait: as many as the engine runs requests, and never more than these.
AUTO_THREADS = 256
# Seconds before an item is tried again, twice as long each time.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0

# As SETTLE_S, where a person waits.
INTERRUPT_S = 2.0


class Prepared(NamedTuple):
    """An item that can be run. work: runs it to the end on `state`. cancel: stops that."""

    state: ProgramState
    work: Callable[[], object]
    cancel: Callable[[], object]


Prepare = Callable[[tuple[Any, ...], Mapping[str, Any]], Prepared]


class Batch:
    """Runs the items while it is iterated, with `for` or `async for`; gives (index, result).

    prepare: `prepare(args, kwargs)` makes one item ready.
    items: taken one by one, when there is a thread for the next; those that share arguments one
        after the other, unless there is one thread only.
    options: for all items; what an item says itself goes before.
    ordered: in the items' order; otherwise as they finish.
    lazy: work only a little ahead of the reader, as far as two items per thread; in the order
        given, if the results are.
    stop_at_error: raise the first error, after the rest has stopped; otherwise errors are results.
    retries: how often an item whose failure may pass is tried again.
    identity: the name of the program and a hash of its code, for the checkpoint.
    """

    def __init__(
        self,
        prepare: Prepare,
        items: Iterable[BatchItem],
        options: Mapping[str, Any],
        *,
        concurrency: Concurrency,
        progress: bool,
        stop_at_error: bool,
        ordered: bool = True,
        lazy: bool = False,
        retries: int = 0,
        checkpoint: Checkpoint | None = None,
        identity: tuple[str, str] = ("", ""),
    ) -> None:
        if not isinstance(progress, bool):
            raise InvalidArgument(f"progress={progress!r}: must be True or False")
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise InvalidArgument(f"retries={retries!r}: must be an integer of at least 0")
        count = _threads(concurrency, options.get("backend"))
        self._total = len(items) if isinstance(items, Sized) else None
        self._threads = count if self._total is None else max(1, min(count, self._total))
        self._prepare = prepare
        self._items: Iterator[tuple[int, BatchItem]] = enumerate(items)
        if isinstance(items, Sequence) and not (lazy and ordered) and self._threads > 1:
            self._items = depth_first(items)
        if checkpoint is not None:
            _refuse_records(options)
        self._options = options = options_of_batch(options)
        self._seed = checked_seed(options.get("seed"))
        self._drawn: int | None = None  # that of the checkpoint, where the caller gives none
        self._stop_at_error = stop_at_error
        self._ordered = ordered
        self._retries = retries
        self._ahead = 2 * self._threads if lazy else None
        self._checkpoint = checkpoint
        if checkpoint is not None:
            self._open(checkpoint, *identity)
        self._progress = BatchProgress(self._total) if progress else None
        # What follows changes under the condition only.
        self._changed = threading.Condition()
        self._wake: Callable[[], object] | None = None  # of a reader in an event loop
        self._results: dict[int, Result] = {}
        self._running: dict[int, Callable[[], object]] = {}
        self._cut_short: dict[int, Cancelled] = {}  # what items were stopped by
        self._begun = self._given = 0
        self._exhausted = False
        self._stopped: BaseException | None = None

    def _open(self, checkpoint: Checkpoint, program: str, code: str) -> None:
        self._drawn = checkpoint.open(
            program=program,
            code=code,
            backend=self._options.get("backend") or default_backend(),
            seed=self._seed,
            new_seed=secrets.randbits(63),
        )

    # Reading

    def __iter__(self) -> Generator[tuple[int, Result], None, None]:
        threads = self._new_threads()
        with self._visible():
            try:
                for thread in threads:
                    thread.start()
                while (taken := self._wait_and_take()) is not None:
                    yield taken
            except BaseException as error:  # Ctrl-C, or the reader has had enough
                self._stop(error)
                _join(threads, _patience(error))
                self._hand_on(error)
                raise
            _join(threads)
        if self._stopped is not None:
            raise self._stopped

    async def __aiter__(self) -> AsyncGenerator[tuple[int, Result], None]:
        threads = self._new_threads()
        more, self._wake = async_waker()
        with self._visible():
            try:
                for thread in threads:
                    thread.start()
                while True:
                    more.clear()
                    with self._changed:
                        ready = self._has_next()
                        taken = self._take() if ready else None
                    if taken is not None:
                        yield taken
                    elif ready:
                        break
                    else:
                        await more.wait()
            except BaseException as error:
                self._stop(error)
                if not isinstance(error, GeneratorExit):  # whose bodies need this loop to end
                    await in_own_thread(lambda: _join(threads, SETTLE_S), "stemma-batch-end")
                self._hand_on(error)
                raise
            await in_own_thread(lambda: _join(threads), "stemma-batch-end")
        if self._stopped is not None:
            raise self._stopped

    @contextmanager
    def _visible(self) -> Iterator[None]:
        """Shown while it goes; at the end the file of the checkpoint is closed."""
        try:
            if self._progress is None:
                yield
            else:
                with self._progress:
                    yield
        finally:
            if isinstance(record := self._options.get("record"), Recording):
                record.let_go()
            if self._checkpoint is not None:
                self._checkpoint.close()

    def _wait_and_take(self) -> tuple[int, Result] | None:
        with self._changed:
            self._changed.wait_for(self._has_next)
            return self._take()

    def _take(self) -> tuple[int, Result] | None:
        """The next result; None at the end, or where an error ends all."""
        index = self._given if self._ordered else next(iter(self._results), self._given)
        result = self._results.pop(index, None)
        if result is None or (isinstance(result, BaseException) and self._stop_at_error):
            return None
        self._given += 1
        self._tell()
        return index, result

    def _has_next(self) -> bool:
        there = self._given in self._results if self._ordered else bool(self._results)
        all_given = self._exhausted and self._given == self._begun
        return there or self._stopped is not None or all_given

    def _tell(self) -> None:
        self._changed.notify_all()
        if self._wake is not None:
            self._wake()

    # Working

    def _new_threads(self) -> list[threading.Thread]:
        return [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._work,),
                name=f"stemma-batch-{i}",
                daemon=True,
            )
            for i in range(self._threads)
        ]

    def _work(self) -> None:
        """A thread's life."""
        while (begun := self._begin()) is not None:
            index, item = begun
            resumed = False
            try:
                result, resumed = self._result_of(index, item)
            except BaseException as error:
                note_item(error, index, item)
                result = error
                if self._stop_at_error:
                    self._stop(error)
            with self._changed:
                self._results[index] = result
                stopped = self._stopped is not None and isinstance(result, Cancelled)
                if stopped:
                    self._cut_short[index] = result
                if self._progress is not None:
                    self._progress.advance(result, resumed=resumed, stopped=stopped)
                self._tell()

    def _begin(self) -> tuple[int, BatchItem] | None:
        with self._changed:
            self._changed.wait_for(self._may_begin)
            if self._stopped is not None or self._exhausted:
                return None
            try:
                index, item = next(self._items)
            except StopIteration:
                self._exhausted = True
                self._tell()
                return None
            except BaseException as error:  # of the program's own iterator: there are no more items
                self._stop(error)
                return None
            self._begun += 1
            return index, item

    def _may_begin(self) -> bool:
        over = self._stopped is not None or self._exhausted
        return over or self._ahead is None or self._begun < self._given + self._ahead

    def _result_of(self, index: int, item: BatchItem) -> tuple[Result, bool]:
        """What an item comes to, and whether it had come to it before this batch."""
        if not isinstance(item, Mapping | tuple | list):
            raise InvalidArgument(
                f"run_batch: item {index} must be a dict, a tuple or a list, not {item!r}"
            )
        own: Mapping[str, Any] = item if isinstance(item, Mapping) else {}
        if any(not isinstance(name, str) for name in own):
            raise InvalidArgument(
                f"run_batch: item {index} has keys that are no names: {list(own)!r}; a dict is of "
                "arguments by name, a tuple or a list of positional ones"
            )
        args = () if isinstance(item, Mapping) else tuple(item)
        given = {**self._options, **own}
        kwargs = {**given, **self._own_seed(index, own)}
        if self._checkpoint is None:
            return self._run_item(index, args, kwargs), False
        general = {"seed", "backend"} - own.keys()
        asked = {name: value for name, value in given.items() if name not in general}
        key = item_key(index, args, asked)
        if self._checkpoint.find(index, key):
            return self._checkpoint.result(index, key, self._prepare(args, kwargs).state), True
        state = self._run_item(index, args, kwargs)
        self._checkpoint.add(index, key, state)
        return state, False

    def _own_seed(self, index: int, own: Mapping[str, Any]) -> dict[str, int]:
        """The item's seed, as an option; nothing where the item says its own, or nobody says one.

        A seed that only the checkpoint knows stands behind one in `sampling`.
        """
        seed = self._seed
        if seed is None and not any(_has_seed(each) for each in (self._options, own)):
            seed = self._drawn
        return {} if seed is None or "seed" in own else {"seed": derive_seed(seed, index)}

    def _run_item(
        self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ProgramState:
        for tries in itertools.count(1):
            prepared = self._prepare(args, kwargs)
            if self._checkpoint is not None:
                prepared.state._run.check_shape = self._checkpoint.check_shape
            try:
                self._execute(index, prepared)
                return prepared.state
            except Exception as error:
                again = tries <= self._retries and may_pass(error) and self._pause(tries)
                if not again:
                    if tries > 1:
                        error.add_note(f"run_batch: tried {tries} times")
                    raise
        raise AssertionError

    def _execute(self, index: int, prepared: Prepared) -> None:
        with self._changed:
            self._running[index] = prepared.cancel
            if self._stopped is not None:
                prepared.cancel()
        try:
            prepared.work()
        finally:
            with self._changed:
                del self._running[index]

    def _pause(self, tries: int) -> bool:
        """Wait before the next try; False where the batch has been stopped."""
        seconds = min(FIRST_PAUSE_S * 2 ** (tries - 1), LONGEST_PAUSE_S)
        with self._changed:
            return not self._changed.wait_for(lambda: self._stopped is not None, timeout=seconds)

    def _hand_on(self, error: BaseException) -> None:
        """Say on the interrupt that ended all how far each item was."""
        with self._changed:
            hand_on_all(sorted(self._cut_short.items()), error)

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            if self._stopped is None:
                self._stopped = error
            for cancel in list(self._running.values()):
                cancel()
            self._tell()


def _threads(concurrency: Concurrency, backend: Any) -> int:
    """How many items are at work at once.

    "auto" is enough to fill the engine where an item makes one request at a time; items that fork
    make more, which wait in the engine.
    """
    if concurrency == "auto":
        return min(getattr(backend, "max_running", None) or AUTO_THREADS, AUTO_THREADS)
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidArgument(
            f"concurrency={concurrency!r} (num_threads is another name of it): must be at least 1, "
            "or 'auto'"
        )
    return concurrency


def _refuse_records(options: Mapping[str, Any]) -> None:
    """Raise InvalidArgument for a record beside a checkpoint: neither would be whole."""
    for name in ("record", "replay"):
        if options.get(name) is not None:
            raise InvalidArgument(
                f"checkpoint= and {name}=: an item that comes from a checkpoint asks no model, so "
                "it would not be in the record; leave one out"
            )


def _join(threads: list[threading.Thread], seconds: float | None = None) -> None:
    """Wait for the threads that were started, so long at most."""
    end = None if seconds is None else time.monotonic() + seconds
    for thread in threads:
        if thread.ident is not None:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))


def _patience(error: BaseException) -> float:
    """How long those that were stopped may take to end, in seconds."""
    if isinstance(error, GeneratorExit):
        return 0.0
    return INTERRUPT_S if isinstance(error, KeyboardInterrupt) else SETTLE_S


def _has_seed(options: Mapping[str, Any]) -> bool:
    sampling = options.get("sampling")
    in_sampling = isinstance(sampling, SamplingParams) and sampling.seed is not None
    return in_sampling or options.get("seed") is not None

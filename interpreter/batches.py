"""`run_batch`, `iter_batch`, `arun_batch`, `aiter_batch`: a program over many items.

The base of `Program`. How a batch goes is in `batch.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing, closing, suppress
from typing import Any, Literal, NamedTuple, overload

from stemma.interpreter.batch import Batch, Concurrency, Prepared
from stemma.interpreter.batch_order import BatchItem
from stemma.interpreter.checkpoint import Checkpoint, code_key
from stemma.interpreter.state import ProgramState
from stemma.interpreter.tracing import tracing_backend
from stemma.lang.errors import Cancelled, InvalidArgument

CheckpointPath = str | os.PathLike[str] | Checkpoint | None


class _Giving(NamedTuple):
    """In which order, how far ahead of the reader, and where async bodies run; see `Batch`."""

    ordered: bool = True
    lazy: bool = False
    loop: asyncio.AbstractEventLoop | None = None


class LoopTask:
    """A coroutine that runs in an event loop while a thread waits for it.

    body: makes it. on_cancel: called as well when it is cancelled. Run by a thread, cancelled by
    any.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        body: Callable[[], Coroutine[Any, Any, None]],
        on_cancel: Callable[[], None],
    ) -> None:
        self._loop, self._body, self._on_cancel = loop, body, on_cancel
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def run(self) -> None:
        """Wait for its end; raises what it raises, Cancelled where it was cancelled."""
        try:
            asyncio.run_coroutine_threadsafe(self._noted(), self._loop).result()
        except concurrent.futures.CancelledError as error:
            raise Cancelled("the run was cancelled") from error

    def cancel(self) -> None:
        self._on_cancel()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel)

    async def _noted(self) -> None:
        self._task = asyncio.current_task()
        if self._cancelled:
            raise asyncio.CancelledError
        await self._body()

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()


class Batches(ABC):
    """What a program can do with many items."""

    name: str
    body: Callable[..., Any]
    _bound: dict[str, Any]

    @abstractmethod
    def _prepare(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Prepared:
        """One item of a batch, ready to run; loop: where an async body is to run."""

    @overload
    def run_batch(
        self,
        items: Iterable[BatchItem],
        *,
        concurrency: Concurrency = "auto",
        progress: bool = False,
        return_exceptions: Literal[False] = False,
        retries: int = 0,
        checkpoint: CheckpointPath = None,
        num_threads: Concurrency | None = None,
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        **options: Any,
    ) -> list[ProgramState]: ...
    @overload
    def run_batch(
        self,
        items: Iterable[BatchItem],
        *,
        concurrency: Concurrency = "auto",
        progress: bool = False,
        return_exceptions: bool,
        retries: int = 0,
        checkpoint: CheckpointPath = None,
        num_threads: Concurrency | None = None,
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        **options: Any,
    ) -> list[ProgramState | BaseException]: ...
    @overload
    def run_batch(
        self,
        items: Iterable[BatchItem],
        *,
        concurrency: Concurrency = "auto",
        progress: bool = False,
        return_exceptions: Literal[False] = False,
        retries: int = 0,
        checkpoint: CheckpointPath = None,
        num_threads: Concurrency | None = None,
        progress_bar: bool = False,
        generator_style: Literal[True],
        **options: Any,
    ) -> Iterator[ProgramState]: ...
    @overload
    def run_batch(
        self,
        items: Iterable[BatchItem],
        *,
        concurrency: Concurrency = "auto",
        progress: bool = False,
        return_exceptions: bool,
        retries: int = 0,
        checkpoint: CheckpointPath = None,
        num_threads: Concurrency | None = None,
        progress_bar: bool = False,
        generator_style: Literal[True],
        **options: Any,
    ) -> Iterator[ProgramState | BaseException]: ...
    def run_batch(
        self,
        items: Iterable[BatchItem],
        *,
        concurrency: Concurrency = "auto",
        progress: bool = False,
        return_exceptions: bool = False,
        retries: int = 0,
        checkpoint: CheckpointPath = None,
        num_threads: Concurrency | None = None,
        progress_bar: bool = False,
        generator_style: bool = False,
        **options: Any,
    ) -> Any:
        """Run once per item, many at a time; the states, in the items' order.

        items: dicts of arguments, or tuples or lists of positional ones.
        concurrency: the most items at work at once; "auto": as many as the backend runs requests,
            at most 256. `num_threads` is SGLang's name of it.
        progress: show a bar with items and tokens per second and the share of the prompts that came
            from the cache; lines where standard error is no terminal. `progress_bar` is SGLang's
            name.
        return_exceptions: an item that fails gives its exception instead of a state; otherwise the
            first error is raised after the rest has stopped.
        retries: how often an item is tried again, with the same seed, after a failure that may
            pass: a Timeout, an OSError, or what an operation has met in the backend, refusals
            excepted.
        checkpoint: a file that keeps what each item came to. A batch that was interrupted goes on
            from there: what is in the file is not run again, its state comes from the record.
            Without `seed` the file's is taken. Raises InvalidArgument where the file belongs to
            another program, model or seed, and for results that JSON cannot hold.
        generator_style: an iterator instead of a list. It gives each state as soon as those before
            it are given, takes items only a little ahead of its reader, and stops the rest when it
            is closed.
        options: those of `run`, for every item. `timeout` is each item's own; from `seed`, every
            item derives a seed of its own.
        """
        batch = self._batch(
            _Giving(lazy=generator_style),
            items if generator_style else _listed(items),
            concurrency=_concurrency(concurrency, num_threads),
            progress=progress or progress_bar,
            return_exceptions=return_exceptions,
            retries=retries,
            checkpoint=checkpoint,
            **options,
        )
        results = _results(batch)
        return results if generator_style else list(results)

    @overload
    def iter_batch(
        self,
        items: Iterable[BatchItem],
        *,
        return_exceptions: Literal[False] = False,
        concurrency: Concurrency = "auto",
        progress: bool = False,
        retries: int = 0,
        checkpoint: CheckpointPath = None,
        **options: Any,
    ) -> Iterator[tuple[int, ProgramState]]: ...
    @overload
    def iter_batch(
        self,
        items: Iterable[BatchItem],
        *,
        return_exceptions: bool,
        concurrency: Concurrency = "auto",
        progress: bool = False,
        retries: int = 0,
        checkpoint: CheckpointPath = None,
        **options: Any,
    ) -> Iterator[tuple[int, ProgramState | BaseException]]: ...
    def iter_batch(self, items: Iterable[BatchItem], **how: Any) -> Iterator[tuple[int, Any]]:
        """`run_batch` as an iterator that gives (index of the item, its state) as items finish.

        Takes items, of which there may be no end, only a little ahead of its reader: two for each
        that may be at work. Closing it stops the rest.

        >>> for index, state in program.iter_batch(items):  # doctest: +SKIP
        ...     print(items[index], state["answer"])
        """
        return iter(self._batch(_Giving(ordered=False, lazy=True), items, **how))

    @overload
    async def arun_batch(
        self,
        items: Iterable[BatchItem],
        *,
        return_exceptions: Literal[False] = False,
        concurrency: Concurrency = "auto",
        progress: bool = False,
        retries: int = 0,
        checkpoint: CheckpointPath = None,
        **options: Any,
    ) -> list[ProgramState]: ...
    @overload
    async def arun_batch(
        self,
        items: Iterable[BatchItem],
        *,
        return_exceptions: bool,
        concurrency: Concurrency = "auto",
        progress: bool = False,
        retries: int = 0,
        checkpoint: CheckpointPath = None,
        **options: Any,
    ) -> list[ProgramState | BaseException]: ...
    async def arun_batch(self, items: Iterable[BatchItem], **how: Any) -> list[Any]:
        """`run_batch` for async code: the bodies of an async program run in this event loop, those
        of a plain one in threads. Cancelling the task cancels all of them.
        """
        batch = self._batch(_Giving(loop=asyncio.get_running_loop()), _listed(items), **how)
        async with aclosing(aiter(batch)) as results:
            return [result async for _, result in results]

    @overload
    def aiter_batch(
        self,
        items: Iterable[BatchItem],
        *,
        return_exceptions: Literal[False] = False,
        concurrency: Concurrency = "auto",
        progress: bool = False,
        retries: int = 0,
        checkpoint: CheckpointPath = None,
        **options: Any,
    ) -> AsyncIterator[tuple[int, ProgramState]]: ...
    @overload
    def aiter_batch(
        self,
        items: Iterable[BatchItem],
        *,
        return_exceptions: bool,
        concurrency: Concurrency = "auto",
        progress: bool = False,
        retries: int = 0,
        checkpoint: CheckpointPath = None,
        **options: Any,
    ) -> AsyncIterator[tuple[int, ProgramState | BaseException]]: ...
    def aiter_batch(self, items: Iterable[BatchItem], **how: Any) -> AsyncIterator[tuple[int, Any]]:
        """`iter_batch` for `async for`, in a running event loop; see `arun_batch`."""
        how_given = _Giving(ordered=False, lazy=True, loop=asyncio.get_running_loop())
        return aiter(self._batch(how_given, items, **how))

    def _batch(
        self,
        how: _Giving,
        items: Iterable[BatchItem],
        /,
        *,
        concurrency: Concurrency = "auto",
        progress: bool = False,
        return_exceptions: bool = False,
        retries: int = 0,
        checkpoint: CheckpointPath = None,
        **options: Any,
    ) -> Batch:
        _check_items(items)
        if not isinstance(return_exceptions, bool):
            raise InvalidArgument(f"return_exceptions={return_exceptions!r}: must be True or False")
        if checkpoint == "":
            raise InvalidArgument("checkpoint='': must be the path of a file, or None")
        if isinstance(checkpoint, str | os.PathLike):
            checkpoint = Checkpoint(checkpoint)
        if not isinstance(checkpoint, Checkpoint | None):
            raise InvalidArgument(f"checkpoint={checkpoint!r}: must be the path of a file, or None")
        if tracing_backend() is not None:  # what a trace comes to is no result
            checkpoint = None
        return Batch(
            lambda args, kwargs: self._prepare(args, kwargs, how.loop),
            items,
            {**self._bound, **options},
            concurrency=concurrency,
            progress=progress,
            stop_at_error=not return_exceptions,
            ordered=how.ordered,
            lazy=how.lazy,
            retries=retries,
            checkpoint=checkpoint,
            identity=(self.name, code_key(self.body) if checkpoint is not None else ""),
        )


def _concurrency(concurrency: Concurrency, num_threads: Concurrency | None) -> Concurrency:
    if num_threads is None:
        return concurrency
    if concurrency != "auto":
        raise InvalidArgument(
            f"concurrency={concurrency!r} and num_threads={num_threads!r} are two names of one: "
            "give one"
        )
    return num_threads


def _check_items(items: object) -> None:
    if not isinstance(items, Iterable):
        raise InvalidArgument(
            f"run_batch: items={items!r}: must be a list, or any iterable, of dicts, tuples or "
            "lists, each the arguments of one item"
        )


def _listed(items: Iterable[BatchItem]) -> list[BatchItem]:
    _check_items(items)
    return list(items)


def _results(batch: Batch) -> Iterator[Any]:
    with closing(iter(batch)) as pairs:
        for _, result in pairs:
            yield result

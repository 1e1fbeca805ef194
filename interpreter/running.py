"""How a run goes: a state is opened, the body runs on it, all branches end, and what must be raised
is raised.

Used by `program.py`, which has the ways to ask for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from stemma.backend.base import Namespace
from stemma.interpreter.conversation import begin_with
from stemma.interpreter.executor import Executor
from stemma.interpreter.feed import Feed
from stemma.interpreter.options import Call
from stemma.interpreter.recorded import backend_and_seed
from stemma.interpreter.run import Run, in_event_loop
from stemma.interpreter.state import ProgramState
from stemma.interpreter.stream import Stream
from stemma.interpreter.tasks import hand_on
from stemma.interpreter.tracing import TracingExecutor, tracing_backend
from stemma.lang.errors import Cancelled, StemmaError, Timeout

if TYPE_CHECKING:
    from stemma.interpreter.program import Program

T = TypeVar("T")


def open_state(program: Program, call: Call, *, feed: Feed | None = None) -> ProgramState:
    """A state to run the body on; inside of a trace one that asks no model."""
    options, tracing = call.options, tracing_backend()
    sampling, seed = options.sampling, options.seed
    if sampling is not None and sampling.seed is not None:
        seed = sampling.seed if seed is None else seed
        sampling = sampling.but(seed=None)
    backend, seed = backend_and_seed(options, program.name, seed)
    run = Run(
        backend,
        program.name,
        seed=seed,
        sampling=sampling,
        asynchronous=program.is_async,
        feed=feed,
    )
    namespace = Namespace(adapter=options.adapter, salt=options.salt)
    try:
        branch = backend.open(namespace, cache=options.cache, priority=options.priority)
    except BaseException:
        run.end_record()
        raise
    kind = Executor if tracing is None else TracingExecutor
    return ProgramState(run, kind(run, program.name, run.seed, branch=branch, main=True))


def execute(program: Program, state: ProgramState, call: Call) -> None:
    """Run to the end of all branches, in this thread."""
    if program.is_async:
        try:
            asyncio.run(execute_async(program, state, call))
        except KeyboardInterrupt as error:  # raised by the event loop, of the task it has cancelled
            if state._run.stopped is not None:
                hand_on(state._run.stopped, error)
            error.state = state  # type: ignore[attr-defined]
            raise
        return
    run = state._run
    try:
        run.value = _begin(program, state, call)
        run.wait(run.until_idle())
    except BaseException as error:
        run.cancel(_cut_short(program.name, error))
        run.until_idle().wait()
        _raise_end(state, error)
    _raise_end(state, run.unread_failure())


async def execute_async(program: Program, state: ProgramState, call: Call) -> None:
    """Run an async program to the end of all branches, in this event loop."""
    run = state._run
    interruption = _Interruption(run)
    try:
        run.value = await _begin(program, state, call)
        await run.until_idle().wait_async()
    except BaseException as error:
        # Of a streamed run the loop may end, which is no error of the program's.
        ours = interruption.end(error) or (run.background and _is_cancelling(error))
        run.cancel(_cut_short(program.name, error))
        await run.until_idle().wait_async()
        _raise_end(state, run.stopped if ours else error)
    interruption.end()
    _raise_end(state, run.unread_failure())


class _Interruption:
    """Cancels this task when its run is stopped: the body may wait for something that is not the
    run's, for a sleep perhaps.
    """

    def __init__(self, run: Run) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] | None = task  # only while the body runs
        self._before = task.cancelling()
        self._cancelled = False
        loop = asyncio.get_running_loop()

        def stop() -> None:  # from the dispatcher's thread
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._cancel)

        run.stopping.on_done(stop)

    def _cancel(self) -> None:
        if self._task is not None and not self._cancelled:
            self._cancelled = True
            self._task.cancel()

    def end(self, error: BaseException | None = None) -> bool:
        """The body has ended; True if it was by this."""
        task, self._task = self._task, None
        alone = task is not None and self._cancelled and task.uncancel() <= self._before
        return alone and _is_cancelling(error)


def _is_cancelling(error: BaseException | None) -> bool:
    return isinstance(error, asyncio.CancelledError)


def execute_in_background(program: Program, call: Call) -> Stream:
    """Start a run in a thread of its own."""
    state, feed = _open_stream(program, call)

    def body() -> None:
        state._run.enter()
        with suppress(BaseException):  # readers of the feed and of the state raise it
            execute(program, state, call)

    stream = Stream(state._for_readers(), feed)
    _start_thread(body, f"stemma-{program.name}")
    return stream


def execute_in_loop(program: Program, call: Call) -> Stream:
    """Start a run of an async program as a task of this event loop."""
    if not in_event_loop():
        raise StemmaError(
            f"{program.name}.astream: no event loop is running here: write `async for` in an async "
            f"function, or {program.name}.stream(...)"
        )
    state, feed = _open_stream(program, call)

    async def body() -> None:
        state._run.enter()
        with suppress(Exception):  # readers of the feed and of the state raise it
            await execute_async(program, state, call)

    stream = Stream(state._for_readers(), feed)
    task = asyncio.get_running_loop().create_task(body(), name=f"stemma-{program.name}")
    _tasks.add(task)  # a loop refers to its tasks weakly
    task.add_done_callback(_tasks.discard)
    return stream


_tasks: set[asyncio.Task[None]] = set()


def _open_stream(program: Program, call: Call) -> tuple[ProgramState, Feed]:
    feed = Feed()
    state = open_state(program, call, feed=feed)
    state._run.background = True
    return state, feed


def _start_thread(target: Callable[[], object], name: str) -> None:
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(target,), name=name, daemon=True).start()


async def in_own_thread(work: Callable[[], T], name: str) -> T:
    """`work()` in a thread of its own: a pool would let only so many programs wait at once."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def target() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    _start_thread(target, name)
    return await future


async def execute_in_thread(program: Program, state: ProgramState, call: Call) -> None:
    """Run a plain program to the end of all branches, in a thread that it blocks while it reads."""
    run = state._run
    try:
        await in_own_thread(lambda: execute(program, state, call), f"stemma-{program.name}")
    except asyncio.CancelledError as error:
        run.cancel(Cancelled(f"the task that ran {program.name} was cancelled"))
        await run.until_idle().wait_async()
        if run.stopped is not None:
            hand_on(run.stopped, error)
        error.state = state  # type: ignore[attr-defined]
        raise


def refuse_in_event_loop(name: str) -> None:
    if in_event_loop():
        raise StemmaError(f"{name} is an async program: in an event loop, `await {name}.arun(...)`")


def _begin(program: Program, state: ProgramState, call: Call) -> Any:
    """The body, started: its value, or a coroutine of it."""
    if call.options.timeout is not None:
        state._run.limit_time(call.options.timeout)
    begin_with(state, call.messages)
    return program.begin(state, *call.args, **call.kwargs)


def _raise_end(state: ProgramState, error: BaseException | None) -> None:
    """End the run, by `error` unless None; its Timeout goes before what that has caused."""
    run = state._run
    failure = run.stopped if error is not None and isinstance(run.stopped, Timeout) else error
    run.finish(failure)
    if failure is None:
        return
    if isinstance(failure, Timeout) and failure.site is None:
        failure.add_note(f"no operation was under way: the time went by in the body of {run.name}")
    if run.stopped is not None and isinstance(failure, KeyboardInterrupt | asyncio.CancelledError):
        hand_on(run.stopped, failure)
    with suppress(AttributeError):  # an exception of somebody else's, with slots
        failure.state = state  # type: ignore[attr-defined]
    try:
        if error is failure:
            raise failure
        raise failure from error
    finally:
        del error, failure  # this frame is in their tracebacks: they would hold themselves


def _cut_short(name: str, error: BaseException) -> BaseException:
    """What other branches are told when a body ended by `error`."""
    why = f"{type(error).__name__}: {error}".removesuffix(": ")
    return Cancelled(f"the run of {name} was cut short by {why}")

"""`@function` and `Program`: a Python function as a program, and the ways to run it.

Makes the `Run` and the first `ProgramState`, runs the body, waits for all branches, and raises what
must be raised.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeVar, cast, overload

from stemma.backend.base import Namespace
from stemma.interpreter.batch import Batch, BatchItem
from stemma.interpreter.default import default_backend
from stemma.interpreter.events import Event, Feed
from stemma.interpreter.executor import Executor
from stemma.interpreter.options import Call, refuse_reserved, take_apart
from stemma.interpreter.run import Run, in_event_loop, timed_out
from stemma.interpreter.state import ProgramState
from stemma.interpreter.stream import Stream
from stemma.interpreter.transcript import Message
from stemma.lang.errors import Cancelled, InvalidArgument, StemmaError, Timeout
from stemma.lang.ops import Chain
from stemma.lang.primitives import assistant, system, user

T = TypeVar("T")


@overload
def function(body: Callable[..., Any]) -> Program: ...
@overload
def function() -> Callable[[Callable[..., Any]], Program]: ...
def function(
    body: Callable[..., Any] | None = None,
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Make a program of a function whose first parameter is the state, whatever its name.

    Methods and `async def` functions work, too. Raises InvalidArgument where a parameter has a run
    option's name.

    >>> @st.function  # doctest: +SKIP
    ... def capital(s, country):
    ...     s += f"The capital of {country} is" + st.gen("name", max_tokens=8, stop=".")
    >>> capital.run(country="France")["name"]  # doctest: +SKIP
    ' Paris'
    """
    return function if body is None else Program(body)


class Program:
    """A function that can be run on a backend. Made by `@function`."""

    def __init__(self, body: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        if not callable(body):
            raise InvalidArgument(f"@function needs a function, not {type(body).__name__}")
        self.body = body
        self.name: str = getattr(body, "__name__", type(body).__name__)
        self.is_async = inspect.iscoroutinefunction(body)
        self._bound = dict(bound or {})
        self._signature = inspect.signature(body)
        parameters = list(self._signature.parameters.values())
        if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
            raise InvalidArgument(f"program {self.name}: needs a first parameter for the state")
        refuse_reserved(self.name, [p.name for p in parameters])
        functools.update_wrapper(self, body)

    def __repr__(self) -> str:
        return f"<Program {self.name}>"

    def __get__(self, instance: object, owner: type | None = None) -> Program:
        """A program in a class is a method: `obj.answer.run(...)`."""
        if instance is None:
            return self
        return Program(functools.partial(self.body, instance), self._bound)._named(self)

    def _named(self, original: Program) -> Program:
        self.name = original.name
        self.is_async = original.is_async
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`other(s, ...)` runs the body on the state `s`; without a state it is `run(...)`."""
        if args and isinstance(args[0], ProgramState):
            return self.body(*args, **{**self._bound, **kwargs})
        return self.run(*args, **kwargs)

    @property
    def bound(self) -> Mapping[str, Any]:
        """The arguments that `bind` has fixed."""
        return self._bound

    def bind(self, **arguments: Any) -> Program:
        """The same program with some arguments fixed."""
        bound = {**self._bound, **arguments}
        unknown = [name for name in arguments if name not in self._signature.parameters]
        if unknown:
            raise TypeError(f"{self.name}.bind: unknown argument {', '.join(map(repr, unknown))}")
        return Program(self.body, bound)._named(self)

    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run to the end, all branches included, and return the state.

        Takes the program's arguments, the options of `RunOptions`, `messages=[...]` to start from a
        conversation, and sampling keywords (`temperature=0`, `max_tokens=64`, ...) as defaults for
        all generations.

        Raises the body's error; the error of a failed operation on the program's own branch; that
        of another branch, if the program did not meet it by a read or a join; Timeout.
        `error.state` is the state.
        """
        call = self._take_apart(args, kwargs)
        if call.options.stream:
            return self._stream(call).state
        if self.is_async:
            _refuse_in_event_loop(self.name)
        state = self._open(call)
        self._execute(state, call)
        return state

    async def arun(self, *args: Any, **kwargs: Any) -> ProgramState:
        """`run` for async code. The body of a plain `def` program runs in a thread of its own.

        Cancelling the task cancels the run.
        """
        call = self._take_apart(args, kwargs)
        if call.options.stream:
            raise InvalidArgument("arun(stream=True): use `async for event in program.stream(...)`")
        state = self._open(call)
        if self.is_async:
            await self._execute_async(state, call)
            return state
        try:
            await _in_own_thread(lambda: self._execute(state, call), f"stemma-{self.name}")
        except asyncio.CancelledError:
            state._run.cancel(Cancelled(f"the task that ran {self.name} was cancelled"))
            await state._run.at_rest().wait_async()
            raise
        return state

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """Run in the background and return the events of all branches, for `for` and `async for`.

        >>> for event in tips.stream(topic="sleep"):  # doctest: +SKIP
        ...     if isinstance(event, st.TextAdded):
        ...         print(event.text, end="", flush=True)
        """
        return self._stream(self._take_apart(args, kwargs))

    @overload
    def run_batch(
        self,
        items: Iterable[BatchItem],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool = False,
        return_exceptions: Literal[False] = False,
        **options: Any,
    ) -> list[ProgramState]: ...
    @overload
    def run_batch(
        self,
        items: Iterable[BatchItem],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool = False,
        return_exceptions: Literal[True],
        **options: Any,
    ) -> list[ProgramState | BaseException]: ...
    def run_batch(
        self,
        items: Iterable[BatchItem],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool = False,
        return_exceptions: bool = False,
        **options: Any,
    ) -> list[ProgramState] | list[ProgramState | BaseException]:
        """Run once per item, many at a time; the states, in the items' order.

        items: dicts of arguments, or tuples of positional ones.
        num_threads: the most items at work at once.
        progress: show a bar.
        return_exceptions: an item that fails gives its exception instead of a state; otherwise the
            first error is raised after the rest has stopped.
        options: those of `run`, for every item. `timeout` is each item's own; from `seed`, every
            item derives a seed of its own.
        """
        batch = Batch(self._prepare, list(items), options)
        results = batch.run(num_threads, progress=progress, stop_at_error=not return_exceptions)
        return cast("list[ProgramState]", results)

    # How a run goes

    def _take_apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        return take_apart(self._signature, self.name, args, {**self._bound, **kwargs})

    def _open(self, call: Call, *, feed: Feed[Event] | None = None) -> ProgramState:
        """A state to run the body on."""
        options = call.options
        sampling, seed = options.sampling, options.seed
        if sampling is not None and sampling.seed is not None:
            seed = sampling.seed if seed is None else seed
            sampling = sampling.but(seed=None)
        run = Run(
            options.backend if options.backend is not None else default_backend(),
            self.name,
            seed=secrets.randbits(63) if seed is None else seed,
            sampling=sampling,
            asynchronous=self.is_async,
            feed=feed,
        )
        branch = run.backend.open(Namespace(salt=options.salt))
        return ProgramState(run, Executor(run, self.name, run.seed, branch=branch, main=True))

    def _begin(self, state: ProgramState, call: Call) -> Any:
        """The body, started: its value, or a coroutine of it."""
        if call.options.timeout is not None:
            state._run.limit_time(call.options.timeout)
        for message in call.messages:
            state.append(message_of(message))
        return self.body(state, *call.args, **call.kwargs)

    def _execute(self, state: ProgramState, call: Call) -> None:
        """Run to the end of all branches, in this thread."""
        if self.is_async:
            asyncio.run(self._execute_async(state, call))
            return
        run = state._run
        try:
            run.value = self._begin(state, call)
            run.wait(run.at_rest())
        except BaseException as error:
            run.cancel(_cut_short(self.name, error))
            run.at_rest().wait()
            raise_end(state, error)
        raise_end(state, run.unread_failure())

    async def _execute_async(self, state: ProgramState, call: Call) -> None:
        run = state._run
        # The run's own limit fails its variables; this one also ends other waiting: sleep().
        limit = asyncio.timeout(call.options.timeout)
        try:
            async with limit:
                run.value = await self._begin(state, call)
                await run.at_rest().wait_async()
        except BaseException as error:
            if limit.expired() and call.options.timeout is not None:
                run.cancel(timed_out(call.options.timeout))
            run.cancel(_cut_short(self.name, error))
            await run.at_rest().wait_async()
            raise_end(state, error)
        raise_end(state, run.unread_failure())

    def _stream(self, call: Call) -> Stream:
        feed: Feed[Event] = Feed()
        state = self._open(call, feed=feed)
        started = threading.Event()

        def body() -> None:
            state._run.background = threading.get_ident()
            started.set()
            with suppress(BaseException):  # readers of the feed and of the state raise it
                self._execute(state, call)

        threading.Thread(target=body, name=f"stemma-{self.name}", daemon=True).start()
        started.wait()
        return Stream(state, feed)

    def _prepare(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Run, Callable[[], ProgramState]]:
        """One item of a batch: its run, and a function that runs it to the end."""
        call = self._take_apart(args, kwargs)
        if call.options.stream:
            raise InvalidArgument("run_batch(stream=True): a batch returns finished states")
        state = self._open(call)

        def execute() -> ProgramState:
            self._execute(state, call)
            return state

        return state._run, execute


def raise_end(state: ProgramState, error: BaseException | None) -> None:
    """End the run, by `error` unless None; its Timeout goes before what that has caused."""
    run = state._run
    failure = run.stopped if error is not None and isinstance(run.stopped, Timeout) else error
    run.finish(failure)
    if failure is None:
        return
    if isinstance(failure, StemmaError) or run.has_failed_by(failure):
        with suppress(AttributeError):  # an exception of somebody else's, with slots
            failure.state = state  # type: ignore[attr-defined]
    if error is failure:
        raise failure
    raise failure from error


def message_of(message: Message) -> Chain:
    """One message of `run(messages=[...])` as an expression."""
    wrappers = {"system": system, "user": user, "assistant": assistant}
    role = message.get("role")
    if role not in wrappers or not isinstance(message.get("content"), str):
        raise InvalidArgument(
            f"messages: {message!r} must have a role ({', '.join(wrappers)}) and a text content"
        )
    return wrappers[role](message["content"])


def _cut_short(name: str, error: BaseException) -> BaseException:
    """What other branches are told when a body ended by `error`."""
    return Cancelled(f"the run of {name} was cut short by {type(error).__name__}: {error}")


async def _in_own_thread(work: Callable[[], T], name: str) -> T:
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

    threading.Thread(target=target, name=name, daemon=True).start()
    return await future


def _refuse_in_event_loop(name: str) -> None:
    if in_event_loop():
        raise StemmaError(f"{name} is an async program: in an event loop, `await {name}.arun(...)`")

"""`@function` and `Program`: a Python function as a program, and the ways to run it.

What the calls take is told apart in `options.py`; how a run goes is in `running.py`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
)
from typing import Any, NoReturn, overload

from stemma.interpreter.batch import Prepared
from stemma.interpreter.batches import Batches, LoopTask
from stemma.interpreter.options import Call, refuse_reserved, take_apart
from stemma.interpreter.running import (
    execute,
    execute_async,
    execute_in_background,
    execute_in_loop,
    execute_in_thread,
    open_state,
    refuse_in_event_loop,
)
from stemma.interpreter.state import ProgramState
from stemma.interpreter.stream import Stream
from stemma.interpreter.trace import Trace, trace_program
from stemma.lang.errors import InvalidArgument, StemmaError, UnsupportedByBackend


@overload
def function(body: Callable[..., Any], *, num_api_spec_tokens: int | None = None) -> Program: ...
@overload
def function(
    *, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], Program]: ...
def function(
    body: Callable[..., Any] | None = None, *, num_api_spec_tokens: int | None = None
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Make a program of a function whose first parameter is the state, whatever its name.

    Methods and `async def` functions work, too. Raises InvalidArgument where a parameter has a run
    option's name, and for a body with `yield`. SGLang's `num_api_spec_tokens` is refused.

    >>> @st.function  # doctest: +SKIP
    ... def capital(s, country):
    ...     s += f"The capital of {country} is" + st.gen("name", max_tokens=8, stop=".")
    >>> capital.run(country="France")["name"]  # doctest: +SKIP
    ' Paris'
    """
    if num_api_spec_tokens is not None:
        raise UnsupportedByBackend(
            "function(num_api_spec_tokens=...): speculation saves calls to remote chat models, "
            "which are no backend yet"
        )
    return function if body is None else Program(body)


class Program(Batches):
    """A function that can be run on a backend. Made by `@function`."""

    def __init__(self, body: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        if isinstance(body, type) or not callable(body):
            what = f"the class {body.__name__}" if isinstance(body, type) else repr(body)
            raise InvalidArgument(f"@function needs a function, as by `def`, not {what}")
        self.body = body
        self.name: str = getattr(body, "__name__", type(body).__name__)
        # Of an object that can be called, its class has the function.
        functions = (body, type(body).__call__)
        if any(inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f) for f in functions):
            raise InvalidArgument(
                f"program {self.name}: a body with `yield` would not run when it is called; append "
                "to the state instead, and read it while it grows by program.stream(...)"
            )
        self.is_async = any(map(inspect.iscoroutinefunction, functions))
        self._bound = dict(bound or {})
        self._owner: str | None = None  # the class that it is a method of
        try:
            self._signature = inspect.signature(body)
        except ValueError as error:  # of some functions that are not written in Python
            raise InvalidArgument(f"@function: {error}; call it in a `def` of your own") from error
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

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner.__name__

    def _named(self, original: Program) -> Program:
        self.name = original.name
        self.is_async = original.is_async
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(self, attribute, getattr(original, attribute, None))
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`other(s, ...)` runs the body on the state `s`; without a state it is `run(...)`."""
        if args and isinstance(args[0], ProgramState):
            if self.is_async and not args[0]._run.asynchronous:
                raise StemmaError(
                    f"{self.name} is an async program: a plain one cannot await it; make the "
                    f"calling program `async def` and write `await {self.name}(s, ...)`"
                )
            return self.begin(*args, **{**self._bound, **kwargs})
        return self.run(*args, **kwargs)

    def begin(self, state: ProgramState, *args: Any, **kwargs: Any) -> Any:
        """Call the body; of an async program the coroutine, which is to be awaited.

        Raises InvalidArgument where a plain body has only made something that has yet to run.
        """
        value = self.body(state, *args, **kwargs)
        if self.is_async or not isinstance(value, Awaitable | Generator | AsyncGenerator):
            return value
        if inspect.iscoroutine(value):
            value.close()
        raise InvalidArgument(
            f"program {self.name} returned a {type(value).__name__}, of which nothing has run: a "
            "program that awaits is written as `async def` itself, and a generator is returned as "
            "a list"
        )

    def cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        """SGLang's way to have a prefix cached beforehand. Not there: nothing need be done."""
        raise UnsupportedByBackend(
            f"{self.name}.cache: the engine shares the prefixes of runs by itself; to keep one "
            "while nobody uses it, backend.pin(text, ttl=seconds)"
        )

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

        messages: dicts of "role" and "content"; contents go in verbatim, between what the model's
        chat format writes around their roles. Raises InvalidArgument that names the index of what
        is no message.

        Raises the body's error; the error of a failed operation on the program's own branch; that
        of another branch, if the program did not meet it by a read or a join; Timeout.
        `error.state` is the state.
        """
        call = self._take_apart(args, kwargs)
        if call.options.stream:
            return execute_in_background(self, call).state
        if self.is_async:
            refuse_in_event_loop(self.name)
        state = open_state(self, call)
        execute(self, state, call)
        return state

    async def arun(self, *args: Any, **kwargs: Any) -> ProgramState:
        """`run` for async code. The body of a plain `def` program runs in a thread of its own.

        Cancelling the task cancels the run.
        """
        call = self._take_apart(args, kwargs)
        if call.options.stream:
            raise InvalidArgument("arun(stream=True): `async for event in program.astream(...)`")
        state = open_state(self, call)
        if self.is_async:
            await execute_async(self, state, call)
        else:
            await execute_in_thread(self, state, call)
        return state

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """Run in the background and return the events of all branches, for `for` and `async for`.

        >>> for event in tips.stream(topic="sleep"):  # doctest: +SKIP
        ...     if isinstance(event, st.TextAdded):
        ...         print(event.text, end="", flush=True)
        """
        return execute_in_background(self, self._take_apart(args, kwargs))

    def astream(self, *args: Any, **kwargs: Any) -> Stream:
        """`stream` for async code: an async program runs as a task of this event loop, and may use
        what belongs to the loop; a plain one runs in a thread of its own.

        >>> async with tips.astream(topic="sleep") as stream:  # doctest: +SKIP
        ...     async for event in stream:
        ...         print(event)
        """
        call = self._take_apart(args, kwargs)
        return (execute_in_loop if self.is_async else execute_in_background)(self, call)

    def trace(self, *args: Any, **kwargs: Any) -> Trace:
        """An outline of the program, without a model: a tree of its operations, which prints.

        The body runs, and what it does besides appending (printing, writing files) is done. Reading
        a variable gives its name in braces, `"{tip}"`, or with `n` a list of them; a `select`
        chooses its first choice; an argument that is not given is its name in braces, too. So the
        outline is that of one way through the program: a condition on what a model writes goes the
        way that the placeholder takes. A body that needs more than some text (`int(s["x"])`) ends
        the outline with its error, and a loop that waits for a certain reply is ended after 10,000
        operations; `trace.error` tells. Programs that it runs inside are not asked of a model
        either, and are no part of the outline. For other replies run it on `st.MockBackend` and
        look at `state.show(children=True)`.

        backend: whose chat format says which roles may be written; without one every role may.

        >>> print(tips.trace(topic="sleep"))  # doctest: +SKIP
        """
        return trace_program(self, self._signature, args, {**self._bound, **kwargs})

    def _take_apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        try:
            return take_apart(self._signature, self.name, args, {**self._bound, **kwargs})
        except TypeError as error:
            if self._owner is None:
                raise
            raise TypeError(
                f"{error}; {self.name} is a method, so it runs on an instance: "
                f"{self._owner}(...).{self.name}.run(...)"
            ) from None

    def _prepare(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Prepared:
        call = self._take_apart(args, kwargs)
        if call.options.stream:
            raise InvalidArgument("run_batch(stream=True): a batch returns finished states")
        state = open_state(self, call)
        if loop is not None and self.is_async:
            task = LoopTask(loop, lambda: execute_async(self, state, call), state._run.cancel)
            return Prepared(state, task.run, task.cancel)
        return Prepared(state, lambda: execute(self, state, call), state._run.cancel)

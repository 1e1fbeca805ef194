"""`program.trace(...)`: the outline of a program, as a value that prints.

Runs the body on placeholders (`tracing.py`) and makes a tree of what it has queued; `show_trace.py`
draws it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from html import escape
from typing import TYPE_CHECKING, Any

from stemma.interpreter.options import Call, RunOptions, take_apart
from stemma.interpreter.running import execute, open_state, refuse_in_event_loop
from stemma.interpreter.tasks import Fork
from stemma.interpreter.tracing import (
    TraceEnds,
    TracingBackend,
    TracingExecutor,
    placeholder,
    tracing,
)
from stemma.lang.errors import InvalidArgument
from stemma.lang.ops import Gen, Operation, ScopeEnd, Score, Select

if TYPE_CHECKING:
    from rich.tree import Tree

    from stemma.interpreter.program import Program

MOST_OPERATIONS = 10_000


@dataclass(frozen=True, slots=True)
class ForkOutline:
    """A fork: the branches that go on from here."""

    branches: tuple[Outline, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """What a program has queued on one branch, in order."""

    label: str
    steps: tuple[Operation | ForkOutline, ...]

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Those of this branch, without its forks."""
        return tuple(step for step in self.steps if isinstance(step, Operation))

    @property
    def variables(self) -> list[str]:
        """The variables that they define, in order."""
        names: dict[str, None] = {}
        for operation in self.operations:
            if isinstance(operation, Gen) and operation.reasoning is not None:
                names[operation.reasoning] = None
            if isinstance(operation, Gen | Select | Score | ScopeEnd) and operation.name:
                names[operation.name] = None
            if isinstance(operation, Gen) and operation.params.constraint is not None:
                names |= dict.fromkeys(operation.params.constraint.captures)
        return list(names)


@dataclass(frozen=True, slots=True)
class Trace:
    """The outline of a program for one set of arguments.

    arguments: those of the body, a placeholder where none was given. value: what the body returned.
    error: what it raised, or why it was stopped; then the outline is what came before.

    Prints in a terminal (`print`, `rich.print`) and in a notebook.
    """

    name: str
    arguments: Mapping[str, Any]
    outline: Outline
    value: Any = None
    error: BaseException | None = None

    @property
    def nodes(self) -> list[Operation]:
        """SGLang's name of the operations of the main branch."""
        return list(self.outline.operations)

    def __rich__(self) -> Tree:
        from stemma.interpreter.show_trace import tree_of

        return tree_of(self)

    def __str__(self) -> str:
        from stemma.interpreter.show_rich import plain_text

        return plain_text(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def trace_program(
    program: Program,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Trace:
    """Run the body on placeholders and tell what it has queued."""
    if program.is_async:
        refuse_in_event_loop(program.name)
    args, kwargs = _with_placeholders(signature, args, kwargs)
    call = take_apart(signature, program.name, args, kwargs)
    _refuse_options(call)
    chat = call.options.backend.chat if call.options.backend is not None else None
    error: BaseException | None = None
    with tracing(TracingBackend(chat=chat, limit=MOST_OPERATIONS)):
        state = open_state(program, call)
        try:
            execute(program, state, call)
        except (Exception, TraceEnds) as raised:
            error = raised
    bound = signature.bind(None, *call.args, **call.kwargs)
    bound.apply_defaults()
    arguments = dict(list(bound.arguments.items())[1:])
    assert isinstance(state._executor, TracingExecutor)
    outline = _outline(state._executor)
    return Trace(program.name, arguments, outline, state._run.value, error)


def _with_placeholders(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with a placeholder for each that is missing."""
    given = dict(kwargs)
    for place, parameter in enumerate(list(signature.parameters.values())[1:]):
        missing = parameter.default is parameter.empty and parameter.name not in given
        if missing and parameter.kind is parameter.KEYWORD_ONLY:
            given[parameter.name] = placeholder(parameter.name)
        elif missing and place >= len(args):
            if parameter.kind is parameter.POSITIONAL_ONLY:
                args = (*args, placeholder(parameter.name))
            elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                given[parameter.name] = placeholder(parameter.name)
    return args, given


def _refuse_options(call: Call) -> None:
    for field in fields(RunOptions):
        if field.name in ("backend", "timeout"):
            continue
        if getattr(call.options, field.name) != field.default:
            raise InvalidArgument(f"trace({field.name}=...) has no meaning: nothing is drawn")


def _outline(main: TracingExecutor) -> Outline:
    """By a loop: forks of forks may be thousands deep."""
    order, todo = [], [main]
    while todo:
        executor = todo.pop()
        order.append(executor)
        todo += _children(executor)
    done: dict[TracingExecutor, Outline] = {}
    for executor in reversed(order):  # children come behind their parents
        steps: list[Operation | ForkOutline] = []
        for step in executor.steps:
            if isinstance(step, Fork):
                branches = (done[child] for child in _of_fork(step))
                steps.append(ForkOutline(tuple(branches)))
            else:
                steps.append(step)
        done[executor] = Outline(executor.label, tuple(steps))
    return done[main]


def _children(executor: TracingExecutor) -> list[TracingExecutor]:
    forks = (step for step in executor.steps if isinstance(step, Fork))
    return [child for fork in forks for child in _of_fork(fork)]


def _of_fork(fork: Fork) -> list[TracingExecutor]:
    return [child for child in fork.children if isinstance(child, TracingExecutor)]

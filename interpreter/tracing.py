"""Running a body without a model: a backend that answers with placeholders, and an executor that
notes what is queued.

Used by `trace.py`, which makes an outline of it, and by `running.py`, since a program that runs
another inside of a trace must not ask a model either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from stemma.backend.base import (
    Backend,
    Branch,
    CacheMode,
    ChoiceScore,
    Completion,
    Generation,
    Namespace,
    Pending,
    ScoredChoices,
)
from stemma.interpreter.executor import Executor
from stemma.interpreter.tasks import Task, Tokens
from stemma.interpreter.variable import Variable
from stemma.lang.constraints import Constraint
from stemma.lang.errors import ConstraintError
from stemma.lang.ops import Gen, Operation
from stemma.lang.reasoning import is_open
from stemma.lang.sampling import SamplingParams

if TYPE_CHECKING:
    from stemma.backend.chat import ChatFormat


class TraceEnds(BaseException):
    """The program has queued as many operations as an outline may have. No Exception, so that a
    body that handles errors does not go on.
    """


def placeholder(name: str) -> str:
    return f"{{{name}}}"


class AnyRole:
    """A chat format for no model: every role is written, with no text around its contents."""

    def begin(self, role: str, previous: Sequence[str] = ()) -> str:
        return ""

    def end(self, role: str) -> str:
        return ""

    def tools(self) -> None:
        return None

    def told_tools(self, schemas: object) -> None:
        return None


class TracingBackend(Backend):
    """Answers at once. left: how many more operations may be queued."""

    def __init__(self, *, chat: ChatFormat | None, limit: int) -> None:
        # No subclass of ChatFormat, whose import takes time; the state asks for nothing else of it.
        self.chat = chat if chat is not None else cast("ChatFormat", AnyRole())
        self.model_name = "a trace"
        self.limit = self.left = limit

    def open(
        self,
        namespace: Namespace = Namespace(),
        *,
        cache: CacheMode = "read-write",
        priority: int = 0,
    ) -> TracingBranch:
        return TracingBranch()

    def count(self, operations: int) -> None:
        """Raises TraceEnds."""
        self.left -= operations
        if self.left < 0:
            raise TraceEnds(
                f"stopped after {self.limit:,} operations: a loop that waits for a certain reply "
                "does not end in a trace"
            )

    def flush_cache(self, namespace: Namespace | None = None) -> int:
        return 0

    def close(self) -> None:
        pass


class TracingBranch(Branch):
    """reply: what the next generation writes."""

    def __init__(self, reply: str = "") -> None:
        self.reply = reply

    def append(self, text: str, *, control: bool = False) -> None:
        pass

    def generate(self, params: SamplingParams, *, heal: bool = True) -> Generation:
        generation = Generation()
        generation.finish(Completion(text=self.reply, token_ids=(), finish_reason="stop"))
        return generation

    def score(
        self, choices: Sequence[str], *, unconditional: bool = False
    ) -> Pending[ScoredChoices]:
        """All alike, so that the first is chosen."""
        alone = (0.0,) if unconditional else None
        pending: Pending[ScoredChoices] = Pending()
        scored = tuple(ChoiceScore(choice, 0, (0,), (0.0,), alone) for choice in choices)
        pending.finish(ScoredChoices(scored))
        return pending

    def commit(self, choice: ChoiceScore) -> None:
        pass

    def fork(self, n: int) -> list[Branch]:
        return [TracingBranch(self.reply) for _ in range(n)]

    def token_ids(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


class TracingExecutor(Executor):
    """steps: the operations of the branch, in order, noted when they are queued."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.steps: list[Operation] = []

    def enqueue(self, *tasks: Task) -> None:
        backend = self.run.backend
        assert isinstance(backend, TracingBackend)
        backend.count(len(tasks))
        self.steps += (operation for operation, _ in tasks if not isinstance(operation, Tokens))
        super().enqueue(*tasks)

    def _generate(self, branch: Branch, operation: Gen, variable: Variable | None) -> None:
        assert isinstance(branch, TracingBranch)
        branch.reply = placeholder(operation.name or "text")
        if (shape := operation.params.constraint) is not None:
            branch.reply = _example(shape) or branch.reply
        if operation.reasoning is not None:
            opened, closed = operation.marks or self.run.backend.reasoning_marks
            begun = is_open(self.transcript.since_message(), (opened, closed))
            thought = ("" if begun else opened) + placeholder(operation.reasoning) + closed
            branch.reply = thought + branch.reply
        super()._generate(branch, operation, variable)


def _example(shape: Constraint) -> str:
    """A text of the shape: a placeholder is none, and the program could not read it."""
    try:
        return shape.examples(1)[0]
    except ConstraintError:
        return ""


_backend: ContextVar[TracingBackend | None] = ContextVar("stemma_tracing_backend", default=None)


def tracing_backend() -> TracingBackend | None:
    """The backend of the trace that this code runs in, if it does."""
    return _backend.get()


@contextmanager
def tracing(backend: TracingBackend) -> Iterator[None]:
    """Let every run that starts in here run on the backend."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)

"""`ProgramState`: the `s` in a program, one growing line of text with variables.

The program's side of a branch: it checks what is appended, names variables, and queues operations
on its `Executor`. Everything returns at once, except reading what is not there yet.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from stemma.backend.base import ChoiceScore, Usage
from stemma.interpreter.block import Block, check_begins, check_ends
from stemma.interpreter.events import Event, Feed, TextAdded, VariableFinished
from stemma.interpreter.executor import Executor
from stemma.interpreter.run import Run
from stemma.interpreter.tasks import Fork, Task, Tokens
from stemma.interpreter.transcript import Message
from stemma.interpreter.variable import Variable
from stemma.lang.errors import InvalidArgument, UnknownVariable
from stemma.lang.ops import (
    Expr,
    Gen,
    Role,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Score,
    Select,
    operations,
)
from stemma.lang.primitives import score as score_of

if TYPE_CHECKING:
    from stemma.interpreter.fork import Forks


class ProgramState:
    """One branch of a running or finished program.

    `s += ...` appends text and operations. `s["x"]` reads a variable and waits for it. `s.fork(n)`
    splits. A failed operation raises its error, with the program line that queued it, at the first
    read that needs its value.

    >>> s += "2 + 2 = " + st.gen("sum", max_tokens=4)  # doctest: +SKIP
    >>> s["sum"]  # doctest: +SKIP
    '4'
    """

    def __init__(
        self, run: Run, executor: Executor, *, inherited: Mapping[str, Variable] | None = None
    ) -> None:
        self._run = run
        self._executor = executor
        self._inherited: Mapping[str, Variable] = inherited or {}
        self._own: dict[str, Variable] = {}
        self._roles: list[str] = []
        self._open_role: str | None = None
        self._forks = 0
        self._original: ProgramState | None = None
        weakref.finalize(self, executor.release).atexit = False

    def __repr__(self) -> str:
        return f"<ProgramState {self.label} with {', '.join(self.variables()) or 'no variables'}>"

    # Appending

    def __iadd__(self, value: str | Expr) -> ProgramState:
        self.append(value)
        return self

    def append(self, value: str | Expr) -> None:
        """What `s += value` does.

        Raises InvalidArgument for messages within messages, UnsupportedByBackend for messages
        without a chat format, TypeError for what is neither text nor operation, and the branch's
        own error once that was read.
        """
        self._raise_known_failure()
        tasks: list[Task] = []
        named: dict[str, Variable] = {}
        role, roles = self._open_role, self._roles
        for operation in operations(value):
            variable = None
            if isinstance(operation, RoleBegin):
                check_begins(operation.role, role)
                text = self._run.backend.chat.begin(operation.role, roles)
                operation = replace(operation, template=text)
                role, roles = operation.role, [*roles, operation.role]
            elif isinstance(operation, RoleEnd):
                check_ends(operation.role, role)
                text = self._run.backend.chat.end(operation.role)
                operation = replace(operation, template=text)
                role = None
            elif isinstance(operation, Score) and operation.name is None:
                raise InvalidArgument("score: without a name nobody can read it; or s.score(text)")
            elif isinstance(operation, Gen | Select | Score | ScopeEnd) and operation.name:
                variable = named[operation.name] = Variable()
            if isinstance(operation, Gen) and operation.reasoning is not None:
                variable = variable or Variable()
                variable.aside = named[operation.reasoning] = Variable()
            tasks.append((operation, variable))
        self._own.update(named)
        self._open_role, self._roles = role, roles
        self._executor.enqueue(*tasks)

    @overload
    def system(self) -> Block: ...
    @overload
    def system(self, content: str | Expr) -> None: ...
    def system(self, content: str | Expr | None = None) -> Block | None:
        """Append a system message; `with s.system(): ...` takes what the block appends."""
        return self._message("system", content)

    @overload
    def user(self) -> Block: ...
    @overload
    def user(self, content: str | Expr) -> None: ...
    def user(self, content: str | Expr | None = None) -> Block | None:
        """Append a user message; `with s.user(): ...` takes what the block appends."""
        return self._message("user", content)

    @overload
    def assistant(self) -> Block: ...
    @overload
    def assistant(self, content: str | Expr) -> None: ...
    def assistant(self, content: str | Expr | None = None) -> Block | None:
        """Append an assistant message; `with s.assistant(): ...` takes what the block appends."""
        return self._message("assistant", content)

    def _message(self, role: Role, content: str | Expr | None) -> Block | None:
        block = Block(self, RoleBegin(role), RoleEnd(role))
        if content is None:
            return block
        self.append(block.begin + content + block.end)
        return None

    def var_scope(self, name: str) -> Block:
        """`with s.var_scope("x"): ...` makes all text that the block appends the variable x."""
        return Block(self, ScopeBegin(name), ScopeEnd(name))

    # Splitting

    def fork(self, n: int | Sequence[str] = 1) -> Forks:
        """Split into `n` branches, or into one per label. Returns at once.

        A branch starts as this one is now, with its text, variables and open message, and goes its
        own way.

        >>> pro, con = s.fork(["pro", "con"])  # doctest: +SKIP
        """
        from stemma.interpreter.fork import Forks, branch_names

        self._raise_known_failure()
        names = branch_names(n)
        ordinal = self._forks
        self._forks += 1
        # The first fork's branches are s/0, s/1, ...; the second's s/2:0, s/2:1, ...
        prefix = f"{ordinal + 1}:" if ordinal else ""
        inherited = {**self._inherited, **self._own}
        children = []
        for index, name in enumerate(names):
            executor = self._executor.child(prefix + name, ordinal, index)
            child = ProgramState(self._run, executor, inherited=inherited)
            child._roles, child._open_role = self._roles, self._open_role
            children.append(child)
        if children:
            self._executor.enqueue((Fork(tuple(c._executor for c in children)), None))
        return Forks(self, children, names)

    def copy(self) -> ProgramState:
        """One branch that goes its own way from here.

        As `with s.copy() as c: ...` its variables become lists of one on this branch at the end of
        the block, as if joined.
        """
        copy = self.fork(1)[0]
        copy._original = self
        return copy

    def __enter__(self) -> ProgramState:
        if self._original is None:
            raise InvalidArgument("`with` takes a copy, as in `with s.copy() as c: ...`")
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        from stemma.interpreter.fork import Forks

        if error is None and self._original is not None:
            Forks(self._original, [self], ["0"]).join()

    # Variables

    def __getitem__(self, name: str) -> Any:
        """The value of a variable; waits for it.

        Raises UnknownVariable for a name that nothing on this branch defines, and what the
        variable's operation raised.
        """
        return self._read(name).value

    def __setitem__(self, name: str, value: Any) -> None:
        """Define a variable; branches made from now on have it, too."""
        self._own[name] = Variable.of(value, raw=value if isinstance(value, str) else None)

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._inherited

    def variables(self) -> list[str]:
        """The names of all variables of the branch, also of those still being written."""
        return list({**self._inherited, **self._own})

    def raw(self, name: str) -> Any:
        """The text of a variable as it was written, with `n=4` the four texts; waits for it."""
        variable = self._read(name)
        if variable.raw is None:
            raise InvalidArgument(f"variable {name!r} was set by the program and has no text")
        return variable.raw

    def meta(self, name: str) -> Any:
        """How a variable came about; waits for it.

        A `Meta` for gen (with `n=4`, a list of four), a `SelectMeta` for select, None for what the
        program set.
        """
        return self._read(name).meta

    async def get(self, name: str) -> Any:
        """`await s.get("x")` is `s["x"]` for async programs."""
        await self._variable(name).wait_async()
        return self[name]

    async def wait(self) -> None:
        """Wait, in an async program, until everything queued on this branch is done."""
        await self._executor.rest().wait_async()
        self._raise_failure()

    # Reading the whole

    def text(self) -> str:
        """All text of the branch, templates included; waits for what is queued."""
        self._rest()
        return self._executor.transcript.text()

    def messages(self) -> list[Message]:
        """The conversation, contents verbatim; waits for what is queued."""
        self._rest()
        return self._executor.transcript.messages()

    def tokens(self) -> list[int]:
        """The token ids of the branch; waits for what is queued."""
        self._raise_known_failure()
        ids = Variable()
        self._executor.enqueue((Tokens(), ids))
        self._wait_for(ids)
        return list(ids.value)

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """The text of the branch in pieces as it grows, or only that of the variable `name`.

        A late reader gets everything, too. Inside a program it ends when all is done that was
        queued; outside (`run(stream=True)`) when the run ends. Raises what the branch or the run
        raised.
        """
        with self._noting_failure():
            for event in self._listen():
                if isinstance(event, TextAdded) and name in (None, event.variable):
                    yield event.text
                elif isinstance(event, VariableFinished) and event.variable == name:
                    return
        if name is not None:
            self._variable(name)

    async def text_async_iter(self, name: str | None = None) -> AsyncIterator[str]:
        """`text_iter` for `async for`."""
        with self._noting_failure():
            async for event in self._listen():
                if isinstance(event, TextAdded) and name in (None, event.variable):
                    yield event.text
                elif isinstance(event, VariableFinished) and event.variable == name:
                    return
        if name is not None:
            self._variable(name)

    def _listen(self) -> Feed[Event]:
        feed: Feed[Event] = Feed()
        outside = self._run.is_outside()
        self._run.dispatcher.call(lambda: self._executor.listen(feed, to_the_end=outside))
        return feed

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """A reader is told of the failure by the iterator, too."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            self._run.note_seen(error)
            raise

    def score(self, text: str) -> ChoiceScore:
        """Log-probabilities of `text` as a continuation, waited for. The branch stays."""
        self._raise_known_failure()
        score = Variable()
        self._executor.enqueue((score_of(text), score))
        self._wait_for(score)
        result: ChoiceScore = score.value
        return result

    @property
    def usage(self) -> Usage:
        """Tokens and time: on the main branch of the whole run, on another of its own work."""
        if self._run.is_outside():
            self._run.finished.wait()
        usages = self._run.usages if self._executor.main else self._executor.transcript.usages
        return sum(usages, Usage())

    @property
    def label(self) -> str:
        """The place in the tree of branches: "tips", "tips/0", "tips/0/expert"; unique in a run."""
        return self._executor.label

    @property
    def seed(self) -> int:
        """The seed of the run: `run(seed=state.seed)` draws the same again."""
        return self._run.seed

    @property
    def value(self) -> Any:
        """What the program returned; None while it runs."""
        if self._run.is_outside():
            self._run.finished.wait()
        self._raise_run_failure()
        return self._run.value

    def cancel(self) -> None:
        """Stop this branch: what is unfinished raises Cancelled. The run does not fail by it."""
        self._executor.cancel()

    # How reading works

    def _variable(self, name: str) -> Variable:
        variable = self._own.get(name) or self._inherited.get(name)
        if variable is None and self._run.is_outside():
            self._run.finished.wait()
            variable = self._own.get(name) or self._inherited.get(name)
        if variable is None:
            self._raise_run_failure()
            known = ", ".join(map(repr, self.variables())) or "none"
            raise UnknownVariable(f"branch {self.label} has no variable {name!r}; it has {known}")
        return variable

    def _read(self, name: str) -> Variable:
        variable = self._variable(name)
        self._wait_for(variable)
        return variable

    def _wait_for(self, variable: Variable) -> None:
        self._run.wait(variable)
        if variable.error is not None:
            self._run.note_seen(variable.error)
            raise variable.error

    def _rest(self) -> None:
        """Wait until everything queued is done; raise if any of it failed."""
        if self._run.is_outside():
            self._run.finished.wait()
        self._raise_run_failure()
        if not self._executor.is_at_rest():
            self._run.wait(self._executor.rest())
        self._raise_failure()

    def _raise_failure(self) -> None:
        error = self._executor.error
        if error is not None:
            self._run.note_seen(error)
            raise error

    def _raise_known_failure(self) -> None:
        """Refuse to go on with a branch whose failure the program was told before."""
        error = self._executor.error
        if error is not None and self._run.was_seen(error):
            raise error

    def _raise_run_failure(self) -> None:
        if self._run.background is not None and self._run.failure is not None:
            raise self._run.failure

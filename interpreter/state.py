"""`ProgramState`: the `s` in a program, one growing line of text with variables.

The program's side of a branch: it checks what is appended, names variables, and queues operations
on its `Executor`. Everything returns at once, except reading what is not there yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from stemma.interpreter.block import Block, check_begins, check_ends
from stemma.interpreter.calling import Calling
from stemma.interpreter.control import check_control
from stemma.interpreter.executor import Executor
from stemma.interpreter.run import Run
from stemma.interpreter.tasks import Fork, Task
from stemma.interpreter.variable import Variable
from stemma.lang.errors import Cancelled, InvalidArgument, UnsupportedByBackend
from stemma.lang.gen import check_captures
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
    Text,
    operations,
)
from stemma.lang.sampling import checked_seed

if TYPE_CHECKING:
    from stemma.interpreter.fork import Forks


class ProgramState(Calling):
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
        super().__init__(run, executor, inherited or {})
        self._roles: list[str] = []
        self._open_role: str | None = None
        self._forks = 0
        self._original: ProgramState | None = None
        self._life = _Life()
        # By a weak reference: an error that the executor keeps has a state, this one perhaps.
        weakref.finalize(self._life, _release, weakref.ref(executor)).atexit = False
        if executor.main:
            weakref.finalize(self._life, run.untold.warn)

    def _for_readers(self) -> ProgramState:
        """The same state for those outside of a streamed run, whose body has this one: what is done
        to one is done to both. When it goes out of use while the run goes on, that is cancelled.
        """
        other = object.__new__(type(self))
        other.__dict__ = self.__dict__
        reason = "its stream and its state are gone: keep one of them as long as it is to go on"
        error = Cancelled(f"nobody can read the run of {self._run.name} any more, for {reason}")
        # By a weak reference: what the run fails by has a traceback, with `other` in its frames.
        weakref.finalize(other, _interrupt, weakref.ref(self._run), error).atexit = False
        return other

    def __repr__(self) -> str:
        return f"<ProgramState {self.label} with {', '.join(self.variables()) or 'no variables'}>"

    # Appending

    def __iadd__(self, value: str | Expr) -> ProgramState:
        self.append(value)
        return self

    def __add__(self, value: str | Expr) -> ProgramState:
        """Refused: only `s += ...` appends."""
        raise TypeError(
            "a state is appended to in place: write `s += ...` instead of `s + ...`, or `t = "
            "s.copy()` and `t += ...` for a text that goes another way"
        )

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
                variable = self._follow(operation.name, Variable(), named)
                variable.streamed = not isinstance(operation, ScopeEnd)
                variable.told += variable.streamed
            if isinstance(operation, Gen):
                samples = self._setting(operation, "n")
                if variable is not None:
                    variable.samples = samples
                if names := self._asides(operation):
                    variable = variable or Variable()
                    variable.asides = tuple(self._follow(name, Variable(), named) for name in names)
                    for aside in variable.asides:
                        aside.streamed = operation.reasoning is not None
                        aside.samples = samples
                        aside.told += 1
                if variable is not None:
                    self._check_shape(operation)
            if isinstance(operation, Text) and operation.control:
                check_control(operation.text, self._run.backend.control_tokens)
            tasks.append((operation, variable))
        self._own.update(named)
        self._open_role, self._roles = role, roles
        self._executor.enqueue(*tasks)

    def _asides(self, operation: Gen) -> tuple[str, ...]:
        """The variables that a generation makes besides its own."""
        if operation.reasoning is not None:
            return (operation.reasoning,)
        shape = self._setting(operation, "constraint")
        if shape is None:
            return ()
        check_captures(operation.name, shape)
        captures: tuple[str, ...] = shape.captures
        return captures

    def _check_shape(self, operation: Gen) -> None:
        if self._run.check_shape is not None and self._executor.main:
            shape = self._setting(operation, "constraint")
            named = operation.name or next(iter(self._asides(operation)))
            self._run.check_shape(shape, f"the variable {named!r} of {self.label}")

    def _setting(self, operation: Gen, name: str) -> Any:
        """A parameter of a generation: its own, or that of the run."""
        defaults = self._run.sampling
        own = defaults is None or name in operation.given
        return getattr(operation.params if own else defaults, name)

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
        if content is None:
            return Block(self, RoleBegin(role), RoleEnd(role))
        self.append(RoleBegin(role) + content + RoleEnd(role))
        return None

    def var_scope(self, name: str) -> Block:
        """`with s.var_scope("x"): ...` makes all text that the block appends the variable x."""
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"var_scope({name!r}): a variable's name is a non-empty string")
        return Block(self, ScopeBegin(name), ScopeEnd(name))

    # Splitting

    def fork(
        self,
        n: int | Sequence[str] = 1,
        *,
        size: int | None = None,
        seed: int | None = None,
        position_ids_offset: Sequence[int] | None = None,
    ) -> Forks:
        """Split into `n` branches, or into one per label. Returns at once.

        A branch starts as this one is now, with its text, variables and open message, and goes its
        own way. seed: what the branches draw depends on it instead of on the run's seed and the
        place of the fork. size is SGLang's name of n; its position_ids_offset is refused.

        >>> pro, con = s.fork(["pro", "con"])  # doctest: +SKIP
        """
        from stemma.interpreter.fork import Forks, branch_names

        _refuse_offsets("fork", position_ids_offset)
        seed = checked_seed(seed)
        if size is not None and n != 1:
            raise InvalidArgument(f"fork({n!r}, size={size!r}): size is another name of the first")
        self._raise_known_failure()
        names = branch_names(n if size is None else size)
        ordinal = self._forks
        self._forks += 1
        # The first fork's branches are s/0, s/1, ...; the second's s/2:0, s/2:1, ...
        prefix = f"{ordinal + 1}:" if ordinal else ""
        inherited = {**self._inherited, **self._own}
        children = []
        for index, name in enumerate(names):
            executor = self._executor.child(prefix + name, ordinal, index, seed)
            child = ProgramState(self._run, executor, inherited=inherited)
            child._roles, child._open_role = self._roles, self._open_role
            children.append(child)
        if children:
            self._executor.enqueue((Fork(tuple(c._executor for c in children)), None))
        return Forks(self, children, names)

    def copy(self, *, position_ids_offset: Sequence[int] | None = None) -> ProgramState:
        """One branch that goes its own way from here.

        As `with s.copy() as c: ...` its variables become lists of one on this branch at the end of
        the block, as if joined.
        """
        _refuse_offsets("copy", position_ids_offset)
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

    def __setitem__(self, name: str, value: Any) -> None:
        """Define a variable; branches made from now on have it, too."""
        self._define(name, value)

    def cancel(self) -> None:
        """Stop this branch: what is unfinished raises Cancelled. The run does not fail by it."""
        self._executor.cancel()


class _Life:
    """Ends when nobody has the state any more."""

    __slots__ = ("__weakref__",)


def _release(reference: weakref.ref[Executor]) -> None:
    if (executor := reference()) is not None:
        executor.release()


def _interrupt(reference: weakref.ref[Run], error: BaseException) -> None:
    if (run := reference()) is not None:
        run.interrupt(error)


def _refuse_offsets(what: str, offsets: Sequence[int] | None) -> None:
    if offsets is not None:
        raise UnsupportedByBackend(
            f"{what}(position_ids_offset=...): the positions of a branch's tokens are those of its "
            "text, or what the cache holds of them would not fit"
        )

"""`Forks`: the branches that `fork` made, and `join`.

Belongs to the program that forked; the branches themselves are ordinary states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, overload

from stemma.interpreter.events import Joined
from stemma.interpreter.state import ProgramState
from stemma.interpreter.transcript import Piece
from stemma.interpreter.variable import Variable
from stemma.lang.errors import InvalidArgument, UnknownVariable
from stemma.lang.ops import Chain, Expr, Operation, RoleBegin, RoleEnd, Text

# The second fork's branches are s/2:0, s/2:1, ...
_LIKE_A_LATER_FORK = re.compile(r"\d+:")

JoinMode = Literal["gather_variable", "concate_and_append"]


class Forks(Sequence[ProgramState]):
    """Sibling branches, in order. `forks[0]` is a branch, `forks["x"]` the list of their values of
    x.

    >>> for i, branch in enumerate(branches := s.fork(3)):  # doctest: +SKIP
    ...     branch += f"Tip {i + 1}:" + st.gen("tip", stop="\\n")
    >>> branches["tip"]  # doctest: +SKIP
    ['Sleep in the dark.', 'Get up early.', 'No coffee at night.']
    """

    def __init__(
        self, parent: ProgramState, states: Sequence[ProgramState], labels: Sequence[str]
    ) -> None:
        self._parent = parent
        self._states = list(states)
        self.labels = tuple(labels)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    @overload
    def __getitem__(self, key: int) -> ProgramState: ...
    @overload
    def __getitem__(self, key: slice) -> list[ProgramState]: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> ProgramState | list[ProgramState] | list[Any]:
        """A branch by index, several by slice; by name the values of a variable, waited for."""
        if not isinstance(key, str):
            return self._states[key]
        try:
            return [state[key] for state in self._states]
        except UnknownVariable as error:
            if key in self.labels:
                error.args = (f"{error}; the branch labelled so is branches.branch({key!r})",)
            raise

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """For `forks[i] += ...`, which stores what it got."""
        if isinstance(index, str):
            raise InvalidArgument(
                f"branches[{index!r}] = ...: each branch has variables of its own; set them by "
                f"`for branch in branches: branch[{index!r}] = ...`"
            )
        if self._states[index] is not state:
            raise InvalidArgument(
                f"branches[{index!r}] = ...: a branch is appended to, as by branches[{index!r}] += "
                "..., not replaced"
            )

    def __iadd__(self, what: str | Expr | Sequence[Any] | Callable[[int], str | Expr]) -> Forks:
        """Append to every branch: the same, one each of a list, or what `what(index)` gives."""
        if callable(what):
            parts: list[Any] = [what(index) for index in range(len(self))]
        elif isinstance(what, list | tuple):
            if len(what) != len(self):
                raise InvalidArgument(f"{len(what)} expressions for {len(self)} branches")
            parts = list(what)
        else:
            parts = [what] * len(self)
        for state, part in zip(self._states, parts, strict=True):
            state.append(part)
        return self

    def branch(self, label: str) -> ProgramState:
        """The branch with that label."""
        if label not in self.labels:
            raise InvalidArgument(f"no branch {label!r}; there are {', '.join(self.labels)}")
        return self._states[self.labels.index(label)]

    async def get(self, name: str) -> list[Any]:
        """`await forks.get("x")` is `forks["x"]` for async programs."""
        return [await state.get(name) for state in self._states]

    def join(self, mode: JoinMode = "gather_variable") -> dict[str, list[Any]]:
        """Wait for all branches and hand what they defined to the parent, as lists aligned with the
        branches.

        Returns those lists by variable. A branch's error is raised here. A variable that some
        branch lacks raises UnknownVariable, naming both; of a branch that was cancelled, None
        stands for what it did not finish. The branches stay usable.

        mode: "concate_and_append" appends what the branches wrote since the fork to the parent
        instead, one after the other, as text; variables stay where they are.
        """
        _check_mode(mode)
        for state in self._states:
            state._run.wait(state._executor.until_idle())
        return self._join(mode)

    async def ajoin(self, mode: JoinMode = "gather_variable") -> dict[str, list[Any]]:
        """`join` for async programs."""
        _check_mode(mode)
        for state in self._states:
            await state._executor.until_idle().wait_async()
        return self._join(mode)

    def _join(self, mode: JoinMode) -> dict[str, list[Any]]:
        failed = [s for s in self._states if s._executor.error and not s._executor.cancelled]
        for state in failed:
            assert state._executor.error is not None
            self._parent._run.note_seen(state._executor.error)
        if failed:
            failed[0]._raise_failure()
        if mode == "gather_variable":
            return self._gather()
        written = (piece for s in self._states for piece in s._executor.transcript.own)
        self._parent.append(
            Chain(tuple(_again(piece) for piece in written if piece.text or piece.role))
        )
        self._tell_joined(())
        return {}

    def _tell_joined(self, names: Sequence[str]) -> None:
        if (feed := self._parent._run.feed) is not None:
            labels = tuple(state.label for state in self._states)
            feed.put(Joined(self._parent.label, labels, tuple(names)))

    def _gather(self) -> dict[str, list[Any]]:
        names = list(dict.fromkeys(name for state in self._states for name in state._own))
        columns = {name: [_defined(state, name) for state in self._states] for name in names}
        for name, column in columns.items():
            joined = Variable.of(
                [variable.value for variable in column],
                raw=[variable.raw for variable in column],
                meta=[variable.meta for variable in column],
            )
            self._parent._follow(name, joined, self._parent._own)
        self._tell_joined(names)
        return {name: [variable.value for variable in column] for name, column in columns.items()}


def _check_mode(mode: object) -> None:
    if mode not in get_args(JoinMode):
        raise InvalidArgument(
            f"join(mode={mode!r}): must be one of {', '.join(get_args(JoinMode))}"
        )


def _again(piece: Piece) -> Operation:
    """What appends a piece once more: what a model has written becomes a literal."""
    if piece.role is not None:
        return RoleBegin(piece.role) if piece.kind == "begin" else RoleEnd(piece.role)
    return Text(piece.text, control=piece.kind == "control")


def _defined(state: ProgramState, name: str) -> Variable:
    variable = state._own.get(name)
    if variable is not None:
        return variable
    if state._executor.cancelled:
        return Variable.of(None)
    raise UnknownVariable(f"join: branch {state.label} has no variable {name!r}, others have")


def branch_names(n: int | Sequence[str]) -> list[str]:
    """The names of the branches that `fork(n)` makes: "0", "1", ... or the labels given."""
    if isinstance(n, int) and not isinstance(n, bool):
        if n < 0:
            raise InvalidArgument(f"fork({n}): must be at least 0")
        return [str(i) for i in range(n)]
    if isinstance(n, str | bytes) or not isinstance(n, Sequence):
        raise InvalidArgument(f"fork({n!r}): must be a number or a list of labels")
    labels: dict[str, None] = {}
    for label in n:
        if not isinstance(label, str) or not label:
            raise InvalidArgument(f"fork: label {label!r} must be a non-empty string")
        if "/" in label or _LIKE_A_LATER_FORK.match(label):
            raise InvalidArgument(
                f"fork: label {label!r}: a slash stands between a branch and its parent, and a "
                "number with a colon before the labels of a later fork; write it without"
            )
        if label in labels:
            raise InvalidArgument(f"fork: label {label!r} is there twice")
        labels[label] = None
    return list(labels)

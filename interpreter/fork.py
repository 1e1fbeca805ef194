"""`Forks`: the branches that `fork` made, and `join`.

Belongs to the program that forked; the branches themselves are ordinary states.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, overload

from stemma.interpreter.contest import Contest
from stemma.interpreter.events import Joined
from stemma.interpreter.state import ProgramState
from stemma.interpreter.transcript import Piece
from stemma.interpreter.variable import Variable
from stemma.lang.errors import InvalidArgument, TooFewBranches, UnknownVariable
from stemma.lang.ops import Chain, Expr, Operation, RoleBegin, RoleEnd, Text

# The second fork's branches are s/2:0, s/2:1, ...
_LIKE_A_LATER_FORK = re.compile(r"\d+:")

JoinMode = Literal["gather_variable", "concate_and_append"]
OnError = Literal["raise", "return", "drop"]


class Gathered(dict[str, list[Any]]):
    """What `join` returns: by variable the list of the branches' values.

    labels: of the branches that the lists are of, in order. errors: by label, why branches have
    failed or were cancelled; empty where `join` would have raised. A value that `max_tokens` has
    cut off is its Truncated.
    """

    def __init__(self, *, labels: tuple[str, ...], errors: dict[str, BaseException]) -> None:
        super().__init__()
        self.labels = labels
        self.errors = errors


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

    # Joining

    def join(self, mode: JoinMode = "gather_variable", *, on_error: OnError = "raise") -> Gathered:
        """Wait for all branches and hand what they defined to the parent, as lists aligned with the
        branches.

        Returns those lists by variable. A variable that some branch lacks raises UnknownVariable,
        naming both. The branches stay usable.

        mode: "concate_and_append" appends what the branches wrote since the fork to the parent
        instead, one after the other, as text; variables stay where they are.
        on_error: what becomes of a branch that has failed.

        - "raise": its error is raised here, of several that of the first. Of a branch that was
          cancelled, None stands for what it did not finish.
        - "return": its error stands in the lists for what it did not finish, also of a branch that
          was cancelled.
        - "drop": the lists leave it out, also where it was cancelled. `labels` of what is returned
          tells which branches are in them.

        With "return" and "drop" the error counts as told: the run goes on. `errors` of what is
        returned has it. A text that is appended is never that of a branch that has failed. What
        ends the whole run, as its timeout does, is raised in any case.
        """
        _check_mode(mode, on_error)
        for state in self._states:
            state._run.wait(state._executor.until_idle())
        return self._join(mode, on_error)

    async def ajoin(
        self, mode: JoinMode = "gather_variable", *, on_error: OnError = "raise"
    ) -> Gathered:
        """`join` for async programs."""
        _check_mode(mode, on_error)
        for state in self._states:
            await state._executor.until_idle().wait_async()
        return self._join(mode, on_error)

    def _join(self, mode: JoinMode, on_error: OnError) -> Gathered:
        run = self._parent._run
        errors: dict[int, BaseException] = {}
        for place, state in enumerate(self._states):
            error = state._executor.error
            if error is None or (on_error == "raise" and state._executor.cancelled):
                continue
            run.note_seen(error)
            errors[place] = error
        for error in errors.values():
            if on_error == "raise" or error is run.cut_short():
                raise error
        places = [i for i in range(len(self)) if on_error != "drop" or i not in errors]
        gathered = Gathered(
            labels=tuple(self.labels[i] for i in places),
            errors={self.labels[i]: error for i, error in errors.items()},
        )
        if mode == "gather_variable":
            gathered |= self._gather(places, errors)
        else:
            self._append_again([self._states[i] for i in places if i not in errors])
        if (feed := run.feed) is not None:
            labels = tuple(self._states[i].label for i in places)
            feed.put(Joined(self._parent.label, labels, tuple(gathered)))
        return gathered

    def _gather(
        self, places: Sequence[int], errors: Mapping[int, BaseException]
    ) -> dict[str, list[Any]]:
        names = list(dict.fromkeys(name for i in places for name in self._states[i]._own))
        columns = {  # all of them first: a variable that a branch lacks leaves the parent as it was
            name: [_defined(self._states[i], name, errors.get(i)) for i in places] for name in names
        }
        for name, column in columns.items():
            joined = Variable()
            joined.finish(
                [_told(variable) for variable in column],
                raw=[variable.raw for variable in column],
                meta=[variable.meta for variable in column],
                unreadable=next((v.unreadable for v in column if v.unreadable is not None), None),
            )
            self._parent._follow(name, joined, self._parent._own)
        return {name: list(map(_told, column)) for name, column in columns.items()}

    def _append_again(self, states: Sequence[ProgramState]) -> None:
        pieces = (piece for state in states for piece in state._executor.transcript.own)
        again = (_again(p) for p in pieces if (p.text or p.role) and not p.broken)
        self._parent.append(Chain(tuple(again)))

    # Racing

    def first(self, k: int = 1, *, when: Callable[[ProgramState], object] | None = None) -> Forks:
        """Wait until `k` branches are done that satisfy `when`, and cancel the rest.

        Returns those, in the branches' order, as `Forks` of their own: `winners["x"]`,
        `winners.labels`, `winners.join()`. The rest is cancelled together with what has been forked
        from it: the engine stops computing it within one step, it takes no more, and what it has
        finished can still be read.

        k: how many, from 1 to the number of branches.
        when: called with a branch that is done with all that was queued on it, in this thread; the
            branch satisfies if it returns something true. It may go on with the branch and wait for
            that. What it raises is raised here, and nothing is cancelled.

        A branch that has failed, or was cancelled, satisfies never, and does not fail the run.
        Branches are asked in the order in which they are done. Raises TooFewBranches where all are
        done and fewer than `k` satisfy: `found` of the error has those, `errors` why others failed.

        >>> branches += st.gen("proof") + st.select("sure", ["yes", "no"])  # doctest: +SKIP
        >>> branches.first(3, when=lambda b: b["sure"] == "yes")["proof"]  # doctest: +SKIP
        """
        contest = self._contest(f"first({k!r})", k, when)
        while contest.is_open():
            if (place := contest.take()) is None:
                self._parent._run.wait(contest.more)
            elif when is None or when(self._states[place]):
                contest.accept(place)
        return self._end_contest(contest, k)

    async def afirst(
        self, k: int = 1, *, when: Callable[[ProgramState], object] | None = None
    ) -> Forks:
        """`first` for async programs; `when` may be an async function."""
        contest = self._contest(f"first({k!r})", k, when)
        while contest.is_open():
            if (place := contest.take()) is None:
                await contest.more.wait_async()
                continue
            answer = True if when is None else when(self._states[place])
            if await answer if inspect.isawaitable(answer) else answer:
                contest.accept(place)
        return self._end_contest(contest, k)

    def race(self) -> ProgramState:
        """Wait for the first branch that is done without an error, and cancel the rest.

        It is `first(1)[0]`, and raises as `first` does.

        >>> branches += st.gen("answer", max_tokens=200)  # doctest: +SKIP
        >>> branches.race()["answer"]  # doctest: +SKIP
        """
        return self.first()[0]

    async def arace(self) -> ProgramState:
        """`race` for async programs."""
        return (await self.afirst())[0]

    def _contest(self, what: str, k: int, when: object) -> Contest:
        if when is not None and not callable(when):
            raise InvalidArgument(
                f"first(when={when!r}): must be a function of a branch, as in "
                'first(k, when=lambda branch: "yes" in branch["x"])'
            )
        return Contest(what, self._states, k)

    def _end_contest(self, contest: Contest, k: int) -> Forks:
        places = sorted(contest.found)
        lost = [state.label for i, state in enumerate(self._states) if i not in set(places)]
        self._parent._run.cancel_branches(lost)
        states = [self._states[i] for i in places]
        found = Forks(self._parent, states, [self.labels[i] for i in places])
        if len(found) == k:
            return found
        errors = {self.labels[i]: error for i, error in sorted(contest.errors.items())}
        message = f"{len(found)} of {len(self)} branches satisfied, {k} were asked for"
        if errors:
            message += f"; failed: {', '.join(errors)}"
        cause = next(iter(errors.values()), None)
        raise TooFewBranches(
            f"first({k}): {message}; error.found has those that did", found=found, errors=errors
        ) from cause


def _check_mode(mode: object, on_error: object) -> None:
    if on_error not in get_args(OnError):
        raise InvalidArgument(
            f"join(on_error={on_error!r}): must be one of {', '.join(get_args(OnError))}"
        )
    if mode not in get_args(JoinMode):
        raise InvalidArgument(
            f"join(mode={mode!r}): must be one of {', '.join(get_args(JoinMode))}"
        )


def _again(piece: Piece) -> Operation:
    """What appends a piece once more: what a model has written becomes a literal."""
    if piece.role is not None:
        return RoleBegin(piece.role) if piece.kind == "begin" else RoleEnd(piece.role)
    return Text(piece.text, control=piece.kind == "control")


def _told(variable: Variable) -> Any:
    """The value, or the error in its place where there is none of the type that was asked for."""
    return variable.value if variable.unreadable is None else variable.unreadable


def _defined(state: ProgramState, name: str, error: BaseException | None) -> Variable:
    """The variable of a branch that may have failed by `error`."""
    variable = state._own.get(name)
    if variable is not None and (error is None or variable.error is None):
        return variable
    if error is not None:
        return Variable.of(error)
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

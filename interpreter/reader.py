"""What can be read of a branch: its variables, its text, what it took, how it looks.

The base of `ProgramState`. Reading waits for what is not there yet, and raises what the operation
that should have made it has raised.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stemma.backend.base import ChoiceScore, Usage
from stemma.interpreter.events import Event, TextAdded, VariableFinished
from stemma.interpreter.executor import Executor
from stemma.interpreter.feed import Feed
from stemma.interpreter.picture import Picture, picture_of
from stemma.interpreter.run import Run, cancellation
from stemma.interpreter.tasks import Define, Tokens
from stemma.interpreter.transcript import Message
from stemma.interpreter.variable import Variable
from stemma.lang.errors import InvalidArgument, UnknownVariable
from stemma.lang.ops import Expr
from stemma.lang.primitives import score as score_of

if TYPE_CHECKING:
    from rich.tree import Tree


class _Pick:
    """Picks the text of all, or of one value of one variable, from a branch's events.

    skip: how many values of the name go before the one that is meant.
    """

    def __init__(self, name: str | None, *, skip: int) -> None:
        self._name = name
        self._skip = skip
        self.done = False

    def take(self, event: Event) -> str:
        """What to pass on of an event."""
        match event:
            case TextAdded(text=text, variable=name):
                wanted = self._name is None or (name == self._name and not self._skip)
                return text if wanted else ""
            case VariableFinished(variable=name) if name == self._name:
                self.done = not self._skip
                self._skip -= 1
        return ""


SHOWN_CHARACTERS = 2000
"""Longer literals are shown with their middle left out."""


def _not_one_text(name: str, variable: Variable) -> InvalidArgument:
    what = f"is a {type(variable.value).__name__}"
    if variable.samples > 1:
        what = f"has {variable.samples} samples"
    return InvalidArgument(
        f"text_iter({name!r}): the variable {what}, not one text: read s[{name!r}]"
    )


class BranchReader:
    """One branch of a running or finished program, for reading."""

    def __init__(self, run: Run, executor: Executor, inherited: Mapping[str, Variable]) -> None:
        self._run = run
        self._executor = executor
        self._inherited = inherited
        self._own: dict[str, Variable] = {}

    # Variables

    def __getitem__(self, name: str) -> Any:
        """The value of a variable; waits for it.

        Raises UnknownVariable for a name that nothing on this branch defines, what the variable's
        operation raised, and Truncated where `max_tokens` has cut off a text that was to have a
        shape.
        """
        variable = self._read(name)
        if variable.unreadable is not None:
            raise variable.unreadable
        return variable.value

    __iter__ = None  # else Python would ask for s[0], s[1], ...

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._inherited

    def _define(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"s[{name!r}] = ...: a variable's name is a non-empty string")
        if isinstance(value, Expr):
            raise InvalidArgument(
                f"s[{name!r}] = {type(value).__name__}: a variable is set to a value; an operation "
                "that names the variable is appended, as in s += st.gen(name)"
            )
        variable = Variable.of(value, raw=value if isinstance(value, str) else None)
        self._follow(name, variable, self._own)
        if self._run.feed is not None and not self._run.finished.done:
            self._executor.enqueue((Define(name, value), None))

    def _follow(self, name: str, variable: Variable, into: dict[str, Variable]) -> Variable:
        """Put a variable in the place of the one that had its name."""
        before = into.get(name) or self._own.get(name) or self._inherited.get(name)
        variable.told = before.told if before is not None else 0
        into[name] = variable
        return variable

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
        if name not in self and self._run.is_outside():
            await self._run.ended.wait_async()
        await self._variable(name).wait_async()
        return self[name]

    async def wait(self) -> None:
        """Wait, in an async program, until everything queued on this branch is done."""
        if self._run.is_outside():
            await self._run.ended.wait_async()
        await self._executor.until_idle().wait_async()
        self._raise_run_failure()
        self._raise_failure()

    # Reading the whole

    def text(self) -> str:
        """All text of the branch, templates included; waits for what is queued."""
        self._wait_until_whole()
        return self._executor.transcript.text()

    def messages(self) -> list[Message]:
        """The conversation, contents verbatim; waits for what is queued."""
        self._wait_until_whole()
        return self._executor.transcript.messages()

    def tokens(self) -> list[int]:
        """The token ids of the branch; waits for what is queued."""
        self._raise_known_failure()
        ids = Variable()
        self._executor.enqueue((Tokens(), ids))
        self._wait_for(ids)
        return list(ids.value)

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text of the branch in pieces as it grows, or only that of one variable.

        That is what `s[var_name]` is now: of a name that was written again the latest, and on a
        branch that has not written it what it had at the fork. One whose value is not one text, as
        with `n=4`, raises InvalidArgument.

        A late reader gets everything, too. Inside a program it ends when all is done that was
        queued; outside (`run(stream=True)`) when the run ends. Raises what the branch or the run
        raised.
        """
        with self._noting_failure():
            pick = self._pick(var_name)
            for event in self._listen():
                if text := pick.take(event):
                    yield text
                if pick.done:
                    return
        if (whole := self._unstreamed(var_name)) is not None:
            yield whole

    async def _text_async_iter(self, var_name: str | None) -> AsyncIterator[str]:
        with self._noting_failure():
            pick = self._pick(var_name)
            async for event in self._listen():
                if text := pick.take(event):
                    yield text
                if pick.done:
                    return
        if (whole := self._unstreamed(var_name)) is not None:
            yield whole

    def _unstreamed(self, name: str | None) -> str | None:
        """The text of a variable that no event tells of: of a scope, or set by the program.

        Raises InvalidArgument for a value that is not one text.
        """
        if name is None or (variable := self._read(name)).streamed:
            return None
        if not isinstance(variable.raw, str):
            raise _not_one_text(name, variable)
        return variable.raw

    def _pick(self, name: str | None) -> _Pick:
        variable = self._own.get(name or "") or self._inherited.get(name or "")
        if name is not None and variable is not None and variable.samples > 1:
            raise _not_one_text(name, variable)
        if variable is None or variable.streamed:
            return _Pick(name, skip=max(0, variable.told - 1) if variable is not None else 0)
        return _Pick(name, skip=variable.told + 1)  # it is read whole at the end

    def _listen(self) -> Feed:
        feed: Feed = Feed()
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
        except KeyboardInterrupt as error:
            self._run.stop_for_reader(error)
            raise
        except BaseException as error:
            self._run.note_seen(error)
            raise

    def score(self, text: str, *, timeout: float | None = None) -> ChoiceScore:
        """Log-probabilities of `text` as a continuation, waited for. The branch stays."""
        self._raise_known_failure()
        score = Variable()
        self._executor.enqueue((score_of(text, timeout=timeout), score))
        self._wait_for(score)
        result: ChoiceScore = score.value
        return result

    @property
    def usage(self) -> Usage:
        """Tokens and time: on the main branch of the whole run, on another of its own work."""
        if self._run.is_outside():
            self._run.wait(self._run.ended)
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
            self._run.wait(self._run.ended)
        self._raise_run_failure()
        return self._run.value

    # Looking

    def show(self, *, children: bool = False, limit: int | None = SHOWN_CHARACTERS) -> None:
        """Print what was sent and written, segment by segment, and what the model did for each: how
        many prompt tokens came from the cache, how many were computed.

        children: with the branches that went on from here. limit: longer texts are shown with their
        middle left out; None shows all. Waits for what is queued; a failure is shown, not raised.

        >>> tips.run(topic="sleep").show(children=True)  # doctest: +SKIP
        """
        from rich.console import Console

        Console().print(self.picture(children=children, limit=limit))

    def picture(self, *, children: bool = False, limit: int | None = SHOWN_CHARACTERS) -> Picture:
        """What `show` prints, as a value that prints in a terminal and in a notebook."""
        self._wait_until_idle()
        return self._picture(children=children, limit=limit)

    def _picture(self, *, children: bool, limit: int | None) -> Picture:
        """As the branch is now, without waiting."""
        transcript, record = self._executor.transcript, tuple(self._run.record)
        picture = picture_of(
            transcript,
            record=record if children else (),
            of_run=sum(tuple(self._run.usages), Usage()) if self._executor.main else None,
            limit=limit,
        )
        if children:
            return picture
        return replace(picture, left_out=sum(each.parent is transcript for each in record))

    def __rich__(self) -> Tree:
        return self._picture(children=False, limit=SHOWN_CHARACTERS).__rich__()

    def _repr_html_(self) -> str:
        return self._picture(children=True, limit=SHOWN_CHARACTERS)._repr_html_()

    # How reading works

    def _variable(self, name: str) -> Variable:
        variable = self._own.get(name) or self._inherited.get(name)
        if variable is None and self._run.is_outside():
            self._run.wait(self._run.ended)
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

    def _wait_until_idle(self) -> None:
        """Wait until everything queued is done, well or not."""
        if self._run.is_outside():
            self._run.wait(self._run.ended)
        if not self._executor.is_idle():
            self._run.wait(self._executor.until_idle())

    def _wait_until_whole(self) -> None:
        """Wait until everything queued is done; raise if any of it failed."""
        self._wait_until_idle()
        self._raise_run_failure()
        self._raise_failure()

    def _raise_failure(self) -> None:
        error = self._executor.error
        if error is not None:
            self._run.note_seen(error)
            raise error

    def _raise_known_failure(self) -> None:
        """Refuse to go on with a branch that was cancelled, or whose failure the program knows."""
        if self._executor.cancelled:
            raise self._executor.error or cancellation(self.label)
        error = self._executor.error
        if error is not None and self._run.was_seen(error):
            raise error

    def _raise_run_failure(self) -> None:
        if self._run.failure is not None:
            self._run.note_seen(self._run.failure)
            raise self._run.failure

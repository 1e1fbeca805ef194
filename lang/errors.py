"""Every exception that a user of Stemma can meet: one family under `StemmaError`.

Raised by all floors of the house; imported by users as `stemma.errors`. An error names the thing,
the place and the remedy. Errors that belong to an operation of a program carry the place that
queued it (`site`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Site:
    """The program's own source line that queued an operation."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class StemmaError(Exception):
    """Base of the family.

    site: the program line that queued the failed operation. branch: the label of its branch.
    variable: the one that it would have written. state: the ProgramState of the run that failed.
    All are None where no program was involved.
    partial: what the operation had written until then. partials: the same by branch, of an error
    that has hit several, as the timeout of a run does.

    The same attributes are set on the errors of others that fail an operation, and a note on the
    exception says them in words.
    """

    site: Site | None = None
    branch: str | None = None
    variable: str | None = None
    partial: str = ""
    partials: Mapping[str, str] = MappingProxyType({})
    state: Any = None


class InvalidArgument(StemmaError, ValueError):
    """A parameter has a value that cannot be meant. Raised where it is written."""


class UnknownVariable(StemmaError, KeyError):
    """A variable is read that no operation of the branch defines."""

    def __str__(self) -> str:  # KeyError would print the repr of the sentence
        return str(self.args[0]) if self.args else ""


class Timeout(StemmaError, TimeoutError):
    """A time limit passed; the work was cancelled and its cache released. `partial` is the text
    generated until then.
    """


class TooFewBranches(StemmaError):
    """`first` or `race` did not find as many branches as were asked for.

    found: those that it found, as `Forks`. errors: why others failed, by label.
    """

    def __init__(
        self, message: str, *, found: Any = (), errors: Mapping[str, BaseException] | None = None
    ) -> None:
        super().__init__(message)
        self.found = found
        self.errors = dict(errors or {})


class Cancelled(StemmaError):
    """The work was cancelled. `partial` is the text generated until then."""

    def __init__(self, message: str, *, partial: str = "") -> None:
        super().__init__(message)
        self.partial = partial


class Truncated(StemmaError):
    """A value was read whose text was cut off before it had the shape that was asked for. Fails
    neither branch nor run.

    partial: the text. needed: how many more tokens would have closed it, where that is known; the
    message says so, too. values: of several samples the value of each, None for those that were cut
    off. find_needed: finds `needed` out, which can take a second: for whoever looks at the error.
    """

    def __init__(
        self,
        message: str,
        *,
        partial: str = "",
        needed: int | None = None,
        values: Sequence[Any] = (),
        find_needed: Callable[[], int | None] | None = None,
    ) -> None:
        super().__init__(message)
        self.partial = partial
        self.values = tuple(values)
        self._needed = needed
        self.find_needed = find_needed

    @property
    def needed(self) -> int | None:
        if (find := self.find_needed) is not None:
            self._needed = find()
            self.find_needed = None
        return self._needed

    def __str__(self) -> str:
        said = super().__str__()
        if self.needed is None:
            return said
        more = "1 more token" if self.needed == 1 else f"{self.needed} more tokens"
        return f"{said}; {more} would close it"

    def __reduce__(self) -> Any:
        """To be pickled it must know what only this process can find out."""
        self.needed  # noqa: B018
        return super().__reduce__()


class ConstraintError(StemmaError):
    """A regular expression, schema or grammar proves to be unusable while it is used; says where
    and what was expected.

    values: of several samples the value of each, None for those that have none.
    """

    values: tuple[Any, ...] = ()


class ContextOverflow(StemmaError):
    """Prompt and output do not fit the model's context. Carries both numbers."""

    def __init__(self, message: str, *, needed: int, limit: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.limit = limit


class UnsupportedByBackend(StemmaError):
    """The backend cannot do what was asked. Nothing is dropped silently."""


class ReplayMismatch(StemmaError):
    """A program that runs on a record asks what is not recorded; says what is most like it."""


class OutOfCacheMemory(StemmaError):
    """The KV pool can never hold the request. Carries both numbers, in tokens."""

    def __init__(self, message: str, *, needed: int, limit: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.limit = limit


class ModelLoadError(StemmaError):
    """A model cannot be found, fetched, read or run; says which and what to do."""


class SyntaxProblem(StemmaError):
    """A program's text is not well formed."""


class BackendClosed(StemmaError):
    """The backend was closed, or its process was forked, and takes no more work."""


class EngineInvariantError(StemmaError):
    """The engine found its own books wrong. A defect of Stemma: please report it with the
    message.
    """

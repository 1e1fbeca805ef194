"""What happens in a run, as typed events. `feed.py` carries them to readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened on the branch with that label."""

    branch: str


@dataclass(frozen=True, slots=True)
class TextAdded(Event):
    """The branch has grown by `text`; `variable` is the one that it belongs to, None for literals
    and for the marks around a reasoning that is kept apart.
    """

    text: str
    variable: str | None = None


@dataclass(frozen=True, slots=True)
class VariableStarted(Event):
    """The model begins to write the variable."""

    variable: str


@dataclass(frozen=True, slots=True)
class VariableFinished(Event):
    """The variable can be read. value: or the error that reading it raises."""

    variable: str
    value: Any


@dataclass(frozen=True, slots=True)
class Selected(Event):
    """A choice was made; `probabilities` has every choice."""

    variable: str | None
    choice: str
    probabilities: dict[str, float]


@dataclass(frozen=True, slots=True)
class Forked(Event):
    """The branch was split; `children` are the labels of the new branches."""

    children: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Joined(Event):
    """The branch has taken over the variables of `children`."""

    children: tuple[str, ...]
    variables: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """An operation of the branch failed, or its time was over, or that of the run."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """The program has cancelled the branch, or it lost a race: what is unfinished there never
    comes.
    """


@dataclass(frozen=True, slots=True)
class Ended(Event):
    """The run ended well: the last event. Where a run fails the iterator raises instead."""

    value: Any

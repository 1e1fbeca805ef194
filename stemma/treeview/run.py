"""A run of a program as a recording: a moment for its variables. Used by `stemma tree`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stemma.backend.local.cache.printing import count, visible
from stemma.interpreter.events import Event, VariableFinished
from stemma.treeview.recorder import Moment, Recorder

CAPTION_WIDTH = 160
EVERY_ONE = 40
"""So many variables have a moment each, the next so many every second, and so on: a long run has
few moments, and begins with all of them.
"""


def record_run(events: Iterable[Event], recorder: Recorder) -> Iterator[Moment]:
    """The moments of a run: before it, when variables are finished, and at its end.

    The engine does not wait: a moment is as near to its variable as we are to the engine.
    """
    yield recorder.note("Before the run")
    finished, told = 0, 0
    for event in events:
        if isinstance(event, VariableFinished):
            finished += 1
            if finished - told > told // EVERY_ONE:
                yield recorder.note(_title(event, finished - told), _caption(event))
                told = finished
    if told < finished or not recorder.is_up_to_date():
        yield recorder.note("The run has ended")


def _title(event: VariableFinished, new: int) -> str:
    name = f"{event.branch}: {event.variable}"
    return name if new == 1 else f"{count(new, 'variable')}, the last is {name}"


def _caption(event: VariableFinished) -> str:
    return visible(str(event.value), CAPTION_WIDTH)

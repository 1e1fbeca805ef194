"""`Stream`: a run in the background, as its events; made by `Program.stream`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from stemma.interpreter.events import Event, Feed
from stemma.interpreter.state import ProgramState


class Stream:
    """The events of all branches of a run, in order, for any number of readers; each gets them from
    the first on.

    Iterating raises the program's error at its end. `state` is the run's state; its reads wait.

    >>> async for event in tips.stream(topic="sleep"):  # doctest: +SKIP
    ...     print(event)
    """

    def __init__(self, state: ProgramState, feed: Feed[Event]) -> None:
        self.state = state
        self._feed = feed

    def __iter__(self) -> Iterator[Event]:
        try:
            yield from self._feed
        except KeyboardInterrupt:
            self.cancel()
            raise
        except Exception as error:
            self.state._run.note_seen(error)
            raise

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            async for event in self._feed:
                yield event
        except Exception as error:
            self.state._run.note_seen(error)
            raise

    def cancel(self) -> None:
        """Stop the run; readers then raise Cancelled."""
        self.state._run.cancel()

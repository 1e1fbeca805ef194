"""`Stream`: a run in the background, as its events; made by `Program.stream`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from stemma.interpreter.events import Event
from stemma.interpreter.feed import Feed
from stemma.interpreter.state import ProgramState
from stemma.lang.errors import Cancelled


class Stream:
    """The events of all branches of a run, in order, for any number of readers; each gets them from
    the first on.

    Iterating raises the program's error at its end. `state` is the run's state; its reads wait.
    Closing the stream stops the run, as does the end of its `with` block. So does losing it: where
    neither the stream nor its state nor a reader of them is there any more, as after a `break` out
    of `for event in program.stream(...)`, nothing is computed on.

    >>> with tips.stream(topic="sleep") as stream:  # doctest: +SKIP
    ...     for event in stream:
    ...         print(event)
    """

    def __init__(self, state: ProgramState, feed: Feed) -> None:
        self.state = state
        self._feed = feed

    def __iter__(self) -> Iterator[Event]:
        try:
            yield from self._feed
        except KeyboardInterrupt as error:
            self.state._run.stop_for_reader(error)
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
        """Stop the run, without waiting; readers then raise Cancelled. Harmless after the end."""
        self.state._run.interrupt(Cancelled("the stream was closed or cancelled"))

    def close(self) -> None:
        """Stop the run and wait until the backend has let go of its work."""
        self.cancel()
        self.state._run.until_idle().wait()

    async def aclose(self) -> None:
        """`close` for async code."""
        self.cancel()
        await self.state._run.until_idle().wait_async()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

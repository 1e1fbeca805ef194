"""The life of one branch: what is queued on it is begun in order, until it is done, fails or is
cancelled.

The base of `Executor`, which knows what operations do. The cursor is the head of the queue: it
stops at an operation that needs the model until the backend's handle resolves, and a new branch
starts when its parent's cursor reaches the fork.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial

from stemma.backend.base import Branch
from stemma.interpreter.events import Failed, Stopped
from stemma.interpreter.feed import Feed
from stemma.interpreter.flight import Flight
from stemma.interpreter.landing import broken_off
from stemma.interpreter.listeners import Listeners
from stemma.interpreter.run import Run, cancellation, ran_out
from stemma.interpreter.tasks import NOT_YET, Fork, Task, annotate
from stemma.interpreter.transcript import Transcript
from stemma.interpreter.variable import Variable


class Cursor(ABC):
    """One branch of a run.

    label: its place in the tree of branches. key: its seed, from which its draws and its forks
        derive theirs. main: it is the program's own branch.
    branch: None until the parent has come to the fork.
    error: why something that was queued will never be done. cancelled: the program wants no more of
        it, which is no failure.
    released: no program holds it any more.
    """

    def __init__(
        self, run: Run, label: str, key: int, *, branch: Branch | None = None, main: bool = False
    ) -> None:
        self.run = run
        self.label = label
        self.key = key
        self.main = main
        self.queue: deque[Task] = deque()
        self.branch = branch
        self.transcript = Transcript(label)
        self.error: BaseException | None = None
        self.cancelled = False
        self.released = self._closed = False
        # The last task that was queued, taken from the queue, and done when it was idle.
        self._queued: Task | None = None
        self._taken: Task | None = None
        self._done: Task | object = NOT_YET
        self._flight: Flight | None = None
        self._listeners = Listeners(label, run.feed)
        self._when_idle: list[Callable[[], object]] = []
        run.executors[self] = None

    def __del__(self) -> None:
        """It was not released, but went together with its state."""
        if self.branch is not None and not self._closed:
            self.run.dispatcher.call(self.branch.close)

    # From any thread

    def enqueue(self, *tasks: Task) -> None:
        if tasks:
            self.queue.extend(tasks)
            self._queued = tasks[-1]
            self.run.dispatcher.call(self.advance)

    def is_idle(self) -> bool:
        """True if all that was queued is done. False may also mean that this is not known yet."""
        return self._done is self._queued

    def until_idle(self) -> Variable:
        """A variable that is resolved once all that is queued now is done, or never will be."""
        idle = Variable()
        self.run.dispatcher.call(lambda: self.when_idle(idle.finish))
        return idle

    def cancel(self) -> None:
        """Stop this branch: the program wants no more of it."""
        self.cancelled = True
        self.run.dispatcher.call(self._cancel)

    def release(self) -> None:
        """No program holds this branch any more: close it when its work is done."""
        self.run.dispatcher.call(self._release)

    # On the dispatcher's thread only, from here on

    def start(self, branch: Branch, transcript: Transcript) -> None:
        """The parent has come to the fork."""
        if self.error is None:
            self.branch, self.transcript = branch, transcript
            self._listeners.catch_up(transcript, None)
            self.advance()
        else:
            branch.close()

    def advance(self) -> None:
        """Go on as far as possible."""
        while self.is_born():
            if self._flight is not None:
                if not self._flight.landed():
                    return
                flight, self._flight = self._flight, None
                flight.set_timer(None)
                if self.error is None:
                    self._land(flight)
            elif not self.queue:
                self._become_idle()
                return
            elif self.error is not None:
                self._drop(self._take(), self.error)
            elif (reason := self._takes_no_more()) is not None:
                self._end(reason)
            else:
                self._begin(self._take())

    def is_born(self) -> bool:
        return self.branch is not None or self.error is not None

    def when_idle(self, callback: Callable[[], object]) -> None:
        self._when_idle.append(callback)
        self.advance()

    def stop(self, error: BaseException, *, cancelled: bool = False) -> None:
        """Fail what is unfinished at once; idle when the backend has let go. A branch that has
        nothing unfinished stays as it is.
        """
        unfinished = self.branch is None or self._flight is not None or self.queue
        if self.error is None and unfinished:
            self.cancelled = self.cancelled or cancelled
            self._end(error)
        self.advance()

    def _abandon(self, flight: Flight) -> None:
        """Ended a while ago, and the backend still has not let go: go on without its answer."""
        if self._flight is flight:
            self._flight = None
            self.advance()

    def _run_out(self, flight: Flight, seconds: float) -> None:
        """The time of the operation is over."""
        if self._flight is flight and self.error is None and not flight.landed():
            self.stop(ran_out(flight.operation, seconds))

    def listen(self, feed: Feed, *, to_the_end: bool) -> None:
        """Tell `feed` the whole text of the branch from its first piece on.

        Until all is done that is queued now, or, `to_the_end`, until the run ends.
        """
        self._listeners.add(feed)
        if self.is_born():
            self._listeners.tell_all(feed, self.transcript, self._flight)
        if not to_the_end:
            self.when_idle(lambda: self._listeners.close(feed, self.run.failure or self.error))
        elif self.run.ended.done:
            self.close_feeds()

    def close_feeds(self) -> None:
        """The run has ended."""
        self._listeners.close_all(self.run.failure or self.error)

    def _cancel(self) -> None:
        """What it may have failed by before fails nobody, either."""
        if self.error is not None:
            self.run.untold.told(self.error)
        text = self._flight.text_so_far() if self._flight is not None else ""
        self.stop(cancellation(self.label, text))

    def _takes_no_more(self) -> BaseException | None:
        """Why nothing more is begun here, though all that was is done."""
        self.cancelled = self.cancelled or self._is_of_no_use()
        return self.run.cut_short() or (cancellation(self.label) if self.cancelled else None)

    def _release(self) -> None:
        self.released = True
        if self._is_of_no_use():
            self.stop(cancellation(self.label), cancelled=True)
        self.advance()

    def _is_of_no_use(self) -> bool:
        """The run has ended, and of what it goes on with here nobody can ever read anything."""
        return (
            self.released
            and self.run.finished.done
            and all(
                child.released
                for operation, _ in self.queue
                if isinstance(operation, Fork)
                for child in operation.children
            )
        )

    def _take(self) -> Task:
        self._taken = self.queue.popleft()
        return self._taken

    def _become_idle(self) -> None:
        self._done = self._taken
        over = self.released or self.cancelled or self.error is not None
        if self.branch is not None and over:
            self._close(self.branch)
        if self.released:
            self.run.executors.pop(self, None)
        waiting, self._when_idle = self._when_idle, []
        for callback in waiting:
            callback()

    def _close(self, branch: Branch) -> None:
        self._closed = True
        try:
            branch.close()
        except Exception as error:  # nobody reads a closing: the end of the run tells
            self.run.note_failure(error)

    # What operations do

    @abstractmethod
    def _begin(self, task: Task) -> None:
        """Do an operation, or begin it where it needs the model."""

    @abstractmethod
    def _land(self, flight: Flight) -> None:
        """The backend is through with an operation."""

    # Failure

    def _fail(self, error: BaseException, task: Task, text: str = "") -> None:
        """The operation failed after writing `text`, and with it the branch."""
        annotate(error, task[0], self.label, text)
        self._end(error)  # first: who reads the variable must find the branch failed
        self._drop(task, error)

    def _end(self, error: BaseException) -> None:
        """Nothing more is done here: what is under way and what is queued fails."""
        self.error = error
        if (flight := self._flight) is not None:
            text = self._break_off(flight)
            annotate(error, flight.operation, self.label, text)
            flight.cancel()
            flight.set_timer(self.run.settle(partial(self._abandon, flight)))
            self._drop((flight.operation, flight.variable), error)
        # Nobody knows of a branch yet that waits for its fork.
        if self._listeners and self.branch is not None:
            stopped = self.cancelled
            self._listeners.tell(Stopped(self.label) if stopped else Failed(self.label, error))
        self.transcript.failure = f"{type(error).__name__}: {error}"
        if not self.cancelled:
            self.run.note_failure(error, self)
        while self.queue:
            self._drop(self._take(), error)

    def _drop(self, task: Task, error: BaseException) -> None:
        """An operation that is not done: neither are its variable and its branches."""
        operation, variable = task
        if variable is not None:
            variable.fail(error)
        if isinstance(operation, Fork):
            for child in operation.children:
                self.run.dispatcher.call(partial(child.stop, error, cancelled=self.cancelled))

    def _break_off(self, flight: Flight) -> str:
        """What it has written until now stays in the branch's picture, and nothing follows it."""
        text = flight.text_so_far()
        flight.finish_relays(text)
        self.transcript.own += broken_off(flight, text)
        return text

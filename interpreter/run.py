"""One run of a program: its backend, seed and branches, and how it ends.

Made by `program.py`; states and executors refer to it. Knows which branches are at work, which
failed, and whether somebody was told.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from stemma.backend.base import Backend, Usage
from stemma.backend.recording import RecordingBackend
from stemma.interpreter.dispatcher import Timer, dispatcher
from stemma.interpreter.events import Ended
from stemma.interpreter.feed import Feed
from stemma.interpreter.tasks import hand_on
from stemma.interpreter.transcript import Transcript
from stemma.interpreter.untold import Untold
from stemma.interpreter.variable import Variable
from stemma.lang.errors import Cancelled, StemmaError, Timeout
from stemma.lang.ops import Gen, Score, Select
from stemma.lang.sampling import SamplingParams

if TYPE_CHECKING:
    from stemma.interpreter.cursor import Cursor
    from stemma.interpreter.lasting_shapes import ShapeCheck

# How long a cancelled run waits for the backend to let go of its work before it goes on without.
SETTLE_S = 10.0

# Of how many branches a run keeps the texts, once nothing else does: more than anybody looks at.
RECORDED_BRANCHES = 10_000


# Of a streamed run, in the context of its body.
_inside: ContextVar[Run | None] = ContextVar("stemma_run", default=None)


class Run:
    """What all branches of a run share.

    name: of the program, and the label of its main branch.
    seed: of the run; every branch and operation derives its own.
    sampling: defaults of its generations.
    feed: the events, where somebody may read them.
    background: it is streamed: its body runs for itself, and all others wait for it.
    finished: resolved when the run has ended, well or not. ended: when those outside need not wait
        any more, be it that the body of a cancelled run still sleeps. stopping: when it is
        cancelled.
    stopped: why the run was cancelled. failure: what the end of a streamed run has raised, for all
        who read it.
    untold: failures that no caller is there to raise to.
    check_shape: refuses generations of the program's own branch that a checkpoint could not keep.
    record: the texts of the branches that were forked, also of those that nothing holds any more;
        of very many the latest, for a run may go on for days. fork_numbers: one for each fork.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        seed: int,
        sampling: SamplingParams | None = None,
        asynchronous: bool = False,
        feed: Feed | None = None,
    ) -> None:
        self.backend = backend
        self.name = name
        self.seed = seed
        self.sampling = sampling
        self.asynchronous = asynchronous
        self.feed = feed
        self.background = False
        self.dispatcher = dispatcher()
        self.finished = Variable()
        self.ended = Variable()
        self.stopping = Variable()
        self.stopped: BaseException | None = None
        self.failure: BaseException | None = None
        self.value: Any = None
        self.executors: dict[Cursor, None] = {}
        self.usages: list[Usage] = []
        self.record: list[Transcript] = []
        self.fork_numbers = itertools.count()
        self.untold = Untold(name)
        self.check_shape: ShapeCheck | None = None
        self._failures: list[tuple[BaseException, Cursor | None]] = []
        self._seen: dict[int, BaseException] = {}  # by id; held, so that an id stays one error's
        self._told: set[int] = set()  # those of them that others than a streamed body have read
        self._timer: Timer | None = None

    # Reading

    def wait(self, variable: Variable) -> None:
        """Block until `variable` is resolved."""
        if variable.done:
            return
        self.dispatcher.check_may_wait()
        if self.asynchronous and in_event_loop():
            raise StemmaError(
                "an async program would block its event loop by waiting here: "
                'write `await s.get("x")` (or `await s.wait()` for the whole branch) first'
            )
        try:
            variable.wait()
        except KeyboardInterrupt as error:
            self.stop_for_reader(error)
            raise

    def stop_for_reader(self, error: KeyboardInterrupt) -> None:
        """Ctrl-C hit who reads a streamed run from outside: stop it, and say on `error` how far its
        branches were. A run that is no longer, or not, streamed is its body's or its caller's.
        """
        if not self.is_outside():
            return
        self.interrupt(Cancelled("whoever read the run was interrupted by KeyboardInterrupt"))
        self.until_idle().wait()
        if self.stopped is not None:
            hand_on(self.stopped, error)

    def note_failure(self, error: BaseException, executor: Cursor | None = None) -> None:
        """Dispatcher only: what `executor` did failed; without one, something nobody asked for."""
        if self.finished.done:
            self._note_untold(error)
        else:
            self._failures.append((error, executor))

    def note_seen(self, error: BaseException) -> None:
        """The program was told of `error` by a read or a join.

        What the body of a streamed run reads, nobody else has been told.
        """
        self._seen[id(error)] = error
        if self.background and not self.finished.done and _inside.get() is self:
            return
        self._told.add(id(error))
        self.untold.told(error)
        if (
            error is self.stopped and self.failure is not None
        ):  # it tells what the run has failed by
            self.untold.told(self.failure)

    def was_seen(self, error: BaseException) -> bool:
        return id(error) in self._seen

    def keep(self, transcript: Transcript) -> None:
        """Dispatcher only: the text of a branch that was forked."""
        self.record.append(transcript)
        if len(self.record) > RECORDED_BRANCHES:
            del self.record[: RECORDED_BRANCHES // 2]

    # Ending

    def limit_time(self, seconds: float) -> None:
        """Cancel everything after `seconds`."""
        self._timer = self.dispatcher.call_in(seconds, lambda: self._interrupt(timed_out(seconds)))

    def interrupt(self, error: BaseException) -> None:
        """`cancel` from outside: readers of a streamed run are told when its branches have let go,
        whatever its body still does.
        """
        self.dispatcher.call(lambda: self._interrupt(error))

    def _interrupt(self, error: BaseException) -> None:
        self._stop(error)
        if self.stopped is error and self.background:
            self.failure = error
            _count_down(list(self.executors), self._end_for_readers)

    def cancel(self, error: BaseException | None = None) -> None:
        """Stop all branches; what is unfinished raises `error`. Harmless after the end."""
        reason = error if error is not None else Cancelled("the run was cancelled")
        self.dispatcher.call(lambda: self._stop(reason))

    def cut_short(self) -> BaseException | None:
        """Why the branches begin nothing more; None again once the run has ended: what is left of
        it can go on.
        """
        return None if self.finished.done else self.stopped

    def _stop(self, error: BaseException) -> None:
        if self.stopped is None and not self.finished.done:
            self.stopped = error
            for executor in list(self.executors):
                executor.stop(error)
            self.stopping.finish()

    def settle(self, job: Callable[[], object]) -> Timer:
        """Do `job` when a backend has had the time to let go."""
        return self.dispatcher.call_in(SETTLE_S, job)

    def cancel_branches(self, labels: Iterable[str]) -> None:
        """Stop the branches with these labels, and all that have come of them."""
        lost = set(labels)
        failed = [executor for _, executor in self._failures if executor is not None]
        for executor in list(self.executors) + failed:
            parts = executor.label.split("/")
            if any("/".join(parts[:end]) in lost for end in range(1, len(parts) + 1)):
                executor.cancel()

    def until_idle(self) -> Variable:
        """A variable resolved once no branch has anything left to do; soon after `cancel`."""
        idle = Variable()
        self.dispatcher.call(lambda: _count_down(list(self.executors), idle.finish))
        return idle

    def unread_failure(self) -> BaseException | None:
        """Of an idle run, what its end has to raise: of the main branch, or told to nobody."""
        if self.stopped is not None:
            return self.stopped
        unread: list[BaseException] = []
        for error, executor in self._failures:
            if executor is not None and executor.main:
                return error
            cancelled = executor is not None and executor.cancelled
            if not cancelled and not self.was_seen(error):
                unread.append(error)
        return unread[0] if unread else None

    def finish(self, failure: BaseException | None = None) -> None:
        """The run has ended; readers of what it did not produce are told `failure`."""
        if self._timer is not None:
            self._timer.cancel()
        # Of other runs the caller has it: a state that held it, and is held by it, would live on.
        if self.background and self.failure is None:
            self.failure = failure
        self._failures.clear()
        self.end_record()
        self.finished.finish()
        if self.failure is not None:
            self._note_untold(self.failure)
        self.dispatcher.call(self._end_for_readers)

    def end_record(self) -> None:
        """Of a run that is recorded: others may record into the file."""
        if isinstance(self.backend, RecordingBackend):
            self.backend.recording.let_go()

    def _note_untold(self, error: BaseException) -> None:
        """First noted, then looked: a reader that is told meanwhile does it the other way round."""
        self.untold.add(error)
        if id(error) in self._told or (self.stopped is not None and id(self.stopped) in self._told):
            self.untold.told(error)

    def _end_for_readers(self) -> None:
        """First resolved, then closed: whoever has read to the end can read on without waiting."""
        self.ended.finish()
        for executor in list(self.executors):
            executor.close_feeds()
        if self.feed is not None:
            if self.failure is None:
                self.feed.put(Ended(self.name, self.value))
            self.feed.close(self.failure)

    def enter(self) -> None:
        """The body of a streamed run begins in this context."""
        _inside.set(self)

    def is_outside(self) -> bool:
        """True for whoever looks at a streamed run from outside while its body still runs."""
        return self.background and not self.ended.done and _inside.get() is not self


def _count_down(executors: Iterable[Cursor], done: Callable[[], object]) -> None:
    """Call `done()` once every executor is idle. Dispatcher only."""
    left = 1

    def one_less() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done()

    for executor in executors:
        left += 1
        executor.when_idle(one_less)
    one_less()


def cancellation(label: str, partial: str = "") -> Cancelled:
    """What a branch raises that the program has cancelled."""
    return Cancelled(f"branch {label} was cancelled", partial=partial)


def timed_out(seconds: float) -> Timeout:
    return Timeout(
        f"the run did not end within its timeout of {seconds:g} s: give it more time, or less to "
        "write by max_tokens; error.state has what was finished"
    )


def ran_out(operation: Gen | Select | Score, seconds: float) -> Timeout:
    """What an operation raises that had a time limit of its own."""
    what = type(operation).__name__.lower() + (f" of {operation.name!r}" if operation.name else "")
    return Timeout(
        f"{what} did not end within its timeout of {seconds:g} s: give it more time, or less to "
        "do; error.partial is what it had written"
    )


def in_event_loop() -> bool:
    """True in a thread whose event loop is running right now."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

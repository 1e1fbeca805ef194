"""Which of several branches are done first and satisfy: what `Forks.first` and `Forks.race` wait
for.

Owned by one call of them; branches report from the dispatcher's thread, all else happens in the
caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from stemma.interpreter.run import cancellation
from stemma.interpreter.state import ProgramState
from stemma.interpreter.variable import Variable
from stemma.lang.errors import InvalidArgument


class Contest:
    """The branches in the order in which they are done; the caller says which of them it accepts.

    They are taken in the order of their reports, also where several are done before the caller
    looks: which ones are found does not depend on when it looks.

    more: resolved when there is something to take; renewed by `take`.
    found: places of those accepted. errors: by place, why others have failed or were cancelled.
    """

    def __init__(self, what: str, states: Sequence[ProgramState], wanted: int) -> None:
        if type(wanted) is not int or not 1 <= wanted <= len(states):
            raise InvalidArgument(
                f"{what}: must be at least 1, and at most the number of branches, {len(states)}"
            )
        self._states = states
        self._wanted = wanted
        self._left = set(range(len(states)))
        self._reports: deque[int] = deque()
        self.more = Variable()
        self.found: list[int] = []
        self.errors: dict[int, BaseException] = {}
        for place, state in enumerate(states):
            state._executor.until_idle().on_done(partial(self._report, place))

    def _report(self, place: int) -> None:
        self._reports.append(place)
        self.more.finish()

    def is_open(self) -> bool:
        """False once enough were accepted, or all have been taken."""
        return len(self.found) < self._wanted and bool(self._left)

    def take(self) -> int | None:
        """The place of the next branch that is done well; None if there is none by now.

        A branch that has failed is passed over, and its error counts as told. Raises what has ended
        the whole run.
        """
        self.more = Variable()  # first renewed, then looked: a report in between resolves the new
        while self._reports:
            place = self._reports.popleft()
            if place not in self._left:  # told twice
                continue
            self._left.remove(place)
            state = self._states[place]
            error = state._executor.error
            if error is None and state._executor.cancelled:
                error = cancellation(state.label)
            if error is None:
                return place
            run = state._run
            run.note_seen(error)
            if error is run.cut_short():
                raise error
            self.errors[place] = error
        if not self._left:  # there will be no report any more
            self.more.finish()
        return None

    def accept(self, place: int) -> None:
        self.found.append(place)

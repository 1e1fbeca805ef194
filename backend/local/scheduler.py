"""Who runs in the next step, and with how many tokens. Called by the engine, between forward
passes.

    waiting --admit--> running --finish--> gone
       ^------retract------'

Continuous batching with chunked prefill: every running request that decodes gets its one row; what
is left of `max_step_tokens` goes to prompts, oldest first, then to admissions in the order of the
policy.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from stemma.backend.local.batch import Entry
from stemma.backend.local.memory import DECODE_RUN, RequestMemory
from stemma.backend.local.request import IntArray, Request, State
from stemma.backend.local.speculation import NO_DRAFT, Speculation
from stemma.backend.local.waiting_order import (
    MAX_OVERTAKEN,
    ORDERED_WINDOW,
    WAITING_ORDERS,
    WaitingOrder,
)
from stemma.lang.errors import EngineInvariantError, InvalidArgument, OutOfCacheMemory


@dataclass(slots=True)
class Step:
    """The requests of one forward pass; `entries[i]` says what `requests[i]` computes.

    slots: those that prompts of the step fill. Two requests that fill the same one share its row.
    """

    requests: list[Request] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    slots: set[int] = field(default_factory=set)

    def add(self, request: Request, end: int, draft: IntArray = NO_DRAFT) -> None:
        if len(draft):
            request.take_draft(draft)
            end += len(draft)
        request.scheduled_end = end
        tokens, table = request.tokens.view(end), request.table.view(end)
        self.requests.append(request)
        self.entries.append(Entry(tokens, table, request.computed))

    def fill(self, slots: Sequence[int]) -> list[tuple[bool, int]]:
        """Take note of a request's slots: by runs, whether another request fills them already, and
        how many.
        """
        runs = [(False, len(slots))]
        if not self.slots.isdisjoint(slots):
            runs = [
                (shared, len(list(run))) for shared, run in groupby(slots, self.slots.__contains__)
            ]
        self.slots.update(slots)
        return runs


class StepFailed(Exception):
    """Planning a step went wrong at `request`, which is the last of the step's. The step must be
    rolled back. `__cause__`: what went wrong.
    """

    def __init__(self, step: Step, request: Request) -> None:
        super().__init__("the step could not be planned")
        step.requests.append(request)
        self.step = step
        self.request = request


class Scheduler:
    """Queues and memory of all requests.

    policy: the order of admission, one of `WAITING_ORDERS`, see `waiting_order.py`.
    max_overtaken: the bound B on overtaking. speculation: drafts for what decodes; None drafts
    nothing.

    Whatever the order, at most B requests overtake one that waits, each admission counted: that is
    how often, in all its life, one that ranks behind it is admitted while it waits. Proof. Its
    count grows by one at each such admission and never falls. Let it be B. If the request is among
    the first ORDERED_WINDOW waiting by rank, `_urgent_first` puts it before all whose count is
    less, and of those whose count is B before all that rank behind it. The queue is sorted so when
    a step begins to admit and whenever a count reaches B, and the first that does not fit ends the
    admissions of the step. So all that are admitted before it rank before it. If it is not among
    the first, only such are looked at as rank before it. Either way its count stays B. QED.

    It does not wait forever either: while it waits at B, only requests that rank before it are
    admitted. There are finitely many of those where the rank is the arrival, each produces finitely
    many tokens, and once nothing runs, it is admitted whatever is free, for what can never fit was
    refused. (Under "priority" more may come that rank before it; then it waits as it should.)
    """

    def __init__(
        self,
        memory: RequestMemory,
        *,
        policy: str | WaitingOrder,
        max_running: int,
        max_step_tokens: int,
        max_overtaken: int = MAX_OVERTAKEN,
        speculation: Speculation | None = None,
    ) -> None:
        if isinstance(policy, str) and policy not in WAITING_ORDERS:
            names = ", ".join(WAITING_ORDERS)
            raise InvalidArgument(f"policy={policy!r}: must be one of {names}")
        if max_running < 1:
            raise InvalidArgument(f"max_running={max_running}: must be at least 1")
        if max_step_tokens < max_running + memory.page_size:
            raise InvalidArgument(
                f"max_step_tokens={max_step_tokens}: must hold a row for each of "
                f"max_running={max_running} requests and one page of {memory.page_size}"
            )
        self.memory = memory
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.retractions = 0
        self.order = WAITING_ORDERS[policy] if isinstance(policy, str) else policy
        self.max_overtaken = max_overtaken
        self.speculation = speculation
        self._arrivals = 0
        self._blocked = False
        self._ended_pins = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- in and out

    def submit(self, request: Request) -> None:
        self._arrivals += 1
        request.arrival = self._arrivals
        priority = request.priority if self.order.by_priority else 0
        request.rank = (-priority, request.arrival)
        request.state = State.WAITING
        self._queue(request)
        self._blocked = False

    def finish(self, request: Request) -> None:
        """Take a request out, in whatever state; what it computed stays in the tree."""
        if request.state is State.FINISHED:
            return
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
        self.memory.release(request)
        request.state = State.FINISHED
        self._blocked = False

    def commit(self, step: Step) -> None:
        """The step's forward pass went well: its tokens are computed. Which of a draft stay is for
        the caller to say.
        """
        self.memory.cache.commit()
        for request in step.requests:
            request.computed = request.scheduled_end - request.drafted

    def rollback(self, step: Step, *, failed: Collection[Request]) -> None:
        """The step went wrong: nothing of it stays in the tree. The failed requests are taken out,
        the others wait.
        """
        for request in step.requests:
            self.running.remove(request)
            request.drop_draft()
            self.memory.discard(request)
            if request in failed:
                request.state = State.FINISHED
            else:
                self._requeue(request)
        self.memory.cache.rollback()
        self._blocked = False

    # -- one step

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can run. Raises StepFailed where slots cannot be had
        for another reason than that there are too few.
        """
        self._look_at_pins()
        step = Step()
        retractions = self.retractions
        running = [(request, request.is_decoding) for request in self.running]
        decoding = sum(decodes for _, decodes in running)
        budget = self.max_step_tokens - decoding
        if self.speculation is not None:
            self.speculation.begin(decoding)
        for request, decodes in running:  # by rank: victims are always later in the list
            if request.state is State.RUNNING:
                go_on = self._decode if decodes else self._continue
                budget -= go_on(request, step, budget)
        if self.retractions == retractions:
            self._admit(step, budget)
        return step if step.requests else None

    def _look_at_pins(self) -> None:
        """Where pins have ended there is room to look at again."""
        pins = self.memory.pins
        pins.expire()
        self._blocked = self._blocked and pins.ended == self._ended_pins
        self._ended_pins = pins.ended

    def _continue(self, request: Request, step: Step, budget: int) -> int:
        """The next rows of a prompt; returns how many of the prefill budget they take."""
        if self.memory.found(request) > request.computed:  # another one computed it, or does so now
            match = self.memory.match(request)
            self.memory.attach(request, match)
            request.count(0, match.length, cached=True)
        return self._add_chunk(request, step, budget, may_retract=True)

    def _decode(self, request: Request, step: Step, budget: int) -> int:
        """A row for the last token, which none of the budget pays for, and rows for a draft behind
        it where there is room: nothing goes for a guess.
        """
        end, slots = request.known_end, request.table.size
        draft = NO_DRAFT
        if self.speculation is not None:
            room = slots - end + self.memory.allocator.free_tokens
            limit = min(budget, request.remaining_output - 1, room)
            if limit > 0:
                draft = self.speculation.draft(request, limit)
                if request.guide is not None:
                    draft = draft[: request.guide.allowed_length(draft)]
        if end + len(draft) > slots:  # seldom, for slots are taken by the run
            spare = min(DECODE_RUN, request.remaining_output) - 1 - len(draft)
            if not self._grow(request, step, end + len(draft), spare=max(spare, 0)):
                draft = NO_DRAFT
                if not self._make_room(request, step, end):
                    return 0
        step.add(request, end, draft)
        return len(draft)

    def _add_chunk(self, request: Request, step: Step, budget: int, *, may_retract: bool) -> int:
        """Compute the next part of the prompt, after what is computed or pending; returns its
        rows.
        """
        start = max(request.computed, request.shared)
        end = request.known_end
        if end - start > budget:
            end = max(start, self.memory.floor(min(start + budget, request.draws_from)))
        make_room = self._make_room if may_retract else self._grow
        room = make_room(request, step, end)
        if request.state is not State.RUNNING:
            return 0
        if not room:
            end = start  # no rows of its own now, but those it shares still belong to the step
        self.memory.publish(request, min(end, request.publish_end))
        at = start
        for shared, length in step.fill(request.table.view(end)[start:].tolist()):
            request.count(at, at + length, cached=shared)
            at += length
        # Pending rows of others may reach further than the rows of a part may.
        stop = end if end == request.known_end else min(end, request.draws_from)
        if stop > request.computed:
            step.add(request, stop)
        return end - start

    def _grow(self, request: Request, step: Step, end: int, *, spare: int = 0) -> bool:
        """Slots up to `end`, if there are so many."""
        try:
            return self.memory.grow(request, end, spare=spare)
        except EngineInvariantError:
            raise
        except Exception as error:
            raise StepFailed(step, request) from error

    def _make_room(self, request: Request, step: Step, end: int, *, spare: int = 0) -> bool:
        """Slots up to `end`, at the cost of those that rank behind it if need be. False: it was
        taken out itself.
        """
        while not self._grow(request, step, end, spare=spare):
            victim = max(self.running, key=_rank)
            if len(self.running) == 1:
                self._refuse(request)
            else:
                self._retract(victim)
            if victim is request:
                return False
        return True

    def _retract(self, request: Request) -> None:
        """Back to the queue. What it computed stays in the tree as ordinary cache and is matched
        when it resumes.
        """
        self.running.remove(request)
        self.memory.release(request)
        self._requeue(request)
        self.retractions += 1

    def _requeue(self, request: Request) -> None:
        request.publish_end = request.known_end
        request.state = State.WAITING
        self._queue(request)

    def _queue(self, request: Request) -> None:
        insort(self.waiting, request, key=_rank)

    # -- admission

    def _admit(self, step: Step, budget: int) -> None:
        full = budget <= 0 or len(self.running) >= self.max_running
        if self._blocked or full or not self.waiting:
            return
        growth = sum(map(self._growth, self.running))
        queue = self.order.sort(self.waiting[:ORDERED_WINDOW], self.memory)
        queue.sort(key=self._urgent_first)
        while queue and budget > 0 and len(self.running) < self.max_running:
            request = queue.pop(0)
            match = self.memory.match(request)
            self.memory.attach(request, match)
            if self.running and self.memory.available < growth + self._growth(request):
                self.memory.release(request)
                self._blocked = True
                break
            growth += self._growth(request)
            self.waiting.remove(request)
            if self._overtake(request):
                queue.sort(key=self._urgent_first)
            request.state = State.RUNNING
            insort(self.running, request, key=_rank)
            request.count(0, match.length, cached=True)
            if request.unaligned_tokens is None:
                request.unaligned_tokens = self.memory.unaligned(request, match)
            before = len(request.table)
            budget -= self._add_chunk(request, step, budget, may_retract=False)
            growth -= len(request.table) - before

    def _overtake(self, request: Request) -> bool:
        """Count an admission with all that it overtakes; whether one of them is urgent now."""
        overtaken = self.waiting[: bisect_left(self.waiting, request.rank, key=_rank)]
        for other in overtaken:
            other.overtaken += 1
        return any(other.overtaken == self.max_overtaken for other in overtaken)

    def _urgent_first(self, request: Request) -> tuple[int, ...]:
        """The key by which urgent requests come first, by rank; the order of others stays."""
        return (0, *request.rank) if request.overtaken >= self.max_overtaken else (1,)

    def _growth(self, request: Request) -> int:
        """Slots that a request will ask for before long: the rest of its prompt and a while of
        decoding.
        """
        end = request.known_end + min(2 * DECODE_RUN, request.remaining_output)
        return max(0, self.memory.ceil(end) - len(request.table))

    def _refuse(self, request: Request) -> None:
        """Fail a request that does not fit though nothing else runs."""
        need, limit = request.known_end, self.memory.capacity
        pinned = self.memory.pins.tokens
        but = f", of which {pinned} are pinned," if pinned else ""
        self.finish(request)
        request.on_error(
            OutOfCacheMemory(
                f"a request of {need} tokens does not fit the KV pool of {limit} tokens{but} "
                "though nothing else runs; "
                f"{'release pins, ' if pinned else ''}raise kv_tokens or shorten the request",
                needed=need,
                limit=limit,
            )
        )


def _rank(request: Request) -> tuple[int, int]:
    return request.rank

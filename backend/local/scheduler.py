"""Who runs in the next step, and with how many tokens. Called by the engine, between forward
passes.

    waiting --admit--> running --finish--> gone
       ^------retract------'

Continuous batching with chunked prefill: every running request that decodes gets its one row; what
is left of `max_step_tokens` goes to prompts, oldest first, then to admissions in the order of the
policy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from stemma.backend.local.batch import Entry
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.backend.local.memory import DECODE_RUN, RequestMemory
from stemma.backend.local.request import Request, State
from stemma.lang.errors import InvalidArgument, OutOfCacheMemory

MAX_OVERTAKEN = 128
"""Admissions of later arrivals that a waiting request lets pass before nobody is admitted ahead of
it.
"""

AGING_TOKENS = 64
"""What one overtaking is worth in the lpm order, in matched tokens."""

ORDERED_WINDOW = 256
"""How many of the oldest waiting requests lpm looks at; the others wait behind them in order of
arrival.
"""


@dataclass(slots=True)
class Step:
    """The requests of one forward pass; `entries[i]` says what `requests[i]` computes.

    slots: those that prompts of the step fill. Two requests that fill the same one share its row.
    """

    requests: list[Request] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    slots: set[int] = field(default_factory=set)

    def add(self, request: Request, end: int) -> None:
        request.scheduled_end = end
        tokens, table = request.tokens.view(end), request.table.view(end)
        self.requests.append(request)
        self.entries.append(Entry(token_ids=tokens, table=table, computed=request.computed))

    def fill(self, slots: Sequence[int]) -> int:
        """Take note of a request's slots; how many leading ones another request fills already."""
        shared = next((i for i, slot in enumerate(slots) if slot not in self.slots), len(slots))
        self.slots.update(slots[shared:])
        return shared


class Scheduler:
    """Queues and memory of all requests.

    policy:
        "lpm": longest prefix match first, with ageing: the order is by matched + AGING_TOKENS *
        overtaken,
            descending, where `overtaken` counts admissions of requests that arrived later. A
            request whose count reaches MAX_OVERTAKEN is urgent: urgent ones go first, in order of
            arrival, and while the first of them does not fit nobody is admitted. So at most
            MAX_OVERTAKEN later arrivals, plus the rest of one step's admissions, are ever admitted
            before it. Source: SGLang (Zheng et al. 2024, section 3), which has no bound.
        "fcfs": first come, first served.
    """

    def __init__(
        self, memory: RequestMemory, *, policy: str, max_running: int, max_step_tokens: int
    ) -> None:
        orders: dict[str, Callable[[], Iterable[Request]]] = {
            "lpm": self._longest_prefix_first,
            "fcfs": lambda: self.waiting,
        }
        if policy not in orders:
            raise InvalidArgument(f"policy={policy!r}: must be one of {', '.join(sorted(orders))}")
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
        self._order = orders[policy]
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
        self.waiting.append(request)
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
        """The step's forward pass went well: its tokens are computed."""
        self.memory.cache.commit()
        for request in step.requests:
            request.computed = request.scheduled_end

    def rollback(self, step: Step, *, failed: Collection[Request]) -> None:
        """The step went wrong: nothing of it stays in the tree. The failed requests are taken out,
        the others wait.
        """
        for request in step.requests:
            self.running.remove(request)
            self.memory.discard(request)
            if request in failed:
                request.state = State.FINISHED
            else:
                self._requeue(request)
        self.memory.cache.rollback()
        self._blocked = False

    # -- one step

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can run."""
        self._look_at_pins()
        step = Step()
        retractions = self.retractions
        budget = self.max_step_tokens - sum(r.is_decoding for r in self.running)
        for request in list(self.running):  # oldest first: victims are always later in the list
            if request.state is State.RUNNING:
                budget -= self._continue(request, step, budget)
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
        """Give a running request its rows; returns how many of the prefill budget it takes."""
        if request.is_decoding:
            end = request.known_end
            spare = min(DECODE_RUN, request.remaining_output) - 1
            if self._make_room(request, end, spare=spare):
                step.add(request, end)
            return 0
        if self.memory.found(request) > request.computed:  # another one computed it, or does so now
            match = self.memory.match(request)
            self.memory.attach(request, match)
            request.count(0, match.length, cached=True)
        return self._add_chunk(request, step, budget, may_retract=True)

    def _add_chunk(self, request: Request, step: Step, budget: int, *, may_retract: bool) -> int:
        """Compute the next part of the prompt, after what is computed or pending; returns its
        rows.
        """
        start = max(request.computed, request.shared)
        end = request.known_end
        if end - start > budget:
            end = max(start, self.memory.floor(min(start + budget, request.draws_from)))
        room = self._make_room(request, end) if may_retract else self.memory.grow(request, end)
        if request.state is not State.RUNNING:
            return 0
        if not room:
            end = start  # no rows of its own now, but those it shares still belong to the step
        self.memory.publish(request, min(end, request.publish_end))
        own = start + step.fill(request.table.view(end)[start:].tolist())
        request.count(start, own, cached=True)
        request.count(own, end, cached=False)
        # Pending rows of others may reach further than the rows of a part may.
        stop = end if end == request.known_end else min(end, request.draws_from)
        if stop > request.computed:
            step.add(request, stop)
        return end - start

    def _make_room(self, request: Request, end: int, *, spare: int = 0) -> bool:
        """Slots up to `end`, at the cost of later arrivals if need be. False: it was taken out
        itself.
        """
        while not self.memory.grow(request, end, spare=spare):
            victim = max(self.running, key=lambda r: r.arrival)
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
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: r.arrival)

    # -- admission

    def _admit(self, step: Step, budget: int) -> None:
        full = budget <= 0 or len(self.running) >= self.max_running
        if self._blocked or full or not self.waiting:
            return
        growth = sum(map(self._growth, self.running))
        for request in list(self._order()):
            if budget <= 0 or len(self.running) >= self.max_running:
                break
            match = self.memory.match(request)
            self.memory.attach(request, match)
            if self.running and self.memory.available < growth + self._growth(request):
                self.memory.release(request)
                self._blocked = True
                break
            growth += self._growth(request)
            self.waiting.remove(request)
            for other in self.waiting:  # in order of arrival, so few stand before a chosen one
                if other.arrival > request.arrival:
                    break
                other.overtaken += 1
            request.state = State.RUNNING
            self.running.append(request)
            request.count(0, match.length, cached=True)
            if request.unaligned_tokens is None:
                request.unaligned_tokens = self.memory.unaligned(request, match)
            before = len(request.table)
            budget -= self._add_chunk(request, step, budget, may_retract=False)
            growth -= len(request.table) - before
        self.running.sort(key=lambda r: r.arrival)

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

    def _longest_prefix_first(self) -> list[Request]:
        urgent = [r for r in self.waiting if r.overtaken >= MAX_OVERTAKEN]
        rest = [r for r in self.waiting if r.overtaken < MAX_OVERTAKEN]
        window = rest[:ORDERED_WINDOW]
        if len(window) > 1:
            for request in window:
                key = RadixKey(request.tokens.view(request.known_end), request.namespace)
                request.matched = self.memory.cache.peek(key).length
            window.sort(key=lambda r: -(r.matched + AGING_TOKENS * r.overtaken))
        return urgent + window + rest[ORDERED_WINDOW:]

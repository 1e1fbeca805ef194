"""The real scheduler, memory and radix tree under a model that takes no time: requests write what
they are told to, and a step takes simulated seconds by how many rows it computes.

Used by `scheduling.py` and by the tests of the scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cache_traces import Ids

from stemma.backend.base import Namespace
from stemma.backend.local.cache.eviction import POLICIES
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.radix_cache import PrefixMatch, RadixCache
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.backend.local.cache.radix_tree import RadixTree
from stemma.backend.local.memory import RequestMemory
from stemma.backend.local.request import Ints, Request, State
from stemma.backend.local.scheduler import Scheduler, Step
from stemma.backend.local.waiting_order import MAX_OVERTAKEN, WaitingOrder
from stemma.lang.sampling import SamplingParams

HOME = Namespace()


@dataclass(slots=True, eq=False)
class Job:
    """A request and the ids it is going to write. The times are simulated seconds."""

    request: Request
    output: list[int]
    done: bool = False

    @property
    def first_token_s(self) -> float:
        """From submission to the first token."""
        assert self.request.first_token_at is not None
        return self.request.first_token_at - self.request.submitted_at


class WatchedMemory(RequestMemory):
    """Notes what is matched, in order: the scheduler matches what it admits."""

    matched: list[int]

    def match(self, request: Request) -> PrefixMatch:
        self.matched.append(request.arrival)
        return super().match(request)


class SimulatedEngine:
    """One pool, one scheduler, a clock. A step takes step_s + row_s * rows seconds.

    jobs: all that were submitted. rows: how many were computed. admitted: the requests in the order
    in which they were admitted, each admission. overtaken: by arrival, how often one that ranks
    behind was admitted while it waited; counted here again, from what can be seen from outside.
    """

    def __init__(
        self,
        pool_tokens: int,
        *,
        policy: str | WaitingOrder = "lpm",
        eviction: str = "program-aware",
        page_size: int = 1,
        max_running: int = 64,
        max_step_tokens: int = 2048,
        max_overtaken: int = MAX_OVERTAKEN,
        step_s: float = 0.008,
        row_s: float = 0.00033,
    ) -> None:
        allocator = PageAllocator(pool_tokens, page_size)
        cache = RadixCache(allocator, eviction=POLICIES[eviction]())
        self.memory = WatchedMemory(allocator, cache)
        self.scheduler = Scheduler(
            self.memory,
            policy=policy,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_overtaken=max_overtaken,
        )
        self.step_s, self.row_s = step_s, row_s
        self.now = 0.0
        self.rows = 0
        self.jobs: list[Job] = []
        self.admitted: list[Request] = []
        self._jobs: dict[int, Job] = {}
        self.overtaken: Counter[int] = Counter()

    def submit(self, prompt: Ids, output: Ids, *, priority: int = 0) -> Job:
        def refuse(error: BaseException) -> None:
            raise error

        request = Request(
            tokens=Ints(prompt),
            namespace=HOME,
            params=SamplingParams(max_tokens=max(1, len(output))),
            on_finish=lambda _: None,
            on_error=refuse,
            max_tokens=max(1, len(output)),
            priority=priority,
            submitted_at=self.now,
        )
        job = Job(request, output.tolist() or [0])
        self.jobs.append(job)
        self._jobs[id(request)] = job
        self.scheduler.submit(request)
        return job

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> Step | None:
        """One step: what the engine does, without the model."""
        waiting = list(self.scheduler.waiting)
        self.memory.matched = []
        step = self.scheduler.schedule()
        self._note_admissions(waiting)
        if step is None:
            return None
        filled = [entry.table[entry.computed :] for entry in step.entries]
        rows = len(np.unique(np.concatenate(filled)))
        self.rows += rows
        self.now += self.step_s + self.row_s * rows
        self.scheduler.commit(step)
        for request in step.requests:
            if request.scheduled_end == request.known_end:
                self._draw(request)
        return step

    def _note_admissions(self, waiting: list[Request]) -> None:
        """waiting: before the step."""
        admitted = [r for r in waiting if r.state is State.RUNNING]
        admitted.sort(key=lambda r: self.memory.matched.index(r.arrival))
        self.admitted += admitted
        for one in admitted:
            waiting.remove(one)
            self.overtaken.update(r.arrival for r in waiting if r.rank < one.rank)

    def _draw(self, request: Request) -> None:
        job = self._jobs[id(request)]
        if request.first_token_at is None:
            request.first_token_at = self.now
        token = job.output[len(request.output_ids)]
        request.tokens.extend([token])
        request.output_ids.append(token)
        if request.remaining_output <= 0:
            self.scheduler.finish(request)
            job.done = True

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self.has_work:
            self.step()

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that came from the cache."""
        return sum(j.request.cached_tokens for j in self.jobs) / sum(
            j.request.prompt_length for j in self.jobs
        )


def new_tokens(texts: Sequence[Ids]) -> list[int]:
    """How many tokens of each text none before it begins with; the shortest come first."""
    tree = RadixTree(1)
    found = []
    for text in sorted(texts, key=len):  # a text comes before those it is the beginning of
        key = RadixKey(text, HOME)
        path, length = tree.descend(key, len(key))
        node, agrees = path[-1] if path else (tree.root, 0)
        if agrees < len(node):
            node = tree.split(node, agrees)
        if length < len(key):
            tree.add(node, key, text, length)
        found.append(len(key) - length)
    return found


def best_hit_rate(prompts: Sequence[Ids]) -> float:
    """The most that any order can hit, where one token of every prompt is always computed:
    1 - sum(max(1, new)) / sum(prompt tokens).
    """
    return 1 - sum(max(1, new) for new in new_tokens(prompts)) / sum(map(len, prompts))

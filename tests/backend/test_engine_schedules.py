"""What a request gives is the same alone, without cache, as in any schedule with others, on a cold
cache as on a warm one. `STEMMA_EXAMPLES` says how many random schedules are tried.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stemma.backend.base import CacheMode
from stemma.backend.local.waiting_order import WAITING_ORDERS
from stemma.lang.errors import Cancelled, StemmaError
from stemma.lang.sampling import SamplingParams
from tests.backend.stepped_for_tests import Stepped

EXAMPLES = int(os.environ.get("STEMMA_EXAMPLES", "100"))

# Prompts are beginnings of these, with a tail: most share something, some are equal.
STEMS = [[(7 * i * i + 3 * i + 11 * stem) % 480 + 3 for i in range(70)] for stem in range(2)]
STEMS.append([*STEMS[0][:33], *STEMS[1][:20]])
GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams(temperature=1.0)
NUCLEUS = SamplingParams(temperature=1.3, top_p=0.9, top_k=40, min_p=0.01)


@dataclass(frozen=True)
class Work:
    """A request. kind "hopeless": its row cannot be drawn from. heal: its last token may change."""

    stem: int
    length: int
    tail: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    heal: bool
    logprobs: bool

    @property
    def prompt(self) -> list[int]:
        return STEMS[self.stem][: self.length] + list(self.tail)

    @property
    def params(self) -> SamplingParams:
        seed = 100 * self.stem + self.length
        return self.sampling.but(max_tokens=self.max_tokens, seed=seed, ignore_eos=True)


@dataclass(frozen=True)
class Visit:
    """When a request comes, in steps, and when it is cancelled, in steps after that, if ever.

    cache: what it takes from the cache and leaves there.
    """

    work: Work
    arrival: int
    leaves_after: int | None
    hopeless: bool
    cache: CacheMode


@dataclass(frozen=True)
class Setting:
    page_size: int
    max_running: int
    spare_rows: int
    spare_pages: int
    policy: str
    eviction: str
    prefix_cache: bool
    failing_step: int | None


@dataclass(frozen=True)
class Result:
    """What must not depend on the schedule."""

    text: str
    output_ids: tuple[int, ...]
    prompt_logprobs: tuple[float, ...]


works = st.builds(
    Work,
    stem=st.integers(0, len(STEMS) - 1),
    length=st.one_of(st.integers(0, 50), st.sampled_from([15, 16, 17, 32, 33])),
    tail=st.lists(st.integers(3, 6), min_size=1, max_size=3).map(tuple),
    max_tokens=st.sampled_from([1, 2, 3, 12]),
    sampling=st.sampled_from([GREEDY, PLAIN, PLAIN, NUCLEUS]),
    heal=st.booleans(),
    logprobs=st.booleans(),
)
visits = st.builds(
    Visit,
    work=works,
    arrival=st.integers(0, 12),
    leaves_after=st.one_of(st.none(), st.none(), st.integers(0, 12)),
    hopeless=st.sampled_from([False] * 9 + [True]),
    cache=st.sampled_from(["read-write"] * 6 + ["read", "off"]),
)
schedules = st.lists(visits, min_size=1, max_size=8)
any_setting = st.builds(
    Setting,
    page_size=st.sampled_from([1, 2, 4, 16]),
    max_running=st.integers(1, 6),
    spare_rows=st.sampled_from([0, 1, 7, 60]),
    spare_pages=st.integers(0, 12),
    policy=st.sampled_from(list(WAITING_ORDERS)),
    eviction=st.sampled_from(["program-aware", "lru", "mru"]),
    prefix_cache=st.sampled_from([True, True, True, False]),
    failing_step=st.one_of(st.none(), st.none(), st.integers(0, 15)),
)


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Callable[[Work], Result]]:
    """What a request gives on a backend of its own that shares and caches nothing."""
    stepped = Stepped(folder, kv_tokens=200, prefix_cache=False)

    @cache
    def run(work: Work) -> Result:
        number = submit(stepped, work)
        stepped.run(at_most=100)
        return result(stepped, number)

    yield run
    stepped.close()


def submit(
    stepped: Stepped, work: Work, *, hopeless: bool = False, cache: CacheMode = "read-write"
) -> int:
    prompt, params = work.prompt, work.params
    heal = None
    if work.heal and len(prompt) > 1:
        tokenizer = stepped.backend.text
        heal = tokenizer.ids_starting_with(tokenizer.bytes_of(prompt[-1]))
    if hopeless:
        vocabulary = range(stepped.backend.config.vocab_size)
        params = params.but(logit_bias=tuple((i, -math.inf) for i in vocabulary))
    return stepped.submit(prompt, params, heal=heal, logprobs=work.logprobs, cache=cache)


def result(stepped: Stepped, number: int) -> Result:
    completion = stepped.handles[number].future.result(timeout=0)
    usage = completion.usage
    request = stepped.requests[number]
    assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    assert usage.prompt_tokens == request.prompt_length
    logprobs = tuple(token.logprob for token in completion.prompt_logprobs or ())
    return Result(completion.text, tuple(request.output_ids), logprobs)


def play(stepped: Stepped, schedule: list[Visit], failing_step: int | None) -> None:
    """Bring and cancel the requests as planned, until all have ended. They are the last in
    `stepped.handles`, by arrival.
    """
    forward = stepped.engine._forward
    steps = 0

    def maybe_fail(batch: object) -> torch.Tensor:
        if steps == failing_step:
            raise RuntimeError("out of device memory")
        return forward(batch)  # type: ignore[arg-type]

    stepped.engine._forward = maybe_fail  # type: ignore[method-assign]
    order = sorted(schedule, key=lambda visit: visit.arrival)
    leaving: list[tuple[int, int]] = []
    coming = list(order)
    while steps < 2000:
        while coming and coming[0].arrival <= steps:
            visit = coming.pop(0)
            number = submit(stepped, visit.work, hopeless=visit.hopeless, cache=visit.cache)
            if visit.leaves_after is not None:
                leaving.append((steps + visit.leaves_after, number))
        for _, number in [leave for leave in leaving if leave[0] == steps]:
            stepped.cancel(number)
        stepped.step()
        steps += 1
        if not coming and not stepped.has_work:
            stepped.engine._forward = forward  # type: ignore[method-assign]
            return
    raise AssertionError("the schedule does not come to an end")


def check(
    stepped: Stepped,
    schedule: list[Visit],
    first: int,
    alone: Callable[[Work], Result],
    *,
    may_fail: bool,
) -> None:
    """The requests from number `first` on gave what each gives alone, or ended as planned."""
    order = sorted(schedule, key=lambda visit: visit.arrival)
    for number, visit in enumerate(order, start=first):
        error = stepped.handles[number].future.exception(timeout=0)
        if error is None:
            assert not visit.hopeless
            found, expected = result(stepped, number), alone(visit.work)
            assert found.output_ids == expected.output_ids
            assert found.text == expected.text
            np.testing.assert_allclose(
                found.prompt_logprobs, expected.prompt_logprobs, rtol=0, atol=1e-9
            )
        elif isinstance(error, Cancelled):
            assert visit.leaves_after is not None
            assert alone(visit.work).text.startswith(error.partial)
        elif isinstance(error, RuntimeError):
            assert may_fail
        else:
            assert isinstance(error, StemmaError)
            assert visit.hopeless


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(schedule=schedules, setting=any_setting)
def test_any_schedule_gives_what_each_request_gives_alone(
    schedule: list[Visit], setting: Setting, folder: Path, alone: Callable[[Work], Result]
) -> None:
    longest = max(len(v.work.prompt) + v.work.max_tokens for v in schedule)
    pages = -(-longest // setting.page_size) + setting.spare_pages
    stepped = Stepped(
        folder,
        kv_tokens=pages * setting.page_size,
        page_size=setting.page_size,
        max_running=setting.max_running,
        max_step_tokens=setting.max_running + setting.page_size + setting.spare_rows,
        policy=setting.policy,
        eviction=setting.eviction,
        prefix_cache=setting.prefix_cache,
    )
    play(stepped, schedule, setting.failing_step)
    check(stepped, schedule, 0, alone, may_fail=setting.failing_step is not None)
    play(stepped, schedule, None)  # on what the first time has left
    check(stepped, schedule, len(schedule), alone, may_fail=False)
    stats = stepped.backend.stats()
    assert stats.running == stats.waiting == 0
    assert stats.protected_tokens == stats.private_tokens == 0
    stepped.backend.flush_cache()
    assert stepped.backend.stats().free_tokens == stats.pool_tokens
    stepped.close()


@pytest.mark.parametrize("page_size", [1, 4])
def test_healing_at_the_edge_of_a_chunk(
    page_size: int, folder: Path, alone: Callable[[Work], Result]
) -> None:
    stepped = Stepped(
        folder, kv_tokens=64, page_size=page_size, max_running=1, max_step_tokens=page_size + 1
    )
    for length in range(1, 2 * page_size + 4):
        healed = Work(0, length, (3,), max_tokens=3, sampling=PLAIN, heal=True, logprobs=False)
        for steps in (1, 2):  # what it leaves in the cache when it goes early is right
            gone = submit(stepped, healed)
            for _ in range(steps):
                stepped.step()
            stepped.cancel(gone)
            for work in (Work(0, length, (3, 4), 2, GREEDY, heal=False, logprobs=False), healed):
                number = submit(stepped, work)
                stepped.run(at_most=40)
                assert result(stepped, number).output_ids == alone(work).output_ids
            stepped.backend.flush_cache()


def test_healing_where_the_rows_of_a_chunk_are_those_of_another_request(
    folder: Path, alone: Callable[[Work], Result]
) -> None:
    stepped = Stepped(
        folder, kv_tokens=400, page_size=16, policy="fcfs", max_running=6, max_step_tokens=22
    )
    plain = {"max_tokens": 9, "sampling": PLAIN, "heal": False, "logprobs": False}
    # In the second step four requests decode, the first takes the 18 rows that are left, and the
    # second shares those up to its last token but has no row left for that one.
    first = Work(0, 33, (3,), **plain)
    second = Work(0, 32, (4,), max_tokens=9, sampling=PLAIN, heal=True, logprobs=False)
    others = [Work(1, 0, (token,), **plain) for token in (3, 4, 5, 6)]
    numbers = [submit(stepped, work) for work in (first, second, *others)]
    stepped.step()
    stepped.step()
    shared = stepped.requests[numbers[1]]
    assert (shared.shared, shared.computed, shared.known_end) == (32, 31, 33)
    stepped.run(at_most=40)
    for number, work in zip(numbers, (first, second, *others), strict=True):
        assert result(stepped, number).output_ids == alone(work).output_ids

"""Who is admitted when: the four orders, and the bound on overtaking. The model is simulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cache_traces import Ids
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import HOME, Job, SimulatedEngine

from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.backend.local.memory import DECODE_RUN
from stemma.backend.local.request import Ints, Request
from stemma.backend.local.waiting_order import (
    AGING_TOKENS,
    MAX_OVERTAKEN,
    WAITING_ORDERS,
    LongestPrefixFirst,
)
from stemma.lang.errors import EngineInvariantError, InvalidArgument
from stemma.lang.sampling import SamplingParams
from tests.backend.conftest import Make
from tests.backend.stepped_for_tests import Stepped

NEVER = 10**9


def ids(seed: int, count: int) -> Ids:
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.int32)


def join(*texts: Ids) -> Ids:
    return np.concatenate(texts)


def admissions(engine: SimulatedEngine) -> list[int]:
    """The jobs in the order of their admissions, by number."""
    return [request.arrival - 1 for request in engine.admitted]


# -- the bound


def flood(engine: SimulatedEngine, *, hot: int, output: int, backlog: int = 20) -> Job:
    """A cold request, then `hot` that hit 96%, of which so many always wait that the cold one need
    never run; until all is done.
    """
    shared = ids(1, 960)
    engine.submit(shared, ids(2, 1))
    engine.run()
    sent = 0
    cold = engine.submit(ids(4, 1000), ids(5, output))
    while sent < hot or engine.has_work:
        while sent < hot and len(engine.scheduler.waiting) < backlog:
            engine.submit(join(shared, ids(100 + sent, 40)), ids(3, output))
            sent += 1
        engine.step()
        engine.memory.check()
    assert cold.done
    return cold


POOLS = {"two at a time": 2_300, "some": 5_000, "all": 40_000}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_cold_request_among_many_hits_is_overtaken_at_most_so_often(
    policy: str, pool: str, page_size: int
) -> None:
    engine = SimulatedEngine(
        POOLS[pool], policy=policy, page_size=page_size, max_running=8, max_step_tokens=512
    )
    cold = flood(engine, hot=400, output=2)
    assert 0 < engine.overtaken[cold.request.arrival] <= MAX_OVERTAKEN
    assert max(engine.overtaken.values()) <= MAX_OVERTAKEN
    assert engine.hit_rate > 0.95


@pytest.mark.parametrize("bound", [1, 5, MAX_OVERTAKEN])
@pytest.mark.parametrize("pool", [1_300, 1_700, 2_300])
def test_bound_holds_though_requests_are_retracted(pool: int, bound: int) -> None:
    order = LongestPrefixFirst(aging=0)
    engine = SimulatedEngine(
        pool, policy=order, max_running=8, max_step_tokens=512, max_overtaken=bound
    )
    cold = flood(engine, hot=200, output=80)
    assert engine.scheduler.retractions > 0
    assert engine.overtaken[cold.request.arrival] == bound
    assert max(engine.overtaken.values()) <= bound


def test_without_ageing_and_bound_a_cold_request_waits_for_as_long_as_hits_come() -> None:
    order = LongestPrefixFirst(aging=0)
    engine = SimulatedEngine(
        5_000, policy=order, max_running=8, max_step_tokens=512, max_overtaken=NEVER
    )
    cold = flood(engine, hot=400, output=2)
    assert engine.overtaken[cold.request.arrival] > 380


def test_ageing_lets_a_cold_request_pass_before_the_bound_does() -> None:
    aging = 16
    order = LongestPrefixFirst(aging)
    engine = SimulatedEngine(5_000, policy=order, max_running=1, max_step_tokens=512)
    cold = flood(engine, hot=400, output=2)
    overtaken = engine.overtaken[cold.request.arrival]
    assert aging > AGING_TOKENS
    assert 960 // aging <= overtaken <= 960 // aging + 1 < MAX_OVERTAKEN


@settings(max_examples=50, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(1, 25), st.integers(0, 3)),
        min_size=2,
        max_size=40,
    ),
    policy=st.sampled_from(sorted(WAITING_ORDERS)),
    bound=st.integers(1, 4),
    page_size=st.sampled_from([1, 4]),
    spare=st.integers(0, 60),
    max_running=st.integers(1, 5),
)
def test_nobody_is_overtaken_more_often_than_the_bound(
    arrivals: list[tuple[int, int, int, int]],
    policy: str,
    bound: int,
    page_size: int,
    spare: int,
    max_running: int,
) -> None:
    engine = SimulatedEngine(
        112 + spare,
        policy=policy,
        page_size=page_size,
        max_running=max_running,
        max_step_tokens=max_running + 20,
        max_overtaken=bound,
    )
    stems = [ids(stem, 60) for stem in range(3)]
    for i, (stem, length, output, pause) in enumerate(arrivals):
        engine.submit(
            join(stems[stem][:length], ids(10 + i, 3)), ids(50 + i, output), priority=i % 3
        )
        for _ in range(pause):
            engine.step()
            engine.memory.check()
    engine.run()
    assert all(job.done for job in engine.jobs)
    assert max(engine.overtaken.values(), default=0) <= bound
    if policy in ("fcfs", "priority"):
        assert not +engine.overtaken


# -- the orders


def test_longest_cached_prefix_comes_first() -> None:
    engine = SimulatedEngine(4_000, policy="lpm", max_running=1)
    stem = ids(1, 300)
    engine.submit(stem, ids(2, 1))
    engine.run()
    for length in (0, 100, 300, 200):
        engine.submit(join(stem[:length], ids(length + 3, 10)), ids(9, 1))
    engine.run()
    assert admissions(engine)[1:] == [3, 4, 2, 1]


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_request_that_takes_nothing_from_the_cache_has_no_prefix_there(policy: str) -> None:
    engine = SimulatedEngine(4_000, policy=policy, max_running=1)
    stem = ids(1, 300)
    engine.submit(stem, ids(2, 1))
    engine.run()
    for i in range(2):
        engine.submit(join(stem, ids(i + 3, 10)), ids(9, 1))
    engine.jobs[1].request.cache = "off"
    engine.run()
    assert admissions(engine)[1:] == [2, 1]


def test_heaviest_subtree_comes_first_and_is_visited_depth_first() -> None:
    engine = SimulatedEngine(4_000, policy="dfs-weight", max_running=1)
    light, heavy = ids(1, 100), ids(2, 50)
    left, right = join(heavy, ids(3, 20)), join(heavy, ids(4, 20))
    for stem in (light, left, right):
        engine.submit(stem, ids(5, 1))
    engine.run()
    names = ["light", "heavy", "left", "none", "right 1", "light 2", "right 2"]
    stems = [light, heavy, left, ids(6, 0), right, light, right]
    for i, stem in enumerate(stems):
        engine.submit(join(stem, ids(10 + i, 5)), ids(9, 1))
    order = engine.scheduler.order.sort(engine.scheduler.waiting, engine.memory)
    expected = ["right 1", "right 2", "left", "heavy", "light", "light 2", "none"]
    assert [names[request.arrival - 4] for request in order] == expected
    assert {node.hits for node in engine.memory.path(order[0])} == {0, 1}  # it left no trace
    engine.run()
    assert admissions(engine)[3] == 3 + names.index("right 1")


def test_heaviest_subtree_is_found_in_a_chain_of_any_depth() -> None:
    engine = SimulatedEngine(4_000, policy="dfs-weight", max_running=1)
    text = ids(1, 1_500)
    memory, allocator = engine.memory, engine.memory.allocator
    slots = np.empty(0, dtype=np.int32)
    for end in range(1, len(text) + 1):
        new = allocator.alloc(1)
        assert new is not None
        slots = join(slots, new)
        key = RadixKey(text[:end], HOME)
        slots = memory.cache.insert(key, slots, owned_from=end - 1).slots
    for length in (10, 1_499):
        engine.submit(join(text[:length], ids(length, 5)), ids(9, 1))
    assert len(memory.path(engine.jobs[1].request)) == 1_499
    order = engine.scheduler.order.sort(engine.scheduler.waiting, memory)
    assert [request.arrival for request in order] == [2, 1]


def test_first_come_is_first_served_whatever_is_cached() -> None:
    engine = SimulatedEngine(4_000, policy="fcfs", max_running=1)
    stem = ids(1, 300)
    engine.submit(stem, ids(2, 1))
    engine.run()
    for length in (0, 100, 300, 200):
        engine.submit(join(stem[:length], ids(length + 3, 10)), ids(9, 1))
    engine.run()
    assert admissions(engine) == [0, 1, 2, 3, 4]


def test_higher_priority_comes_first_and_equal_ones_in_order_of_arrival() -> None:
    engine = SimulatedEngine(4_000, policy="priority", max_running=1)
    for i, priority in enumerate([0, 2, -1, 2, 1]):
        engine.submit(ids(i, 20), ids(9, 2), priority=priority)
    engine.run()
    assert admissions(engine) == [1, 3, 4, 0, 2]


def test_lowest_priority_gives_way_when_memory_runs_out() -> None:
    engine = SimulatedEngine(400, policy="priority", max_running=4)
    engine.submit(ids(1, 100), ids(5, 150), priority=-1)
    engine.submit(ids(2, 100), ids(6, 150), priority=1)
    low, high = engine.jobs
    while not high.done:
        engine.step()
        engine.memory.check()
    assert engine.scheduler.retractions > 0
    assert not low.done
    assert admissions(engine).count(1) == 1
    engine.run()
    assert low.done


def test_other_orders_do_not_look_at_priorities() -> None:
    for policy in sorted(set(WAITING_ORDERS) - {"priority"}):
        engine = SimulatedEngine(4_000, policy=policy, max_running=1)
        for i in range(3):
            engine.submit(ids(i, 20), ids(9, 2), priority=i)
        engine.run()
        assert admissions(engine) == [0, 1, 2]


def test_unknown_order_is_refused_with_all_names(make: Make) -> None:
    with pytest.raises(InvalidArgument, match="lpm, dfs-weight, fcfs, priority"):
        make(policy="lifo")


# -- in a backend


@pytest.mark.parametrize("policy", list(WAITING_ORDERS))
def test_order_changes_no_text(make: Make, policy: str) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    stem = [3 + 7 * i % 490 for i in range(80)]
    work = [[*stem[: 11 * i % 80], 5 + i, 6 + i] for i in range(16)]
    expected = [c.token_ids for c in make(prefix_cache=False).generate(work, greedy)]
    backend = make(policy=policy, kv_tokens=220, max_running=4, max_step_tokens=48)
    assert [c.token_ids for c in backend.generate(work, greedy)] == expected


def test_priority_of_a_branch_reaches_the_queue(tiny_model: Callable[..., Path]) -> None:
    backend = LocalBackend(tiny_model(), kv_tokens=500, policy="priority", max_running=1)
    finished: list[int] = []
    branches = {priority: backend.open(priority=priority) for priority in (0, 1, 2)}

    def ask() -> None:  # on the engine's thread, so that no step comes between
        for priority, branch in branches.items():
            branch.append("Once")
            handle = branch.generate(SamplingParams(max_tokens=2, seed=1))
            handle.add_done_callback(lambda _, priority=priority: finished.append(priority))

    backend.engine.call(ask)
    backend.stats()
    while len(finished) < 3:
        backend.stats()
    assert finished == [2, 1, 0]
    backend.close()


def test_stats_count_requests_before_they_have_ended(tiny_model: Callable[..., Path]) -> None:
    stepped = Stepped(tiny_model(), kv_tokens=500, max_running=2, max_step_tokens=32)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    prompt = [3 + 7 * i % 490 for i in range(50)]
    for tail in (5, 6, 7):
        stepped.submit([*prompt, tail], params)
    stepped.step()
    stats = stepped.backend.stats()
    assert stats.finished == 0
    assert stats.computed_tokens == stats.prompt_tokens - stats.cached_tokens > 0
    before = stats
    while stepped.has_work:
        stepped.step()
        stats = stepped.backend.stats()
        assert stats.prompt_tokens >= before.prompt_tokens
        assert stats.cached_tokens >= before.cached_tokens
        before = stats
    usages = [handle.result().usage for handle in stepped.handles]
    assert stats.prompt_tokens == 3 * 51 == sum(usage.prompt_tokens for usage in usages)
    assert stats.cached_tokens == sum(usage.cached_tokens for usage in usages) == 2 * 50
    assert stats.output_tokens == 12
    assert stats.computed_tokens == 3 * 51 - 2 * 50 + 12 - 3  # nothing reads the last of an output
    assert stats.scheduling_seconds > 0
    assert stats.forward_seconds > 0
    assert stats.scheduling_seconds + stats.forward_seconds <= stats.step_seconds
    stepped.close()


def test_decoding_takes_slots_by_the_run_where_cached_tokens_must_go_for_them() -> None:
    engine = SimulatedEngine(600, max_running=4, max_step_tokens=512)
    for leaf in range(400):  # the pool becomes full, of leaves of one token that nobody uses
        engine.submit(join(ids(1, 200), ids(leaf, 1)), ids(2, 1))
        engine.run()
    assert engine.memory.allocator.free_tokens < DECODE_RUN
    taken: list[int] = []
    alloc = engine.memory.allocator.alloc

    def watched(count: int, *, after: int | None = None) -> np.ndarray | None:
        taken.append(count)
        return alloc(count, after=after)

    engine.memory.allocator.alloc = watched  # type: ignore[method-assign]
    engine.submit(join(ids(1, 200), ids(500, 100)), ids(4, 48))
    engine.run()
    assert taken == [100, DECODE_RUN, DECODE_RUN, 48 - 1 - 2 * DECODE_RUN]


@pytest.mark.parametrize(("tokens", "scored"), [(0, False), (1, True)])
def test_request_that_leaves_nothing_to_compute_is_refused(tokens: int, scored: bool) -> None:
    with pytest.raises(EngineInvariantError, match=f"a request of {tokens} tokens leaves nothing"):
        Request(
            tokens=Ints([1] * tokens),
            namespace=HOME,
            params=SamplingParams(),
            on_finish=lambda _: None,
            on_error=lambda _: None,
            scored=scored,
        )

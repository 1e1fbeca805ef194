"""How requests use the cache: modes, namespaces, priorities, flushing, and what pages cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from stemma.backend.base import CacheMode, Namespace
from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.cache.eviction import POLICIES
from stemma.lang.errors import InvalidArgument, UnsupportedByBackend
from stemma.lang.sampling import SamplingParams
from tests.backend.conftest import Make
from tests.backend.stepped_for_tests import Stepped

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64])


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


# -- modes


def cached(backend: LocalBackend, prompt: list[int], cache: CacheMode) -> int:
    return backend.generate([prompt], GREEDY, cache=cache)[0].usage.cached_tokens


def test_mode_read_takes_what_is_there_and_leaves_nothing(make: Make) -> None:
    backend = make()
    shared, prompt = tokens(1, 40), [*tokens(1, 40), *tokens(2, 20)]
    backend.generate([shared], GREEDY)
    before = backend.tree()
    assert cached(backend, prompt, "read") == 40
    after = backend.tree()
    assert after.total_tokens == before.total_tokens
    assert cached(backend, prompt, "read") == 40  # still only what was there before
    assert cached(backend, prompt, "read-write") == 40
    assert cached(backend, prompt, "read") == len(prompt) - 1


def test_mode_off_takes_nothing_and_leaves_nothing(make: Make) -> None:
    backend = make()
    prompt = tokens(1, 40)
    assert cached(backend, prompt, "off") == 0
    assert backend.tree().total_tokens == 0
    backend.generate([prompt], GREEDY)
    total = backend.tree().total_tokens
    assert cached(backend, prompt, "off") == 0
    assert backend.tree().total_tokens == total


@pytest.mark.parametrize("mode", ["read", "off"])
def test_requests_of_one_step_that_leave_nothing_share_no_row(make: Make, mode: CacheMode) -> None:
    backend = make()
    prompt = tokens(3, 30)
    found = backend.generate([prompt] * 4, GREEDY, cache=mode)
    assert [c.usage.computed_tokens for c in found] == [30] * 4
    assert backend.tree().total_tokens == 0


def test_reader_shares_the_rows_of_a_writer_of_the_same_step(
    tiny_model: Callable[..., Path],
) -> None:
    stepped = Stepped(tiny_model(), kv_tokens=500, page_size=4)
    prompt = tokens(3, 30)
    stepped.submit(prompt, GREEDY)
    stepped.submit(prompt, GREEDY)
    stepped.requests[1].cache = "read"
    stepped.run(at_most=10)
    writer, reader = (handle.result() for handle in stepped.handles)
    assert writer.usage.computed_tokens == 30
    assert reader.usage.cached_tokens == 28
    assert reader.token_ids == writer.token_ids
    stepped.close()


@PAGE_SIZES
@pytest.mark.parametrize("mode", ["read", "off"])
def test_text_does_not_depend_on_the_mode(make: Make, page_size: int, mode: CacheMode) -> None:
    rng = random.Random(5)
    stem = tokens(5, 100)
    work = [stem[: rng.randrange(100)] + tokens(i, rng.randrange(1, 40)) for i in range(10)]
    plain = make(prefix_cache=False)
    expected = [c.token_ids for c in plain.generate(work, GREEDY)]
    backend = make(
        page_size=page_size, kv_tokens=640, max_running=6, max_step_tokens=6 + max(page_size, 34)
    )
    backend.generate(work[:3], GREEDY)
    mixed = [backend.generate([w], GREEDY, cache=mode)[0].token_ids for w in work[:5]]
    assert mixed == expected[:5]
    assert [c.token_ids for c in backend.generate(work, GREEDY, cache=mode)] == expected
    assert [c.token_ids for c in backend.generate(work, GREEDY)] == expected


def test_branches_inherit_their_mode(make: Make) -> None:
    backend = make()
    branch = backend.open(cache="read")
    branch.append("The quick brown fox jumps over")
    (child,) = branch.fork(1)
    for each in (branch, child):
        each.generate(GREEDY).result(30)
    child.score([" a", " b"]).result(30)
    assert backend.tree().total_tokens == 0
    other = backend.open()
    other.append("The quick brown fox jumps over")
    other.generate(GREEDY).result(30)
    assert backend.tree().total_tokens > 0


def test_unknown_mode_is_refused_where_it_is_written(make: Make) -> None:
    backend = make()
    with pytest.raises(InvalidArgument, match="'read-write', 'read', 'off'"):
        backend.open(cache="write")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="cache=None"):
        backend.generate([[5]], cache=None)  # type: ignore[arg-type]


def test_small_pool_serves_readers_that_are_retracted(make: Make) -> None:
    work = [tokens(i, 60) for i in range(12)]
    params = GREEDY.but(max_tokens=60)
    expected = [c.token_ids for c in make(prefix_cache=False).generate(work, params)]
    tight = make(kv_tokens=300, max_running=12, max_step_tokens=256)
    assert [c.token_ids for c in tight.generate(work, params, cache="read")] == expected
    assert tight.stats().retractions > 0


# -- namespaces


FIELDS = ("adapter", "salt", "extra_key")


def test_no_pair_of_namespace_fields_can_be_crossed(tiny_model: Callable[..., Path]) -> None:
    """The same characters in another field, or split otherwise over two, are another namespace."""
    stepped = Stepped(tiny_model(), kv_tokens=4096)
    prompt = tokens(7, 20)
    spaces = {Namespace(), Namespace(adapter="")}
    for field in FIELDS:
        spaces |= {Namespace(**{field: text}) for text in ("a", "ab", "a\0b")}
    for first, second in combinations(FIELDS, 2):
        for one, other in (("a", "b"), ("ab", ""), ("", "ab"), ("a", "ab"), ("ab", "a")):
            spaces |= {Namespace(**{first: one, second: other})}
            spaces |= {Namespace(**{first: other, second: one})}
    assert len(spaces) == 25
    for expected in (0, len(prompt) - 1):
        for space in spaces:
            number = stepped.submit(prompt, GREEDY)
            stepped.requests[number].namespace = space
            stepped.run(at_most=10)
            assert stepped.handles[number].result().usage.cached_tokens == expected
    stepped.close()


def test_adapter_that_the_backend_does_not_have_is_refused_where_it_is_written(make: Make) -> None:
    backend, space = make(), Namespace(adapter="french")
    for ask in (
        lambda: backend.open(space),
        lambda: backend.generate([[5]], namespace=space),
        lambda: backend.pin([5, 6], ttl=1, namespace=space),
    ):
        with pytest.raises(UnsupportedByBackend, match="adapter='french': this backend has none"):
            ask()


def test_model_version_a_caller_gives_changes_nothing(make: Make) -> None:
    backend = make()
    prompt = tokens(7, 20)
    backend.generate([prompt], GREEDY, namespace=Namespace(model_version="mine"))
    assert cached(backend, prompt, "read") == len(prompt) - 1
    assert {node.namespace.model_version for node in backend.tree().nodes()} == {
        backend.model_version
    }


# -- flushing


def test_flush_while_requests_run_takes_only_what_they_do_not_use(
    tiny_model: Callable[..., Path],
) -> None:
    stepped = Stepped(tiny_model(), kv_tokens=1000)
    backend = stepped.backend
    old, prompt = tokens(1, 50), tokens(2, 30)
    stepped.submit(old, GREEDY)
    stepped.run(at_most=20)
    other = Namespace(salt="x")
    held = backend.stats().evictable_tokens
    assert held == 50 + 5
    stepped.submit(prompt, GREEDY)
    stepped.step()
    stepped.step()
    assert backend.stats().protected_tokens == 30
    assert backend.flush_cache(other) == 0
    assert backend.flush_cache() == held
    assert backend.stats().evictable_tokens == 0
    assert backend.stats().protected_tokens == 30
    stepped.run(at_most=20)
    expected = stepped.handles[1].result().token_ids
    backend.check()
    assert backend.flush_cache(Namespace()) == 30 + 5
    stepped.submit(prompt, GREEDY)
    stepped.run(at_most=20)
    assert stepped.handles[2].result().token_ids == expected
    stepped.close()


def test_flush_of_one_namespace_leaves_the_others(make: Make) -> None:
    backend = make()
    prompt = tokens(4, 20)
    mine, yours = Namespace(salt="mine"), Namespace(salt="yours")
    for space in (mine, yours):
        backend.generate([prompt], GREEDY, namespace=space)
    assert backend.flush_cache(mine) == 25
    assert backend.generate([prompt], GREEDY, namespace=mine)[0].usage.cached_tokens == 0
    assert backend.generate([prompt], GREEDY, namespace=yours)[0].usage.cached_tokens == 19


def test_flushing_at_random_under_many_requests_harms_nobody(
    tiny_model: Callable[..., Path],
) -> None:
    rng = random.Random(8)
    stem = tokens(8, 80)
    work = [stem[: rng.randrange(80)] + tokens(i, rng.randrange(1, 40)) for i in range(40)]
    plain = Stepped(tiny_model(), kv_tokens=8000, prefix_cache=False)
    stepped = Stepped(tiny_model(), kv_tokens=700, page_size=4, max_running=8, max_step_tokens=64)
    for prompt in work:
        plain.submit(prompt, GREEDY)
        stepped.submit(prompt, GREEDY)
    plain.run(at_most=200)
    flushed = 0
    while stepped.has_work:
        stepped.step()  # the books are checked
        if rng.random() < 0.3:
            evictable = stepped.backend.stats().evictable_tokens
            assert stepped.backend.flush_cache() == evictable
            flushed += evictable
    assert flushed > 0
    for one, other in zip(plain.handles, stepped.handles, strict=True):
        assert one.result().token_ids == other.result().token_ids
    plain.close()
    stepped.close()


# -- policies


@pytest.mark.parametrize("eviction", list(POLICIES))
def test_every_policy_serves_a_small_pool(make: Make, eviction: str) -> None:
    rng = random.Random(9)
    stem = tokens(9, 60)
    work = [stem[: rng.randrange(60)] + tokens(i, rng.randrange(1, 40)) for i in range(24)]
    expected = [c.token_ids for c in make(prefix_cache=False).generate(work, GREEDY)]
    backend = make(eviction=eviction, kv_tokens=260, max_running=4, max_step_tokens=64)
    for _ in range(2):
        assert [c.token_ids for c in backend.generate(work, GREEDY)] == expected
    assert backend.stats().evicted_tokens > 0


def test_unknown_policy_is_refused_with_all_names(make: Make) -> None:
    with pytest.raises(InvalidArgument, match="lru, lfu, slru, fifo, filo, mru, priority, program"):
        make(eviction="random")


def test_priority_keeps_what_it_was_given_for(make: Make) -> None:
    backend = make(eviction="priority", kv_tokens=200, max_running=4, max_step_tokens=128)
    dear = tokens(1, 60)
    backend.generate([dear], GREEDY, priority=1)
    for i in range(10):
        backend.generate([tokens(10 + i, 50)], GREEDY)
    assert cached(backend, dear, "read") == 59


def test_priority_of_a_branch_is_that_of_its_forks(make: Make) -> None:
    backend = make(eviction="priority")
    branch = backend.open(priority=3)
    branch.append("The quick brown fox")
    (child,) = branch.fork(1)
    child.generate(GREEDY).result(30)
    priorities = backend.engine.call(
        lambda: {n.priority for n in backend.engine.scheduler.memory.cache._tree.nodes()}
    )
    assert priorities == {3}


def test_priority_that_nobody_looks_at_is_refused(make: Make) -> None:
    backend = make()
    with pytest.raises(InvalidArgument, match="policy='priority' and eviction='priority'"):
        backend.open(priority=1)
    with pytest.raises(InvalidArgument, match="'lpm' and 'program-aware'"):
        backend.generate([[5]], priority=1)
    with pytest.raises(InvalidArgument, match=r"priority=1\.5: must be an integer"):
        make(policy="priority").open(priority=1.5)  # type: ignore[arg-type]


# -- pages


@PAGE_SIZES
def test_alignment_lost_is_what_pages_of_one_would_have_saved(make: Make, page_size: int) -> None:
    rng = random.Random(11)
    stem = tokens(11, 150)
    work = [stem[: rng.randrange(150)] + tokens(i, rng.randrange(1, 30)) for i in range(30)]
    exact, paged = make(), make(page_size=page_size)
    for prompt in work:
        fine = exact.generate([prompt], GREEDY.but(max_tokens=1))[0].usage
        before = paged.stats().alignment_lost_tokens
        coarse = paged.generate([prompt], GREEDY.but(max_tokens=1))[0].usage
        lost = paged.stats().alignment_lost_tokens - before
        assert lost < page_size
        # what stands in an unfilled page at the end of another prompt is nobody's
        assert 0 <= fine.cached_tokens - coarse.cached_tokens - lost < page_size
        assert coarse.cached_tokens % page_size == 0
    assert exact.stats().alignment_lost_tokens == 0
    if page_size > 1:
        assert paged.stats().alignment_lost_tokens > 0


def test_alignment_lost_counts_a_request_once_however_often_it_is_admitted(make: Make) -> None:
    work = [tokens(1, 18) + tokens(i, 40) for i in range(12)]
    params = GREEDY.but(max_tokens=60)
    tight = make(kv_tokens=320, page_size=16, max_running=12, max_step_tokens=256)
    tight.generate([work[0]], params.but(max_tokens=1))
    before = tight.stats()
    tight.generate(work[1:], params)
    after = tight.stats()
    assert after.retractions > before.retractions
    assert after.alignment_lost_tokens - before.alignment_lost_tokens == 2 * 11


def test_alignment_lost_leaves_out_rows_that_are_needed_anyway(make: Make) -> None:
    backend = make(page_size=4)
    prompt = tokens(1, 12)
    backend.generate([prompt], GREEDY.but(max_tokens=1))
    backend.generate([prompt], GREEDY.but(max_tokens=1))
    assert backend.stats().alignment_lost_tokens == 3  # 8..10; the last one gives the logits

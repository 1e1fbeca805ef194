"""Pins: what they keep, when they end, how much may be under them, and that the books know."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from stemma.backend.base import Namespace
from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.lang.errors import (
    EngineInvariantError,
    InvalidArgument,
    OutOfCacheMemory,
    UnsupportedByBackend,
)
from stemma.lang.sampling import SamplingParams
from tests.backend.conftest import Make
from tests.backend.stepped_for_tests import Stepped

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


def fill(backend: LocalBackend) -> None:
    """Bring in more than the pool holds."""
    for seed in range(50, 50 + backend.stats().pool_tokens // 50 + 2):
        backend.generate([tokens(seed, 70)], GREEDY)


def cached(backend: LocalBackend, prompt: list[int]) -> int:
    return backend.generate([prompt], GREEDY, cache="read")[0].usage.cached_tokens


@pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64])
def test_pinned_prefix_stays_whatever_comes(make: Make, page_size: int) -> None:
    backend = make(
        kv_tokens=512, page_size=page_size, max_running=4, max_step_tokens=4 + max(page_size, 60)
    )
    prefix = tokens(1, 100)
    whole = 100 - 100 % page_size
    pin = backend.pin(prefix, ttl=60)
    assert pin.tokens == whole
    fill(backend)
    assert backend.stats().evicted_tokens > 0
    assert backend.stats().pinned_tokens == whole
    assert cached(backend, [*prefix, 7]) == whole
    pin.release()
    fill(backend)
    assert cached(backend, [*prefix, 7]) == 0
    backend.check()


def test_pin_computes_what_is_not_cached_and_only_that(make: Make) -> None:
    backend = make()
    prefix = tokens(1, 60)
    backend.generate([prefix[:40]], GREEDY.but(max_tokens=1))
    before = backend.stats()
    backend.pin(prefix, ttl=60)
    middle = backend.stats()
    assert middle.computed_tokens - before.computed_tokens == 20
    assert middle.output_tokens == before.output_tokens
    backend.pin(prefix, ttl=60)
    after = backend.stats()
    assert (after.steps, after.finished) == (middle.steps, middle.finished)


def test_pinned_text_is_what_a_prompt_of_that_text_finds(make: Make) -> None:
    backend = make()
    text = "The quick brown fox jumps over the lazy dog."
    pin = backend.pin(text, ttl=60)
    ids = backend.encode(text)
    assert pin.tokens >= len(ids)
    usage = backend.generate([text], GREEDY)[0].usage
    assert usage.cached_tokens == usage.prompt_tokens - 1


def test_pin_belongs_to_its_namespace(make: Make) -> None:
    backend = make()
    prefix = tokens(1, 30)
    backend.pin(prefix, ttl=60, namespace=Namespace(salt="a"))
    assert backend.flush_cache() == 0
    assert cached(backend, prefix) == 0
    usage = backend.generate([prefix], GREEDY, namespace=Namespace(salt="a"))[0].usage
    assert usage.cached_tokens == 29


def test_pin_ends_with_its_block_and_again_does_nothing(make: Make) -> None:
    backend = make()
    with backend.pin(tokens(1, 30), ttl=60) as pin:
        assert pin.active
        assert backend.stats().pinned_tokens == 30
        backend.check()
    assert not pin.active
    assert backend.stats().pinned_tokens == backend.stats().protected_tokens == 0
    pin.release()
    assert backend.flush_cache() == 30
    backend.check()


def test_pin_may_be_released_after_its_backend_was_closed(make: Make) -> None:
    backend = make()
    pin = backend.pin(tokens(1, 30), ttl=60)
    backend.close()
    pin.release()
    assert not pin.active


# -- time


def test_pin_ends_when_its_time_is_over_without_any_request(make: Make) -> None:
    clock = Clock()
    backend = make(clock=clock)
    pin = backend.pin(tokens(1, 30), ttl=10)
    assert str(pin) == "Pin(30 tokens, 10.0 s left)"
    clock.now += 9.5
    assert pin.active
    assert backend.stats().pinned_tokens == 30
    backend.check()
    clock.now += 0.5
    assert not pin.active
    assert str(pin) == "Pin(30 tokens, ended)"
    assert backend.engine.call(lambda: backend.engine.scheduler.memory.pins.tokens) == 30
    stats = backend.stats()
    assert (stats.pinned_tokens, stats.protected_tokens, stats.evictable_tokens) == (0, 0, 30)
    pin.release()
    backend.check()


@pytest.mark.parametrize("look", ["check", "flush", "request", "pin"])
def test_expired_pin_gives_way_to_whoever_looks_first(make: Make, look: str) -> None:
    clock = Clock()
    backend = make(clock=clock, kv_tokens=100, max_running=2, max_step_tokens=128)
    backend.pin(tokens(1, 50), ttl=10)
    clock.now += 10
    if look == "check":
        backend.check()
    elif look == "flush":
        assert backend.flush_cache() == 50
    elif look == "request":
        assert backend.generate([tokens(2, 90)], GREEDY)[0].usage.output_tokens == 6
    else:
        backend.pin(tokens(2, 50), ttl=10)
    assert backend.engine.scheduler.memory.pins.ended == 1


def test_pins_of_one_prefix_end_each_at_its_own_time(make: Make) -> None:
    clock = Clock()
    backend = make(clock=clock)
    prefix = tokens(1, 40)
    backend.pin(prefix, ttl=10)
    backend.pin(prefix[:20], ttl=30)
    late = backend.pin([*prefix[:10], *tokens(2, 10)], ttl=20)
    assert backend.stats().pinned_tokens == 50
    clock.now += 10
    assert backend.stats().pinned_tokens == 30
    clock.now += 10
    assert backend.stats().pinned_tokens == 20
    late.release()
    assert backend.stats().pinned_tokens == 20
    clock.now += 10
    assert backend.stats().pinned_tokens == 0
    assert backend.flush_cache() == 50


def test_request_that_waits_for_a_pin_to_end_runs_then(tiny_model: Callable[..., Path]) -> None:
    """One request decodes, the other does not fit beside it and the pin."""
    clock = Clock()
    stepped = Stepped(tiny_model(), kv_tokens=300, max_running=4, max_step_tokens=256, clock=clock)
    prefix = tokens(1, 120)
    stepped.submit(prefix, GREEDY.but(max_tokens=1))
    stepped.run(at_most=5)
    pins = stepped.engine.scheduler.memory.pins
    key = RadixKey.of(prefix, stepped.backend.versioned(Namespace()))
    assert pins.add(key, 10, release=pins.drop) is not None
    stepped.submit(tokens(2, 60), GREEDY.but(max_tokens=100))
    stepped.step()
    stepped.submit(tokens(3, 100), GREEDY)
    for _ in range(3):
        stepped.step()
    assert len(stepped.engine.scheduler.running) == 1
    clock.now += 10
    stepped.step()
    assert len(stepped.engine.scheduler.running) == 2
    stepped.run(at_most=150)
    stepped.close()


# -- how much


def test_more_than_the_share_is_refused_with_the_numbers(make: Make) -> None:
    backend = make(kv_tokens=200, max_running=4, max_step_tokens=128, max_pinned_share=0.25)
    backend.pin(tokens(1, 30), ttl=60)
    with pytest.raises(OutOfCacheMemory, match=r"21 more.*30 pinned.*50 of 200.*0\.25") as error:
        backend.pin(tokens(2, 21), ttl=60)
    assert (error.value.needed, error.value.limit) == (51, 50)
    assert backend.stats().computed_tokens == 30  # nothing was computed in vain
    backend.pin(tokens(2, 20), ttl=60)
    assert backend.stats().pinned_tokens == 50
    backend.check()


def test_shared_prefixes_count_once_towards_the_share(make: Make) -> None:
    backend = make(kv_tokens=200, max_running=4, max_step_tokens=128)
    stem = tokens(1, 80)
    for seed in range(2, 6):
        backend.pin([*stem, *tokens(seed, 5)], ttl=60)
    assert backend.stats().pinned_tokens == 100
    backend.pin(stem[:50], ttl=60)
    with pytest.raises(OutOfCacheMemory):
        backend.pin([*stem, 5], ttl=60)


def test_pins_made_at_once_never_exceed_the_share(make: Make) -> None:
    backend = make(kv_tokens=400, max_running=8, max_step_tokens=128)
    refused: list[OutOfCacheMemory] = []

    def pin(seed: int) -> None:
        try:
            backend.pin(tokens(seed, 60), ttl=60)
        except OutOfCacheMemory as error:
            refused.append(error)

    threads = [threading.Thread(target=pin, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(refused) == 8 - 3
    assert backend.stats().pinned_tokens == 180
    backend.check()


def test_request_that_does_not_fit_beside_the_pins_says_so(make: Make) -> None:
    backend = make(kv_tokens=200, max_running=4, max_step_tokens=128)
    with backend.pin(tokens(1, 90), ttl=60):
        with pytest.raises(OutOfCacheMemory, match=r"90 are pinned.*release pins"):
            backend.generate([tokens(2, 130)], GREEDY)
        backend.generate([[*tokens(1, 90), *tokens(3, 60)]], GREEDY)
    backend.generate([tokens(2, 130)], GREEDY)


def test_share_of_nothing_allows_no_pin_and_of_everything_is_refused(make: Make) -> None:
    with pytest.raises(OutOfCacheMemory):
        make(max_pinned_share=0).pin([5], ttl=1)
    for share in (1, -0.1, float("nan")):
        with pytest.raises(InvalidArgument, match="max_pinned_share"):
            make(max_pinned_share=share)


@pytest.mark.parametrize("ttl", [0, -1, float("nan")])
def test_time_to_live_must_be_above_nothing(make: Make, ttl: float) -> None:
    with pytest.raises(InvalidArgument, match="ttl"):
        make().pin([5], ttl=ttl)


def test_pin_without_an_end_ends_with_release(make: Make) -> None:
    backend = make()
    pin = backend.pin([5, 6], ttl=float("inf"))
    assert pin.active
    pin.release()
    assert backend.stats().pinned_tokens == 0


def test_what_cannot_be_pinned_is_refused(make: Make) -> None:
    backend = make(page_size=16)
    with pytest.raises(InvalidArgument, match="less than a page of 16"):
        backend.pin(tokens(1, 15), ttl=60)
    with pytest.raises(InvalidArgument, match="no tokens"):
        backend.pin([], ttl=60)
    with pytest.raises(InvalidArgument, match="vocabulary"):
        backend.pin([10**7] * 16, ttl=60)
    with pytest.raises(UnsupportedByBackend, match="prefix_cache=False"):
        make(prefix_cache=False).pin([5], ttl=60)


# -- books


def test_check_finds_a_lock_that_is_no_pin(make: Make) -> None:
    backend = make()
    backend.pin(tokens(1, 30), ttl=60)
    backend.generate([tokens(2, 10)], GREEDY)
    cache = backend.engine.scheduler.memory.cache
    node = next(n for n in cache._tree.nodes() if n.lock_ref == 0)
    backend.engine.call(lambda: cache.inc_lock_ref(node))
    with pytest.raises(EngineInvariantError, match="30 are pinned"):
        backend.check()
    backend.engine.call(lambda: cache.dec_lock_ref(node))


def test_pins_under_a_busy_engine_leave_nothing_behind(tiny_model: Callable[..., Path]) -> None:
    rng = random.Random(3)
    clock = Clock()
    with LocalBackend(
        tiny_model(), dtype="float64", kv_tokens=600, max_running=8, max_step_tokens=64, clock=clock
    ) as backend:
        backend.engine.check_every_step = True
        stem = tokens(3, 100)
        pins = []
        for round_ in range(12):
            try:
                pins.append(backend.pin(stem[: rng.randrange(1, 100)] + tokens(round_, 30), ttl=5))
            except OutOfCacheMemory:
                pins.pop(rng.randrange(len(pins))).release()
            work = [stem[: rng.randrange(100)] + tokens(i, 30) for i in range(4)]
            backend.generate(work, GREEDY)
            clock.now += rng.choice([0, 1, 3])
            backend.check()
        clock.now += 5
        stats = backend.stats()
        assert stats.pinned_tokens == stats.protected_tokens == stats.private_tokens == 0
        assert backend.engine.scheduler.memory.pins.ended > 4
        backend.flush_cache()
        assert backend.stats().free_tokens == 600

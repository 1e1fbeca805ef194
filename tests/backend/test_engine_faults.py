"""Whatever goes wrong in a step, and at whichever moment: who is at fault gets that error, the
others their text, and nothing stays behind.
"""

from __future__ import annotations

import random

import pytest

from stemma.backend.base import Namespace
from tests.backend.stubbed_for_tests import WORDS, Asked, InjectedFault, Stubbed, without_engine

SALTED = Namespace(salt="x")


def workload() -> list[tuple[int, list[Asked]]]:
    """Thirty requests with the steps before which they come: much is shared, some leave nothing,
    and the first two outgrow the pool.
    """
    rng = random.Random(5)
    stems = [bytes(rng.randrange(1, len(WORDS)) for _ in range(24)) for _ in range(2)]
    asked = [Asked(stems[0] + bytes([number]), max_tokens=40, seed=number) for number in (1, 2)]
    for number in range(2, 30):
        stem = stems[number % 5 == 4]
        own = bytes(rng.randrange(1, len(WORDS)) for _ in range(rng.randrange(1, 6)))
        heal = number % 3 == 0
        if heal:
            own += bytes([number // 3 % 3 + 1])  # which other tokens begin with
        scored = number % 9 == 8
        asked.append(
            Asked(
                stem[: rng.randrange(len(stem) + 1)] + own if number % 4 else stem + b"\x01",
                max_tokens=0 if scored else rng.choice([1, 3, 8]),
                temperature=float(number % 2),
                seed=number,
                namespace=SALTED if number % 7 == 6 else Namespace(),
                cache="read" if number % 10 == 3 else "off" if number % 10 == 5 else "read-write",
                heal=heal,
                logprobs=number % 6 == 0,
                scored=scored,
            )
        )
    return [(0, asked[:2]), (3, asked[2:16]), (9, asked[16:])]


WORK = workload()


def play(page_size: int, kind: str | None, number: int) -> Stubbed:
    """The workload from beginning to end, the number-th of a kind going wrong."""
    stubbed = Stubbed(
        96, page_size=page_size, max_running=8, max_step_tokens=8 + page_size + 12, check=False
    )
    if kind is not None:
        stubbed.faults.arm(kind, number)
    arrivals, steps = list(WORK), 0
    while arrivals or stubbed.has_work:
        while arrivals and arrivals[0][0] <= steps:
            stubbed.submit(*arrivals.pop(0)[1])
        ended = {asking for asking in stubbed.askings if asking.ended}
        fired = len(stubbed.faults.fired)
        stubbed.step()
        steps += 1
        assert steps < 1000
        if len(stubbed.faults.fired) > fired:
            stubbed.engine.check()
            stubbed.check_slots()
            failed = [a for a in stubbed.askings if a.ended and a not in ended]
            at_fault = 1 if kind == "alloc" else stubbed.decoder.entries
            assert len(failed) == at_fault
            for asking in failed:
                assert isinstance(asking.error, InjectedFault)
                assert without_engine(asking.asked).text.startswith("".join(asking.pieces))
    return stubbed


@pytest.mark.parametrize("page_size", [1, 4])
def test_workload_has_what_may_go_wrong(page_size: int) -> None:
    stubbed = play(page_size, None, 0)
    for asking in stubbed.askings:
        asking.check()
    stubbed.check_idle()
    stats = stubbed.engine.stats()
    assert len(stubbed.askings) == 30
    assert min(stats.retractions, stats.evicted_tokens, stats.cached_tokens) > 0
    assert sum(asking.request.healed for asking in stubbed.askings) > 2
    assert min(stubbed.faults.seen[kind] for kind in ("forward", "sample", "alloc")) > 30


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    "every", [10, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("kind", ["forward", "sample", "alloc"])
def test_fault_at_any_moment_harms_nobody_else_and_leaks_nothing(
    page_size: int, kind: str, every: int
) -> None:
    moments = play(page_size, None, 0).faults.seen[kind]
    assert moments > 30
    for number in range(1, moments + 1, every):
        stubbed = play(page_size, kind, number)
        assert stubbed.faults.fired == [kind]
        unharmed = [a for a in stubbed.askings if not isinstance(a.error, InjectedFault)]
        assert len(unharmed) >= 30 - 8  # of a step there are at most max_running
        for asking in unharmed:
            asking.check()
        stubbed.check_idle()
        stubbed.memory.flush()
        assert stubbed.allocator.free_tokens == stubbed.allocator.capacity


@pytest.mark.parametrize("kind", ["forward", "sample", "alloc"])
def test_fault_in_every_step_ends_every_request_with_it(kind: str) -> None:
    stubbed = Stubbed(96, page_size=4, max_running=8, max_step_tokens=24)
    for _, asked in WORK:
        stubbed.submit(*asked)
    for _ in range(100):
        stubbed.faults.arm(kind, 1)
        stubbed.step()  # the books are checked
    assert all(asking.ended for asking in stubbed.askings)
    failed = [a for a in stubbed.askings if isinstance(a.error, InjectedFault)]
    for asking in stubbed.askings:
        if asking not in failed:
            asking.check()  # what ends without a drawing or a slot of its own
    assert len(failed) > 20
    stubbed.check_idle()

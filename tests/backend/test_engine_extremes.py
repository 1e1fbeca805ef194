"""The engine on prompts of extreme length, on trees of extreme depth, at every page boundary, and
in every namespace.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from itertools import combinations

import pytest

from stemma.backend.base import Namespace
from stemma.backend.local.cache.radix_key import RadixKey
from tests.backend.stubbed_for_tests import WORDS, Asked, Stubbed, without_engine

HOME = Namespace()
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64])


def text(seed: int, length: int) -> bytes:
    rng = random.Random(seed)
    return bytes(rng.randrange(1, len(WORDS)) for _ in range(length))


def calls_of(work: Callable[[], object]) -> int:
    """How many Python functions it calls."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


# -- depth


DEPTH = 20_000


def chain(stubbed: Stubbed, tokens: bytes) -> None:
    """Compute a prompt and cut its edge behind every token, from the end up."""
    stubbed.submit(Asked(tokens, max_tokens=0))
    stubbed.run(at_most=100)
    key = RadixKey.of(list(tokens), HOME)
    for length in range(len(tokens) - 1, 0, -1):
        stubbed.cache.match_prefix(key.head(length))
    assert sum(1 for _ in stubbed.cache._tree.nodes()) == len(tokens)


def test_chain_of_twenty_thousand_nodes_serves_requests_like_an_edge() -> None:
    stubbed = Stubbed(DEPTH + 200, max_step_tokens=4096, check=False)
    tokens = text(1, DEPTH)
    chain(stubbed, tokens)
    above = tokens[: DEPTH // 2]
    asked = [
        Asked(tokens + b"\x01", max_tokens=6, temperature=1.0, seed=1, heal=True),
        Asked(tokens, max_tokens=6),
        Asked(above + b"\x02\x03", max_tokens=6),
        Asked(above + b"\x02\x04", max_tokens=40),
    ]
    known = stubbed.submit(*asked)
    stubbed.step()
    # The second draws from a row that the first, which may replace its last token, computes anew.
    cached = [asking.request.cached_tokens for asking in known]
    assert cached == [DEPTH - 1, DEPTH, DEPTH // 2, DEPTH // 2 + 1]
    pin = stubbed.memory.pins.add(
        RadixKey.of(list(tokens[: DEPTH // 4]), HOME), 9.0, release=stubbed.memory.pins.drop
    )
    assert pin is not None
    stubbed.engine.check()
    decoding = calls_of(stubbed.step)
    assert decoding < 2000  # a step does not walk the chain
    for _ in range(5):
        stubbed.step()
    stubbed.cancel(known[3])
    for asking in known[:3]:
        asking.check()
    assert not stubbed.has_work
    assert stubbed.cache.snapshot(lambda ids: "x" * len(ids)).total_tokens > DEPTH
    assert stubbed.cache.evict(DEPTH // 4) == DEPTH // 4
    pin.release()
    stubbed.check_idle_books()
    stubbed.memory.flush()
    assert stubbed.allocator.free_tokens == stubbed.allocator.capacity


def test_failed_step_on_a_deep_chain_is_rolled_back() -> None:
    stubbed = Stubbed(2 * DEPTH, max_step_tokens=4096, check=False)
    tokens = text(2, DEPTH)
    chain(stubbed, tokens)
    failed, good = stubbed.submit(Asked(tokens + b"\x01\x02", max_tokens=3), Asked(text(3, 9)))
    stubbed.faults.arm("alloc", 1)
    stubbed.step()
    assert [failed.ended, good.ended] == [True, False]
    stubbed.run(at_most=20)
    good.check()
    stubbed.check_idle_books()


# -- length


LONG = 100_000


def long_run(length: int) -> Stubbed:
    """A long prompt, the same again with another end, and one that parts from it in the middle."""
    stubbed = Stubbed(3 * length + 600, max_step_tokens=2048, check=False)
    prompt = text(4, length)
    asked = [
        Asked(prompt, max_tokens=3),
        Asked(prompt[:-1] + bytes([prompt[-1] % 20 + 1]), max_tokens=3, temperature=1.0, seed=3),
        Asked(prompt[: length // 2] + text(5, length // 2), max_tokens=3),
    ]
    stubbed.submit(*asked)
    stubbed.run(at_most=20 + length // 500)
    return stubbed


def test_prompts_of_a_hundred_thousand_tokens_are_computed_once() -> None:
    stubbed = long_run(LONG)
    for asking in stubbed.askings:
        asking.check()
    stats = stubbed.engine.stats()
    assert stats.computed_tokens == LONG + 1 + LONG // 2 + 3 * 2
    assert stats.steps <= stats.computed_tokens // 2000 + 10
    stubbed.check_idle_books()


def test_cost_of_a_prompt_grows_with_its_length_not_with_its_square() -> None:
    def seconds(length: int) -> float:
        best = float("inf")
        for _ in range(2):
            start = time.process_time()
            long_run(length)
            best = min(best, time.process_time() - start)
        return best

    long_run(1000)
    assert calls_of(lambda: long_run(LONG)) < 10 * calls_of(lambda: long_run(LONG // 8))
    assert seconds(LONG) < 24 * seconds(LONG // 8)  # of the square it would be 64


def test_long_prompt_that_is_retracted_goes_on_from_what_it_computed() -> None:
    stubbed = Stubbed(30_000, page_size=16, max_step_tokens=4096, check=False)
    first, second = stubbed.submit(
        Asked(text(6, 13_000), max_tokens=1500, seed=1),
        Asked(text(7, 14_500), max_tokens=3000, seed=2),
    )
    for _ in range(4000):
        if first.ended:
            break
        stubbed.step()
    assert stubbed.scheduler.retractions == 1
    assert first.request.output_ids[:50] == generated(first.asked, 50)
    written = len(second.request.output_ids)
    assert written > 0
    rows = stubbed.decoder.rows
    stubbed.step()
    assert stubbed.decoder.rows - rows <= written + 16  # its prompt was kept
    assert second.request.output_ids[:50] == generated(second.asked, 50)
    stubbed.cancel(second)
    stubbed.check_idle_books()


def generated(asked: Asked, count: int) -> list[int]:
    """The beginning of what it gives alone."""
    short = Asked(**{**vars(asked), "max_tokens": count})
    return list(without_engine(short).output_ids)


# -- page boundaries


def around(page_size: int) -> list[int]:
    """A token before, at and after the end of each of two pages."""
    ends = {pages * page_size + by for pages in (1, 2) for by in (-1, 0, 1)}
    return sorted(end for end in ends if end > 0)


@PAGE_SIZES
@pytest.mark.parametrize("rows", [None, 0, 45], ids=["whole", "page by page", "chunks"])
def test_any_two_lengths_around_page_ends_share_their_whole_pages(
    page_size: int, rows: int | None
) -> None:
    most = 2048 if rows is None else 2 + page_size + rows
    stubbed = Stubbed(64 * 64, page_size=page_size, max_running=2, max_step_tokens=most)
    known = text(8, 3 * page_size)
    for m in around(page_size):
        for n in around(page_size):
            for heal in (False, True):
                space = Namespace(salt=f"{m} {n} {heal}")
                first = Asked(known[:m], max_tokens=3, namespace=space)
                stubbed.submit(first)
                stubbed.run(at_most=300)
                # Of its output all but the last token have been computed.
                line = without_engine(first).tokens[: m + 2]
                second = Asked((line + known)[: n + 2], 2, heal=heal, namespace=space)
                asking, *_ = stubbed.submit(second)
                stubbed.run(at_most=300)
                drawn_from = n + 2 - (1 if second.candidates is None else 2)
                assert asking.request.cached_tokens == shared(line, second, page_size, drawn_from)
    for asking in stubbed.askings:
        asking.check()
    stubbed.check_idle()


def shared(line: bytes, second: Asked, page_size: int, limit: int) -> int:
    """What a cached line and a prompt have in common, below the rows that are needed."""
    length = 0
    while length < min(len(line), limit) and line[length] == second.prompt[length]:
        length += 1
    return length // page_size * page_size


@PAGE_SIZES
def test_requests_of_one_step_share_whole_pages_however_they_part(page_size: int) -> None:
    stubbed = Stubbed(64 * 64, page_size=page_size, max_step_tokens=2048)
    known = text(9, 4 * page_size + 2)
    for cut in around(page_size):
        space = Namespace(salt=str(cut))
        other = bytes([known[cut] % 20 + 1])
        before = stubbed.decoder.rows
        pair = stubbed.submit(
            Asked(known, max_tokens=1, namespace=space),
            Asked(known[:cut] + other + known[cut + 1 :], max_tokens=1, namespace=space),
        )
        stubbed.step()
        assert all(asking.ended for asking in pair)
        assert stubbed.decoder.rows - before == 2 * len(known) - cut // page_size * page_size
    for asking in stubbed.askings:
        asking.check()
    stubbed.check_idle()


# -- namespaces


FIELDS = ("model_version", "adapter", "salt", "extra_key")


def namespaces() -> list[Namespace]:
    """The same characters in other fields, or divided otherwise over any two of them."""
    spaces = {Namespace(): None, Namespace(adapter=""): None}
    for first, second in combinations(FIELDS, 2):
        for one, other in (("a", "b"), ("ab", ""), ("", "ab"), ("a", "ab"), ("ab", "a")):
            spaces[Namespace(**{first: one, second: other})] = None
            spaces[Namespace(**{first: other, second: one})] = None
    return list(spaces)


@PAGE_SIZES
def test_identical_prompts_of_one_step_share_nothing_across_namespaces(page_size: int) -> None:
    spaces = namespaces()
    length = 2 * page_size + 1
    stubbed = Stubbed(
        len(spaces) * 4 * page_size,
        page_size=page_size,
        max_running=len(spaces),
        max_step_tokens=len(spaces) * (length + 1) + page_size,
    )
    asked = [Asked(text(10, length), max_tokens=1, namespace=space) for space in spaces]
    stubbed.submit(*asked)
    stubbed.step()
    assert stubbed.decoder.rows == len(spaces) * length
    again = stubbed.submit(*asked)
    stubbed.step()
    assert [a.request.cached_tokens for a in again] == [2 * page_size] * len(spaces)
    for asking in stubbed.askings:
        asking.check()
    stubbed.check_idle()
    for gone, space in enumerate(spaces, start=1):
        assert stubbed.memory.flush(space) == length // page_size * page_size
        kept = stubbed.cache.cached_tokens // (length // page_size * page_size)
        assert kept == len(spaces) - gone

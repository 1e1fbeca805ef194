"""Feeds: every reader gets all text in order, and what is kept grows with the text alone."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.interpreter import feed as feed_module
from stemma.interpreter.feed import Feed, merged

BRANCHES = ("p", "p/a", "p/b")


def events() -> some.SearchStrategy[list[st.Event]]:
    branch = some.sampled_from(BRANCHES)
    variable = some.sampled_from([None, "x", "y"])
    texts = some.builds(st.TextAdded, branch, some.text(min_size=1, max_size=3), variable)
    others = some.one_of(
        some.builds(st.VariableStarted, branch, some.just("x")),
        some.builds(st.VariableFinished, branch, some.just("x"), some.just("value")),
        some.just(st.Forked("p", BRANCHES[1:])),
        some.just(st.Joined("p", BRANCHES[1:], ("x",))),
    )
    return some.lists(some.one_of(texts, texts, texts, others), max_size=40)


def stories(told: list[st.Event]) -> dict[str, list[Any]]:
    """What every branch has seen of itself: each character with its variable, and all else."""
    seen: dict[str, list[Any]] = defaultdict(list)
    for event in told:
        if isinstance(event, st.TextAdded):
            seen[event.branch] += [(letter, event.variable) for letter in event.text]
            continue
        children = event.children if isinstance(event, st.Forked | st.Joined) else ()
        for label in (event.branch, *children):
            seen[label].append(event)
    return seen


@given(events())
def test_merging_changes_no_branchs_story(told: list[st.Event]) -> None:
    fewer = merged(told)
    assert stories(fewer) == stories(told)
    assert [e for e in fewer if not isinstance(e, st.TextAdded)] == [
        e for e in told if not isinstance(e, st.TextAdded)
    ]
    assert merged(fewer) == fewer


@given(events(), some.lists(some.integers(0, 40), max_size=4), some.integers(1, 8))
@settings(deadline=None)
def test_readers_early_and_late_get_the_whole_story(
    told: list[st.Event], come: list[int], few: int
) -> None:
    before, feed_module.FEW = feed_module.FEW, few
    try:
        feed = Feed()
        readers: list[Any] = []
        got: list[list[st.Event]] = []
        for number, event in enumerate(told):
            for place in come:
                if place == number:
                    readers.append(feed._join(lambda: None))
                    got.append([])
            feed.put(event)
            for place in range(0, len(readers), 2):  # these come along, the others lag behind
                got[place] += feed._take(readers[place])[0]
        for reader, seen in zip(readers, got, strict=True):
            seen += feed._take(reader)[0]
            assert stories(seen) == stories(told)
        feed.close()
        assert stories(list(feed)) == stories(told)
    finally:
        feed_module.FEW = before


def test_a_reader_that_keeps_up_gets_every_piece() -> None:
    feed, got = Feed(), []
    reader = iter(feed)
    for number in range(3 * feed_module.FEW):
        feed.put(st.TextAdded("b", f"{number} ", "x"))
        got.append(next(reader))
    feed.close()
    assert [event.text for event in got] == [f"{n} " for n in range(3 * feed_module.FEW)]  # type: ignore[attr-defined]
    assert list(reader) == []
    assert "".join(e.text for e in feed if isinstance(e, st.TextAdded)) == "".join(
        f"{n} " for n in range(3 * feed_module.FEW)
    )


@pytest.mark.parametrize(("branches", "pieces"), [(1, 100_000), (32, 30_000)])
def test_memory_goes_with_the_text_and_not_with_its_pieces(branches: int, pieces: int) -> None:
    piece = "word "
    tracemalloc.start()
    try:
        feed = Feed()
        slow = iter(feed)
        feed.put(st.TextAdded("b", "first", "x"))
        next(slow)  # and never again
        before, _ = tracemalloc.get_traced_memory()
        for number in range(pieces):
            # A token's text is a new string every time.
            feed.put(st.TextAdded(f"b{number % branches}", "".join(piece), "x"))
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    text = pieces * len(piece)
    # Kept twice, once of them for the slow reader; the rest is at most FEW events for each.
    assert after - before < 2 * text + 800_000
    assert peak - before < 4 * text + 1_600_000
    feed.close()
    assert sum(len(e.text) for e in slow if isinstance(e, st.TextAdded)) == text


def test_a_long_text_on_a_backend_is_streamed_whole_to_a_slow_and_a_late_reader() -> None:
    count = 20_000
    reply = " word" * count
    backend = MockBackend([reply], delay=1.0, pieces=count)
    program = st.function(lambda s: s.append(st.gen("x", max_tokens=count)))
    stream = program.stream(backend=backend)
    slow = iter(stream)
    next(slow)
    assert stream.state["x"] == reply
    stream.state._run.finished.wait()
    kept = stream._feed._kept.events
    assert len(kept) <= 2 * feed_module.FEW
    for reader in (slow, stream):
        assert "".join(e.text for e in reader if isinstance(e, st.TextAdded)) == reply
    assert "".join(stream.state.text_iter("x")) == reply


def test_readers_in_threads_and_tasks_lose_nothing_while_it_is_merged() -> None:
    feed = Feed()
    count = 5 * feed_module.FEW
    texts: list[str] = []

    def read() -> None:
        texts.append("".join(e.text for e in feed if isinstance(e, st.TextAdded)))

    async def read_async() -> None:
        texts.append("".join([e.text async for e in feed if isinstance(e, st.TextAdded)]))

    readers = [threading.Thread(target=read) for _ in range(3)]
    readers += [threading.Thread(target=lambda: asyncio.run(read_async())) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(count):
        feed.put(st.TextAdded("b", f"{number} "))
    feed.close()
    for reader in readers:
        reader.join()
    assert texts == ["".join(f"{n} " for n in range(count))] * 6


def test_nothing_follows_what_was_closed_and_the_first_closing_counts() -> None:
    feed = Feed()
    feed.close(ZeroDivisionError("first"))
    feed.put(st.TextAdded("b", "late"))
    feed.close()
    with pytest.raises(ZeroDivisionError, match="first"):
        list(feed)

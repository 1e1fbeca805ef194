"""Streams: typed events in order, any number of readers, early or late, and their errors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import Broken, MockBackend
from stemma.interpreter.feed import Feed
from stemma.lang.errors import Cancelled, UnknownVariable


class Broke(Exception):
    """A backend's own error."""


@st.function
def story(s: st.ProgramState) -> str:
    s += "Once " + st.gen("start") + ", "
    branches = s.fork(["sad", "glad"])
    for branch in branches:
        branch += st.gen("end")
    branches.join()
    s += st.select("mood", ["good", "bad"]) + "."
    return "told"


def read_all(iterable: Iterable[Any]) -> tuple[list[Any], BaseException | None]:
    """What an iterator gives, and what it raises at its end."""
    got = []
    try:
        for item in iterable:
            got.append(item)
    except Exception as error:
        return got, error
    return got, None


def replies() -> list[str]:
    return ["upon a time", "tears", "tears"]


def test_events_tell_what_happened_in_order() -> None:
    stream = story.stream(backend=MockBackend(replies(), pieces=4, delay=0.1))
    events = list(stream)
    main = [event for event in events if event.branch == "story"]
    assert [type(event) for event in main] == [
        st.TextAdded,
        st.VariableStarted,
        *[st.TextAdded] * 4,
        st.VariableFinished,
        st.TextAdded,
        st.Forked,
        st.Joined,
        st.TextAdded,
        st.Selected,
        st.VariableFinished,
        st.TextAdded,
        st.Ended,
    ]
    assert st.Forked("story", ("story/sad", "story/glad")) in main
    assert st.Joined("story", ("story/sad", "story/glad"), ("end",)) in main
    assert st.Selected("story", "mood", "good", {"good": 0.5, "bad": 0.5}) in main
    assert main[-1] == st.Ended("story", "told")
    assert events[-1] is main[-1]
    sad = [event for event in events if event.branch == "story/sad"]
    assert sad[-1] == st.VariableFinished("story/sad", "end", "tears")


def test_the_pieces_of_a_branch_are_its_text() -> None:
    stream = story.stream(backend=MockBackend(replies(), pieces=3, delay=0.02))
    added = [e for e in stream if isinstance(e, st.TextAdded) and e.branch == "story"]
    assert "".join(event.text for event in added) == stream.state.text()
    assert [e.text for e in added if e.variable == "start"] == ["upon", " a t", "ime"]


def test_text_arrives_while_it_is_written() -> None:
    stream = story.stream(backend=MockBackend(replies(), pieces=4, delay=0.4))
    for event in stream:
        if isinstance(event, st.TextAdded) and event.variable == "start":
            break
    assert not stream.state._own["start"].done
    assert stream.state["start"] == "upon a time"


def test_late_and_many_readers_get_everything() -> None:
    stream = story.stream(backend=MockBackend(replies(), pieces=4, delay=0.02))
    got: list[list[st.Event]] = [[], []]
    threads = [threading.Thread(target=lambda g=g: g.extend(stream)) for g in got]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = list(stream)
    assert got[0] == got[1] == late
    assert late[-1] == st.Ended("story", "told")

    async def read() -> list[st.Event]:
        return [event async for event in stream]

    assert asyncio.run(read()) == late


def test_the_iterator_raises_the_programs_error_after_the_events() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "a"
        raise ZeroDivisionError("mine")

    stream = program.stream(backend=MockBackend())
    for _ in range(2):
        seen, error = read_all(stream)
        assert seen == [st.TextAdded("program", "a")]
        assert str(error) == "mine"
    with pytest.raises(ZeroDivisionError):
        stream.state["never written"]
    with pytest.raises(ZeroDivisionError):
        stream.state.text()
    with pytest.raises(ZeroDivisionError):
        _ = stream.state.value


def test_a_failed_operation_is_an_event_and_then_the_error() -> None:
    boom = Broke("boom")

    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x")

    stream = program.stream(backend=MockBackend([Broken("half", boom)]))
    seen, error = read_all(stream)
    assert error is boom
    assert seen[-2:] == [st.TextAdded("program", "half", "x"), st.Failed("program", boom)]


def test_a_stream_can_be_cancelled() -> None:
    backend = MockBackend(["never"], delay=60)
    stream = story.stream(backend=backend)
    stream.cancel()
    with pytest.raises(Cancelled):
        list(stream)
    assert backend.running == 0


def test_a_streamed_run_is_read_piece_by_piece_from_outside() -> None:
    state = story.run(backend=MockBackend(replies(), pieces=3, delay=0.05), stream=True)
    assert list(state.text_iter("start")) == ["upon", " a t", "ime"]
    assert "".join(state.text_iter()) == "Once upon a time, good."
    assert state["mood"] == "good"
    assert state.value == "told"


def test_reading_from_outside_waits_for_what_the_body_has_not_written_yet() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        time.sleep(0.1)
        s += "a" + st.gen("x")

    backend = MockBackend(["b", "b", "b"])
    assert program.run(backend=backend, stream=True)["x"] == "b"
    assert program.run(backend=backend, stream=True).text() == "ab"
    assert program.run(backend=backend, stream=True).usage.prompt_tokens == 1
    with pytest.raises(UnknownVariable):
        program.run(backend=MockBackend(["b"]), stream=True)["y"]


def test_a_late_text_iterator_gets_everything_and_then_the_end() -> None:
    state = story.run(backend=MockBackend(replies(), pieces=3))
    assert list(state.text_iter("start")) == ["upon a time"]
    assert "".join(state.text_iter()) == state.text()
    with pytest.raises(UnknownVariable, match="'nothing'"):
        list(state.text_iter("nothing"))


def test_a_text_iterator_raises_what_the_run_raised() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "a" + st.gen("x")

    state = program.run(backend=MockBackend([Broken("half", Broke("boom"))]), stream=True)
    for name, expected in (("x", ["half"]), (None, ["a", "half"])):
        got, error = read_all(state.text_iter(name))
        assert isinstance(error, Broke)
        assert got[-len(expected) :] == expected


def test_a_program_may_iterate_its_own_text_and_its_branches() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        s += "p" + st.gen("x")
        child = s.copy()
        child += "c" + st.gen("y")
        return list(s.text_iter("x")), "".join(child.text_iter()), "".join(s.text_iter())

    state = program.run(backend=MockBackend(["abcd", "ef"], pieces=2, delay=0.1))
    assert state.value == (["ab", "cd"], "pabcdcef", "pabcd")


def test_an_async_reader_may_iterate_text() -> None:
    async def read(state: st.ProgramState) -> list[str]:
        return [piece async for piece in state.text_async_iter("start")]

    state = story.run(backend=MockBackend(replies(), pieces=3, delay=0.05), stream=True)
    assert asyncio.run(read(state)) == ["upon", " a t", "ime"]


def test_async_programs_stream_too() -> None:
    @st.function
    async def program(s: st.ProgramState) -> str:
        s += st.gen("x")
        return str(await s.get("x")) + "!"

    stream = program.stream(backend=MockBackend(["a"]))
    assert list(stream)[-1] == st.Ended("program", "a!")


def test_a_slow_reader_holds_nobody_up() -> None:
    backend = MockBackend(replies(), pieces=4)
    stream = story.stream(backend=backend)
    slow = iter(stream)
    next(slow)
    assert stream.state.value == "told"
    assert list(slow)[-1] == st.Ended("story", "told")


def test_a_feed_ends_for_readers_that_come_after_it_closed() -> None:
    feed, event = Feed(), st.TextAdded("b", "a")
    feed.put(event)
    feed.close(ZeroDivisionError())
    reader = iter(feed)
    assert next(reader) is event
    with pytest.raises(ZeroDivisionError):
        next(reader)

"""An error says what failed, the program's own line, the branch and what had been written; in plain
and async programs, in forks, subroutines and batches alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import Broken, MockBackend
from stemma.interpreter.tasks import MOST_NOTES


class Broke(Exception):
    """A backend's own error."""


class Slotted(BaseException):
    """An error that takes no attributes."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


@st.function
def plain(s: st.ProgramState) -> None:
    s += "Q" + st.gen("x")  # plain


@st.function
async def awaiting(s: st.ProgramState) -> None:
    s += "Q" + st.gen("x")  # awaiting
    await s.get("x")


@st.function
def forking(s: st.ProgramState) -> None:
    for branch in s.fork(["only"]):
        for deeper in branch.fork(1):
            deeper += "Q" + st.gen("x")  # forking


@st.function
def calling(s: st.ProgramState) -> None:
    plain(s)


@st.function
def scoring(s: st.ProgramState) -> None:
    s.score("x")  # scoring


@st.function
def messaging(s: st.ProgramState) -> None:
    with s.assistant():
        s += st.gen("x")  # messaging


def line_of(site: Any) -> str:
    assert site.file == __file__
    with open(__file__, encoding="utf-8") as source:
        return source.read().splitlines()[site.line - 1].rpartition("# ")[2]


def run(program: st.Program, backend: MockBackend) -> None:
    program.run(backend=backend)


def arun(program: st.Program, backend: MockBackend) -> None:
    asyncio.run(program.arun(backend=backend))


def batch(program: st.Program, backend: MockBackend) -> None:
    program.run_batch([{}], backend=backend)


def stream(program: st.Program, backend: MockBackend) -> None:
    list(program.stream(backend=backend))


def astream(program: st.Program, backend: MockBackend) -> None:
    async def read() -> None:
        async for _ in program.astream(backend=backend):
            pass

    asyncio.run(read())


@pytest.mark.parametrize("way", [run, arun, batch, stream, astream])
@pytest.mark.parametrize(
    ("program", "line", "branch"),
    [
        (plain, "plain", "plain"),
        (awaiting, "awaiting", "awaiting"),
        (forking, "forking", "forking/only/0"),
        (calling, "plain", "calling"),
        (scoring, "scoring", "scoring"),
        (messaging, "messaging", "messaging"),
    ],
)
def test_every_way_to_run_tells_line_branch_variable_and_text(
    way: Callable[[st.Program, MockBackend], None], program: st.Program, line: str, branch: str
) -> None:
    boom = Broke("boom")
    backend = MockBackend(lambda text, params: Broken("half", boom), fail={1: boom})
    if program is not scoring:
        backend = MockBackend(lambda text, params: Broken("half", boom))
    with pytest.raises(Broke) as caught:
        way(program, backend)
    error: Any = caught.value
    assert error is boom
    assert line_of(error.site) == line
    assert error.branch == branch
    if program is scoring:
        assert (error.variable, getattr(error, "partial", "")) == (None, "")
    else:
        assert (error.variable, error.partial) == ("x", "half")
        assert error.partials == {branch: "half"}
    note = error.__notes__[0]
    assert f"on branch {branch}, queued at {error.site}" in note
    assert ("after writing 'half'" in note) is (program is not scoring)
    assert error.state.label == program.name


def test_an_error_that_takes_no_attributes_is_raised_all_the_same() -> None:
    error = Slotted("boom")
    with pytest.raises(Slotted) as caught:
        plain.run(backend=MockBackend([error]))
    assert caught.value is error


def test_an_error_that_hits_very_many_branches_is_still_one_that_can_be_read() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(300)
        branches += st.gen("x")

    backend = MockBackend(lambda text, params: "w " * 100, delay=60, pieces=6000)
    with pytest.raises(st.errors.Timeout) as caught:
        program.run(backend=backend, timeout=2)
    assert len(caught.value.__notes__) == MOST_NOTES


def test_the_same_source_gives_the_same_output_plain_and_async() -> None:
    def replies(text: str, params: st.SamplingParams) -> str:
        return f"<{len(text)} {params.seed}>"

    @st.function(num_api_spec_tokens=None)
    def story(s: st.ProgramState) -> None:
        branches = s.fork(2)
        branches += "a" + st.gen("x", n=2) + st.select("y", ["b", "c"])
        s += st.gen("z")

    @st.function
    async def story_async(s: st.ProgramState) -> None:
        story(s)

    def events(stream: st.Stream) -> list[tuple[str, str]]:
        texts = [event for event in stream if isinstance(event, st.TextAdded)]
        return sorted((event.branch.partition("/")[2], event.text) for event in texts)

    backend = MockBackend(replies)
    one, other = story.run(backend=backend, seed=5), story_async.run(backend=backend, seed=5)
    third = asyncio.run(story_async.arun(backend=backend, seed=5))
    fourth = asyncio.run(story.arun(backend=backend, seed=5))
    assert one.text() == other.text() == third.text() == fourth.text()
    assert events(story.stream(backend=backend, seed=5)) == events(
        story_async.stream(backend=backend, seed=5)
    )


def test_a_plain_program_runs_inside_a_running_loop_as_in_a_notebook() -> None:
    async def cell() -> Any:
        state = plain.run(backend=MockBackend(lambda t, p: "said"))
        stream = plain.stream(backend=MockBackend(lambda t, p: "said"))
        awaited = await awaiting.arun(backend=MockBackend(lambda t, p: "said"))
        return state["x"], [event async for event in stream][-1], awaited["x"]

    assert asyncio.run(cell()) == ("said", st.Ended("plain", None), "said")

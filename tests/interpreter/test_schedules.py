"""Whatever the timing, a program means the same: random programs, slow and quick, one seed."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as draw

import stemma as st
from stemma.backend.mock import MockBackend

ACTIONS = draw.lists(
    draw.tuples(
        draw.sampled_from(["text", "gen", "samples", "select", "fork", "copy", "read", "message"]),
        draw.integers(0, 7),
    ),
    max_size=25,
)


def reply(prompt: str, params: st.SamplingParams) -> str:
    return f"{params.seed}"[-3:] + f"{len(prompt)}"


@st.function
def program(s: st.ProgramState, actions: list[tuple[str, int]]) -> list[Any]:
    """Do every action on the branch that its number picks; what the branches come to say."""
    branches = [s]
    for action, number in actions:
        branch = branches[number % len(branches)]
        match action:
            case "text":
                branch += f"{number}"
            case "gen":
                branch += st.gen("x")
            case "samples":
                branch += st.gen("x", n=2)
            case "select":
                branch += st.select("x", ["a", "b c"])
            case "fork":
                branches += branch.fork(number % 3)
            case "copy":
                branches.append(branch.copy())
            case "read":
                assert "x" not in branch or branch["x"]
            case "message":
                branch += st.user(f"{number}")
    said: list[Any] = []
    for branch in branches:
        variables = {name: branch[name] for name in branch.variables()}
        said.append((branch.label, branch.text(), variables, branch.messages()))
    return said


@given(ACTIONS, draw.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_timing_changes_nothing_and_nothing_leaks(
    actions: list[tuple[str, int]], seed: int
) -> None:
    quick, slow = MockBackend(reply), MockBackend(reply, delay=0.001, pieces=2)
    expected = program.run(actions, seed=seed, backend=quick).value
    assert program.run(actions, seed=seed, backend=slow).value == expected
    streamed = program.stream(actions, seed=seed, backend=slow)
    texts: dict[str, str] = {}
    for event in streamed:
        if isinstance(event, st.TextAdded):
            texts[event.branch] = texts.get(event.branch, "") + event.text
    assert streamed.state.value == expected
    for label, text, _, _ in expected:
        assert text.endswith(texts.get(label, ""))
    del streamed
    end = time.monotonic() + 5
    while (quick.open_branches or slow.open_branches) and time.monotonic() < end:
        time.sleep(0.001)
    assert (quick.open_branches, slow.open_branches) == (0, 0)

"""Tests of the agent in react_agent.py, without a model: its replies come from a script.

    pytest examples/test_react_agent.py                     # run them
    pytest examples/test_react_agent.py --update-prompts    # what is sent has changed on purpose

`scripted` and `prompt_snapshot` are fixtures that pytest has wherever Stemma is installed; see
docs/testing.md.
"""

from __future__ import annotations

import pytest
from react_agent import agent

import stemma as st


def test_the_agent_asks_its_tools_and_answers(scripted) -> None:
    backend = scripted(
        [
            "I need the price of a lamp.",
            'price({"thing": "lamp"})',
            "2 lamps cost 2 times 34.",
            'calculate({"expression": "2 * 34"})',
            "Done.",
            'answer({"text": "68"})',
        ]
    )
    state = agent.run("How much do 2 lamps cost?")
    assert state.value == "68"
    assert 'Action: price({"thing": "lamp"})\nObservation: 34\n' in state.text()
    assert 'Action: calculate({"expression": "2 * 34"})\nObservation: 68\n' in state.text()
    assert len(backend.calls) == 6


def test_what_is_sent_to_the_model(scripted, prompt_snapshot) -> None:
    """The snapshot is snapshots/test_react_agent/test_what_is_sent_to_the_model.txt."""
    backend = scripted(
        ["I need the price.", 'price({"thing": "lamp"})', "Done.", 'answer({"text": "34"})']
    )
    agent.run("How much is a lamp?", temperature=0)
    prompt_snapshot(backend)


def test_a_tool_that_fails_tells_the_model(scripted) -> None:
    scripted(
        ["Hm.", 'calculate({"expression": "1 / 0"})', "It cannot be.", 'answer({"text": "none"})']
    )
    state = agent.run("What is 1 divided by 0?")
    assert "Observation: ZeroDivisionError: division by zero\n" in state.text()
    assert state.value == "none"


def test_the_agent_can_ask_for_nothing_that_is_not_there(scripted) -> None:
    scripted(["Hm.", 'price({"thing": "boat"})'])
    with pytest.raises(st.errors.ConstraintError, match="boat"):
        agent.run("How much is a boat?")


def test_the_agent_gives_up_after_its_last_step(scripted) -> None:
    scripted(["Hm.", 'price({"thing": "lamp"})'] * 3)
    assert agent.run("How much is a boat?", most_steps=3).value is None


def test_a_lost_connection_ends_the_run_with_its_line(scripted) -> None:
    scripted(["I need the price.", ConnectionError("lost")])
    with pytest.raises(ConnectionError, match="lost") as caught:
        agent.run("How much is a lamp?")
    assert "s.call(" in source_line(caught.value.site)


def source_line(site: st.errors.Site) -> str:
    with open(site.file, encoding="utf-8") as file:
        return file.read().splitlines()[site.line - 1]

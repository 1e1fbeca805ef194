"""Where a hint saves an hour: what does nothing says so, and what is wrong says what is right."""

from __future__ import annotations

import inspect
import pydoc
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.interpreter.events import VariableFinished


class Agent:
    @st.function
    def answer(self, s: st.ProgramState, question: str) -> None:
        """Answer the question."""
        s += question


def test_a_method_keeps_its_docstring_and_name() -> None:
    assert inspect.getdoc(Agent().answer) == "Answer the question."
    assert "Answer the question." in pydoc.render_doc(Agent().answer)
    bound = Agent().answer.bind(question="Why?")
    assert inspect.getdoc(bound) == "Answer the question."
    assert bound.__name__ == "answer"


def test_a_method_that_runs_without_its_instance_says_how() -> None:
    with pytest.raises(TypeError, match=r"answer is a method.*Agent\(\.\.\.\)\.answer\.run\("):
        Agent.answer.run(question="Why?", backend=MockBackend())
    assert Agent().answer.run(question="Why?", backend=MockBackend()).text() == "Why?"


def test_a_program_that_is_an_attribute_of_a_class_runs_as_ever() -> None:
    program = st.function(lambda s: s.append("x"))
    type("Config", (), {"program": program})
    assert program.run(backend=MockBackend()).text() == "x"


def test_a_state_is_no_list() -> None:
    state = st.function(lambda s: s.append("x")).run(backend=MockBackend())
    with pytest.raises(TypeError, match="'ProgramState' object is not iterable"):
        list(state)


def test_an_error_that_several_items_share_names_one_of_them() -> None:
    shared = ConnectionError("gone")
    program = st.function(lambda s: s.append(st.gen("x")))
    backend = MockBackend(lambda text, params: shared)
    results = program.run_batch([{}] * 5, backend=backend, return_exceptions=True)
    assert results == [shared] * 5
    notes = [note for note in shared.__notes__ if note.startswith("run_batch: item")]
    assert len(notes) == 1


def test_the_time_of_a_slow_reply_adds_up() -> None:
    def usage(**how: Any) -> st.Usage:
        program = st.function(lambda s: s.append(st.gen("x")))
        return program.run(backend=MockBackend(["a b c d"], **how)).usage

    slow = usage(delay=0.02)
    assert slow.ttft_s is not None
    assert 0 < slow.ttft_s <= slow.total_s == 0.02
    pieces = usage(delay=0.02, pieces=4)
    assert pieces.ttft_s is not None
    assert pieces.ttft_s < slow.ttft_s


@pytest.mark.parametrize("make", [lambda s: s.user(), lambda s: s.var_scope("x")])
def test_a_block_that_no_with_opens_says_that_it_does_nothing(make: Callable[[Any], Any]) -> None:
    program = st.function(lambda s: (make(s), None)[1])
    with pytest.warns(RuntimeWarning, match="appends nothing") as caught:
        program.run(backend=MockBackend())
    assert caught[0].filename == __file__


def test_a_block_that_a_with_opens_says_nothing() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        with s.user(), s.var_scope("x"):
            s += "hi"
        s.user("")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert program.run(backend=MockBackend())["x"] == "hi"


def test_what_show_leaves_out_it_says() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "x"
        s.fork(3)

    state = program.run(backend=MockBackend())
    assert "… 3 branches went on from here: show(children=True)" in str(state.picture())
    assert "went on" not in str(state.picture(children=True))
    alone = st.function(lambda s: s.append("x")).run(backend=MockBackend())
    assert "went on" not in str(alone.picture())


def test_too_many_arguments_are_counted_and_the_allowed_ones_named() -> None:
    program = st.function(lambda s, topic, count=3: None)
    with pytest.raises(TypeError, match=r"3 positional .* at most 2: topic, count"):
        program.run("a", 2, 3, backend=MockBackend())


def test_events_tell_of_variables_that_the_program_sets_in_their_order() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        (branch,) = s.fork(["b"])
        branch += st.gen("x")
        branch["number"] = 5
        with branch.var_scope("scope"):
            branch += "y"

    events = [
        (event.branch, event.variable, event.value)
        for event in program.stream(backend=MockBackend(["a"], delay=0.05))
        if isinstance(event, VariableFinished)
    ]
    assert events == [
        ("program/b", "x", "a"),
        ("program/b", "number", 5),
        ("program/b", "scope", "y"),
    ]


def test_a_trace_shows_control_text_as_such() -> None:
    program = st.function(lambda s: s.append("a" + st.control("<|im_end|>")))
    assert "── control “<|im_end|>”" in str(program.trace())
    assert "── “a”" in str(program.trace())

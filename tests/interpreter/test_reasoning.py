"""Reasoning kept apart: a variable of its own, also while streaming, and the branch as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.backend.chat import ChatFormat
from stemma.backend.mock import CHATML, Broken, MockBackend
from stemma.lang.errors import InvalidArgument

THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."


@st.function
def ask(s: st.ProgramState, **how: Any) -> None:
    s += st.user("2 + 2?") + st.assistant(st.gen("answer", reasoning="why", **how))


def opening(mark: str) -> ChatFormat:
    """A chat format whose assistant turns begin inside the reasoning."""
    begin = {role: CHATML.begin(role) for role in ("system", "user")}
    begin["assistant"] = CHATML.begin("assistant") + mark + "\n"
    return ChatFormat(begin, {role: CHATML.end(role) for role in begin})


def test_what_stands_between_the_marks_is_a_variable_and_the_rest_another() -> None:
    backend = MockBackend([THOUGHT])
    state = ask.run(backend=backend)
    assert state["why"] == state.raw("why") == "\nTwo and two.\n"
    assert state["answer"] == state.raw("answer") == "\n\nFour."
    assert state.variables() == ["answer", "why"]
    assert state.meta("why") == state.meta("answer")
    assert state.meta("answer").token_ids == backend._ids(THOUGHT)


def test_the_branch_keeps_all_that_was_written() -> None:
    state = ask.run(backend=MockBackend([THOUGHT]))
    assert state.text().endswith(f"assistant\n{THOUGHT}<|im_end|>\n")


def test_messages_have_the_answer_without_the_reasoning() -> None:
    state = ask.run(backend=MockBackend([THOUGHT]))
    assert state.messages()[1] == {"role": "assistant", "content": "\n\nFour."}
    plain = st.function(lambda s: s.append(st.assistant(st.gen("answer"))))
    assert plain.run(backend=MockBackend([THOUGHT])).messages()[0]["content"] == THOUGHT


def test_an_answer_without_reasoning_leaves_it_empty() -> None:
    state = ask.run(backend=MockBackend(["Four."]))
    assert (state["why"], state["answer"]) == ("", "Four.")


def test_a_template_may_have_opened_the_mark() -> None:
    state = ask.run(backend=MockBackend(["Two and two.</think>Four."], chat=opening("<think>")))
    assert (state["why"], state["answer"]) == ("Two and two.", "Four.")


def test_a_mark_that_the_template_opens_and_closes_leaves_only_an_answer() -> None:
    state = ask.run(backend=MockBackend(["Four."], chat=opening("<think>\n\n</think>\n")))
    assert (state["why"], state["answer"]) == ("", "Four.")


def test_the_program_may_begin_the_reasoning_itself() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("<think> is a mark") + st.assistant_begin()
        s += st.control("<think>\n") + "First," + st.gen("answer", reasoning="why")

    state = program.run(backend=MockBackend([" why</think>so"]))
    assert (state["why"], state["answer"]) == (" why", "so")


def test_a_mark_in_an_earlier_message_opens_nothing() -> None:
    state = st.function(
        lambda s: s.append(
            st.user("What is <think>?") + st.assistant(st.gen("answer", reasoning="why"))
        )
    ).run(backend=MockBackend(["A mark."]))
    assert (state["why"], state["answer"]) == ("", "A mark.")


@pytest.mark.parametrize("opened", [True, False])
def test_reasoning_that_max_tokens_cuts_leaves_the_answer_empty(opened: bool) -> None:
    chat = opening("<think>") if opened else CHATML
    text = "one two three four five" if opened else "<think>one two three four five"
    state = ask.run(backend=MockBackend([text], chat=chat), max_tokens=3)
    assert (state["why"], state["answer"]) == ("one two three", "")
    assert state.meta("answer").finish_reason == "length"
    assert state.text().endswith("one two three<|im_end|>\n")


@pytest.mark.parametrize("how", ["backend", "gen"])
def test_the_marks_are_the_models_or_those_given(how: str) -> None:
    marks = ("[THINK]", "[/THINK]")
    backend = MockBackend(["[THINK]why[/THINK]<think>so"])
    given = {"reasoning_marks": marks} if how == "gen" else {}
    if how == "backend":
        backend.reasoning_marks = marks
    state = ask.run(backend=backend, **given)
    assert (state["why"], state["answer"]) == ("why", "<think>so")


def test_samples_have_their_reasoning_each() -> None:
    replies = ["<think>a</think>1", "2", "<think>c"]
    state = ask.run(backend=MockBackend(replies), n=3)
    assert state["why"] == ["a", "", "c"]
    assert state["answer"] == ["1", "2", ""]
    assert len(state.meta("why")) == 3


def added(stream: st.Stream) -> list[tuple[str, str | None]]:
    return [(e.text, e.variable) for e in stream if isinstance(e, st.TextAdded)]


@pytest.mark.parametrize("pieces", [1, 7, len(THOUGHT)])
def test_streamed_text_names_the_variable_of_its_part(pieces: int) -> None:
    stream = ask.stream(backend=MockBackend([THOUGHT], pieces=pieces, delay=0.05))
    told = added(stream)
    state = stream.state
    for name in ("why", "answer"):
        assert "".join(text for text, variable in told if variable == name) == state[name]
    assert "".join(text for text, _ in told) == state.text()
    if pieces > 1:
        assert len([1 for _, variable in told if variable == "why"]) > 1


def test_both_variables_start_and_finish_in_order() -> None:
    events = list(ask.stream(backend=MockBackend([THOUGHT])))
    started = [e.variable for e in events if isinstance(e, st.VariableStarted)]
    finished = [(e.variable, e.value) for e in events if isinstance(e, st.VariableFinished)]
    assert started == ["why", "answer"]
    assert finished == [("why", "\nTwo and two.\n"), ("answer", "\n\nFour.")]


def test_a_late_reader_is_told_the_same() -> None:
    state = ask.run(backend=MockBackend([THOUGHT]))
    assert list(state.text_iter("why")) == ["\nTwo and two.\n"]
    assert list(state.text_iter("answer")) == ["\n\nFour."]
    assert "".join(state.text_iter()) == state.text()


def test_a_failure_fails_both_variables_and_tells_what_was_held_back() -> None:
    broken = Broken("<think>why</th", ZeroDivisionError("gone"))
    stream = ask.stream(backend=MockBackend([broken]))
    told: list[st.Event] = []
    with pytest.raises(ZeroDivisionError):
        told.extend(stream)
    texts = [(event.text, event.variable) for event in told if isinstance(event, st.TextAdded)]
    assert texts[-2:] == [("why", "why"), ("</th", "why")]
    for name in ("why", "answer"):
        with pytest.raises(ZeroDivisionError):
            stream.state[name]


def test_the_answer_may_have_no_name() -> None:
    program = st.function(lambda s: s.append(st.gen(reasoning="why")))
    state = program.run(backend=MockBackend([THOUGHT]))
    assert state["why"] == "\nTwo and two.\n"
    assert state.variables() == ["why"]


@pytest.mark.parametrize(
    "how",
    [
        {"reasoning": ""},
        {"reasoning": "answer"},
        {"reasoning": "why", "reasoning_marks": ("<think>",)},
        {"reasoning_marks": ("<a>", "</a>")},
        {"reasoning": "why", "choices": ["a", "b"]},
    ],
)
def test_what_cannot_be_meant_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="reasoning"):
        st.gen("answer", **how)


def test_separate_reasoning_is_sglangs_way_to_say_it() -> None:
    written = st.separate_reasoning("So: " + st.gen("answer") + st.gen(), model_type="mistral")
    state = st.function(lambda s: s.append(written)).run(
        backend=MockBackend(["[THINK]why[/THINK]so", "<think>"])
    )
    assert state["answer_reasoning_content"] == "why"
    assert (state["answer"], state.variables()) == ("so", ["answer", "answer_reasoning_content"])


def test_the_local_engine_keeps_the_tokens_of_the_reasoning(
    tiny_model: Callable[..., Path],
) -> None:
    """The marks are tokens of the model; a random one writes them where a bias makes it."""
    with st.LocalBackend(tiny_model(), dtype="float32", kv_tokens=500) as backend:
        opened, closed = (backend.encode(mark, control=True)[0] for mark in ("<think>", "</think>"))

        @st.function
        def program(s: st.ProgramState) -> None:
            s += "Why?" + st.gen("answer", reasoning="why", max_tokens=1, logit_bias={opened: 1e6})
            s += st.gen("none", reasoning="more", max_tokens=3, ignore_eos=True)
            s += st.gen("nil", reasoning="last", max_tokens=1, logit_bias={closed: 1e6})

        state = program.run(backend=backend, seed=3)
        assert (state["why"], state["answer"]) == ("", "")
        assert (state["none"], len(state["more"]) > 0) == ("", True)
        assert (state["last"], state["nil"]) == ("", "")
        assert state.text() == f"Why?<think>{state['more']}</think>"
        assert state.tokens()[-5:] == [opened, *state.meta("more").token_ids, closed]


def test_a_shape_cannot_hold_for_an_answer_alone() -> None:
    """Neither where it is written, nor by SGLang's way, nor by the run's sampling."""
    with pytest.raises(InvalidArgument, match="the shape would hold for the reasoning, too"):
        st.gen("n", dtype=int, reasoning="why")
    with pytest.raises(InvalidArgument, match="the shape would hold for the reasoning, too"):
        st.separate_reasoning(st.gen("n", dtype=int))

    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("n", reasoning="why")

    sampling = st.SamplingParams(constraint=st.Constraint.of_type(int))
    with pytest.raises(InvalidArgument, match="dtype=int: the shape would hold"):
        program.run(backend=st.MockBackend(["<think>x</think>12"]), sampling=sampling)

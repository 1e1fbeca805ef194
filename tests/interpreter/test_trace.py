"""Outlines of programs without a model: what they have and where they end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import stemma as st
from stemma.backend.chat import ChatFormat
from stemma.backend.mock import MockBackend
from stemma.interpreter.trace import MOST_OPERATIONS, ForkOutline
from stemma.lang.errors import InvalidArgument, StemmaError, UnsupportedByBackend
from stemma.lang.ops import RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Text


@st.function
def tips(s: st.ProgramState, topic: str, count: int = 2) -> list[str]:
    s += st.system("Be brief.") + st.user(f"Give {count} tips about {topic}.")
    branches = s.fork(count)
    for i, branch in enumerate(branches):
        branch += st.assistant(f"Tip {i + 1}: " + st.gen("tip", max_tokens=48, stop="\n"))
    s += st.assistant("; ".join(branches["tip"]) + st.gen("summary", reasoning="why"))
    s += st.user(st.select("good", ["yes", "no"]))
    return [s["summary"], s["why"], s["good"]]


OUTLINE = """\
tips(topic='{topic}', count=2)
├── system “Be brief.”
├── user “Give 2 tips about {topic}.”
├── fork into 2
│   ├── tips/0
│   │   └── assistant
│   │       ├── “Tip 1: ”
│   │       └── gen tip  max_tokens=48 stop=('\\n',)
│   └── tips/1
│       └── assistant
│           ├── “Tip 2: ”
│           └── gen tip  max_tokens=48 stop=('\\n',)
├── assistant
│   ├── “{tip}; {tip}”
│   └── gen summary  reasoning='why'
└── user
    └── select good  'yes' | 'no'"""


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the default backend fails."""

    def refuse() -> None:
        raise AssertionError("a model was asked for")

    monkeypatch.setattr("stemma.interpreter.recorded.default_backend", refuse)


def test_an_outline_prints_as_a_tree() -> None:
    assert str(tips.trace()) == OUTLINE


def test_a_read_gives_the_name_and_a_choice_is_the_first() -> None:
    trace = tips.trace("sleep")
    assert trace.value == ["{summary}", "{why}", "yes"]
    assert trace.error is None


def test_an_outline_is_a_value() -> None:
    outline = tips.trace("sleep", count=1).outline
    assert outline.label == "tips"
    assert outline.operations[:3] == (
        RoleBegin("system"),
        Text("Be brief."),
        RoleEnd("system"),
    )
    assert outline.variables == ["why", "summary", "good"]
    (fork,) = (step for step in outline.steps if isinstance(step, ForkOutline))
    assert [branch.label for branch in fork.branches] == ["tips/0"]
    assert fork.branches[0].operations[1:3] == (
        Text("Tip 1: "),
        st.gen("tip", max_tokens=48, stop="\n"),
    )
    assert tips.trace("sleep").nodes == list(tips.trace("sleep").outline.operations)


def test_arguments_are_the_given_ones_their_defaults_or_their_names() -> None:
    @st.function
    def program(s: st.ProgramState, a: str, /, b: str, *rest: int, c: str, d: int = 4) -> Any:
        return a, b, rest, c, d

    assert program.trace().value == ("{a}", "{b}", (), "{c}", 4)
    assert program.trace("x", c="y").value == ("x", "{b}", (), "y", 4)
    assert program.trace("x", "y", 1, c="z").value == ("x", "y", (1,), "z", 4)
    bound = program.bind(c="bound").trace()
    assert bound.value[3] == "bound"
    assert bound.arguments == {"a": "{a}", "b": "{b}", "rest": (), "c": "bound", "d": 4}
    with pytest.raises(TypeError, match="'e'"):
        program.trace(e=1)


def test_samples_are_a_list_and_a_score_has_log_probabilities() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        s += st.gen("x", n=2) + st.score(" y", "later")
        return s["x"], sum(s.score(" z").logprobs), s.meta("x")[0].finish_reason, s.tokens()

    trace = program.trace()
    assert trace.value == (["{x}", "{x}"], 0, "stop", [])
    assert "score later  “ y”" in str(trace)
    assert "gen x  n=2" in str(trace)


def test_join_scopes_and_text_work_as_in_a_run() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        with s.var_scope("all"):
            s += "a" + st.gen("x")
        branches = s.fork(2)
        branches += st.gen("y")
        branches.join()
        return s["all"], s["y"], s.text()

    trace = program.trace()
    assert trace.value == ("a{x}", ["{y}", "{y}"], "a{x}")
    assert trace.outline.operations[0] == ScopeBegin("all")
    assert trace.outline.operations[3] == ScopeEnd("all")
    assert "├── var all\n│   ├── “a”\n│   └── gen x" in str(trace)


def test_a_branch_may_end_what_its_parent_began() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user_begin() + "q"
        (child,) = s.fork(1)
        child += "!" + st.user_end()

    assert str(program.trace()) == (
        "program()\n└── user\n    ├── “q”\n    └── program/0\n"
        "        ├── “!”\n        └── end of user"
    )


def test_long_literals_are_shortened_and_control_characters_move_no_cursor() -> None:
    @st.function
    def program(s: st.ProgramState, word: str) -> None:
        s += word * 1000 + "\x1b[2J\nend"

    (line,) = str(program.trace("long ")).splitlines()[1:]
    assert "[…4,948 characters…]" in line
    assert "\\x1b[2J⏎end" in line
    assert len(line) < 120


def test_the_body_really_runs_side_effects_and_all() -> None:
    seen: list[str] = []

    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x")
        seen.append(s["x"])

    program.trace()
    assert seen == ["{x}"]


def test_a_body_that_needs_more_than_some_text_ends_the_outline_with_its_error() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "2 + 2 = " + st.gen("sum")
        branch = s.copy()
        branch += "asked before"
        s += str(int(s["sum"]))

    trace = program.trace()
    assert isinstance(trace.error, ValueError)
    assert trace.outline.variables == ["sum"]
    assert "asked before" in str(trace)
    assert str(trace).endswith(
        "the outline ends here: ValueError: invalid literal for int() with base 10: '{sum}'"
    )


def test_a_loop_that_waits_for_a_reply_is_ended() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        while True:
            try:
                s += st.gen("x")
                if s["x"] == "done":
                    break
            except Exception:
                pass

    trace = program.trace()
    assert f"{MOST_OPERATIONS:,} operations" in str(trace.error)
    assert len(trace.nodes) == MOST_OPERATIONS


def test_programs_run_inside_of_a_trace_ask_no_model_either() -> None:
    @st.function
    def inner(s: st.ProgramState) -> str:
        s += st.gen("deep")
        return str(s["deep"])

    backend = MockBackend(["never asked"])

    @st.function
    def outer(s: st.ProgramState) -> Any:
        batch = inner.run_batch([{}] * 2, backend=backend)
        stream = inner.stream(backend=backend)
        return inner.run().value, [state.value for state in batch], stream.state.value

    assert outer.trace().value == ("{deep}", ["{deep}", "{deep}"], "{deep}")
    assert backend.calls == []
    assert inner.run(backend=MockBackend(["real"])).value == "real"


def test_async_programs_and_methods_are_traced() -> None:
    class Guide:
        @st.function
        async def answer(self, s: st.ProgramState, question: str) -> Any:
            s += question + st.gen("x")
            return await s.get("x")

    trace = Guide().answer.trace("why?")
    assert (trace.value, trace.name) == ("{x}", "answer")

    async def within() -> None:
        Guide().answer.trace("why?")

    with pytest.raises(StemmaError, match="event loop"):
        asyncio.run(within())


def test_a_conversation_stands_at_the_beginning() -> None:
    trace = st.function(lambda s: None).trace(messages=[{"role": "tool", "content": "4"}])
    assert trace.nodes == [RoleBegin("tool"), Text("4"), RoleEnd("tool")]


def test_a_backend_says_which_roles_may_be_written() -> None:
    program = st.function(lambda s: s.append(st.system("x")))
    assert program.trace().error is None
    backend = MockBackend(chat=ChatFormat({"user": "U"}, {"user": "u"}))
    assert isinstance(program.trace(backend=backend).error, UnsupportedByBackend)
    assert backend.calls == []


@pytest.mark.parametrize("option", [{"seed": 3}, {"temperature": 0}, {"stream": True}])
def test_options_without_a_meaning_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="has no meaning"):
        tips.trace("sleep", **option)


def test_many_and_deep_branches_are_counted_not_drawn() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s.fork(100).__iadd__("x")
        for _ in range(3000):
            s = s.copy()

    trace = program.trace()
    printed = str(trace).splitlines()
    assert trace.error is None
    assert any("… 50 more" in line for line in printed)
    assert "… fork into 1, and what is below" in printed[-1]
    assert len(printed) < 120


def test_a_notebook_gets_the_tree_escaped() -> None:
    program = st.function(lambda s: s.append("<b>&"))
    html = program.trace()._repr_html_()
    assert "&lt;b&gt;&amp;" in html
    assert "<b>" not in html

"""Messages: written as the chat format has it, read back verbatim, refused where they cannot be."""

from __future__ import annotations

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.lang.errors import InvalidArgument, UnsupportedByBackend

TURNS = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n hi \n<|im_end|>\n"
    "<|im_start|>assistant\nhello<|im_end|>\n"
)


def test_three_ways_to_write_messages_are_one_text() -> None:
    @st.function
    def wrapped(s: st.ProgramState) -> None:
        s += st.system("Be brief.") + st.user(" hi \n") + st.assistant(st.gen("x"))

    @st.function
    def opened(s: st.ProgramState) -> None:
        s += st.system_begin() + "Be brief." + st.system_end()
        s += st.user_begin()
        s += " hi \n"
        s += st.user_end() + st.assistant_begin() + st.gen("x") + st.assistant_end()

    @st.function
    def blocks(s: st.ProgramState) -> None:
        s.system("Be brief.")
        with s.user():
            s += " hi \n"
        with s.assistant():
            s += st.gen("x")

    for program in (wrapped, opened, blocks):
        state = program.run(backend=MockBackend(["hello"]))
        assert state.text() == TURNS
        assert state.messages() == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": " hi \n"},
            {"role": "assistant", "content": "hello"},
        ]


def test_what_was_written_is_what_is_sent() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("  two spaces, <|im_end|> and a line  \n") + st.assistant(st.gen("x"))

    backend = MockBackend(["  x  "])
    state = program.run(backend=backend)
    assert "user\n  two spaces, <|im_end|> and a line  \n<|im_end|>" in backend.prompts[0]
    assert [m["content"] for m in state.messages()] == [
        "  two spaces, <|im_end|> and a line  \n",
        "  x  ",
    ]


def test_control_tokens_come_from_templates_and_control_only() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("<|im_end|>") + st.control("<think>") + "<think>"

    backend = MockBackend()
    program.run(backend=backend)
    assert backend.controls == ["<|im_start|>user\n", "<|im_end|>\n", "<think>"]


def test_text_outside_of_messages_belongs_to_none_and_an_open_message_counts() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "before" + st.user("q") + "between" + st.assistant_begin() + "so far"

    state = program.run(backend=MockBackend())
    assert state.messages() == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "so far"},
    ]


def test_a_run_can_start_from_a_conversation() -> None:
    @st.function
    def go_on(s: st.ProgramState) -> None:
        s += st.user("and?") + st.assistant(st.gen("x"))

    first = go_on.run(backend=MockBackend(["one"]))
    second = go_on.run(messages=first.messages(), backend=MockBackend(["two"]))
    assert second.text() == first.text() + first.text().replace("one", "two")
    with pytest.raises(InvalidArgument, match="role"):
        go_on.run(messages=[{"role": "judge", "content": "x"}], backend=MockBackend())


def test_a_parameter_named_messages_is_the_programs() -> None:
    @st.function
    def program(s: st.ProgramState, messages: list[str]) -> None:
        s += ",".join(messages)

    assert program.run(messages=["a", "b"], backend=MockBackend()).text() == "a,b"


def test_the_format_is_told_the_roles_before() -> None:
    seen: list[tuple[str, list[str]]] = []

    class Format(type(MockBackend().chat)):  # type: ignore[misc]
        def begin(self, role: str, previous: object = ()) -> str:
            seen.append((role, list(previous)))  # type: ignore[call-overload]
            return str(super().begin(role, previous))

    backend = MockBackend(
        ["x"] * 2, chat=Format({"user": "U", "assistant": "A"}, {"user": "u", "assistant": "a"})
    )

    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("q")
        for branch in s.fork(2):
            branch += st.assistant(st.gen("x"))

    program.run(backend=backend)
    assert seen == [("user", []), ("assistant", ["user"]), ("assistant", ["user"])]


@pytest.mark.parametrize(
    "write",
    [
        lambda: st.user("a" + st.user("b")),
        lambda: st.user_begin() + st.assistant("x"),
        st.user_end,
        lambda: st.user_begin() + st.assistant_end(),
    ],
)
def test_messages_that_do_not_nest_are_refused_where_they_are_appended(write: object) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += write()  # type: ignore[operator]

    with pytest.raises(InvalidArgument, match="message"):
        program.run(backend=MockBackend())


def test_a_refused_expression_leaves_the_state_as_it_was() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        with pytest.raises(InvalidArgument):
            s += st.user("a" + st.gen("x") + st.user("b"))
        s += st.user("c")
        assert "x" not in s

    assert program.run(backend=MockBackend()).messages() == [{"role": "user", "content": "c"}]


def test_a_model_without_a_chat_format_refuses_messages_where_they_are_appended() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "plain"
        s += st.user("hi")

    with pytest.raises(UnsupportedByBackend, match="template") as caught:
        program.run(backend=MockBackend(chat=None))
    assert any(entry.lineno == caught.traceback[-1].lineno for entry in caught.traceback)

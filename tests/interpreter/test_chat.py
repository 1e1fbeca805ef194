"""Messages: written as the chat format has it, read back verbatim, refused where they cannot be."""

from __future__ import annotations

import asyncio

import pytest

import stemma as st
from stemma.backend.chat import ChatFormat
from stemma.backend.mock import MockBackend, MockBranch
from stemma.lang.errors import InvalidArgument, UnsupportedByBackend

HI = {"role": "user", "content": "hi"}
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


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hi", "must be a list of messages, not str"),
        ({"role": "user", "content": "hi"}, "must be a list of messages, not dict"),
        (3, "must be a list of messages, not int"),
        ([HI, "hi"], r"messages\[1\]: must be a dict with .* not 'hi'"),
        ([HI, HI, {"content": "hi"}], r"messages\[2\]: has no 'role', only 'content'"),
        ([{"role": "user"}], r"messages\[0\]: has no 'content'"),
        ([{"role": 1, "content": "hi"}], r"messages\[0\]: its role must be a string, not int"),
        ([{"role": "", "content": "hi"}], r"messages\[0\]: its role is empty"),
        ([HI, {"role": "assistant", "content": None}], r"\[1\]: its content .* not NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"\[0\]: its content .* not list"),
        ([{**HI, "tool_calls": [3]}], r"messages\[0\]: has 'tool_calls', which is neither"),
    ],
)
@pytest.mark.parametrize("how", ["run", "stream"])
def test_a_conversation_with_a_fault_is_refused_with_its_index(
    messages: object, said: str, how: str
) -> None:
    body = st.function(lambda s: None)
    with pytest.raises(InvalidArgument, match=said):
        getattr(body, how)(messages=messages, backend=MockBackend())


def test_keys_without_a_value_are_no_fault() -> None:
    state = st.function(lambda s: None).run(
        messages=[{**HI, "tool_calls": None}], backend=MockBackend()
    )
    assert state.messages() == [HI]


def test_the_contents_of_a_conversation_go_in_verbatim() -> None:
    said = "  <|im_end|> {x} \n"
    backend = MockBackend()
    state = st.function(lambda s: None).run(
        messages=({"role": role, "content": said} for role in ("system", "user", "assistant")),
        backend=backend,
    )
    assert [message["content"] for message in state.messages()] == [said] * 3
    assert not any(said in control for control in backend.controls)


def test_the_chat_format_decides_which_roles_a_conversation_may_have() -> None:
    chat = ChatFormat({"user": "U:", "tool": "T:"}, {"user": "\n", "tool": "\n"})
    messages = [HI, {"role": "tool", "content": "4"}]
    program = st.function(lambda s: None)
    state = program.run(messages=messages, backend=MockBackend(chat=chat))
    assert (state.text(), state.messages()) == ("U:hi\nT:4\n", messages)
    with pytest.raises(UnsupportedByBackend, match=r"messages\[1\]: a turn of 'tool'"):
        program.run(messages=messages, backend=MockBackend())


def test_a_message_that_fails_tells_the_line_that_gave_it() -> None:
    broken = MockBackend()
    broken.open = lambda namespace, **_: Full(broken, namespace)  # type: ignore[assignment, method-assign]
    with pytest.raises(OSError, match="full") as caught:
        list(st.function(lambda s: None).stream(messages=[HI], backend=broken))
    assert caught.value.site.function == "test_a_message_that_fails_tells_the_line_that_gave_it"  # type: ignore[attr-defined]


class Full(MockBranch):
    """A branch that takes no text."""

    def append(self, text: str, *, control: bool = False) -> None:
        raise OSError("full")


def test_all_ways_to_run_start_from_a_conversation() -> None:
    program = st.function(lambda s, more: s.append(st.user(more)))
    backend = MockBackend()
    options = {"messages": [HI], "backend": backend}
    states = [
        program.run("a", **options),
        asyncio.run(program.arun("a", **options)),
        program.stream("a", **options).state,
        *program.run_batch([("a",)], **options),
    ]
    for state in states:
        assert [message["content"] for message in state.messages()] == ["hi", "a"]


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

"""`s.call`: the model writes a call, the function runs, the result is appended."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field, ValidationError
from transformers import PreTrainedTokenizerFast

import stemma as st
from stemma.backend.chat import ChatFormat
from tests.conftest import TinyModel
from tests.tokenizers_for_tests import metaspace_tokenizer
from tests.tool_templates_for_tests import ALL, HERMES

LAMP = 'price({"thing": "lamp"})'
END = 'answer({"text": "34"})'


def price(thing: Literal["lamp", "chair"]) -> int:
    """What a thing costs."""
    return {"lamp": 34, "chair": 58}[thing]


def divide(x: int, y: int) -> float:
    """x divided by y."""
    return x / y


def answer(text: str) -> None:
    """The last call of all."""


@st.function
def agent(s: st.ProgramState, question: str) -> Any:
    s += f"Question: {question}\n"
    while True:
        s += "Thought: " + st.gen("thought", stop="\n") + "\nAction: "
        call = s.call([price, divide, answer])
        if call.name == "answer":
            return call.arguments["text"]


# A call in plain text


def test_a_call_is_written_run_and_its_result_appended() -> None:
    state = agent.run("A lamp?", backend=st.MockBackend(["Hm.", LAMP, "Well.", END]))
    assert state.value == "34"
    assert state.text() == (
        "Question: A lamp?\n"
        f"Thought: Hm.\nAction: {LAMP}\nObservation: 34\n"
        f"Thought: Well.\nAction: {END}\n"
    )


def test_the_variable_is_the_call_with_its_text_and_its_meta() -> None:
    @st.function
    def program(s: st.ProgramState) -> st.ToolCall:
        return s.call([price], "bought", max_tokens=20, logprobs=True)

    state = program.run(backend=st.MockBackend([LAMP]))
    call = st.ToolCall("price", {"thing": "lamp"}, LAMP, result=34, observation="34")
    assert state["bought"] == state.value == call
    assert state.raw("bought") == LAMP
    assert state.meta("bought").finish_reason == "stop"
    assert state.meta("bought").logprobs
    assert "".join(state.text_iter("bought")) == LAMP


def test_the_model_can_write_nothing_but_a_call() -> None:
    with pytest.raises(st.errors.ConstraintError, match=r"tools=\[price, divide, answer\]"):
        agent.run("?", backend=st.MockBackend(["Hm.", 'price({"thing": "boat"})']))


class Colour(Enum):
    RED = "red"


class Place(BaseModel):
    city: str


def test_a_tool_gets_typed_arguments_and_its_own_defaults() -> None:
    got: list[Any] = []

    def paint(place: Place, colour: Colour, coats: int = 2, *, note: str | None = None) -> None:
        got.append((place, colour, coats, note))

    @st.function
    def program(s: st.ProgramState) -> None:
        s.call([paint])

    text = 'paint({"place": {"city": "Ur"}, "colour": "red", "note": "x"})'
    program.run(backend=st.MockBackend([text]))
    assert got == [(Place(city="Ur"), Colour.RED, 2, "x")]


def test_a_program_chooses_its_own_words() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "> "
        s.call([price], result=" -> {} euros\n> ")
        s.call([answer], "end", result="{}")

    state = program.run(backend=st.MockBackend([LAMP, END]))
    assert state.text() == f"> {LAMP} -> 34 euros\n> {END}"


def test_a_result_stays_plain_text_whatever_it_spells(tiny_model: TinyModel) -> None:
    def read(page: Literal[1]) -> str:
        return "<|im_end|>"

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "> "
        s.call([read])

    with st.LocalBackend(tiny_model(), quantization=None) as backend:
        state = program.run(backend=backend, temperature=0)
        assert state.text() == '> read({"page": 1})\nObservation: <|im_end|>\n'
        assert not any(map(backend.text.is_control, state.tokens()[1:]))


# What fails


def test_an_exception_is_an_observation() -> None:
    replies = ["Hm.", 'divide({"x": 1, "y": 0})', "Oh.", END]
    state = agent.run("?", backend=st.MockBackend(replies))
    assert "\nObservation: ZeroDivisionError: division by zero\nThought: Oh." in state.text()


@st.function
def divides(s: st.ProgramState, on_error: Literal["observe", "raise"]) -> Any:
    try:
        return s.call([divide], on_error=on_error)
    except ZeroDivisionError as error:
        s += " = nothing"
        return error


def test_an_exception_is_raised_where_the_program_wants_that() -> None:
    text = 'divide({"x": 1, "y": 0})'
    state = divides.run("raise", backend=st.MockBackend([text]))
    assert isinstance(state.value, ZeroDivisionError)
    assert state.value.__notes__ == [f"in tool divide, called as {text!r}"]
    assert state.text() == f"{text} = nothing"
    assert state["call"].error == "ZeroDivisionError: division by zero"
    assert state["call"].observation is None
    seen = divides.run("observe", backend=st.MockBackend([text])).value
    assert seen.error == seen.observation == "ZeroDivisionError: division by zero"
    assert seen.result is None


def even(x: int) -> int:
    if x % 2:
        raise ValueError("odd")
    return x


def halve(x: Annotated[int, AfterValidator(even)]) -> int:
    return x // 2


def test_arguments_that_a_validator_refuses_are_observed_or_raised() -> None:
    @st.function
    def program(s: st.ProgramState, on_error: Literal["observe", "raise"]) -> st.ToolCall:
        return s.call([halve], on_error=on_error)

    call = program.run("observe", backend=st.MockBackend(['halve({"x": 3})'])).value
    assert call.arguments == {"x": 3}
    assert call.observation == "ValidationError: x: Value error, odd"
    with pytest.raises(ValidationError, match="odd") as caught:
        program.run("raise", backend=st.MockBackend(['halve({"x": 3})']))
    assert caught.value.__notes__[0].startswith("in tool halve, called as")


def test_what_a_validator_raises_is_raised_as_it_is() -> None:
    class OwnError(Exception):
        pass

    def own(x: int) -> int:
        raise OwnError("mine")

    def take(x: int) -> None:
        """A tool."""

    take.__annotations__["x"] = Annotated[int, AfterValidator(own)]

    @st.function
    def program(s: st.ProgramState) -> None:
        s.call([take], on_error="raise")

    with pytest.raises(OwnError, match="mine"):
        program.run(backend=st.MockBackend(['take({"x": 3})']))


def circular() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    "made",
    [lambda: b"\xff", circular, lambda: "\ud800", lambda: ["\ud800"]],
    ids=["bytes", "circular", "surrogate", "inside"],
)
def test_a_result_that_cannot_be_told_is_an_error_of_the_tool(made: Callable[[], Any]) -> None:
    def look() -> Any:
        return made()

    @st.function
    def program(s: st.ProgramState, on_error: Literal["observe", "raise"]) -> st.ToolCall:
        return s.call([look], on_error=on_error)

    state = program.run("observe", backend=st.MockBackend(["look({})"]))
    assert type(state.value.result) is type(made())
    assert state.value.error == state.value.observation
    assert state.value.error.startswith("InvalidArgument: tool look: its result, a ")
    assert state.text() == f"look({{}})\nObservation: {state.value.error}\n"
    with pytest.raises(st.errors.InvalidArgument, match="tool look: its result, a ") as caught:
        program.run("raise", backend=st.MockBackend(["look({})"]))
    assert caught.value.__notes__[0].startswith("in tool look, called as")


def test_an_iterator_is_kept_as_a_list_and_what_it_raises_is_the_tools() -> None:
    def count(y: int) -> Any:
        return (6 // (y - i) for i in range(3))

    @st.function
    def program(s: st.ProgramState) -> None:
        s.call([count], "good")
        s.call([count], "bad")

    script = ['count({"y": 3})', 'count({"y": 2})']
    state = program.run(backend=st.MockBackend(script))
    assert (state["good"].result, state["good"].observation) == ([2, 3, 6], "[2, 3, 6]")
    assert state["bad"].error.startswith("ZeroDivisionError")


def test_a_call_that_is_cut_off_runs_nothing() -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        with pytest.raises(st.errors.Truncated) as caught:
            s.call([price], max_tokens=1)
        s += "..."
        return caught.value.partial

    state = program.run(backend=st.MockBackend([LAMP]))
    assert state.value == 'price({"thing":'
    assert state.text() == 'price({"thing":...'


def test_a_call_can_be_closed_in_time() -> None:
    def say(words: list[str]) -> int:
        return len(words)

    @st.function
    def program(s: st.ProgramState) -> Any:
        return s.call([say], max_tokens=4, on_limit="close").arguments["words"]

    reply = 'say({"words": ["a", "b", "c", "d", "e"]})'
    said = program.run(backend=st.MockBackend([reply])).value
    assert said[:2] == ["a", "b"]
    assert len(said) < 5


def test_a_failed_operation_before_the_call_is_raised_there() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x")
        s.call([price])

    with pytest.raises(ConnectionError):
        program.run(backend=st.MockBackend([ConnectionError("lost")]))

    @st.function
    def talk(s: st.ProgramState) -> None:
        s += st.gen("x")
        with s.assistant():
            s.call([price])

    with pytest.raises(ConnectionError):
        talk.run(backend=st.MockBackend([ConnectionError("lost")], chat=chat_of(HERMES)))


async def fetch(page: int) -> str:
    """Fetch a page."""
    await asyncio.sleep(0)
    return f"page {page}"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s: s.call([fetch]), "tool fetch is async.*await s.acall"),
        (lambda s: s.call([price], None), "call.name=None.: .* name it"),
        (lambda s: s.call([price], ""), "call.name=''.: a variable's name"),
        (lambda s: s.call([price], result="no place"), "result='no place'.*one {} in it"),
        (lambda s: s.call([price], result="{}{}"), "one {} in it"),
        (lambda s: s.call([price], on_error="ignore"), "must be 'observe' or 'raise'"),
        (lambda s: s.call([price], n=2), "call.n=...*leave it out"),
        (lambda s: s.call([price], regex="x"), "call.regex=...*leave it out"),
        (lambda s: s.call([]), "at least one"),
        (lambda s: s.call([], max_token=1), "at least one"),
        (lambda s: s.call(price), "must be a list of functions"),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_is_written(
    call: Callable[[st.ProgramState], Any], said: str
) -> None:
    backend = st.MockBackend()
    with pytest.raises(st.errors.InvalidArgument, match=said):
        st.function(lambda s: call(s)).run(backend=backend)
    assert backend.calls == []


def test_a_setting_that_gen_has_not_is_an_argument_that_call_has_not() -> None:
    backend = st.MockBackend()
    with pytest.raises(
        TypeError, match=r"call\(\) got an unexpected keyword argument 'temprature'"
    ):
        st.function(lambda s: s.call([price], temprature=0)).run(backend=backend)
    assert backend.calls == []


@pytest.mark.parametrize("role", ["user", "system"])
def test_it_is_the_assistant_who_calls(role: Literal["user", "system"]) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        with getattr(s, role)():
            s.call([price])

    with pytest.raises(st.errors.InvalidArgument, match=rf"a {role} message.*st.{role}_end"):
        program.run(backend=st.MockBackend())


def test_a_plain_function_that_returns_a_coroutine_is_refused() -> None:
    def sly(page: int) -> Any:
        return fetch(page)

    @st.function
    def program(s: st.ProgramState) -> None:
        s.call([sly])

    with pytest.raises(st.errors.InvalidArgument, match=r"tool sly returned a coroutine.*acall"):
        program.run(backend=st.MockBackend(['sly({"page": 1})']))


# In async programs


def test_an_async_program_awaits_calls_and_tools() -> None:
    @st.function
    async def program(s: st.ProgramState) -> list[Any]:
        first = await s.acall([fetch, price], "first")
        second = await s.acall([fetch, price], "second")
        return [first.result, second.result]

    backend = st.MockBackend(['fetch({"page": 7})', LAMP])
    state = asyncio.run(program.arun(backend=backend))
    assert state.value == ["page 7", 34]
    assert state.text() == f'fetch({{"page": 7}})\nObservation: page 7\n{LAMP}\nObservation: 34\n'


def test_calls_of_several_branches_wait_side_by_side() -> None:
    arrived = asyncio.Event()

    async def meet(who: Literal["a", "b"]) -> str:
        if who == "a":
            await asyncio.wait_for(arrived.wait(), 10)
        arrived.set()
        return who

    @st.function
    async def program(s: st.ProgramState) -> list[str]:
        branches = s.fork(["a", "b"])
        for label, branch in zip(branches.labels, branches, strict=True):
            branch += label
        calls = await asyncio.gather(*(branch.acall([meet]) for branch in branches))
        await branches.ajoin()
        assert s["call"] == calls
        return [call.result for call in calls]

    backend = st.MockBackend(lambda prompt, params: f'meet({{"who": "{prompt}"}})')
    assert asyncio.run(program.arun(backend=backend)).value == ["a", "b"]


def test_an_async_tool_that_fails_is_observed() -> None:
    async def fail(x: int) -> None:
        await asyncio.sleep(0)
        raise LookupError(x)

    @st.function
    async def program(s: st.ProgramState) -> str | None:
        return (await s.acall([fail])).observation

    backend = st.MockBackend(['fail({"x": 1})'])
    assert asyncio.run(program.arun(backend=backend)).value == "LookupError: 1"


# In conversations


@st.function
def shop(s: st.ProgramState, **settings: Any) -> None:
    s += st.system("You sell. " + s.tools([price, divide]))
    s += st.user("A lamp?")
    s.call([price], **settings)
    s += st.assistant(st.gen("reply"))


def test_without_a_format_of_its_own_a_model_is_told_in_plain_words() -> None:
    state = shop.run(backend=st.MockBackend([LAMP, "34."]))
    assert state.messages() == [
        {
            "role": "system",
            "content": "You sell. "
            'price({"thing": {"enum": ["lamp", "chair"], "type": "string"}}): '
            "What a thing costs.\n"
            'divide({"x": {"type": "integer"}, "y": {"type": "integer"}}): x divided by y.',
        },
        {"role": "user", "content": "A lamp?"},
        {"role": "assistant", "content": LAMP},
        {"role": "user", "content": "Observation: 34"},
        {"role": "assistant", "content": "34."},
    ]


def test_in_an_open_message_the_plain_result_stays_in_it() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("A lamp?")
        with s.assistant():
            s += "Let me see: "
            s.call([price])
            s.call([answer], "end")

    state = program.run(backend=st.MockBackend([LAMP, END]))
    said = f"Let me see: {LAMP}\nObservation: 34\n{END}\n"
    assert state.messages()[1:] == [{"role": "assistant", "content": said}]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = metaspace_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return PreTrainedTokenizerFast.from_pretrained(folder)


def chat_of(template: str) -> ChatFormat:
    return ChatFormat.from_template(template, bos_token="<s>", eos_token="</s>")


def their_call(name: str, arguments: Any, text: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call = {"type": "function", "id": "call00000", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def their_result(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": "call00000", "content": content}


@st.function
def two_calls(s: st.ProgramState) -> None:
    s += st.user("A lamp?")
    s.call([price], "first")
    s.call([price], "second")
    s += st.assistant(st.gen("reply")) + st.user("Thanks.")
    s += st.assistant("So ")


@pytest.mark.parametrize("name", list(ALL))
def test_calls_and_results_are_in_the_models_own_format(name: str, renderer: Any) -> None:
    chat = chat_of(ALL[name])
    pieces = chat.tools()
    assert pieces is not None
    form = pieces.call
    space = " " if name == "mistral-v3" else ""  # which the first token of a reply brings

    def call(thing: str) -> str:
        return f'price{form.between}{{"thing": "{thing}"}}{form.after}'

    backend = st.MockBackend([call("lamp"), call("chair"), f"{space}92."], chat=chat)
    state = two_calls.run(backend=backend)

    def arguments(thing: str) -> Any:
        return f'{{"thing": "{thing}"}}' if name == "deepseek-v3" else {"thing": thing}

    theirs = renderer.apply_chat_template(
        [
            {"role": "user", "content": "A lamp?"},
            their_call("price", arguments("lamp")),
            their_result("price", "34"),
            their_call("price", arguments("chair")),
            their_result("price", "58"),
            {"role": "assistant", "content": "92."},
            {"role": "user", "content": "Thanks."},
            {"role": "assistant", "content": "So "},
        ],
        chat_template=ALL[name],
        tokenize=False,
    )
    assert state.text().replace("So ", space + "So ") == theirs
    assert [message["role"] for message in state.messages()] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant", "user", "assistant")
    ]
    assert state["second"].arguments == {"thing": "chair"}


HERMES_LAMP = 'price", "arguments": {"thing": "lamp"}}\n</tool_call>'


def test_in_an_open_message_the_result_goes_between_that_and_a_new_one(renderer: Any) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("A lamp?")
        with s.assistant():
            s += "Let me see."
            s.call([price])
            s += st.gen("reply")

    state = program.run(backend=st.MockBackend([HERMES_LAMP, "34."], chat=chat_of(HERMES)))
    theirs = renderer.apply_chat_template(
        [
            {"role": "user", "content": "A lamp?"},
            their_call("price", {"thing": "lamp"}, "Let me see."),
            their_result("price", "34"),
            {"role": "assistant", "content": "34."},
        ],
        chat_template=HERMES,
        tokenize=False,
    )
    assert state.text() == theirs


def test_own_words_and_plain_text_are_plain_on_every_model() -> None:
    chat = chat_of(HERMES)
    state = agent.run("A lamp?", backend=st.MockBackend(["Hm.", LAMP, "Well.", END], chat=chat))
    assert f"Action: {LAMP}\nObservation: 34\n" in state.text()
    state = shop.run(result="{}", backend=st.MockBackend([LAMP, "34."], chat=chat))
    assert [message["content"] for message in state.messages()[2:]] == [LAMP, "34", "34."]


def test_of_a_tool_that_returns_none_there_is_only_the_call() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("A lamp?")
        s.call([answer])
        s += st.user("Thanks.")

    reply = 'answer", "arguments": {"text": "34"}}\n</tool_call>'
    state = program.run(backend=st.MockBackend([reply], chat=chat_of(HERMES)))
    assert state.messages()[1:] == [
        {"role": "assistant", "content": f'<tool_call>\n{{"name": "{reply}'},
        {"role": "user", "content": "Thanks."},
    ]
    state = program.run(backend=st.MockBackend([END]))
    assert state.messages()[1]["content"] == END


def test_the_tools_are_told_of_in_the_models_own_words() -> None:
    backend = st.MockBackend([HERMES_LAMP, "34."], chat=chat_of(HERMES))
    content = shop.run(backend=backend).messages()[0]["content"]
    assert content.startswith("You sell. # Tools\n\nCall one of these functions:\n<tools>\n{")
    assert '"description": "x divided by y."' in content
    assert any(text.startswith("# Tools") for text in backend.controls)


# On the engine


@pytest.fixture(scope="module")
def engine(tiny_model: TinyModel) -> Any:
    with st.LocalBackend(tiny_model(seed=3), quantization=None) as backend:
        yield backend


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("native", [True, False])
def test_a_random_model_writes_valid_calls(engine: Any, native: bool, seed: int) -> None:
    known = engine.chat
    engine.chat = chat_of(HERMES) if native else known
    seen: list[Any] = []

    def note(kind: Literal["a", "b"], level: int = 0) -> str:
        """Note it."""
        seen.append((kind, level))
        return "done"

    @st.function
    def program(s: st.ProgramState) -> list[st.ToolCall]:
        s += st.user("Note.")
        return [s.call([note], max_tokens=80, on_limit="close") for _ in range(3)]

    try:
        state = program.run(backend=engine, seed=seed)
    finally:
        engine.chat = known
    assert seen == [(c.arguments["kind"], c.arguments.get("level", 0)) for c in state.value]
    assert len(seen) == 3
    roles = [message["role"] for message in state.messages()]
    assert roles == ["user", *(["assistant", "tool" if native else "user"] * 3)]
    assert state.tokens().count(2) == state.text().count("<|im_end|>") == 7 + (not native)


def test_a_docstring_may_spell_no_control_token(engine: Any) -> None:
    def bad(x: int) -> None:
        """Ends with <|im_end|>."""

    with pytest.raises(st.errors.InvalidArgument, match=r"tool bad: .*'<\|im_end\|>'"):
        st.function(lambda s: s.tools([bad])).run(backend=engine)


def test_a_control_token_between_name_and_arguments_makes_it_plain(engine: Any) -> None:
    known = engine.chat
    engine.chat = chat_of(HERMES.replace('", "arguments": ', '<|im_start|>"arguments": '))
    assert engine.chat.tools() is not None

    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("A lamp?")
        s.call([price], temperature=0)

    try:
        state = program.run(backend=engine)
    finally:
        engine.chat = known
    assert state.raw("call").startswith('price({"thing": "')


# Together with the rest


def test_run_settings_are_those_of_the_call_but_for_n() -> None:
    @st.function
    def program(s: st.ProgramState) -> st.ToolCall:
        return s.call([price])

    backend = st.MockBackend([LAMP])
    state = program.run(backend=backend, temperature=0.25, n=3)
    assert state.value.result == 34
    (call,) = backend.calls
    assert call.params is not None
    assert (call.params.temperature, call.params.n) == (0.25, 1)


def test_a_stream_tells_once_of_a_call_with_what_it_came_to() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s.call([price])

    events = list(program.stream(backend=st.MockBackend([LAMP])))
    told = [e.value for e in events if isinstance(e, st.VariableFinished)]
    assert [call.result for call in told] == [34]
    assert "".join(e.text for e in events if isinstance(e, st.TextAdded)) == (
        f"{LAMP}\nObservation: 34\n"
    )


def test_a_stream_tells_of_a_call_that_was_cut_off_or_has_failed() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        with suppress(st.errors.Truncated):
            s.call([price], "cut", max_tokens=1)
        with suppress(ZeroDivisionError):
            s.call([divide], "failed", on_error="raise")

    script = [LAMP, 'divide({"x": 1, "y": 0})']
    events = list(program.stream(backend=st.MockBackend(script)))
    cut, failed = [e.value for e in events if isinstance(e, st.VariableFinished)]
    assert isinstance(cut, st.errors.Truncated)
    assert failed.error == "ZeroDivisionError: division by zero"


def test_the_text_of_a_call_can_be_read_while_its_tool_runs() -> None:
    read: list[str] = []

    def look() -> str:
        read.append("".join(state.text_iter("call")))
        return "seen"

    @st.function
    def program(s: st.ProgramState) -> None:
        nonlocal state
        state = s
        s.call([look])

    state: Any = None
    program.run(backend=st.MockBackend(["look({})"]))
    assert read == ["look({})"]


@pytest.mark.parametrize("template", [None, HERMES])
def test_a_record_plays_calls_back(template: str | None, tmp_path: Path) -> None:
    replies = [LAMP if template is None else HERMES_LAMP, "34."]
    settings = {} if template is None else {"chat": chat_of(template)}
    recorded = shop.run(backend=st.MockBackend(replies, **settings), record=tmp_path / "run.jsonl")
    played = shop.run(replay=tmp_path / "run.jsonl")
    assert played.text() == recorded.text()
    assert played["call"] == recorded["call"]


def test_a_checkpoint_gives_a_call_back_as_it_was(tmp_path: Path) -> None:
    def pair(x: list[int]) -> list[int]:
        return x

    @st.function
    def program(s: st.ProgramState, number: int) -> None:
        s += f"{number}: "
        s.call([pair])

    def backend() -> st.MockBackend:
        return st.MockBackend(lambda prompt, params: 'pair({"x": [1, 2]})')

    items = [{"number": 1}, {"number": 2}]
    path = tmp_path / "kept"
    first = program.run_batch(items, backend=backend(), checkpoint=path)
    second = program.run_batch(items, backend=backend(), checkpoint=path)
    assert [state["call"] for state in second] == [state["call"] for state in first]
    assert second[0]["call"].result == [1, 2]


def test_a_trace_runs_no_tool() -> None:
    ran: list[str] = []

    def delete(path: str) -> None:
        ran.append(path)

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Action: "
        s.call([delete])
        s += st.gen("more")

    trace = program.trace()
    assert trace.error is None
    assert "Observation: {delete}" in str(trace)
    assert ran == []


def test_a_call_keeps_no_state_alive() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        def look(x: Literal[1]) -> str:
            return f"{s.label} {x}"

        s.call([look])

    state = program.run(backend=st.MockBackend(['look({"x": 1})']))
    assert state["call"].result == "program 1"
    gone = weakref.ref(state._executor)
    del state
    gc.collect()
    assert gone() is None


def test_a_fork_after_a_call_has_it() -> None:
    @st.function
    def program(s: st.ProgramState) -> list[int]:
        s.call([price])
        return [branch["call"].result for branch in s.fork(2)]

    assert program.run(backend=st.MockBackend([LAMP])).value == [34, 34]


def test_a_result_has_the_aliases_that_its_schema_asks_for() -> None:
    class Train(BaseModel):
        start: str = Field(alias="from")

    def train() -> Any:
        return [Train(**{"from": "Paris"})]

    @st.function
    def program(s: st.ProgramState) -> None:
        s.call([train])

    state = program.run(backend=st.MockBackend(["train({})"]))
    assert state["call"].observation == '[{"from": "Paris"}]'

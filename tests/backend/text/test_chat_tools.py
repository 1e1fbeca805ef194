"""Tool calls in a model's own format: the pieces, against what the template itself renders."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from stemma.backend.chat import ChatFormat
from stemma.backend.chat_tools import ToolPieces
from stemma.lang.tools import CallForm, Tool
from tests.chat_templates_for_tests import ALL as WITHOUT_TOOLS
from tests.tokenizers_for_tests import CHATML, metaspace_tokenizer
from tests.tool_templates_for_tests import (
    ALL,
    DEEPSEEK_V3,
    HERMES,
    LLAMA31,
    MISTRAL_V3,
    NO_THINKING,
    WITH_XML,
)

ARGUMENTS = '{"thing": "lamp", "count": 2}'


def price(thing: str, count: int = 1) -> int:
    """What a thing costs."""
    return 34 * count


SCHEMAS = [Tool.of(price).schema()]


def chat_of(template: str) -> ChatFormat:
    return ChatFormat.from_template(template, bos_token="<s>", eos_token="</s>")


def pieces_of(template: str) -> ToolPieces:
    pieces = chat_of(template).tools()
    assert pieces is not None
    return pieces


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = metaspace_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return PreTrainedTokenizerFast.from_pretrained(folder)


def conversation(name: str, *, text: str = "", result: str = "68") -> list[dict[str, Any]]:
    arguments: Any = ARGUMENTS if name == "deepseek-v3" else {"thing": "lamp", "count": 2}
    call = {
        "type": "function",
        "id": "call00000",
        "function": {"name": "price", "arguments": arguments},
    }
    return [
        {"role": "user", "content": "How much?"},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "name": "price", "tool_call_id": "call00000", "content": result},
    ]


def ours(chat: ChatFormat, *, text: str = "", result: str = "68") -> str:
    pieces = chat.tools()
    assert pieces is not None
    form = pieces.call
    call = (form.behind if text else form.before) + "price" + form.between + ARGUMENTS + form.after
    said = result.replace('"', '\\"') if pieces.quoted else result
    turns = [("user", "How much?"), ("assistant", text + call), ("tool", said)]
    return chat.render(turns, add_generation_prompt=True)


@pytest.mark.parametrize("result", ["68", 'a "b" c'])
@pytest.mark.parametrize("name", list(ALL))
def test_a_call_and_its_result_are_written_as_the_template_writes_them(
    name: str, result: str, renderer: Any
) -> None:
    theirs = renderer.apply_chat_template(
        conversation(name, result=result),
        chat_template=ALL[name],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ours(chat_of(ALL[name]), result=result) == theirs


@pytest.mark.parametrize("name", list(ALL))
def test_a_reply_goes_on_behind_the_result(name: str, renderer: Any) -> None:
    reply = {"role": "assistant", "content": "It is 68."}
    theirs = renderer.apply_chat_template(
        [*conversation(name), reply], chat_template=ALL[name], tokenize=False
    )
    space = " " if name == "mistral-v3" else ""  # which the first token of a reply brings
    chat = chat_of(ALL[name])
    assert ours(chat) + space + "It is 68." + chat.end("assistant") == theirs


def test_a_call_behind_text_in_the_same_message(renderer: Any) -> None:
    theirs = renderer.apply_chat_template(
        conversation("hermes", text="Let me see."),
        chat_template=HERMES,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ours(chat_of(HERMES), text="Let me see.") == theirs


def test_the_pieces_of_a_call() -> None:
    assert pieces_of(HERMES).call == CallForm(
        before='<tool_call>\n{"name": "',
        behind='\n<tool_call>\n{"name": "',
        between='", "arguments": ',
        after="}\n</tool_call>",
    )
    assert pieces_of(LLAMA31).quoted
    assert pieces_of(DEEPSEEK_V3).reply == ""


def test_white_space_within_the_arguments_is_the_templates() -> None:
    compact = HERMES.replace("| tojson }}", "| tojson(separators=(',', ':')) }}")
    assert pieces_of(HERMES).call.whitespace == "spaced"
    assert pieces_of(compact).call.whitespace == "compact"


def test_a_prompt_that_says_more_than_the_history_is_kept(renderer: Any) -> None:
    pieces = pieces_of(NO_THINKING)
    assert pieces.call.before == '<tool_call>\n{"name": "'
    assert pieces.reply.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "template", [CHATML, WITH_XML, *WITHOUT_TOOLS.values()], ids=["chatml", "xml", *WITHOUT_TOOLS]
)
def test_a_template_without_calls_of_name_and_json_has_no_pieces(template: str) -> None:
    assert chat_of(template).tools() is None


def test_a_template_that_writes_the_tools_name_with_its_result_has_no_pieces() -> None:
    named = HERMES.replace("'\\n<tool_response>\\n'", "'\\n' + m.name + '\\n'")
    assert named != HERMES
    assert chat_of(named).tools() is None


def test_turns_behind_a_result_are_opened_as_ever() -> None:
    """Also by a template that refuses roles that do not alternate."""
    chat = chat_of(MISTRAL_V3)
    turns = ["user", "assistant", "tool", "assistant", "user", "assistant", "tool"]
    assert chat.begin("assistant", turns[:3]) == ""
    assert chat.begin("user", turns[:4]) == "[INST] "
    assert chat.begin("assistant", turns[:5]) == ""
    assert chat.begin("tool", turns[:6]) == chat.begin("tool", turns[:2])
    assert chat.begin("user", turns) == "[INST] "


@pytest.mark.parametrize("name", ["hermes", "llama3.1", "mistral-v3"])
def test_the_tools_are_told_of_in_the_templates_words(name: str, renderer: Any) -> None:
    told = chat_of(ALL[name]).told_tools(SCHEMAS)
    assert told is not None
    messages = [{"role": "system", "content": "S."}, {"role": "user", "content": "Q?"}]
    theirs = renderer.apply_chat_template(
        messages, chat_template=ALL[name], tools=SCHEMAS, tokenize=False
    )
    assert all(passage in theirs for passage in told.split("\n\n"))
    assert "What a thing costs." in told
    assert "S." not in told
    assert "Q?" not in told


def test_what_is_told_begins_and_ends_with_the_templates_words() -> None:
    told = chat_of(HERMES).told_tools(SCHEMAS) or ""
    assert told.startswith("# Tools\n\nCall one")
    assert told.endswith("Write <tool_call>...</tool_call>.")
    told = chat_of(MISTRAL_V3).told_tools(SCHEMAS) or ""
    assert told.startswith("[AVAILABLE_TOOLS][{")
    assert told.endswith("}][/AVAILABLE_TOOLS]")


@pytest.mark.parametrize("template", [CHATML, DEEPSEEK_V3])
def test_a_template_may_say_nothing_of_tools(template: str) -> None:
    assert chat_of(template).told_tools(SCHEMAS) is None


def test_pieces_that_are_given_are_taken() -> None:
    pieces = ToolPieces(CallForm(before="<", after=">"), "{", "}", "|")
    chat = ChatFormat(
        {"user": "U", "assistant": "A"}, {"user": "u", "assistant": "a"}, tools=pieces
    )
    turns = [("user", "1"), ("assistant", "<f(2)>"), ("tool", "3")]
    assert chat.render(turns, add_generation_prompt=True) == "U1uA<f(2)>a{3}|"
    assert ToolPieces.loads(pieces.dumps()) == pieces
    assert chat.told_tools(SCHEMAS) is None
    assert ChatFormat.absent().tools() is None

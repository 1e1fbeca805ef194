"""`stemma chat`: a conversation at the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.commands.chat import conversation
from stemma.interpreter.meta import Meta
from stemma.lang.errors import ContextOverflow
from tests.cli_for_tests import Piped, Typed, run_stemma


class Scripted:
    """A screen that asks what it was told to and remembers the rest."""

    def __init__(self, *messages: str, stop_after: str | None = None) -> None:
        self.messages = list(messages)
        self.stop_after = stop_after
        self.written: list[str] = [""]
        self.ends: list[Meta | str] = []

    def ask(self) -> str | None:
        return self.messages.pop(0) if self.messages else None

    def write(self, piece: str) -> None:
        self.written[-1] += piece
        if self.stop_after is not None and self.stop_after in self.written[-1]:
            self.stop_after = None
            raise KeyboardInterrupt

    def finish(self, how: Meta | str) -> None:
        self.ends.append(how)
        self.written.append("")


def talk(screen: Scripted, backend: MockBackend, *, system: str = "", most: int = 50) -> None:
    conversation.run(screen, system, most, backend=backend)


def turns(*contents: str) -> str:
    roles = ["user", "assistant"] * len(contents)
    parts = [f"<|im_start|>{r}\n{c}<|im_end|>\n" for r, c in zip(roles, contents, strict=False)]
    return "".join(parts) + "<|im_start|>assistant\n"


def test_every_turn_goes_on_from_those_before() -> None:
    backend = MockBackend(["Hello, Ann.", "Ann.", "Bye."])
    screen = Scripted("I am Ann.", "Who am I?", "Bye")
    talk(screen, backend, system="Be brief.")
    assert screen.written == ["Hello, Ann.", "Ann.", "Bye.", ""]
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert backend.prompts == [
        system + turns("I am Ann."),
        system + turns("I am Ann.", "Hello, Ann.", "Who am I?"),
        system + turns("I am Ann.", "Hello, Ann.", "Who am I?", "Ann.", "Bye"),
    ]
    assert all(isinstance(end, Meta) for end in screen.ends)


def test_the_answer_streams() -> None:
    pieces: list[str] = []

    class Watched(Scripted):
        def write(self, piece: str) -> None:
            pieces.append(piece)

    talk(Watched("Hi"), MockBackend(["abcdef"], delay=0.05, pieces=3))
    assert pieces == ["ab", "cd", "ef"]


def test_a_stopped_answer_stays_in_the_conversation_as_far_as_it_came() -> None:
    backend = MockBackend(["one two three four", "Yes."], delay=0.4, pieces=4)
    screen = Scripted("Count.", "Go on", stop_after="two")
    talk(screen, backend)
    said = screen.written[0]
    assert "two" in said
    assert "four" not in said
    assert screen.ends[0] == "stopped"
    assert backend.prompts[1] == turns("Count.", said, "Go on")
    assert screen.written[1] == "Yes."


def test_a_failed_turn_leaves_the_conversation_as_it_was() -> None:
    backend = MockBackend(["one", "never", "three"], fail={2: st.StemmaError("out of order")})
    screen = Scripted("a", "b", "c")
    talk(screen, backend)
    assert screen.ends[1] == "out of order"
    assert backend.prompts[2] == turns("a", "one", "c")


def overflow(limit: int) -> Callable[[str, Any], Any]:
    """Refuses what needs more than `limit` words, as a context does; else answers with "x"s."""

    def reply(prompt: str, params: st.SamplingParams) -> Any:
        assert params.max_tokens is not None
        needed = len(prompt.split()) + params.max_tokens
        if needed > limit:
            return ContextOverflow("too long", needed=needed, limit=limit)
        return "x " * params.max_tokens

    return reply


def test_the_last_answer_takes_the_room_that_is_left() -> None:
    backend = MockBackend(overflow(20))
    screen = Scripted("a b c")
    talk(screen, backend, most=50)
    prompt = len(turns("a b c").split())
    assert len(screen.written[0].split()) == 20 - prompt
    assert isinstance(screen.ends[0], Meta)


def test_a_full_context_is_told_with_the_remedy() -> None:
    screen = Scripted("word " * 30, "short")
    talk(screen, MockBackend(overflow(20)), most=5)
    assert isinstance(screen.ends[0], str)
    assert "20 tokens: /reset" in screen.ends[0]
    assert isinstance(screen.ends[1], Meta)


# On a model


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> str:
    return str(tiny_model(max_position_embeddings=8192))


@pytest.fixture(scope="module")
def slow_model(tiny_model: Any) -> str:
    """Deep enough that an answer takes seconds."""
    return str(tiny_model(max_position_embeddings=8192, num_hidden_layers=64))


def test_lines_are_messages_where_there_is_no_terminal(model: str) -> None:
    lines = "Hello\n\n  \n/stats\n/tree\n/nonsense\nAgain\n/reset\nHello\n/quit\nnever\n"
    done = run_stemma("chat", "--model", model, "--max-tokens", "6", "--seed", "1", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    counts = re.findall(r"\((\d+) prompt tokens: (\d+) cached, (\d+) computed; ", done.stdout)
    (first, second, third) = [tuple(map(int, count)) for count in counts]
    assert first[1] == 0
    assert second[0] > first[0]
    assert second[1] >= first[0]  # the whole of the turn before comes from the cache
    assert third[0] == first[0]
    assert third[1] > 0
    assert "prompt tokens" in done.stdout
    assert "pool tokens" in done.stdout
    assert "radix tree" in done.stdout
    assert "there is no /nonsense" in done.stdout
    assert done.stdout.count("/quit") == 1  # in the list of commands


def test_the_end_of_the_input_ends_the_conversation(model: str) -> None:
    done = run_stemma("chat", "--model", model, "--max-tokens", "3", stdin="Hello")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 written" in done.stdout or "cached" in done.stdout


def test_ctrl_c_stops_the_answer_and_keeps_the_session(slow_model: str) -> None:
    chat = Piped("chat", "--model", slow_model, "--max-tokens", "8000", "--seed", "1")
    chat.say("Hello")
    chat.out.read_until("a")  # some of the answer
    chat.interrupt()
    chat.out.read_until("(stopped)")
    chat.say("/reset")
    chat.say("/stats")
    chat.out.read_until("pool tokens")
    status, _, errors = chat.end()
    assert (status, errors) == (0, "")


def test_ctrl_c_while_nothing_is_answered_ends_with_status_130(model: str) -> None:
    chat = Piped("chat", "--model", model)
    chat.say("/help")
    chat.out.read_until("/quit")
    chat.interrupt()
    status, _, errors = chat.end()
    assert (status, errors) == (130, "")


def test_on_a_terminal_ctrl_c_warns_first_and_ctrl_d_ends(model: str) -> None:
    chat = Typed("chat", "--model", model, "--max-tokens", "3")
    assert "Ctrl-D ends" in chat.screen.read_until("> ")
    chat.interrupt()
    chat.screen.read_until("Ctrl-C again or Ctrl-D ends.")
    chat.type("Hello\r")
    chat.screen.read_until("written")
    chat.screen.read_until("> ")
    chat.type("\x04")
    status, rest = chat.end()
    assert status == 0
    assert "Traceback" not in rest


def test_on_a_terminal_ctrl_c_twice_ends_with_status_130(model: str) -> None:
    chat = Typed("chat", "--model", model)
    chat.screen.read_until("> ")
    chat.interrupt()
    chat.screen.read_until("Ctrl-D ends.")
    chat.screen.read_until("> ")
    chat.interrupt()
    status, rest = chat.end()
    assert status == 130
    assert "Traceback" not in rest


def test_on_a_terminal_ctrl_c_stops_the_answer(slow_model: str) -> None:
    chat = Typed("chat", "--model", slow_model, "--max-tokens", "8000", "--seed", "1")
    chat.screen.read_until("> ")
    chat.type("Hello\r")
    chat.screen.read_until("\n")  # its echo
    chat.screen.read_until("a")  # some of the answer
    chat.type("\x03")
    chat.screen.read_until("(stopped)")
    chat.screen.read_until("> ")
    chat.type("/quit\r")
    assert chat.end()[0] == 0


def test_a_model_without_a_chat_template_is_refused_with_the_remedy(
    tiny_model: Any, tmp_path: Path
) -> None:
    for file in tiny_model().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings.pop("chat_template", None)
    config.write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    done = run_stemma("chat", "--model", str(tmp_path), stdin="Hello\n")
    assert done.returncode == 1
    assert "no chat template" in done.stderr
    assert "ChatFormat(" in done.stderr


@pytest.mark.slow
def test_the_default_model_remembers_what_was_said(default_model_folder: Path) -> None:
    lines = "My dog is called Biscuit.\nWhat is my dog called?\n"
    done = run_stemma("chat", "--temperature", "0", "--max-tokens", "40", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "Biscuit" in done.stdout.split("written")[1]

"""Where a program means something else here than in SGLang, or is refused: what
docs/from-sglang.md says and no other test of the interpreter shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import stemma as sgl
from stemma.errors import InvalidArgument


def run(body: Callable[[Any], Any], *replies: Any, **how: Any) -> sgl.ProgramState:
    return sgl.function(body).run(backend=sgl.MockBackend(list(replies), **how))


@pytest.mark.parametrize(
    ("dtype", "reply", "value"),
    [
        *((int, "4", 4), ("int", "4", 4), (float, "4.5", 4.5), ("float", "4.5", 4.5)),
        *((bool, "true", True), ("bool", "false", False)),
    ],
)
def test_a_type_gives_a_value_of_it_and_the_text_beside(dtype: Any, reply: str, value: Any) -> None:
    state = run(lambda s: s.append("It is " + sgl.gen("x", dtype=dtype)), reply)
    assert state["x"] == value
    assert type(state["x"]) is type(value)
    assert (state.raw("x"), state.text()) == (reply, f"It is {reply}")


def test_an_integer_is_one() -> None:
    state = run(lambda s: s.append("2 + 2 = " + sgl.gen_int("sum", max_tokens=4)), "4")
    assert (state["sum"], state.raw("sum")) == (4, "4")


def test_a_string_is_plain_text_without_quotes() -> None:
    state = run(lambda s: s.append(sgl.gen_string("x") + sgl.gen("y", dtype=str)), "it's", " so")
    assert (state["x"], state["y"]) == ("it's", " so")


def test_no_choices_are_an_error_where_they_are_written() -> None:
    with pytest.raises(ValueError, match="choices"):
        sgl.gen("x", choices=[])


def test_a_choice_is_not_drawn() -> None:
    with pytest.raises(InvalidArgument, match="temperature"):
        sgl.gen("x", choices=["a", "b"], temperature=0.5)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        sgl.gen("x", max_tokens=8, choices=["a", "b"])


@pytest.mark.parametrize("value", [None, 3, ["a"]])
def test_only_text_and_operations_are_appended(value: Any) -> None:
    with pytest.raises(TypeError):
        run(lambda s: s.append(value))


def test_a_message_that_a_method_appends_is_not_appended_twice() -> None:
    def body(s: Any) -> None:
        s += s.system("Be brief.")

    with pytest.raises(TypeError):
        run(body)


def test_a_variable_is_there_while_it_is_written() -> None:
    def body(s: Any) -> tuple[bool, bool]:
        s += sgl.gen("x")
        return "x" in s, "y" in s

    assert run(body, "late", delay=0.1).value == (True, False)


def test_a_fork_waits_for_nothing_and_is_the_same_state() -> None:
    def body(s: Any) -> Any:
        s += sgl.user_begin() + "a" + sgl.gen("x")
        start = time.monotonic()
        (child,) = s.fork(1)
        took = time.monotonic() - start
        child += "b" + sgl.user_end()
        return took, child.meta("x").finish_reason, child["x"], child.messages()

    took, reason, x, messages = run(body, "-", delay=0.5).value
    assert took < 0.4
    assert (reason, x) == ("stop", "-")
    assert messages == [{"role": "user", "content": "a-b"}]


def test_join_makes_a_name_that_the_parent_had_the_list_of_the_branches() -> None:
    def body(s: Any) -> None:
        s += sgl.gen("x")
        forks = s.fork(2)
        forks += [sgl.gen("x"), sgl.gen("x")]
        assert forks["x"] == ["b", "c"]
        assert s["x"] == "a"
        forks.join()

    assert run(body, "a", "b", "c")["x"] == ["b", "c"]


def test_reasoning_is_a_variable_of_its_own_and_stays_in_the_text() -> None:
    def body(s: Any) -> None:
        s += sgl.assistant_begin()
        s += sgl.separate_reasoning(sgl.gen("answer", max_tokens=512), model_type="qwen3")
        s += sgl.assistant_end()

    state = run(body, "<think>Two and two.</think>Four.")
    assert state["answer"] == "Four."
    assert state["answer_reasoning_content"] == "Two and two."
    assert state.messages() == [{"role": "assistant", "content": "Four."}]
    assert "<think>Two and two.</think>Four." in state.text()


def test_the_body_runs_once_per_item_of_a_batch() -> None:
    ran: list[int] = []

    @sgl.function
    def program(s: Any, number: int) -> None:
        ran.append(number)
        s += "The same long beginning. " * 20 + sgl.gen("x")

    program.run_batch(
        [{"number": n} for n in range(5)], backend=sgl.MockBackend(lambda prompt, params: "x")
    )
    assert sorted(ran) == [0, 1, 2, 3, 4]


def test_an_iterator_without_a_streamed_run_gets_pieces_too() -> None:
    def body(s: Any) -> list[str]:
        s += "a" + sgl.gen("x")
        return list(s.text_iter())

    assert run(body, "bcd", pieces=3, delay=0.1).value == ["a", "b", "c", "d"]

"""SGLang's own names of what states, forks and batches can do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import stemma as sgl
from stemma.lang.ops import Gen, Select, Text


@pytest.fixture(autouse=True)
def _scripted() -> Iterator[None]:
    sgl.set_default_backend(sgl.MockBackend(lambda prompt, params: " said"))
    yield
    sgl.set_default_backend(None)


@sgl.function
def choose(s: Any) -> None:
    s += "I need a" + sgl.gen("tool", choices=[" saw", " long ladder"])
    s += " and" + sgl.gen("more", max_tokens=3, return_logprob=True) + "."


def test_meta_info_of_a_choice_has_the_log_probabilities_of_each() -> None:
    info = choose.run().get_meta_info("tool")
    assert [row[0] for row in info["input_token_logprobs"][1]] == [-1.0, -1.0]
    assert info["normalized_prompt_logprobs"] == [-1.0, -1.0]


def test_meta_info_of_a_generation_has_tokens_and_the_reason_of_its_end() -> None:
    info = choose.run().get_meta_info("more")
    assert info["completion_tokens"] == 1
    assert info["finish_reason"]["type"] == "stop"
    assert [row[0] for row in info["output_token_logprobs"]] == [-1.0]


def test_variables_have_a_getter_and_a_setter() -> None:
    def body(s: Any) -> None:
        s += sgl.gen("x")
        s.set_var("y", s.get_var("x").strip())
        s.sync()
        assert s.error() is None

    assert sgl.function(body).run()["y"] == "said"


def test_the_value_of_a_program_is_ret_value() -> None:
    assert sgl.function(lambda s: 3).run().ret_value == 3


def test_branches_are_concatenated_and_appended_to_their_parent() -> None:
    def body(s: Any) -> None:
        s += "a"
        forks = s.fork(2)
        forks += lambda i: f" {i}" + sgl.gen("x")
        forks.join(mode="concate_and_append")

    assert sgl.function(body).run().text() == "a 0 said 1 said"


def test_a_fork_takes_a_size() -> None:
    assert sgl.function(lambda s: len(s.fork(size=2))).run().value == 2


@pytest.mark.parametrize("split", [sgl.ProgramState.fork, sgl.ProgramState.copy])
def test_offsets_of_positions_are_refused(split: Any) -> None:
    with pytest.raises(sgl.errors.UnsupportedByBackend, match="position"):
        sgl.function(lambda s: split(s, position_ids_offset=[0])).run()


def test_an_iterator_takes_the_name_of_a_variable_by_keyword() -> None:
    assert list(choose.run(stream=True).text_iter(var_name="more")) == [" said"]


def test_an_async_iterator_gives_meta_info_with_the_pieces() -> None:
    async def read() -> list[Any]:
        state = choose.run(stream=True)
        return [p async for p in state.text_async_iter(var_name="more", return_meta_data=True)]

    sgl.set_default_backend(sgl.MockBackend([" said"], pieces=2, delay=0.05))
    (first, nothing_yet), (last, info) = asyncio.run(read())
    assert (first + last, nothing_yet, info["completion_tokens"]) == (" said", {}, 1)


def test_a_batch_shows_progress_by_sglangs_name() -> None:
    assert len(choose.run_batch([{}, {}], progress_bar=True)) == 2


def test_a_batch_may_be_a_generator() -> None:
    assert [s["tool"] for s in choose.run_batch([{}] * 3, generator_style=True)] == [" saw"] * 3


def test_a_batch_takes_lists_of_positional_arguments() -> None:
    program = sgl.function(lambda s, word: s.append(word))
    assert [s.text() for s in program.run_batch([["a"], ["b"]])] == ["a", "b"]


def test_a_program_is_traced_without_being_run() -> None:
    backend = sgl.MockBackend()
    trace = choose.trace(backend=backend)
    tool, more = (node for node in trace.nodes if not isinstance(node, Text))
    assert isinstance(tool, Select)
    assert isinstance(more, Gen)
    assert (tool.name, tool.choices) == ("tool", (" saw", " long ladder"))
    assert (more.name, more.params.max_tokens) == ("more", 3)
    assert backend.calls == []

"""Programs as SGLang's users write them, on the default model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as sgl
from tests.interpreter.test_from_sglang import expand, few_shot

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(default_model_folder: Path) -> Iterator[sgl.LocalBackend]:
    backend = sgl.LocalBackend(default_model_folder)
    sgl.set_default_backend(backend)
    yield backend
    sgl.set_default_backend(None)
    backend.close()


@pytest.mark.usefixtures("model")
def test_a_batch_answers_as_single_runs_do() -> None:
    questions = [f"How many legs has a {animal}?" for animal in ("cow", "dog", "horse")]
    states = few_shot.run_batch([{"question": q} for q in questions], temperature=0)
    assert all(state["answer"].endswith(".") for state in states)
    assert sgl.flush_cache() > 0
    alone = [few_shot.run(question=q, temperature=0)["answer"] for q in questions]
    assert [state["answer"] for state in states] == alone


@pytest.mark.usefixtures("model")
def test_a_skeleton_is_expanded_on_one_prefix() -> None:
    state = expand.run(topic="bread", points=3, temperature=0)
    assert len(state["detail"]) == 3
    assert all(state["detail"])
    assert [m["role"] for m in state.messages()] == ["system", *["user", "assistant"] * 2]
    assert state.usage.cached_tokens > state.usage.computed_tokens


@pytest.mark.usefixtures("model")
def test_a_choice_and_a_stream_of_at_least_so_many_tokens() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "France: the capital is Paris. Spain: the capital is"
        s += sgl.gen("city", choices=[" Rome", " Madrid"]) + ".\nItaly: the capital is"
        s += sgl.gen("more", min_tokens=12, max_tokens=24, stop=[".", "\n"])

    state = program.run(temperature=0, stream=True)
    pieces = list(state.text_iter("more"))
    assert len(pieces) > 1
    assert "".join(pieces) == state["more"]
    assert len(state.meta("more").token_ids) >= 12
    assert state["city"] == " Madrid"

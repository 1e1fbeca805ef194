"""The language on the default model: what is counted, what is healed, what caches share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.interpreter.picture import Split

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def backend(default_model_folder: Path) -> Iterator[st.LocalBackend]:
    with st.LocalBackend(default_model_folder, kv_tokens=4096) as backend:
        yield backend


@pytest.fixture(autouse=True)
def _empty_cache(backend: st.LocalBackend) -> None:
    backend.flush_cache()


@st.function
def tips(s: st.ProgramState, topic: str) -> None:
    s += st.system("You answer briefly.") + st.user(f"Give two tips about {topic}.")
    branches = s.fork(2)
    branches += lambda i: st.assistant(f"Tip {i + 1}: " + st.gen("tip", max_tokens=6))
    branches["tip"]
    s += st.user("Is that good advice?") + st.assistant(st.select("good", ["Yes", "No"]))


def test_what_is_shown_is_what_the_engine_counted(backend: st.LocalBackend) -> None:
    before = backend.stats()
    state = tips.run("sleep", backend=backend, seed=1)
    after = backend.stats()
    picture = state.picture(children=True)
    assert picture.of_run == state.usage
    assert state.usage.prompt_tokens == after.prompt_tokens - before.prompt_tokens
    assert state.usage.cached_tokens == after.cached_tokens - before.cached_tokens
    (split,) = (part for part in picture.parts if isinstance(part, Split))
    first, second = (branch.usage for branch in split.branches)
    assert first.cached_tokens + second.cached_tokens >= len(backend.encode("You answer briefly."))
    assert first.prompt_tokens == first.cached_tokens + first.computed_tokens
    (choice,) = (s for s in picture.segments if s.kind == "selected")
    assert choice.usage == state.meta("good").usage == picture.usage
    shown = str(picture)
    assert f"{choice.usage.cached_tokens:,} from the cache" in shown
    assert f"“{split.branches[0].segments[2].text}”" in shown


def test_a_second_run_finds_its_prompt_in_the_cache(backend: st.LocalBackend) -> None:
    program = st.function(lambda s: s.append("The sky is blue because" + st.gen("x", max_tokens=3)))
    first = program.run(backend=backend).picture().segments[1].usage
    second = program.run(backend=backend).picture().segments[1].usage
    assert first is not None
    assert second is not None
    assert first.cached_tokens == 0
    assert second.computed_tokens <= 2  # the last token, and where it may be healed the one before
    assert second.prompt_tokens == first.prompt_tokens


def test_a_literal_that_ends_in_half_a_word_is_healed(backend: st.LocalBackend) -> None:
    def ask(s: st.ProgramState, heal: bool) -> None:
        s += "The capital of France is Par" + st.gen("x", temperature=0, max_tokens=4, heal=heal)

    program = st.function(ask)
    state = program.run(True, backend=backend)
    assert state["x"].startswith("is")
    assert state.text() == "The capital of France is Par" + state["x"]
    assert backend.decode(state.tokens()) == state.text()
    assert state.picture().segments[0].text == "The capital of France is Par"
    assert " Paris" in [backend.decode([token]) for token in state.tokens()]
    assert " Paris" not in [
        backend.decode([t]) for t in program.run(False, backend=backend).tokens()
    ]


def test_runs_with_different_salts_share_nothing(backend: st.LocalBackend) -> None:
    program = st.function(
        lambda s: s.append("A secret prompt of a tenant" + st.gen("x", max_tokens=2))
    )

    def cached(salt: str, **how: Any) -> int:
        return program.run(backend=backend, salt=salt, **how).usage.cached_tokens

    assert cached("mine") == 0
    assert cached("yours") == 0
    assert cached("") == 0
    assert cached("mine") > 0
    assert cached("yours") > 0
    assert backend.flush_cache(st.Namespace(salt="mine")) > 0
    assert cached("mine") == 0
    assert cached("yours") > 0


def test_the_default_backend_runs_and_forgets(backend: st.LocalBackend) -> None:
    program = st.function(lambda s: s.append("One two three" + st.gen("x", max_tokens=2)))
    st.set_default_backend(backend)
    try:
        assert program.run().usage.cached_tokens == 0
        assert program.run().usage.cached_tokens > 0
        assert st.flush_cache() > 0
        assert program.run().usage.cached_tokens == 0
        assert st.flush_cache(backend) > 0
    finally:
        st.set_default_backend(None)


def test_a_forks_seed_gives_the_same_texts_in_any_run(backend: st.LocalBackend) -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        s += "Once upon a time"
        branches = s.fork(3, seed=5)
        branches += st.gen("x", max_tokens=5)
        return branches["x"]

    first = program.run(backend=backend, seed=1).value
    assert program.run(backend=backend, seed=2).value == first
    assert len(set(first)) > 1


def test_the_models_own_sampling_can_be_taken(backend: st.LocalBackend) -> None:
    params = st.SamplingParams.from_model(backend)
    assert params == st.SamplingParams()  # its generation_config.json recommends nothing
    assert backend.reasoning_marks == ("<think>", "</think>")

"""Usage tells what was really computed: rows that requests of one step share count once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import stemma as st
from stemma.lang.ops import Gen, Select
from stemma.lang.sampling import SamplingParams

TinyModel = Callable[..., Path]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_samples_of_a_cached_prompt_count_its_last_rows_once(
    tiny_model: TinyModel, page_size: int
) -> None:
    params = SamplingParams(n=16, max_tokens=1, ignore_eos=True, seed=0)
    prompt = list(range(10, 58))
    with st.LocalBackend(tiny_model(), kv_tokens=4096, page_size=page_size) as backend:
        backend.generate([prompt], params)
        before = backend.stats().computed_tokens
        usages = [completion.usage for completion in backend.generate([prompt], params)]
        rows = backend.stats().computed_tokens - before
    assert sum(usage.computed_tokens for usage in usages) == rows
    assert all(usage.prompt_tokens == len(prompt) for usage in usages)
    assert all(u.cached_tokens + u.computed_tokens == u.prompt_tokens for u in usages)


@pytest.mark.parametrize(
    "operation",
    [st.gen("x", n=8, max_tokens=1, ignore_eos=True), st.select("x", ["elm", "fir", "ash"])],
    ids=["gen", "select"],
)
def test_the_usage_of_a_program_is_the_rows_that_ran(
    tiny_model: TinyModel, operation: Gen | Select
) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "A tree of texts: " + operation

    with st.LocalBackend(tiny_model(), kv_tokens=4096) as backend:
        for _ in ("cold", "all of it cached"):
            before = backend.stats().computed_tokens
            usage = program.run(backend=backend, seed=1).usage
            assert usage.computed_tokens == backend.stats().computed_tokens - before

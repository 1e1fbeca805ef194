"""What a state has under SGLang's names, and what of it is refused with a sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.lang.errors import InvalidArgument, UnknownVariable, UnsupportedByBackend


def run(body: Callable[[Any], Any], *replies: Any, **how: Any) -> st.ProgramState:
    return st.function(body).run(backend=MockBackend(list(replies), **how))


def test_meta_info_of_a_generation_has_sglangs_keys() -> None:
    state = run(lambda s: s.append("a b" + st.gen("x", stop=".", return_logprob=True)), " c d. e")
    assert state.get_meta_info("x") == {
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "completion_tokens": 2,
        "e2e_latency": 0.0,
        "finish_reason": {"type": "stop", "matched": "."},
        "output_token_logprobs": [(-1.0, 0, None), (-1.0, 1, None)],
    }


def test_meta_info_of_a_cut_and_of_several_samples() -> None:
    info = run(lambda s: s.append(st.gen("x", max_tokens=1, n=2)), "a b", "c").get_meta_info("x")
    assert [one["finish_reason"] for one in info] == [
        {"type": "length", "length": 1},
        {"type": "stop", "matched": None},
    ]
    assert "output_token_logprobs" not in info[0]


def test_meta_info_has_the_alternatives_of_each_token() -> None:
    from stemma.backend.base import TokenLogprob
    from stemma.interpreter.meta import Meta
    from stemma.interpreter.sglang_names import meta_info

    rows = (TokenLogprob(7, -0.5, top=((7, -0.5), (9, -1.5))),)
    info = meta_info(Meta("stop", None, st.Usage(), (7,), rows))
    assert info["output_top_logprobs"] == [[(-0.5, 7, None), (-1.5, 9, None)]]


def test_meta_info_of_a_choice_has_the_rows_of_each() -> None:
    scores = {"a": [-1.0], "b c": [-2.0, -4.0]}

    def choose(s: st.ProgramState, method: str) -> None:
        s += "p" + st.select("x", ["a", "b c"], choices_method=method)

    backend = MockBackend(scores=lambda prompt, choice: scores[choice] if prompt else [-0.5] * 2)
    program = st.function(choose)
    info = program.run("token_length_normalized", backend=backend).get_meta_info("x")
    assert info["normalized_prompt_logprobs"] == [-1.0, -3.0]
    assert [[row[0] for row in rows] for rows in info["input_token_logprobs"]] == [[-1], [-2, -4]]
    assert info["output_token_logprobs"] == [[], []]
    assert "unconditional_token_logprobs" not in info
    scores["a"] = [-1.0, -1.0]
    meta = program.run("unconditional_likelihood_normalized", backend=MockBackend())
    assert meta.get_meta_info("x")["unconditional_token_logprobs"][1][0][0] == -1.0
    assert meta.get_meta_info("x")["normalized_unconditional_prompt_logprobs"] == [0.0, 0.0]


def test_meta_info_of_a_score_and_of_what_the_program_set() -> None:
    def body(s: st.ProgramState) -> None:
        s += "a" + st.score(" b", "x")
        s["y"] = 3

    state = run(body)
    assert state.get_meta_info("x") == {"prompt_tokens": 1, "cached_tokens": 0}
    assert state.get_meta_info("y") is None
    with pytest.raises(UnknownVariable, match="'z'"):
        state.get_meta_info("z")


def test_variables_and_value_have_getters_and_a_setter() -> None:
    def body(s: st.ProgramState) -> int:
        s += st.gen("x")
        s.set_var("y", s.get_var("x") * 2)
        return 3

    state = run(body, "a")
    assert (state["y"], state.raw("y"), state.ret_value) == ("aa", "aa", 3)


def test_sync_waits_and_error_tells_without_raising() -> None:
    boom = ZeroDivisionError()

    def body(s: st.ProgramState) -> Any:
        branches = s.fork(2)
        branches += st.gen("x")
        branches[0].sync()
        return [branch.error() for branch in branches], branches[1]["x"]

    state = st.function(body).run(backend=MockBackend(["a", "b"], delay=0.05, fail={1: boom}))
    assert state.value == ([boom, None], "a")


def test_an_iterator_takes_the_name_by_keyword() -> None:
    state = run(lambda s: s.append("p" + st.gen("x") + "q"), "a")
    assert list(state.text_iter(var_name="x")) == ["a"]


def test_an_async_iterator_gives_the_meta_info_with_the_last_piece() -> None:
    async def read(state: st.ProgramState) -> list[Any]:
        return [pair async for pair in state.text_async_iter("x", return_meta_data=True)]

    program = st.function(lambda s: s.append("p" + st.gen("x")))
    state = program.run(backend=MockBackend(["a b c"], pieces=2, delay=0.05), stream=True)
    first, last = asyncio.run(read(state))
    assert first == ("a b", {})
    assert last[0] == " c"
    assert last[1]["completion_tokens"] == 3
    assert asyncio.run(read(run(lambda s: s.append(st.gen("x")), ""))) == []
    with pytest.raises(InvalidArgument, match="name"):
        state.text_async_iter(return_meta_data=True)  # type: ignore[call-overload]


def test_positions_of_a_branch_cannot_be_moved() -> None:
    for split in (
        lambda s: s.fork(2, position_ids_offset=[0, 1]),
        lambda s: s.copy(position_ids_offset=[0]),
    ):
        with pytest.raises(UnsupportedByBackend, match="position_ids_offset"):
            run(split)


def test_the_number_of_branches_is_also_called_size() -> None:
    assert len(run(lambda s: s.fork(size=3)).value) == 3
    with pytest.raises(InvalidArgument, match="size"):
        run(lambda s: s.fork(2, size=3))


def test_speculation_is_refused() -> None:
    with pytest.raises(UnsupportedByBackend, match="num_api_spec_tokens"):
        st.function(num_api_spec_tokens=8)
    with pytest.raises(UnsupportedByBackend, match="num_api_spec_tokens"):
        st.function(lambda s: None, num_api_spec_tokens=8)

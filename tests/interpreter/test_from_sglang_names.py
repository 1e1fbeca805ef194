"""Every public name of SGLang's frontend is in the tables of docs/from-sglang.md, and what they say
of it is so.

The names are those of SGLang's `sglang.__all__`, and the public methods and parameters of its
programs, states and groups of states. A row says `same`, `differs`, `refused` (raises
UnsupportedByBackend) or `missing` (no such name or parameter).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as sgl
from tests.markdown_for_tests import table_rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-sglang.md"


def words(text: str) -> list[str]:
    return text.split()


MODULE = words("""
    Anthropic Crusoe Engine LiteLLM OpenAI Runtime RuntimeEndpoint ServerArgs VertexAI __version__
    assistant assistant_begin assistant_end flush_cache function gen gen_int gen_string
    get_server_info global_config greedy_token_selection image select separate_reasoning
    set_default_backend system system_begin system_end token_length_normalized
    unconditional_likelihood_normalized user user_begin user_end video
""")
PROGRAM = words("run run_batch bind trace cache __call__")
STATE = words("""
    system user assistant var_scope fork copy text messages sync error text_iter text_async_iter
    get_var set_var get_meta_info __iadd__ __getitem__ __setitem__ __contains__ ret_value
    stream_executor
""")
FORKS = words("join __getitem__ __setitem__ __iadd__")
# Those that are not simply taken over; `test_from_sglang.py` uses the others.
PARAMETERS = words("""
    function(num_api_spec_tokens=) gen(dtype=) gen(dtype=int) gen(regex=) gen(json_schema=)
    gen(stop_regex=) gen(logprob_start_len=) gen(return_text_in_logprobs=) flush_cache(empty_cache=)
    program.run(max_new_tokens=) program.run(stop_regex=) program.run(logprob_start_len=)
    program.run(return_text_in_logprobs=) program.run(use_thread=)
    program.run_batch(progress_bar=) program.run_batch(generator_style=)
    state.fork(position_ids_offset=) state.copy(position_ids_offset=) state.text_iter(var_name=)
    state.text_async_iter(return_meta_data=) forks.join(mode=)
""")

NAMES = [
    *MODULE,
    *(f"program.{name}" for name in PROGRAM),
    *(f"state.{name}" for name in STATE),
    *(f"forks.{name}" for name in FORKS),
    *PARAMETERS,
]
OWNERS: dict[str, Any] = {
    "": sgl,
    "program": sgl.Program,
    "state": sgl.ProgramState,
    "forks": sgl.Forks,
}


def told() -> dict[str, str]:
    """The first two cells of all rows: name -> what it is here."""
    rows: dict[str, str] = {}
    for line, (name, status, *_) in table_rows(PAGE):
        match = re.fullmatch(r"`([^`]+)`", name)
        assert match is not None, f"{PAGE}:{line}: the first cell is no name"
        assert match[1] not in rows, f"{PAGE}:{line}: {match[1]} is there twice"
        rows[match[1]] = status
    return rows


TOLD = told()


def exists(name: str) -> bool:
    owner, _, member = name.rpartition(".")
    return hasattr(OWNERS[owner], member)


@pytest.fixture(autouse=True)
def _scripted() -> Iterator[None]:
    sgl.set_default_backend(sgl.MockBackend(lambda prompt, params: "x"))
    yield
    sgl.set_default_backend(None)


def test_the_page_has_every_name_of_sglang_and_no_other() -> None:
    assert set(NAMES) - set(TOLD) == set()
    assert set(TOLD) - set(NAMES) == set()


@pytest.mark.parametrize("name", [name for name in NAMES if "(" not in name])
def test_a_name_is_there_unless_the_page_says_that_it_is_missing(name: str) -> None:
    assert TOLD[name] in ("same", "differs", "refused", "missing")
    assert exists(name) == (TOLD[name] != "missing")


@pytest.mark.parametrize("name", [n for n in MODULE if TOLD[n] == "refused"])
def test_a_refused_name_says_so_in_a_sentence(name: str) -> None:
    with pytest.raises(sgl.errors.UnsupportedByBackend, match=r"\w+ \w+ \w+"):
        getattr(sgl, name)("x")


RUN_SAMPLING = {
    "max_new_tokens": 3,
    "n": 1,
    "stop": ["a"],
    "stop_token_ids": [7],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "return_logprob": True,
    "top_logprobs_num": 2,
    "stream": True,
    "backend": None,
}


def run(program: Callable[[Any], Any], **how: Any) -> Any:
    return sgl.function(program).run(**how)


def forked(s: Any) -> Any:
    forks = s.fork(2)
    forks += "text"
    return forks


USES: dict[str, Callable[[], Any]] = {
    "function(num_api_spec_tokens=)": lambda: sgl.function(num_api_spec_tokens=8),
    "gen(dtype=)": lambda: sgl.gen("x", dtype=str),
    "gen(dtype=int)": lambda: sgl.gen("x", dtype=int),
    "gen(regex=)": lambda: sgl.gen("x", regex="a+"),
    "gen(json_schema=)": lambda: sgl.gen("x", json_schema="{}"),
    "gen(stop_regex=)": lambda: sgl.gen("x", stop_regex="a+"),
    "gen(logprob_start_len=)": lambda: sgl.gen("x", logprob_start_len=0),
    "gen(return_text_in_logprobs=)": lambda: sgl.gen("x", return_text_in_logprobs=True),
    "flush_cache(empty_cache=)": lambda: sgl.flush_cache(empty_cache=True),
    "program.run(max_new_tokens=)": lambda: run(len_of_nothing, **RUN_SAMPLING),
    "program.run(stop_regex=)": lambda: run(len_of_nothing, stop_regex="a+"),
    "program.run(logprob_start_len=)": lambda: run(len_of_nothing, logprob_start_len=0),
    "program.run(return_text_in_logprobs=)": lambda: run(
        len_of_nothing, return_text_in_logprobs=True
    ),
    "program.run(use_thread=)": lambda: run(len_of_nothing, use_thread=False),
    "program.run_batch(progress_bar=)": lambda: sgl.function(len_of_nothing).run_batch(
        [{}], progress_bar=True
    ),
    "program.run_batch(generator_style=)": lambda: list(
        sgl.function(len_of_nothing).run_batch([{}], generator_style=True)
    ),
    "state.fork(position_ids_offset=)": lambda: run(lambda s: s.fork(2, position_ids_offset=[0])),
    "state.copy(position_ids_offset=)": lambda: run(lambda s: s.copy(position_ids_offset=[0])),
    "state.text_iter(var_name=)": lambda: run(lambda s: [s.text_iter(var_name="x")]),
    "state.text_async_iter(return_meta_data=)": lambda: run(
        lambda s: [s.text_async_iter("x", return_meta_data=True)]
    ),
    "forks.join(mode=)": lambda: run(lambda s: forked(s).join(mode="concate_and_append")),
}


def len_of_nothing(s: Any) -> int:
    return len(s.text())


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_is_taken_refused_or_missing_as_the_page_says(name: str) -> None:
    error = {"refused": sgl.errors.UnsupportedByBackend, "missing": TypeError}.get(TOLD[name])
    if error is None:
        assert TOLD[name] in ("same", "differs")
        USES[name]()
    else:
        with pytest.raises(error):
            USES[name]()

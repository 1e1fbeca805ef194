"""What is refused says which thing, where, and what to write instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.lang.errors import (
    Cancelled,
    InvalidArgument,
    Timeout,
    UnknownVariable,
    UnsupportedByBackend,
)


@pytest.fixture(autouse=True)
def _scripted() -> Iterator[None]:
    st.set_default_backend(st.MockBackend(lambda prompt, params: "said"))
    yield
    st.set_default_backend(None)


def run(body: Callable[[Any], Any], **options: Any) -> st.ProgramState:
    return st.function(body).run(**options)


@st.function
def nothing(s: st.ProgramState) -> None:
    pass


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda s: s.__setitem__("a", st.gen("x")), r"s\['a'\] = Gen.*s \+= "),
        (lambda s: s.set_var("a", "b" + st.gen("x")), r"s\['a'\] = Chain"),
        (lambda s: s.fork(2).__setitem__("t", 3), r"branches\['t'\].*for branch in branches"),
        (lambda s: s.fork(2).__setitem__(0, s), r"branches\[0\] \+="),
        (
            lambda s: s.append(st.assistant_begin() + st.user("x")),
            r"a user message begins inside an assistant message.*st\.assistant_end\(\)",
        ),
        (
            lambda s: s.append(st.user_begin() + st.assistant_end()),
            r"an assistant message ends inside a user message.*st\.user_end\(\)",
        ),
        (lambda s: s.append(st.system_end()), r"a system message ends.*st\.system_begin\(\)"),
    ],
)
def test_what_a_state_cannot_take(body: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        run(body)


def test_a_state_plus_a_text_is_no_text() -> None:
    with pytest.raises(TypeError, match=r"s \+= \.\.\."):
        run(lambda s: s + "x")


def test_a_label_in_place_of_a_name_is_said() -> None:
    with pytest.raises(UnknownVariable, match=r"'pro'.*branches\.branch\('pro'\)"):
        run(lambda s: s.fork(["pro", "con"])["pro"])
    with pytest.raises(UnknownVariable) as caught:
        run(lambda s: s.fork(["pro", "con"])["x"])
    assert "branches.branch" not in str(caught.value)


@pytest.mark.parametrize("thing", [int, dict, min, 3])
def test_what_is_no_function_of_ones_own(thing: Any) -> None:
    with pytest.raises(InvalidArgument, match="@function"):
        st.function(thing)


def test_a_reserved_name_is_to_be_another() -> None:
    with pytest.raises(InvalidArgument, match=r"'seed'.*rename it.*'my_seed'"):
        st.function(lambda s, seed: None)


@pytest.mark.parametrize(
    ("given", "near"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("back_end", "backend")],
)
def test_an_argument_that_is_nearly_another(given: str, near: str) -> None:
    with pytest.raises(TypeError, match=rf"'{given}' \(did you mean '{near}'\?\)"):
        nothing.run(**{given: 1})


def test_an_argument_like_no_other_is_only_named() -> None:
    with pytest.raises(TypeError) as caught:
        nothing.run(zzz=1)
    assert "'zzz';" in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"max_tokens": 3}, {"max_new_tokens": 4}),
        ({"logprobs": True}, {"return_logprob": True}),
        ({"top_logprobs": 1}, {"top_logprobs_num": 1}),
    ],
)
def test_one_setting_by_two_names(first: dict[str, Any], second: dict[str, Any]) -> None:
    for both in ({**first, **second}, {**second, **first}):
        with pytest.raises(InvalidArgument, match="two names") as caught:
            nothing.run(**both)
        assert all(f"{name}={value!r}" in str(caught.value) for name, value in both.items())


def test_names_of_sglang_say_what_to_do_instead() -> None:
    for name in ("logprob_start_len", "return_text_in_logprobs", "use_thread"):
        with pytest.raises(UnsupportedByBackend, match=f"{name}=1"):
            nothing.run(**{name: 1})
    with pytest.raises(UnsupportedByBackend, match=r"backend\.pin"):
        nothing.cache("x")
    with pytest.raises(UnsupportedByBackend, match="empty_cache=False"):
        st.flush_cache(empty_cache=False)


def test_a_programs_own_parameter_may_have_such_a_name() -> None:
    assert st.function(lambda s, use_thread: use_thread).run(use_thread=3).value == 3


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_a_batch_names_the_item_that_failed() -> None:
    @st.function
    def fails(s: st.ProgramState, word: str, number: int = 0) -> None:
        if number:
            raise ZeroDivisionError

    items: list[Any] = [("a",), {"word": "b" * 500, "number": 1}, ("c", 2), 7]
    results = fails.run_batch(items, return_exceptions=True)
    _, second, third, fourth = results
    assert isinstance(second, ZeroDivisionError)
    assert "run_batch: item 1, {" in notes(second)
    assert "'number': 1" in notes(second)
    assert len(notes(second)) < 200
    assert isinstance(third, ZeroDivisionError)
    assert "run_batch: item 2, ('c', 2)" in notes(third)
    assert isinstance(fourth, InvalidArgument)
    assert "run_batch: item 3, 7" in notes(fourth)
    with pytest.raises(ZeroDivisionError) as caught:
        fails.run_batch(items, num_threads=1)
    assert "run_batch: item 1" in notes(caught.value)


def test_a_timeout_names_the_line_that_took_the_time() -> None:
    backend = st.MockBackend(["late one"], delay=60, pieces=2)

    @st.function
    def program(s: st.ProgramState) -> None:
        (branch,) = s.fork(["slow"])
        branch += st.gen("x")  # the line
        branches = branch["x"]
        del branches

    with pytest.raises(Timeout) as caught:
        program.run(backend=backend, timeout=0.1)
    site = caught.value.site
    assert site is not None
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert lines[site.line - 1].endswith("# the line")
    assert f"gen of 'x' on branch program/slow, queued at {site}" in notes(caught.value)


def test_a_timeout_of_a_body_that_asks_nothing_says_so() -> None:
    with pytest.raises(Timeout) as caught:
        st.function(lambda s: time.sleep(0.3)).run(timeout=0.05)
    assert "body of <lambda>" in notes(caught.value)


def test_an_error_of_the_body_cancels_its_branches_and_has_the_state() -> None:
    branches: list[st.ProgramState] = []

    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("x")
        s["x"]
        backend.delay = 60
        branches.append(s.copy())
        branches[0] += st.gen("y")
        raise ZeroDivisionError

    backend = st.MockBackend(["a", "late"])
    with pytest.raises(ZeroDivisionError) as caught:
        program.run(backend=backend)
    assert caught.value.state["x"] == "a"  # type: ignore[attr-defined]
    assert backend.running == 0
    with pytest.raises(Cancelled, match="ZeroDivisionError"):
        branches[0]["y"]


def test_token_ids_beyond_the_vocabulary_are_named(tiny_model: Callable[..., Path]) -> None:
    with st.LocalBackend(tiny_model(), kv_tokens=256) as backend:
        size = backend.config.vocab_size
        for setting in ({"stop_token_ids": [1, size]}, {"logit_bias": {size: 1.0}}):
            (name,) = setting
            program = st.function(lambda s, how: s.append("a" + st.gen("x", **how)))
            with pytest.raises(InvalidArgument, match=f"token id {size} of {name}.*{size} tokens"):
                program.run(setting, backend=backend)

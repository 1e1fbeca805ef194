"""The scripted backend itself: it must be honest, or the tests that use it are not."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import Broken, MockBackend
from stemma.lang.errors import (
    BackendClosed,
    Cancelled,
    InvalidArgument,
    StemmaError,
    UnsupportedByBackend,
)

PARAMS = st.SamplingParams()


def test_replies_come_in_order_and_the_end_of_the_script_is_said() -> None:
    branch = MockBackend(["a", " b"]).open()
    assert [branch.generate(PARAMS).result().text for _ in range(2)] == ["a", " b"]
    with pytest.raises(StemmaError, match="no reply number 3, to 'a b'"):
        branch.generate(PARAMS).result()


def test_stops_and_max_tokens_cut_a_reply() -> None:
    backend = MockBackend(lambda prompt, params: "a b c.d")
    cut = backend.open().generate(st.SamplingParams(stop=("b", ".")))
    assert (cut.result().text, cut.result().matched_stop) == ("a ", "b")
    kept = backend.open().generate(st.SamplingParams(stop=".", include_stop=True)).result()
    assert kept.text == "a b c."
    short = backend.open().generate(st.SamplingParams(max_tokens=2)).result()
    assert (short.text, short.finish_reason, len(short.token_ids)) == ("a b", "length", 2)


def test_a_stop_expression_cuts_a_reply() -> None:
    backend = MockBackend(lambda prompt, params: "call 12 then 3")
    cut = backend.open().generate(st.SamplingParams(stop_regex=r"\d\d")).result()
    assert (cut.text, cut.matched_stop) == ("call ", "12")
    both = st.SamplingParams(stop_regex=r"\d\d", stop="ll", include_stop=True)
    assert backend.open().generate(both).result().text == "call"


def test_no_stop_begins_in_the_first_words() -> None:
    backend = MockBackend(lambda prompt, params: "a b a b a b")
    cut = backend.open().generate(st.SamplingParams(stop="a", min_tokens=3)).result()
    assert (cut.text, cut.matched_stop) == ("a b a b ", "a")
    whole = backend.open().generate(st.SamplingParams(stop="a", min_tokens=20)).result()
    assert (whole.text, whole.matched_stop) == ("a b a b a b", None)


@pytest.mark.parametrize(
    "setting", [{"stop_token_ids": (3,)}, {"logit_bias": {3: 1.0}}, {"top_logprobs": 2}]
)
def test_what_a_script_cannot_do_is_refused(setting: dict[str, Any]) -> None:
    backend = MockBackend(["a"])
    with pytest.raises(UnsupportedByBackend, match=f"^{next(iter(setting))}="):
        backend.open().generate(st.SamplingParams(**setting))
    assert backend.calls == []


@pytest.mark.parametrize("setting", [{"pieces": 0}, {"pieces": 1.5}, {"delay": -1}])
def test_settings_that_cannot_be_meant_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=f"^{next(iter(setting))}="):
        MockBackend(**setting)


def test_pieces_come_over_time_and_are_the_text() -> None:
    pieces: list[str] = []
    generation = MockBackend(["abcdef"], delay=0.1, pieces=3).open().generate(PARAMS)
    generation.subscribe(pieces.append)
    assert not generation.done()
    assert generation.result(5).text == "".join(pieces) == "abcdef"
    assert pieces == ["ab", "cd", "ef"]


def test_a_broken_reply_writes_and_then_fails_and_leaves_the_branch() -> None:
    branch = MockBackend([Broken("half", OSError("gone"))]).open()
    branch.append("p")
    pieces: list[str] = []
    generation = branch.generate(PARAMS)
    generation.subscribe(pieces.append)
    with pytest.raises(OSError, match="gone"):
        generation.result()
    assert pieces == ["half"]
    assert len(branch.token_ids()) == 1


@pytest.mark.parametrize("by", ["cancel", "close", "backend"])
def test_work_can_be_stopped(by: str) -> None:
    backend = MockBackend(["never"], delay=60)
    branch = backend.open()
    generation = branch.generate(PARAMS)
    {"cancel": generation.cancel, "close": branch.close, "backend": backend.close}[by]()
    with pytest.raises(BackendClosed if by == "backend" else Cancelled):
        generation.result(5)
    assert backend.running == 0


def test_branches_are_counted_and_closing_twice_counts_once() -> None:
    backend = MockBackend()
    branch = backend.open()
    forks = branch.fork(2)
    assert backend.open_branches == 3
    for closing in (branch, branch, *forks):
        closing.close()
    assert backend.open_branches == 0
    backend.close()
    with pytest.raises(BackendClosed):
        backend.open()


def test_a_branch_draws_one_sample() -> None:
    with pytest.raises(InvalidArgument, match="n=2"):
        MockBackend().open().generate(st.SamplingParams(n=2))


def test_mocks_share_one_thread() -> None:
    before = threading.active_count()
    waiting = [MockBackend(["a"], delay=0.2).open().generate(PARAMS) for _ in range(20)]
    assert threading.active_count() <= before + 1
    start = time.monotonic()
    for generation in waiting:
        assert generation.result(5).text == "a"
    assert time.monotonic() - start < 3


def test_a_slow_function_stalls_neither_other_runs_nor_time_limits() -> None:
    gone = threading.Event()

    def reply(text: str, params: st.SamplingParams) -> str:
        gone.wait(30)
        return " late"

    def scores(text: str, choice: str) -> list[float]:
        gone.wait(30)
        return [-1.0]

    @st.function
    def writes(s: st.ProgramState) -> None:
        s += st.gen("x")

    @st.function
    def chooses(s: st.ProgramState) -> None:
        s += st.select("x", [" a", " b"])

    try:
        for program, backend in (
            (writes, MockBackend(reply)),
            (chooses, MockBackend(scores=scores)),
        ):
            with pytest.raises(st.errors.Timeout) as caught:
                program.run(backend=backend, timeout=0.5)
            assert caught.value.variable == "x"
            assert not any("no operation" in note for note in caught.value.__notes__)
            assert writes.run(backend=MockBackend([" a"]), timeout=5)["x"] == " a"
    finally:
        gone.set()


def test_what_is_no_reply_is_refused_where_it_can_be_known() -> None:
    with pytest.raises(InvalidArgument, match=r"reply 1 is 5: must be a text"):
        MockBackend([" a", 5])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match=r"replies=5: must be a list"):
        MockBackend(5)  # type: ignore[arg-type]
    for backend in (MockBackend(lambda text, params: None), MockBackend(iter([None]))):  # type: ignore
        generation = backend.open().generate(st.SamplingParams())
        with pytest.raises(InvalidArgument, match="the script's reply is None: must be a text"):
            generation.result()


def test_functions_are_called_in_the_order_of_the_requests() -> None:
    asked: list[str] = []

    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(3)
        for i, branch in enumerate(branches):
            branch += f"{i}" + st.gen("x") + st.gen("y")

    def reply(text: str, params: st.SamplingParams) -> str:
        asked.append(text)
        return "!"

    backend = MockBackend(reply)
    program.run(backend=backend)
    assert asked == ["0", "0!", "1", "1!", "2", "2!"] == backend.prompts

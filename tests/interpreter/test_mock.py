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

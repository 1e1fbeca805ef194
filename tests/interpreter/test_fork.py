"""Forking and joining: nobody blocks, lists are aligned, nothing leaks, depth is no danger."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.lang.errors import InvalidArgument, UnknownVariable


def echo(prompt: str, params: st.SamplingParams) -> str:
    return f"<{prompt[-3:]}>"


def eventually(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not true() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.005)
    return true()


def test_a_fork_has_its_parents_text_variables_meta_and_open_message() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        s["set"] = 1
        s += st.assistant_begin() + "p" + st.gen("x")
        (child,) = s.fork()
        s["set"] = 2
        s += "-parent"
        child += "-child" + st.assistant_end()
        return child["set"], s["set"], child["x"], child.meta("x") == s.meta("x"), child.messages()

    state = program.run(backend=MockBackend(["v"]))
    assert state.value == (1, 2, "v", True, [{"role": "assistant", "content": "pv-child"}])
    assert state.text() == "<|im_start|>assistant\npv-parent"


def test_fork_append_and_copy_return_before_the_parent_is_done() -> None:
    @st.function
    def program(s: st.ProgramState) -> float:
        start = time.monotonic()
        s += st.gen("slow")
        branches = s.fork(3)
        branches += st.gen("x")
        branches[0].copy().append(st.gen("y"))
        asked = time.monotonic() - start
        branches["x"]
        return asked

    assert program.run(backend=MockBackend(echo, delay=0.2)).value < 0.1


def test_branches_are_written_at_the_same_time() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s.fork(20).__iadd__(st.gen("x"))

    backend = MockBackend(echo, delay=0.1)
    start = time.monotonic()
    program.run(backend=backend)
    assert time.monotonic() - start < 1
    assert backend.most_running == 20


def test_values_come_in_the_order_of_the_branches() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        branches = s.fork(3)
        for i, branch in enumerate(branches):
            branch += f"{i}" + st.gen("x")
        branches[1] += "!" + st.gen("only")
        return branches["x"], [b.label for b in branches[1:]], len(branches), branches[-1]["x"]

    state = program.run(backend=MockBackend(echo))
    assert state.value == (["<0>", "<1>", "<2>"], ["program/1", "program/2"], 3, "<2>")


def test_a_group_takes_one_expression_one_each_or_a_function() -> None:
    @st.function
    def program(s: st.ProgramState) -> list[str]:
        branches = s.fork(2)
        branches += "all"
        branches += ["a", "b"]
        branches += lambda i: f"{i}"
        with pytest.raises(InvalidArgument, match="3 expressions for 2"):
            branches += ["x", "y", "z"]
        return [branch.text() for branch in branches]

    assert program.run(backend=MockBackend()).value == ["alla0", "allb1"]


def test_labels_name_branches_and_places_are_unique() -> None:
    @st.function
    def program(s: st.ProgramState) -> list[str]:
        pair = s.fork(["pro", "con"])
        pair.branch("con").append("against")
        assert pair.labels == ("pro", "con")
        assert pair[1].text() == "against"
        with pytest.raises(InvalidArgument, match="pro, con"):
            pair.branch("x")
        again = s.fork(2)
        return [b.label for b in (*pair, *again, pair[0].copy(), pair[0].copy())]

    labels = program.run(backend=MockBackend()).value
    assert labels[:4] == ["program/pro", "program/con", "program/2:0", "program/2:1"]
    assert len(set(labels)) == 6


@pytest.mark.parametrize("n", [-1, True, "ab", ["a", "a"], [""], [1], 2.0])
def test_a_fork_that_cannot_be_meant_is_refused(n: Any) -> None:
    with pytest.raises(InvalidArgument, match="fork"):
        st.function(lambda s: s.fork(n)).run(backend=MockBackend())


def test_a_fork_of_none_is_empty() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        branches = s.fork([])
        branches += st.gen("x")
        return branches["x"], branches.join(), list(branches)

    assert program.run(backend=MockBackend()).value == ([], {}, [])


def test_join_hands_aligned_lists_to_the_parent() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        s += st.gen("old") + st.gen("kept")
        branches = s.fork(2)
        for i, branch in enumerate(branches):
            branch += f"{i}" + st.gen("x") + st.gen("old")
            branch["set"] = i
        joined = branches.join()
        branches += "usable"
        return joined

    state = program.run(backend=MockBackend(["o", "k", "a", "b", "c", "d"], delay=0.01))
    lists = {"x": state["x"], "old": state["old"], "set": state["set"]}
    assert state.value == lists
    assert sorted(lists["x"] + lists["old"]) == ["a", "b", "c", "d"]
    assert lists["set"] == [0, 1]
    assert state["kept"] == "k"
    assert [meta.finish_reason for meta in state.meta("x")] == ["stop", "stop"]


def test_join_can_append_what_the_branches_wrote() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        s += "a"
        branches = s.fork(2)
        branches += lambda i: f" {i}" + st.gen("x")
        joined = branches.join(mode="concate_and_append")
        s += "!"
        return joined, "x" in s, branches["x"]

    backend = MockBackend(lambda prompt, params: f"<{prompt[-1]}>", delay=0.02)
    state = program.run(backend=backend)
    assert state.text() == "a 0<0> 1<1>!"
    assert state.value == ({}, False, ["<0>", "<1>"])


def test_appended_branches_keep_their_messages_and_control_text() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user("q")
        branches = s.fork(2)
        branches += st.assistant(st.control("<x>") + st.gen("a")) + st.user("more")
        branches.join("concate_and_append")

    backend = MockBackend(lambda prompt, params: "so")
    state = program.run(backend=backend)
    turns = [("user", "q"), ("assistant", "<x>so"), ("user", "more")]
    said = [*turns, *turns[1:]]
    assert [(m["role"], m["content"]) for m in state.messages()] == said
    assert backend.controls.count("<x>") == 4


def test_branches_that_both_close_a_message_cannot_be_appended() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.user_begin()
        branches = s.fork(2)
        branches += st.user_end()
        branches.join("concate_and_append")

    with pytest.raises(InvalidArgument, match="outside of any message"):
        program.run(backend=MockBackend())


def test_both_ways_to_join_raise_a_branchs_error_and_know_no_third() -> None:
    @st.function
    def program(s: st.ProgramState, mode: Any) -> None:
        branches = s.fork(2)
        branches += st.gen("x")
        branches.join(mode)

    for mode in ("gather_variable", "concate_and_append"):
        with pytest.raises(ZeroDivisionError):
            program.run(mode, backend=MockBackend(echo, fail={2: ZeroDivisionError()}))
    with pytest.raises(InvalidArgument, match="gather_variable, concate_and_append"):
        program.run("concatenate", backend=MockBackend(echo))


def test_a_fork_with_a_seed_draws_the_same_in_any_run_and_place() -> None:
    @st.function
    def program(s: st.ProgramState, before: int) -> Any:
        for _ in range(before):
            s.fork(2)
        seeded, free = s.fork(2, seed=5), s.fork(2)
        seeded += st.gen("x")
        free += st.gen("x")
        return seeded["x"], free["x"]

    def draw(before: int, seed: int) -> Any:
        def of_seed(prompt: str, params: st.SamplingParams) -> str:
            return str(params.seed)

        return program.run(before, seed=seed, backend=MockBackend(of_seed)).value

    first, other = draw(0, seed=1), draw(3, seed=2)
    assert first[0] == other[0]
    assert len({*first[0], *first[1], *other[1]}) == 6
    for seed in (2**64, 1.5, "5"):
        with pytest.raises(InvalidArgument, match="seed"):
            st.function(lambda s, seed=seed: s.fork(2, seed=seed)).run(  # type: ignore[misc]
                backend=MockBackend()
            )


def test_a_copy_in_a_with_block_is_joined_at_its_end() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "p"
        with s.copy() as copy:
            copy += st.gen("x")
        s += s["x"][0] + "!"
        with pytest.raises(InvalidArgument, match="takes a copy"), s:
            pass

    state = program.run(backend=MockBackend(echo))
    assert state["x"] == ["<p>"]
    assert state.text() == "p<p>!"


def test_join_names_the_branch_and_the_variable_that_is_missing() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(3)
        branches += st.gen("x")
        branches[0] += st.gen("y")
        with pytest.raises(UnknownVariable, match="branch program/1 has no variable 'y'"):
            branches["y"]
        branches.join()

    with pytest.raises(UnknownVariable, match="branch program/1 has no variable 'y'"):
        program.run(backend=MockBackend(echo))


def test_join_has_none_for_what_a_cancelled_branch_did_not_finish() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        branches = s.fork(2)
        branches[0] += st.gen("x")
        branches[0]["x"]
        branches[1] += st.gen("x")
        branches[1].cancel()
        return branches.join()

    assert program.run(backend=MockBackend(echo, delay=0.1)).value == {"x": ["<>", None]}


def test_a_branch_cannot_be_replaced() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(2)
        branches[0] = branches[1]

    with pytest.raises(InvalidArgument, match="not replaced"):
        program.run(backend=MockBackend())


def test_a_thousand_live_forks_need_no_thousand_threads() -> None:
    counted: list[int] = []

    @st.function
    def program(s: st.ProgramState) -> list[str]:
        s += "p"
        branches = s.fork(1000)
        branches += st.gen("x")
        counted.append(threading.active_count())
        return branches["x"]

    backend = MockBackend(echo, delay=1.0)
    before = threading.active_count()
    state = program.run(backend=backend)
    assert state.value == ["<p>"] * 1000
    assert counted[0] - before <= 2
    assert backend.most_running > 500


@pytest.mark.parametrize("fails", [False, True])
def test_forks_may_be_thousands_deep(fails: bool) -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        s += st.gen("first")
        line = s
        for _ in range(5000):
            line = line.copy()
            line += "."
        line += st.gen("last")
        return line.text() if not fails else line["last"]

    backend = MockBackend(["<", ">"], delay=0.05, fail={1: ZeroDivisionError()} if fails else {})
    if fails:
        with pytest.raises(ZeroDivisionError):
            program.run(backend=backend)
    else:
        assert program.run(backend=backend).value == "<" + "." * 5000 + ">"
    assert eventually(lambda: backend.open_branches == 0)


def test_the_run_waits_for_branches_that_were_dropped() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        for _ in range(3):
            s.copy().append(st.gen("x"))

    backend = MockBackend(echo, delay=0.05)
    program.run(backend=backend)
    assert len(backend.calls) == 3
    assert backend.running == 0


def test_branches_close_when_nothing_refers_to_them() -> None:
    @st.function
    def program(s: st.ProgramState) -> st.ProgramState:
        s += st.gen("x", n=4)
        branches = s.fork(5)
        branches += st.gen("y")
        return branches[3]

    backend = MockBackend(echo)
    state = program.run(backend=backend)
    assert eventually(lambda: backend.open_branches == 2)
    child = state.value
    child += "!" + st.gen("z")
    assert child["z"] == "<>>!>"
    del child
    state._run.value = None
    assert eventually(lambda: backend.open_branches == 1)
    assert state.tokens()
    del state
    assert eventually(lambda: backend.open_branches == 0)

"""`first` and `race`: the branches that are done first and satisfy; the rest is cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.lang.errors import Cancelled, InvalidArgument, StemmaError, Timeout, TooFewBranches


class Broke(Exception):
    """A backend's own error."""


class Paced(MockBackend):
    """Answers after as many tenths of a second as the last character of the prompt says."""

    def __init__(self, replies: Callable[[str, st.SamplingParams], Any] | None = None) -> None:
        super().__init__(replies or (lambda text, params: f"<{text[-1]}>"), delay=1.0)

    def _play(self, steps: Any) -> None:
        prompt = self.calls[-1].prompt
        self.delay = int(prompt[-1]) / 10
        super()._play(steps)


def race(paces: str, judge: Callable[[st.Forks], Any], backend: MockBackend | None = None) -> Any:
    """What `judge` returns of branches with these paces."""

    @st.function
    def program(s: st.ProgramState) -> Any:
        branches = s.fork(len(paces))
        branches += [pace + st.gen("x") for pace in paces]
        return judge(branches)

    backend = Paced() if backend is None else backend
    state = program.run(backend=backend, timeout=30)
    assert backend.running == 0
    return state.value


def test_race_gives_the_branch_that_is_done_first_and_cancels_the_rest() -> None:
    seen = []

    def judge(branches: st.Forks) -> Any:
        winner = branches.race()
        for loser in (branches[0], branches[2]):
            with pytest.raises(Cancelled, match=f"{loser.label} was cancelled"):
                loser["x"]
            with pytest.raises(Cancelled):
                loser.append("more")
        winner += " and more"
        seen.append(winner.text())
        return winner["x"], winner.label

    start = time.monotonic()
    assert race("919", judge) == ("<1>", "program/1")
    assert seen == ["1<1> and more"]
    assert time.monotonic() - start < 0.8


def test_first_takes_k_branches_that_satisfy_in_the_branches_order() -> None:
    asked: list[str] = []

    def odd(branch: st.ProgramState) -> bool:
        asked.append(branch["x"])
        assert threading.current_thread() is threading.main_thread()
        return int(branch["x"][1]) % 2 == 1

    def judge(branches: st.Forks) -> Any:
        found = branches.first(2, when=odd)
        assert isinstance(found, st.Forks)
        assert found.labels == ("1", "3")
        assert found.join() == {"x": ["<3>", "<1>"]}
        assert branches.join(on_error="drop").labels == ("0", "1", "3")  # 0 was done, and is read
        return found["x"]

    assert race("2391", judge) == ["<3>", "<1>"]
    assert asked == ["<1>", "<2>", "<3>"]


def test_branches_that_are_done_already_are_asked_in_their_order() -> None:
    asked: list[str] = []

    def judge(branches: st.Forks) -> Any:
        branches.join()
        found = branches.first(2, when=lambda b: asked.append(b.label) or b.label[-1] != "0")
        return found.labels

    assert race("0000", judge, MockBackend(lambda t, p: "said")) == ("1", "2")
    assert asked == ["program/0", "program/1", "program/2"]


def test_when_the_caller_looks_does_not_change_who_wins() -> None:
    def late(branches: st.Forks) -> Any:
        time.sleep(0.5)
        return branches.first(2).labels

    # All are done by then; the report of one that is idle already comes in the branches' order.
    assert race("3121", late) == race("3121", late) == ("0", "1")
    assert race("3121", lambda branches: branches.first(2).labels) == ("1", "3")


def test_a_branch_that_fails_does_not_win_and_fails_nobody() -> None:
    def reply(text: str, params: st.SamplingParams) -> Any:
        return Broke("quick and wrong") if text.endswith("0") else "right"

    assert race("02", lambda branches: branches.race()["x"], Paced(reply)) == "right"


def test_a_loser_that_has_failed_before_it_could_be_cancelled_fails_nobody() -> None:
    failed = threading.Event()

    def reply(text: str, params: st.SamplingParams) -> Any:
        if text.endswith("b"):
            failed.set()
            return Broke("too late to matter")
        return "right"

    def judge(branches: st.Forks) -> Any:
        def slowly(branch: st.ProgramState) -> bool:
            branches[1].append("b" + st.gen("y"))
            assert failed.wait(5)
            return True

        return branches.first(1, when=slowly)["x"]

    assert race("00", judge, MockBackend(reply)) == ["right"]


def test_fewer_than_asked_for_is_an_error_that_has_those_and_why_others_failed() -> None:
    def reply(text: str, params: st.SamplingParams) -> Any:
        return Broke("no luck") if text.endswith("1") else "said"

    def judge(branches: st.Forks) -> Any:
        with pytest.raises(TooFewBranches) as caught:
            branches.first(2, when=lambda b: b.label.endswith("/2"))
        error = caught.value
        assert str(error) == (
            "first(2): 1 of 3 branches satisfied, 2 were asked for; failed: 1; error.found has "
            "those that did"
        )
        assert str(error.errors["1"]) == "no luck"
        assert error.__cause__ is error.errors["1"]
        assert branches[0]["x"] == "said"
        return error.found.labels

    assert race("010", judge, MockBackend(reply)) == ("2",)


def test_a_race_that_all_have_lost_raises_with_the_first_branchs_error_as_its_cause() -> None:
    with pytest.raises(TooFewBranches, match="failed: 0, 1") as caught:
        race("21", lambda branches: branches.race(), Paced(lambda t, p: Broke(f"at {t}")))
    assert str(caught.value.__cause__) == "at 2"
    assert caught.value.state.label == "program"


def test_what_the_predicate_raises_is_raised_and_cancels_nothing() -> None:
    def judge(branches: st.Forks) -> Any:
        with pytest.raises(ZeroDivisionError):
            branches.first(1, when=lambda b: 1 // 0)
        return branches["x"]

    assert race("12", judge) == ["<1>", "<2>"]


def test_the_predicate_may_go_on_with_the_branch() -> None:
    def sure(branch: st.ProgramState) -> bool:
        branch += "0" + st.select("sure", ["yes", "no"])
        return bool(branch["sure"] == "yes")

    backend = Paced()
    backend._scores = lambda text, choice: [-0.1 if ("<2>" in text) == (choice == "yes") else -3.0]
    assert race("129", lambda branches: branches.first(when=sure)["x"], backend) == ["<2>"]


def test_what_losers_have_forked_is_cancelled_too() -> None:
    backend = Paced()

    @st.function
    def program(s: st.ProgramState) -> Any:
        branches = s.fork(["a", "b", "ab"])
        deeper = [branch.fork(2) for branch in branches]
        for forks in deeper:
            forks += "9" + st.gen("x")
        branches[1].append("1" + st.gen("x"))
        branches[0].append("9" + st.gen("x"))
        branches[2].append("9" + st.gen("x"))
        assert branches.race().label == "program/b"
        for forks in (deeper[0], deeper[2]):
            with pytest.raises(Cancelled):
                forks[0]["x"]
        return deeper[1]["x"]

    assert program.run(backend=backend, timeout=30).value == ["<9>", "<9>"]


def test_all_may_be_asked_for_and_then_nothing_is_cancelled() -> None:
    def judge(branches: st.Forks) -> Any:
        found = branches.first(3)
        found += "0" + st.gen("y")
        return found["y"]

    assert race("213", judge) == ["<0>"] * 3


def test_the_runs_timeout_ends_the_waiting() -> None:
    program = st.function(lambda s: _all(s).first(2))
    start = time.monotonic()
    with pytest.raises(Timeout):
        program.run(backend=MockBackend(lambda t, p: "late", delay=60), timeout=0.1)
    assert time.monotonic() - start < 5


def _all(s: st.ProgramState) -> st.Forks:
    branches = s.fork(3)
    branches += st.gen("x")
    return branches


def test_the_async_forms_do_the_same_and_take_async_predicates() -> None:
    async def odd(branch: st.ProgramState) -> bool:
        await asyncio.sleep(0)
        return int((await branch.get("x"))[1]) % 2 == 1

    @st.function
    async def program(s: st.ProgramState) -> Any:
        branches = s.fork(4)
        branches += [pace + st.gen("x") for pace in "2391"]
        found = await branches.afirst(2, when=odd)
        again = s.fork(2)
        again += ["9" + st.gen("x"), "1" + st.gen("x")]
        return found["x"], (await again.arace()).label

    backend = Paced()
    state = asyncio.run(program.arun(backend=backend))
    assert state.value == (["<3>", "<1>"], "program/2:1")
    assert backend.running == 0


def test_in_an_async_program_the_plain_form_says_what_to_write() -> None:
    @st.function
    async def program(s: st.ProgramState) -> None:
        with pytest.raises(StemmaError, match="await"):
            _all(s).race()

    asyncio.run(program.arun(backend=MockBackend(lambda t, p: "said", delay=0.05)))


@pytest.mark.parametrize("k", [0, -1, 4, True, 1.0, "1"])
def test_a_number_that_cannot_be_is_refused(k: Any) -> None:
    def judge(branches: st.Forks) -> None:
        with pytest.raises(InvalidArgument, match=r"first.*at most the number of branches, 3"):
            branches.first(k)

    race("000", judge)


def test_what_is_no_predicate_is_refused() -> None:
    def judge(branches: st.Forks) -> None:
        with pytest.raises(InvalidArgument, match=r"when='x'.*lambda branch"):
            branches.first(1, when="x")  # type: ignore[arg-type]

    race("0", judge)


def test_the_stream_tells_who_has_lost() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        branches = s.fork(["slow", "quick"])
        branches += ["9" + st.gen("x"), "1" + st.gen("x")]
        branches.race()

    events = list(program.stream(backend=Paced()))
    ends = [e for e in events if isinstance(e, st.Stopped | st.VariableFinished | st.Failed)]
    assert ends == [
        st.VariableFinished("program/quick", "x", "<1>"),
        st.Stopped("program/slow"),
    ]


def test_an_outline_takes_the_first_branches() -> None:
    program = st.function(lambda s: _all(s).first(2)["x"])
    trace = program.trace()
    assert trace.error is None
    assert trace.value == ["{x}", "{x}"]

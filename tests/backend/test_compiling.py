"""While a constraint is compiled only those wait who asked for it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stemma as st
from stemma.backend.base import Generation
from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.constrain import Constrainer
from stemma.lang.constraints import Constraint
from stemma.lang.errors import BackendClosed, Cancelled, ConstraintError
from stemma.lang.sampling import SamplingParams
from tests.backend.conftest import Make

SLOW = Constraint.regex("slow [a-z]{3}")
QUICK = Constraint.regex("quick [a-z]{3}")


class HeldUp:
    """Compiling of SLOW: begun, may go on, and how often everything was compiled."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_go_on = threading.Event()
        self.threads: set[threading.Thread] = set()
        self.times: Counter[tuple[str, bytes]] = Counter()


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUp]:
    held, compile_ = HeldUp(), Constrainer._compile

    def slowly(self: Constrainer, constraint: Constraint, literal: bytes) -> object:
        held.times[constraint.compiled, literal] += 1
        held.threads.add(threading.current_thread())
        if constraint == SLOW:
            held.begun.release()
            assert held.may_go_on.wait(60)
        return compile_(self, constraint, literal)

    monkeypatch.setattr(Constrainer, "_compile", slowly)
    yield held
    held.may_go_on.set()
    for thread in held.threads:
        thread.join(60)


def ask(backend: LocalBackend, constraint: Constraint | None, prompt: str = "Now: ") -> Generation:
    branch = backend.open()
    branch.append(prompt)
    return branch.generate(SamplingParams(constraint=constraint, max_tokens=12, temperature=0))


def check_done(backend: LocalBackend) -> None:
    stats = backend.stats()
    assert (stats.running, stats.waiting, stats.protected_tokens) == (0, 0, 0)
    backend.check()


def test_other_requests_are_taken_in_and_finish_meanwhile(make: Make, held_up: HeldUp) -> None:
    backend = make()
    slow = ask(backend, SLOW)
    assert held_up.begun.acquire(timeout=60)
    assert QUICK.prefix_ok(ask(backend, QUICK).result(60).text)
    assert ask(backend, None).result(60).usage.output_tokens
    assert backend.stats().waiting == 1
    assert not slow.done()
    held_up.may_go_on.set()
    assert SLOW.prefix_ok(slow.result(60).text)
    check_done(backend)


def test_other_programs_go_on_meanwhile(make: Make, held_up: HeldUp) -> None:
    backend = make()

    @st.function
    def program(s: st.ProgramState, shape: Constraint) -> None:
        s += "Now: " + st.gen("x", constraint=shape, max_tokens=40)

    slow = program.run(SLOW, backend=backend, stream=True)
    assert held_up.begun.acquire(timeout=60)
    assert QUICK.matches(program.run(QUICK, backend=backend, timeout=60)["x"])
    held_up.may_go_on.set()
    assert SLOW.matches(slow["x"])


def test_a_shape_is_compiled_once_for_all_who_ask_for_it(make: Make, held_up: HeldUp) -> None:
    backend = make()
    before = threading.active_count()
    waiting = [ask(backend, SLOW) for _ in range(32)]
    assert held_up.begun.acquire(timeout=60)
    assert threading.active_count() < before + 8
    held_up.may_go_on.set()
    texts = {handle.result(60).text for handle in waiting}
    assert len(texts) == 1
    assert texts == {ask(backend, SLOW).result(60).text}
    assert set(held_up.times.values()) == {1}
    check_done(backend)


def test_those_that_waited_compute_their_prompt_once(make: Make, held_up: HeldUp) -> None:
    backend = make()
    branch = backend.open()
    branch.append("A prompt of some tokens, which all of them have: ")
    params = SamplingParams(constraint=SLOW, max_tokens=12)
    waiting = branch.sample([params.but(seed=seed) for seed in range(5)])
    assert held_up.begun.acquire(timeout=60)
    held_up.may_go_on.set()
    usages = [handle.result(60).usage for handle in waiting]
    assert sum(usage.computed_tokens for usage in usages) < 2 * usages[0].prompt_tokens
    branch.close()
    check_done(backend)


@pytest.mark.parametrize("by_branch", [False, True], ids=["request", "branch"])
def test_who_waits_can_be_cancelled(make: Make, held_up: HeldUp, by_branch: bool) -> None:
    backend = make()
    branch = backend.open()
    branch.append("Now: ")
    slow = branch.generate(SamplingParams(constraint=SLOW, max_tokens=12))
    other = ask(backend, SLOW)
    assert held_up.begun.acquire(timeout=60)
    branch.close() if by_branch else slow.cancel()
    with pytest.raises(Cancelled):
        slow.result(60)
    assert not held_up.may_go_on.is_set()
    held_up.may_go_on.set()
    assert SLOW.prefix_ok(other.result(60).text)
    check_done(backend)


def test_a_time_limit_holds_while_it_is_compiled(make: Make, held_up: HeldUp) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Now: " + st.gen("x", constraint=SLOW)

    with pytest.raises(st.errors.Timeout):
        program.run(backend=make(), timeout=0.3)
    assert not held_up.may_go_on.is_set()


def test_closing_the_backend_waits_for_no_compiling(make: Make, held_up: HeldUp) -> None:
    backend = make()
    waiting = [ask(backend, SLOW) for _ in range(3)]
    assert held_up.begun.acquire(timeout=60)
    backend.close()
    for handle in waiting:
        with pytest.raises(BackendClosed):
            handle.result(60)
    assert not held_up.may_go_on.is_set()
    held_up.may_go_on.set()
    for thread in list(held_up.threads):
        thread.join(60)
    with pytest.raises(BackendClosed):
        ask(backend, SLOW)


def test_errors_go_to_those_who_asked_each_with_its_own(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_fail, compile_ = threading.Event(), Constrainer._compile

    def fails(self: Constrainer, constraint: Constraint, literal: bytes) -> object:
        if constraint != SLOW:
            return compile_(self, constraint, literal)
        assert may_fail.wait(60)
        raise ConstraintError("too complex")

    monkeypatch.setattr(Constrainer, "_compile", fails)
    backend = make()
    waiting = [ask(backend, SLOW) for _ in range(3)]
    assert QUICK.prefix_ok(ask(backend, QUICK).result(60).text)
    may_fail.set()
    errors = [handle.future.exception(60) for handle in waiting]
    assert [str(error) for error in errors] == ["too complex"] * 3
    assert len(set(map(id, errors))) == 3
    check_done(backend)
    monkeypatch.setattr(Constrainer, "_compile", compile_)  # what failed is tried again
    assert SLOW.prefix_ok(ask(backend, SLOW).result(60).text)


def test_no_request_is_kept_by_what_it_waited_for(make: Make, held_up: HeldUp) -> None:
    backend = make()
    gc.collect()
    gc.disable()
    try:
        branch = backend.open()
        branch.append("Now: ")
        handle = branch.generate(SamplingParams(constraint=SLOW, max_tokens=12))
        kept = weakref.ref(branch)
        held_up.may_go_on.set()
        handle.result(60)
        branch.close()
        for thread in list(held_up.threads):
            thread.join(60)
        backend.stats()  # a step later
        del branch, handle
        assert kept() is None
    finally:
        gc.enable()


ENDS = """
import sys, time
from stemma.backend.local.backend import LocalBackend
from stemma.lang.constraints import Constraint
from stemma.lang.sampling import SamplingParams
def large(number):
    names = [f"k{i}" for i in range(900)]
    texts = [
        {"type": "string", "pattern": "^[a-z]{1,%d}[0-9]*$" % (i % 50 + 1), "maxLength": i + number}
        for i in range(100, 1_000)
    ]
    return {"type": "object", "properties": dict(zip(names, texts)), "required": names}
schema = {"type": "array", "prefixItems": [large(900 * k) for k in range(2)]}
branch = LocalBackend(sys.argv[1], dtype="float64", device="cpu").open()
branch.append("Now: ")
handle = branch.generate(SamplingParams(constraint=Constraint.json_schema(schema)))
time.sleep(0.1)
print(handle.done())
"""


def test_a_process_ends_in_the_middle_of_compiling(tiny_model: Callable[..., Path]) -> None:
    command = [sys.executable, "-c", ENDS, str(tiny_model())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")

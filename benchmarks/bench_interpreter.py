"""What the interpreter costs, without a model: microseconds per operation on the mock backend.

The baseline is the same calls made on the backend's branch by hand, in the same run; where each
result is read at once, on another thread, for two changes of thread are the price of a backend that
works beside its caller. The overhead is the difference in processor time of all threads, which
other work on the machine does not change; its limit is the design's: 50 microseconds for an
operation, 0.2 s for a thousand forks.

    python benchmarks/bench_interpreter.py [--repeat 5]
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from rich.console import Console
from rich.table import Table

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.lang.sampling import SamplingParams

OPERATIONS = 2_000
BRANCHES = 1_000


@dataclass(frozen=True)
class Case:
    """A program's work and the same by hand; each returns how many operations it has done."""

    name: str
    program: Callable[[], int]
    by_hand: Callable[[], int] | None
    limit_us: float | None = 50.0


def reply(prompt: str, params: SamplingParams) -> str:
    return "a"


def run(body: Callable[[st.ProgramState], Any], **options: Any) -> None:
    st.function(body).run(backend=MockBackend(reply), **options)


def literals(s: st.ProgramState) -> None:
    for _ in range(OPERATIONS):
        s += "word "
    s.text()


def literals_by_hand() -> int:
    branch = MockBackend(reply).open()
    for _ in range(OPERATIONS):
        branch.append("word ")
    return OPERATIONS


def queued(s: st.ProgramState) -> None:
    """All operations first, one read last: the dispatcher is never waited for in between."""
    for _ in range(OPERATIONS):
        s += st.gen("x", max_tokens=1)
    assert s["x"]


def generations_by_hand() -> int:
    branch = MockBackend(reply).open()
    params = SamplingParams(max_tokens=1)
    for _ in range(OPERATIONS):
        assert branch.generate(params).result()
    return OPERATIONS


def generations_beside_by_hand() -> int:
    """Each is made on a thread that does nothing else, and waited for."""
    asked: SimpleQueue[SimpleQueue[Any] | None] = SimpleQueue()

    def serve() -> None:
        branch = MockBackend(reply).open()
        params = SamplingParams(max_tokens=1)
        while (answer := asked.get()) is not None:
            answer.put(branch.generate(params).result())

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(OPERATIONS):
        answer: SimpleQueue[Any] = SimpleQueue()
        asked.put(answer)
        assert answer.get()
    asked.put(None)
    thread.join()
    return OPERATIONS


def read_at_once(s: st.ProgramState) -> None:
    """Every generation is read before the next is written: two changes of thread each."""
    for _ in range(OPERATIONS):
        s += st.gen("x", max_tokens=1)
        assert s["x"]


def selections(s: st.ProgramState) -> None:
    for _ in range(OPERATIONS):
        s += st.select("x", ["yes", "no"])
    assert s["x"]


def selections_by_hand() -> int:
    branch = MockBackend(reply).open()
    for _ in range(OPERATIONS):
        scored = branch.score(["yes", "no"]).result()
        branch.commit(scored.choices[0])
    return OPERATIONS


def forks(s: st.ProgramState) -> None:
    s += "prefix"
    branches = s.fork(BRANCHES)
    s.text()
    assert len(branches) == BRANCHES


def forks_by_hand() -> int:
    branch = MockBackend(reply).open()
    branch.append("prefix")
    assert len(branch.fork(BRANCHES)) == BRANCHES
    return BRANCHES


def fork_and_write(s: st.ProgramState) -> None:
    s += "prefix"
    branches = s.fork(BRANCHES)
    branches += "a" + st.gen("x", max_tokens=1)
    assert len(branches["x"]) == BRANCHES


def fork_and_write_by_hand() -> int:
    branch = MockBackend(reply).open()
    params = SamplingParams(max_tokens=1)
    for child in branch.fork(BRANCHES):
        child.append("a")
        assert child.generate(params).result()
    return BRANCHES


def short_runs() -> int:
    backend = MockBackend(reply)
    program = st.function(lambda s: s.append("word " + st.gen("x", max_tokens=1)))
    for _ in range(OPERATIONS // 10):
        program.run(backend=backend)
    return OPERATIONS // 10


def program_of(
    body: Callable[[st.ProgramState], Any], count: int, **options: Any
) -> Callable[[], int]:
    def work() -> int:
        run(body, **options)
        return count

    return work


CASES = [
    Case("append a literal", program_of(literals, OPERATIONS), literals_by_hand),
    Case("generate, read at the end", program_of(queued, OPERATIONS), generations_by_hand),
    Case("generate, read each", program_of(read_at_once, OPERATIONS), generations_beside_by_hand),
    Case("select, read at the end", program_of(selections, OPERATIONS), selections_by_hand),
    Case("fork, per branch", program_of(forks, BRANCHES), forks_by_hand, 200.0),
    Case(
        "fork, append, generate, per branch",
        program_of(fork_and_write, BRANCHES),
        fork_and_write_by_hand,
        200.0,
    ),
    Case("a run of its own", short_runs, None, None),
]


def best_us(work: Callable[[], int], repeat: int) -> tuple[float, float]:
    """Wall and processor time, the best of `repeat` runs each, in microseconds per operation."""
    walls, processors = [], []
    for _ in range(repeat):
        wall, processor = time.perf_counter(), time.process_time()
        count = work()
        walls.append((time.perf_counter() - wall) / count * 1e6)
        processors.append((time.process_time() - processor) / count * 1e6)
    return min(walls), min(processors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="runs of each case; the best counts")
    repeat = parser.parse_args().repeat
    table = Table(title="Interpreter on the mock backend, microseconds per operation")
    columns = ("operation", "wall", "cpu", "by hand, cpu", "ratio", "overhead", "limit")
    for column in columns:
        table.add_column(column, justify="left" if column == "operation" else "right")
    for case in CASES:
        wall, cpu = best_us(case.program, repeat)
        row = [case.name, f"{wall:.1f}", f"{cpu:.1f}"]
        if case.by_hand is None:
            row += ["", "", ""]
        else:
            _, base = best_us(case.by_hand, repeat)
            row += [f"{base:.1f}", f"{cpu / base:.1f}x", f"{cpu - base:.1f}"]
        table.add_row(*row, "" if case.limit_us is None else f"{case.limit_us:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()

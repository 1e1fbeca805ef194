"""Runs workloads on contenders by turns, and what is to be told of that."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import stemma as st
from suite.contenders import Contender, Stemma, Unavailable, run_program
from suite.floor import Floor
from suite.peers.serve import Setup
from suite.recorder import Recorder
from suite.work import Call, Outcome
from suite.workloads import Workload


@dataclass(slots=True)
class Runs:
    """A workload, and by contender what came of each turn. failures: why one has no more turns."""

    workload: str
    calls: int
    rounds: int
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)

    def seconds(self, key: str) -> float | None:
        """The median, None where it has no turn."""
        times = [outcome.seconds for outcome in self.outcomes.get(key, ())]
        return statistics.median(times) if times else None

    def ratio(self, key: str, reference: str) -> float | None:
        """How many times as long as the reference it takes: the median over the turns that both
        have.
        """
        pairs = zip(self.outcomes.get(key, ()), self.outcomes.get(reference, ()), strict=False)
        ratios = [one.seconds / other.seconds for one, other in pairs]
        return statistics.median(ratios) if ratios else None

    def hit_rate(self, key: str) -> float | None:
        outcomes = self.outcomes.get(key)
        return outcomes[0].hit_rate if outcomes else None

    def floor_share(self, key: str) -> float | None:
        """The floor's share of the time."""
        seconds = self.seconds(key)
        return self.floors[key] / seconds if seconds and key in self.floors else None

    def first_token_s(self, key: str) -> list[float]:
        """Of all later turns of all runs."""
        return [s for outcome in self.outcomes.get(key, ()) for s in outcome.first_token_s]


@dataclass(slots=True)
class Measured:
    """All of a run of the suite. names: of the contenders by key; skipped: why one is not there."""

    names: dict[str, str]
    skipped: dict[str, str]
    floor: Floor
    runs: list[Runs] = field(default_factory=list)


def start_all(
    contenders: Sequence[Contender], setup: Setup, tell: Callable[[str], None]
) -> tuple[list[Contender], dict[str, str]]:
    """Those that are there, and by key why the others are not."""
    started, skipped = [], {}
    for contender in contenders:
        tell(f"loading {contender.name}")
        try:
            contender.start(setup)
            started.append(contender)
        except Unavailable as error:
            skipped[contender.key] = str(error)
            tell(f"{contender.name} is left out: {error}")
    return started, skipped


def record(workload: Workload, backend: st.Backend, seed: int) -> list[Call]:
    """What the workload asks of a model."""
    recorder = Recorder(backend)
    try:
        run_program(workload, recorder, seed)
    finally:
        recorder.close()
    return recorder.calls


def measure(
    workload: Workload,
    contenders: Sequence[Contender],
    calls: Sequence[Call],
    *,
    pairs: int,
    patience_s: float,
    tell: Callable[[str], None],
) -> Runs:
    """Every contender once, then again, `pairs` times; who took longer than `patience_s` in all
    goes no more. The order turns, so that nobody always runs behind the same one.
    """
    runs = Runs(workload.name, len(calls), 1 + max(call.round for call in calls))
    for turn in range(pairs):
        shift = turn % len(contenders)
        for contender in [*contenders[shift:], *contenders[:shift]]:
            key = contender.key
            outcomes = runs.outcomes.setdefault(key, [])
            spent = sum(outcome.seconds for outcome in outcomes)
            if key in runs.failures or spent > patience_s:
                continue
            try:
                outcome = contender.run(workload, calls)
            except (RuntimeError, st.StemmaError) as error:
                runs.failures[key] = f"{type(error).__name__}: {error}"
                tell(f"{workload.name}: {contender.name} failed: {error}")
                continue
            outcomes.append(outcome)
            tell(f"{workload.name}: {contender.name} {outcome.seconds:.2f} s")
    return runs


def add_floors(runs: Runs, ours: Sequence[Stemma], floor: Floor) -> None:
    """The floors of those that tell how many rows and steps they took."""
    for one in ours:
        if outcomes := runs.outcomes.get(one.key):
            int8 = one.options.get("quantization") == "int8"
            seconds = floor.seconds(outcomes[0], one.backend.config, int8=int8)
            if seconds is not None:
                runs.floors[one.key] = seconds


def references(keys: Mapping[str, object] | Sequence[str]) -> list[str]:
    """The contenders that the others are compared with: ours in their best settings."""
    return [key for key in ("int8", "fp32") if key in keys]

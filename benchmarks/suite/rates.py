"""Tokens per second of the simplest work: a prompt, one text, many texts behind one prompt.

A rate is of what one run has more than another: the tokens behind a prompt, without the prompt.
Each contender is alone in memory while it runs. Used by `command.py`, with --rates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from suite.contenders import Contender, Stemma, Unavailable
from suite.measure import record
from suite.peers.serve import Setup
from suite.text import Writer
from suite.work import Call
from suite.workloads import Workload, samples


@dataclass(frozen=True, slots=True)
class Rate:
    """tokens: what the run has more than the one that it is compared with, if there is one.
    runs: prompt tokens, samples and tokens of each.
    """

    name: str
    tokens: int
    runs: tuple[tuple[int, int, int], ...]


RATES = (
    Rate("prefill of 1,000", 1000, ((997, 1, 1),)),
    Rate("one sequence, 128 tokens after 200", 128, ((197, 1, 129), (197, 1, 1))),
    Rate("32 branches on 1,000, 32 tokens each", 1024, ((997, 32, 33), (997, 32, 1))),
)


def measured_rates(
    contenders: Sequence[Contender], setup: Setup, *, turns: int, tell: Callable[[str], None]
) -> dict[str, list[float]]:
    """Of each contender that is there, its rates: medians over the turns."""
    works = [[_workload(*run) for run in rate.runs] for rate in RATES]
    recording = Stemma("recording", "recording", compile=False)
    recording.start(setup)
    try:
        calls = [[record(run, recording.backend, setup.seed) for run in runs] for runs in works]
    finally:
        recording.close()
    found = {}
    for contender in contenders:
        tell(f"loading {contender.name}")
        try:
            contender.start(setup)
            found[contender.name] = [
                statistics.median(_rate(contender, *each) for _ in range(turns))
                for each in zip(RATES, works, calls, strict=True)
            ]
        except Unavailable as error:
            tell(f"{contender.name} is left out: {error}")
        finally:
            contender.close()
    return found


def rates_table(found: dict[str, list[float]]) -> Table:
    """Tokens per second, and how many times as many the first contender makes."""
    table = Table(title="tokens per second, and how many times as many the first one makes")
    table.add_column("work")
    for name in found:
        table.add_column(name, justify="right")
    for rate, row in zip(RATES, zip(*found.values(), strict=True), strict=True):
        others = (f"{each:,.0f} ({row[0] / each:.2f}x)" for each in row[1:])
        table.add_row(rate.name, f"{row[0]:,.0f}", *others)
    return table


def _workload(prompt: int, count: int, new: int) -> Workload:
    text = Writer(14).text(prompt)
    return Workload("rate", samples, [{"prompt": text, "count": count, "new": new}])


def _rate(
    contender: Contender, rate: Rate, works: Sequence[Workload], calls: Sequence[Sequence[Call]]
) -> float:
    seconds = [contender.run(*run).seconds for run in zip(works, calls, strict=True)]
    return rate.tokens / (seconds[0] - sum(seconds[1:]))

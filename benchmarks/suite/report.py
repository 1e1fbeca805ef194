"""The results of the suite as a table, as JSON and as a plot."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from suite.measure import Measured, Runs, references


def machine() -> str:
    """The kind of machine, without its name."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{len(os.sched_getaffinity(0))} cores, {model}"


def table(measured: Measured, title: str) -> Group:
    """Seconds, and how many times as long as ours that is."""
    ours = references(measured.names)
    found = Table(title=title)
    found.add_column("work")
    for key, name in measured.names.items():
        against = [other for other in ours if other != key] if key in ours else ours
        ratio = f"\ns, times {' / '.join(against)}" if against else "\ns"
        share = "\nhit rate, share of the floor" if key in ours else ""
        found.add_column(name + ratio + share, justify="right")
    for runs in measured.runs:
        found.add_row(runs.workload, *(_cell(runs, key, ours) for key in measured.names))
    notes = [f"{key}: left out: {why}" for key, why in measured.skipped.items()]
    notes += [
        f"{runs.workload}: {key} failed: {why}"
        for runs in measured.runs
        for key, why in runs.failures.items()
    ]
    return Group(found, *map(Text, notes))


def _cell(runs: Runs, key: str, ours: Sequence[str]) -> str:
    seconds = runs.seconds(key)
    if seconds is None:
        return "failed" if key in runs.failures else ""
    ratios = [runs.ratio(key, other) for other in ours if other != key]
    cell = f"{seconds:.2f}"
    if ratios:
        cell += "  " + " / ".join("-" if ratio is None else f"{ratio:.1f}x" for ratio in ratios)
    if key in ours:
        cell += f"\n{_percent(runs.hit_rate(key))}, {_percent(runs.floor_share(key))}"
    return cell


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def latency_table(measured: Measured) -> Table | None:
    """The time to the first token of later turns; None where no contender tells of any."""
    rows = []
    for runs in measured.runs:
        waits = {key: runs.first_token_s(key) for key in measured.names}
        reference = next((key for key in references(measured.names) if waits[key]), None)
        for key, seconds in waits.items():
            if reference is None or not seconds:
                continue
            median = statistics.median(seconds)
            ratio = median / statistics.median(waits[reference])
            cells = (f"{1e3 * median:.0f}", f"{1e3 * ninth_decile(seconds):.0f}", f"{ratio:.1f}x")
            rows.append((runs.workload, measured.names[key], *cells))
    if not rows:
        return None
    found = Table(title="time to the first token of turns after the first, all chats at once")
    for column in ("work", "", "median, ms", "90%, ms", "times ours"):
        found.add_column(column, justify="right" if "," in column else "left")
    for row in rows:
        found.add_row(*row)
    return found


def parts_table(measured: Measured) -> Table | None:
    """What our best setting spends its time on; None where it is not there."""
    reference = next(iter(references(measured.names)), None)
    if reference is None:
        return None
    rows = []
    for runs in measured.runs:
        if outcomes := runs.outcomes.get(reference):
            whole = sum(outcome.seconds for outcome in outcomes)
            shares = {
                part: sum(outcome.parts[part] for outcome in outcomes) / whole
                for part in outcomes[0].parts
            }
            rows.append((runs.workload, shares))
    if not rows:
        return None
    found = Table("work", *rows[0][1], title=f"where {measured.names[reference]} spends its time")
    for name, shares in rows:
        found.add_row(name, *(f"{share:.1%}" for share in shares.values()))
    return found


def ninth_decile(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def as_json(measured: Measured, settings: dict[str, Any]) -> dict[str, Any]:
    """All figures: medians and ratios, and every single run behind them."""
    ours = references(measured.names)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "settings": settings,
        "contenders": measured.names,
        "skipped": measured.skipped,
        "floor": asdict(measured.floor),
        "workloads": [
            {
                "name": runs.workload,
                "calls": runs.calls,
                "rounds": runs.rounds,
                "failures": runs.failures,
                "results": {
                    key: {
                        "seconds": runs.seconds(key),
                        "ratios": {other: runs.ratio(key, other) for other in ours},
                        "hit_rate": runs.hit_rate(key),
                        "floor_s": runs.floors.get(key),
                        "floor_share": runs.floor_share(key),
                        "runs": [asdict(outcome) for outcome in outcomes],
                    }
                    for key, outcomes in runs.outcomes.items()
                },
            }
            for runs in measured.runs
        ],
    }


def write_json(path: Path, measured: Measured, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(as_json(measured, settings), indent=1) + "\n", encoding="utf-8")


def write_plot(path: Path, measured: Measured) -> None:
    """Bars: how many times as long as our best setting each contender takes, on a log scale.

    Raises ImportError where matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    reference = next(iter(references(measured.names)), None) or next(iter(measured.names))
    others = [key for key in measured.names if key != reference]
    thickness = 0.8 / max(1, len(others))
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.6 * len(measured.runs)))
    for n, key in enumerate(others):
        ratios = [runs.ratio(key, reference) for runs in measured.runs]
        places = [i + n * thickness for i, ratio in enumerate(ratios) if ratio]
        axes.barh(places, [r for r in ratios if r], thickness, label=measured.names[key])
    middle = (len(others) - 1) * thickness / 2
    axes.set_yticks([i + middle for i in range(len(measured.runs))])
    axes.set_yticklabels([runs.workload for runs in measured.runs])
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda ratio, _: f"{ratio:g}x"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel(f"times as long as {measured.names[reference]}")
    if others:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize="small")
    figure.tight_layout()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path)
    pyplot.close(figure)

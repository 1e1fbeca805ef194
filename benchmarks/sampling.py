"""Drawing tokens: all rows of a step, against a textbook sampler, at 49,152 tokens.

    python benchmarks/sampling.py [--vocab 49152] [--rows 1 32 256] [--seconds 1]

The textbook sampler works on the whole batch too: argmax where temperature is 0, else softmax,
torch.sort of each row for a cut, and `torch.multinomial`. The limit is reading the logits once, at
the rate at which this machine sums a large array, measured here. Times are the best of many, the
two sides taking turns, so that other work on the machine disturbs the ratio little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stemma.backend.local.sampler import Draw, sample
from stemma.lang.sampling import SamplingParams

CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_k 40": SamplingParams(top_k=40),
    "top_k 40, top_p 0.9": SamplingParams(top_k=40, top_p=0.9),
    "min_p 0.05": SamplingParams(min_p=0.05),
}


def textbook(logits: Tensor, params: SamplingParams) -> list[int]:
    """What every tutorial does; the cuts in the order of ours."""
    if params.temperature == 0:
        greedy: list[int] = logits.argmax(-1).tolist()
        return greedy
    probabilities = (logits / params.temperature).softmax(-1)
    if params.top_k or params.top_p < 1 or params.min_p:
        probabilities, ids = probabilities.sort(-1, descending=True)
        if params.top_k:
            probabilities[:, params.top_k :] = 0
        before = probabilities.cumsum(-1) - probabilities
        probabilities[before >= params.top_p * probabilities.sum(-1, keepdim=True)] = 0
        probabilities[probabilities < params.min_p * probabilities[:, :1]] = 0
        places = torch.multinomial(probabilities, 1)
        cut: list[int] = ids.gather(1, places)[:, 0].tolist()
        return cut
    plain: list[int] = torch.multinomial(probabilities, 1)[:, 0].tolist()
    return plain


def language_like(rows: int, vocab: int) -> Tensor:
    """Logits whose probabilities fall as those of words do, by a power of the rank, shuffled."""
    generator = torch.Generator().manual_seed(0)
    falling = -1.5 * torch.arange(1, vocab + 1).log()
    places = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)])
    noise = torch.randn(rows, vocab, generator=generator) / 2
    return falling[places] + noise


def best_times(works: list[Callable[[], object]], budget: float) -> list[float]:
    """The shortest time of each, in seconds; they take turns until the budget is spent on each."""
    best = [float("inf")] * len(works)
    spent = 0.0
    rounds = 0
    while spent < budget * len(works) or rounds < 3:
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            took = time.perf_counter() - start
            spent += took
            best[i] = min(best[i], took)
        rounds += 1
    return best


def read_rate() -> float:
    """Bytes per second of summing an array far larger than the caches."""
    array = torch.zeros(1 << 26)
    (best,) = best_times([lambda: array.sum()], 1.0)
    return 4 * array.numel() / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each side of each line")
    args = parser.parse_args()

    rate = read_rate()
    threads = torch.get_num_threads()
    table = Table(
        title=f"{args.vocab:,} fp32 logits a row, {threads} threads, {rate / 1e9:.0f} GB/s"
    )
    for column in ("settings", "rows", "ours ms", "textbook ms", "ratio", "limit ms"):
        table.add_column(column, justify="left" if column == "settings" else "right", no_wrap=True)

    def measure(name: str, params: SamplingParams, logits: Tensor, rows: list[int]) -> None:
        """A line: draw i is from row rows[i] of the logits."""
        draws = [Draw(params, seed, counter=7) for seed in range(len(rows))]
        copies = logits if len(rows) == len(logits) else logits.expand(len(rows), -1)
        ours, theirs = best_times(
            [lambda: sample(logits, rows, draws), lambda: textbook(copies, params)], args.seconds
        )
        limit = 4 * logits.numel() / rate
        times = (f"{1e3 * ours:.2f}", f"{1e3 * theirs:.2f}", f"{theirs / ours:.1f}x")
        table.add_row(name, str(len(rows)), *times, f"{1e3 * limit:.3f}")

    for rows in args.rows:
        logits = language_like(rows, args.vocab)
        for name, params in CASES.items():
            measure(name, params, logits, list(range(rows)))
        if rows > 1:
            measure("1 prompt, temp. 0.8", CASES["temperature 0.8"], logits[:1], [0] * rows)
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()

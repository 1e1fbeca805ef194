"""Where the time of a step goes, part by part, each against its own floor.

    python benchmarks/step_parts.py [--model MODEL] [--fp32] [--json FILE]

A step of 1 to 32 branches that decode, on a shared prefix with tails of their own, and the prefill
of 1,000 tokens. Floors: of the linears and the head, reading the weights once or multiplying at the
rate of a large product, whichever is longer; of attention, reading each key and value once or
multiplying at the rate of a large fp32 product. Times are medians; the parts are timed in one loop.
On a thread of its own, as the engine has it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from suite.floor import Floor, weights
from torch import Tensor

import stemma as st
from stemma.backend.local.batch import Batch, Entry, build_batch
from stemma.backend.local.logit_rules import Draw
from stemma.backend.local.model.decoder import Attend
from stemma.backend.local.sampler import sample

REPEATS = 15
PARTS = ("lay out", "linears", "attention", "head", "draw")


def branches(count: int, shared: int, tail: int) -> list[Entry]:
    """`count` sequences that decode one token each."""
    entries = []
    for i in range(count):
        own = np.arange(shared + i * tail, shared + (i + 1) * tail)
        table = np.concatenate((np.arange(shared), own)).astype(np.int32)
        entries.append(Entry(np.zeros(len(table), dtype=np.int32), table, len(table) - 1))
    return entries


def prefill(tokens: int) -> list[Entry]:
    table = np.arange(tokens, dtype=np.int32)
    return [Entry(np.zeros(tokens, dtype=np.int32), table, 0)]


CASES = {
    "1 branch on 200": lambda: branches(1, 200, 1),
    "1 branch on 1,000": lambda: branches(1, 1000, 1),
    "8 branches on 200 + 30": lambda: branches(8, 200, 30),
    "32 branches on 1,000 + 32": lambda: branches(32, 1000, 32),
    "prefill of 1,000": lambda: prefill(1000),
}


class Timed:
    """Attention that adds up how long it takes."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self.seconds = 0.0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = time.perf_counter()
        result = self._attend(layer, q, k, v)
        self.seconds += time.perf_counter() - before
        return result


@torch.inference_mode()
def timed(backend: st.LocalBackend, case: str) -> dict[str, float]:
    """Median milliseconds of each part."""
    engine = backend.engine
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(REPEATS):
        entries = CASES[case]()
        begun = time.perf_counter()
        batch = build_batch(entries)
        attend = engine.attention.prepare(batch)
        laid_out = time.perf_counter() - begun
        timed_attend = Timed(attend)

        start = time.perf_counter()
        ids, positions = (torch.from_numpy(x) for x in (batch.token_ids, batch.positions))
        hidden = engine.decoder(ids, positions, timed_attend)
        forward = time.perf_counter()
        drawn = [int(rows[-1]) for rows in batch.entry_rows]
        logits = engine.decoder.logits(hidden[torch.tensor(drawn)])
        head = time.perf_counter()
        params = st.SamplingParams()
        sample(logits, range(len(drawn)), [Draw(params, 0, i) for i in range(len(drawn))])
        end = time.perf_counter()
        attending = timed_attend.seconds
        times = (laid_out, forward - start - attending, attending, head - forward, end - head)
        for part, seconds in zip(PARTS, times, strict=True):
            found[part].append(seconds * 1e3)
    return {part: statistics.median(values) for part, values in found.items()}


def floors(backend: st.LocalBackend, batch: Batch, floor: Floor) -> dict[str, float]:
    """The least milliseconds that the machine needs for the parts that have a floor."""
    config = backend.config
    layers, head = weights(config)
    int8 = backend.quantization == "int8"
    rate = (floor.int8 if int8 else None) or floor.fp32
    size = 1 if int8 else 4
    rows, drawn = len(batch.slots), len(batch.entry_rows)
    pairs = int((batch.positions + 1).sum())
    keys = len(np.unique(np.concatenate(batch.tables)))
    halves = backend.kv_dtype == torch.bfloat16
    attention_rate = max(floor.bf16, floor.fp32) if halves else floor.fp32
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * backend.kv_dtype.itemsize
    products = 4 * config.num_layers * config.num_heads * config.head_dim
    return {
        "linears": 1e3 * max(2 * rows * layers / rate, size * layers / floor.reads),
        "attention": 1e3 * max(pairs * products / attention_rate, keys * kv / floor.reads),
        "head": 1e3 * max(2 * drawn * head / rate, size * head / floor.reads),
    }


def measure(backend: st.LocalBackend, floor: Floor) -> dict[str, dict[str, dict[str, float]]]:
    result = {}
    for case, make in CASES.items():
        timed(backend, case)  # memory and caches are warm after the first round
        result[case] = {
            "ms": timed(backend, case),
            "floor": floors(backend, build_batch(make()), floor),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--fp32", action="store_true", help="not int8")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    quantization = None if args.fp32 else "int8"
    with st.LocalBackend(args.model, quantization=quantization, kv_tokens=8192) as backend:

        def work() -> None:
            found.update(measure(backend, Floor.measured()))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    table = Table("step", *PARTS, "sum", title="milliseconds, and the share that is the floor")
    for case, figures in found.items():
        cells = [cell(figures["ms"][part], figures["floor"].get(part)) for part in PARTS]
        table.add_row(case, *cells, f"{sum(figures['ms'].values()):.1f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


def cell(milliseconds: float, floor: float | None) -> str:
    share = "" if floor is None else f" ({floor / milliseconds:.0%})"
    return f"{milliseconds:.2f}{share}"


if __name__ == "__main__":
    main()

"""Self-consistency: many samples of one long prompt, against transformers' `generate` on the same
work.

    python benchmarks/self_consistency.py [--model FOLDER] [--prompt 1000] [--samples 32] [--new 32]
    [--pairs 1]

Both sides run the same weights in fp32 in this process, one after the other, `--pairs` times; the
table shows medians, their ratio, and our parts against the machine's limit: the fp32 matrix product
rate, measured here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from stemma.backend.local.backend import LocalBackend
from stemma.lang.sampling import SamplingParams

TEXT = (
    "A stemma is the tree by which the copies of a text descend from a common ancestor. "
    "Scholars draw it by comparing the errors that copies share: an error is rarely made twice. "
)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def matmul_rate() -> float:
    """fp32 multiply-adds per second of a large matrix product, times two."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = min(seconds(lambda: a @ b) for _ in range(20))
    return 2 * 1024**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=1)
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM

    ours = LocalBackend(args.model, dtype="float32")
    ours.warmup()
    peer = AutoModelForCausalLM.from_pretrained(ours.model_folder, dtype=torch.float32)
    ids = (ours.encode(TEXT) * (1 + args.prompt // 20))[: args.prompt]
    params = SamplingParams(max_tokens=args.new, n=args.samples, seed=7, ignore_eos=True)
    tensor = torch.tensor([ids])

    def run_ours() -> None:
        ours.flush_cache()
        ours.generate([ids], params)

    def run_peer() -> None:
        with torch.inference_mode():
            peer.generate(
                tensor,
                attention_mask=torch.ones_like(tensor),
                do_sample=True,
                top_k=0,
                num_return_sequences=args.samples,
                max_new_tokens=args.new,
                min_new_tokens=args.new,
                pad_token_id=0,
            )

    before = ours.stats()
    pairs = [(seconds(run_ours), seconds(run_peer)) for _ in range(args.pairs)]
    after = ours.stats()
    own, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    computed = (after.computed_tokens - before.computed_tokens) / args.pairs
    weights = sum(p.numel() for p in peer.parameters())
    floor = 2 * weights * computed / matmul_rate()

    table = Table(
        title=f"{args.prompt} tokens of prompt, {args.samples} samples of {args.new} tokens, fp32"
    )
    for column in ("", "seconds", "ratio"):
        table.add_column(column, justify="right")
    table.add_row("stemma", f"{own:.2f}", "1.0")
    table.add_row("transformers generate", f"{other:.2f}", f"{other / own:.1f}x slower")
    table.add_row(
        "matrix products alone", f"{floor:.2f}", f"{100 * floor / own:.0f}% of stemma's time"
    )
    console = Console()
    console.print(table)
    console.print(f"tokens run through the model per round: {computed:.0f} (prompt {args.prompt})")
    ours.close()


if __name__ == "__main__":
    main()

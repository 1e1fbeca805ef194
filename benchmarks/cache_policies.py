"""Hit rates of the eviction policies on traces of nine kinds, against the offline optimum.

    python benchmarks/cache_policies.py [--page-size 1] [--seeds 1] [--kind chat]

No model: a small simulator drives the radix cache and the page allocator in the order in which the
engine does. The hit rate is the share of all prompt tokens that need not be computed. The pools are
5, 10, 25 and 50% of the distinct tokens of the trace. The optimum knows the future and throws out
what is wanted again last (Belady 1966), token by token.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from statistics import fmean

import numpy as np
from cache_traces import KINDS, Call, Ids, Trace
from rich.console import Console
from rich.table import Table

from stemma.backend.base import Namespace
from stemma.backend.local.cache.eviction import POLICIES, EvictionPolicy
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.radix_cache import RadixCache, RadixNode
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.backend.local.cache.radix_tree import RadixTree

SHARES = (0.05, 0.10, 0.25, 0.50)
HOME = Namespace()


def key(ids: Ids) -> RadixKey:
    return RadixKey(ids, HOME)


def priority_of(call: Call) -> int:
    """What a user might say of a program; unrelated to what is used again."""
    return len(call.prompt) % 3


@dataclass(slots=True)
class Running:
    call: Call
    node: RadixNode
    table: Ids
    shared: int


class Simulator:
    """One pool under one policy; `run` plays a trace and counts."""

    def __init__(self, policy: EvictionPolicy, capacity: int, page_size: int) -> None:
        self.allocator = PageAllocator(capacity, page_size)
        self.cache = RadixCache(self.allocator, eviction=policy)
        self.prompt_tokens = self.hit_tokens = 0
        self.places: dict[int, RadixNode] = {}

    def run(self, trace: Trace) -> float:
        for each in trace:
            running: list[Running] = []
            for call in each.calls:
                if not self.admit(call, running):  # wait until the others are done
                    self.end(running)
                    if not self.admit(call, running):
                        raise ValueError(f"a pool of {self.allocator.capacity} is too small")
            self.end(running)
            for branch in each.closes:
                self.cache.let_go(self.places.pop(branch))
        self.cache.check()
        return self.hit_tokens / self.prompt_tokens

    def admit(self, call: Call, running: list[Running]) -> bool:
        """Match, lock, take slots for prompt and output, and give the prompt to the tree."""
        cache, page = self.cache, self.allocator.page_size
        prompt, length = key(call.prompt), len(call.prompt)
        match = cache.match_prefix(prompt, limit=length - 1, priority=priority_of(call))
        cache.inc_lock_ref(match.node)
        own = self.take(len(call.text) - match.length)
        if own is None:
            cache.dec_lock_ref(match.node)
            return False
        self.prompt_tokens += length
        self.hit_tokens += match.length
        now = Running(call, match.node, np.concatenate((match.slots, own)), match.length)
        self.give(now, length - length % page, computed=False)
        running.append(now)
        return True

    def end(self, running: list[Running]) -> None:
        """The calls finish: outputs go into the tree, locks and the rest of the slots are given
        back, branches stand where they are now.
        """
        self.cache.commit()
        for now in running:
            computed = len(now.call.text) - 1
            self.give(now, computed - computed % self.allocator.page_size, output=True)
            self.allocator.free(now.table[now.shared :])
            self.cache.dec_lock_ref(now.node)
            if now.call.branch is not None:
                before = self.places.get(now.call.branch)
                self.places[now.call.branch] = self.cache.hold(key(now.call.text))
                if before is not None:
                    self.cache.let_go(before)
        running.clear()

    def take(self, tokens: int) -> Ids | None:
        page = self.allocator.page_size
        short = -(-tokens // page) * page - self.allocator.free_tokens
        if short > 0:
            self.cache.evict(short)
        return self.allocator.alloc(tokens)

    def give(self, now: Running, end: int, *, computed: bool = True, output: bool = False) -> None:
        if end <= now.shared:
            return
        done = self.cache.insert(
            key(now.call.text[:end]),
            now.table[:end],
            owned_from=now.shared,
            computed=computed,
            output=output,
            own=output and now.call.branch is not None,
            priority=priority_of(now.call),
        )
        self.cache.inc_lock_ref(done.node)
        self.cache.dec_lock_ref(now.node)
        now.node, now.shared = done.node, end
        now.table[:end] = done.slots


# -- the optimum


@dataclass(slots=True, eq=False)
class Run:
    """Tokens that the trace always uses together: an edge of the tree of all its texts.

    uses: the calls that could take them from the cache, in order.
    """

    length: int
    depth: int
    uses: list[int] = field(default_factory=list)
    resident: int = 0
    locked: bool = False

    def next_use(self, now: int) -> float:
        place = bisect_right(self.uses, now)
        return self.uses[place] if place < len(self.uses) else float("inf")


class Future:
    """A trace read in advance: the runs of every call, and when each run is asked for."""

    def __init__(self, trace: Trace, page_size: int) -> None:
        self.trace = trace
        self.page_size = page_size
        tree = RadixTree(page_size)
        calls = [call for each in trace for call in each.calls]
        for call in calls:
            for ids in (call.text, call.prompt[:-1]):
                self._add(tree, ids)
        runs: dict[RadixNode | None, Run] = {}
        for node in tree.nodes():
            above = runs[node.parent].depth if node.parent in runs else 0
            runs[node] = Run(len(node), above + 1)

        def runs_of(ids: Ids) -> list[Run]:
            found, _ = tree.descend(key(ids), tree.floor(len(ids)))
            return [runs[node] for node, _ in found]

        self.asked = [runs_of(call.prompt[:-1]) for call in calls]
        self.whole = [runs_of(call.text) for call in calls]
        self.runs = list(runs.values())
        self.distinct = sum(run.length for run in self.runs)
        for index, path in enumerate(self.asked):
            for run in path:
                run.uses.append(index)
        self.prompt_tokens = sum(len(call.prompt) for call in calls)

    @staticmethod
    def _add(tree: RadixTree, ids: Ids) -> None:
        """Bring a text into the tree; a node ends where it does."""
        whole = key(ids[: tree.floor(len(ids))])
        path, length = tree.descend(whole, len(whole))
        node, agrees = path[-1] if path else (tree.root, 0)
        if agrees < len(node):
            node = tree.split(node, agrees)
        if length < len(whole):
            tree.add(node, whole, whole.token_ids, length)


class Optimum:
    """Belady's rule on single pages: of those that are not locked, the one that is next asked for
    last goes first, of equals the deepest. So what stays is always closed under prefixes.

    No policy hits more. The tokens of the calls under way are locked, as in the engine.
    """

    def __init__(self, future: Future, capacity: int) -> None:
        self.future = future
        self.page_size = future.page_size
        self.capacity = capacity - capacity % future.page_size
        self.used = self.now = 0
        self.locked: list[Run] = []
        self.heap: list[tuple[float, int, int, Run]] = []
        self.tickets = count()

    def hit_rate(self) -> float:
        for run in self.future.runs:
            run.resident, run.locked = 0, False
        hits = 0
        for each in self.future.trace:
            for _ in each.calls:
                hits += self.admit(self.future.asked[self.now], self.future.whole[self.now])
                self.now += 1
            self.unlock()
        return hits / self.future.prompt_tokens

    def admit(self, asked: list[Run], whole: list[Run]) -> int:
        """Bring a call's runs in and lock them; returns how many tokens were there."""
        need = sum(run.length for run in whole if not run.locked)
        if sum(run.length for run in self.locked) + need > self.capacity:
            self.unlock()
        hits = 0
        for run in asked:
            hits += run.resident
            if run.resident < run.length:
                break
        for run in whole:
            if not run.locked:
                self.locked.append(run)
                run.locked = True
            self.used += run.length - run.resident
            run.resident = run.length
        while self.used > self.capacity:
            self.throw_out()
        return hits

    def unlock(self) -> None:
        for run in self.locked:
            run.locked = False
            self.offer(run)
        self.locked.clear()

    def offer(self, run: Run) -> None:
        next_use = run.next_use(self.now - 1)
        heappush(self.heap, (-next_use, -run.depth, next(self.tickets), run))

    def throw_out(self) -> None:
        filed, _, _, run = heappop(self.heap)
        if run.locked or not run.resident or -filed != run.next_use(self.now):
            return  # another entry stands for it, or will
        pages = -(-(self.used - self.capacity) // self.page_size)
        gone = min(run.resident, pages * self.page_size)
        run.resident -= gone
        self.used -= gone
        if run.resident:
            heappush(self.heap, (filed, -run.depth, next(self.tickets), run))


# -- tables


def measure(trace: Trace, page_size: int) -> dict[str, list[float]]:
    """Hit rates by policy, one for each of SHARES."""
    future = Future(trace, page_size)
    largest = page_size + max(len(call.text) for each in trace for call in each.calls)
    pools = [max(int(share * future.distinct), largest) for share in SHARES]
    rates = {
        name: [Simulator(policy(), pool, page_size).run(trace) for pool in pools]
        for name, policy in POLICIES.items()
    }
    rates[OPTIMUM] = [Optimum(future, pool).hit_rate() for pool in pools]
    for name, row in rates.items():
        if any(rate > best for rate, best in zip(row, rates[OPTIMUM], strict=True)):
            raise AssertionError(f"{name} beats the optimum: one of them is wrong")
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="traces of each kind; means are shown")
    parser.add_argument("--kind", choices=list(KINDS), action="append")
    args = parser.parse_args()
    console = Console()
    shares: dict[str, list[float]] = {name: [] for name in POLICIES}
    wins = ties = losses = 0
    for kind in args.kind or KINDS:
        found = [measure(KINDS[kind](seed), args.page_size) for seed in range(args.seeds)]
        rates = {
            name: [fmean(column) for column in zip(*(each[name] for each in found), strict=True)]
            for name in found[0]
        }
        console.print(table_of(kind, rates))
        for name in POLICIES:
            shares[name] += [a / b for a, b in zip(rates[name], rates[OPTIMUM], strict=True)]
        for ours, theirs in zip(rates["program-aware"], rates["lru"], strict=True):
            wins += ours > theirs + TIE
            losses += ours < theirs - TIE
            ties += abs(ours - theirs) <= TIE
    summary = Table(title="share of the optimum's hits, over all kinds and pools")
    for column in ("policy", "mean", "worst"):
        summary.add_column(column, justify="right")
    for name in sorted(shares, key=lambda name: -fmean(shares[name])):
        summary.add_row(name, f"{fmean(shares[name]):.1%}", f"{min(shares[name]):.1%}")
    console.print(summary)
    ours, theirs = fmean(shares["program-aware"]), fmean(shares["lru"])
    best = "program-aware" if ours > theirs and wins > losses else "lru"
    console.print(
        f"program-aware against lru: better in {wins}, equal in {ties} (within {TIE:.1%}), worse "
        f"in {losses} of {wins + ties + losses} cells; {ours:.1%} of the optimum's hits against "
        f"{theirs:.1%}. The default should be {best}."
    )


def table_of(kind: str, rates: dict[str, list[float]]) -> Table:
    table = Table(title=f"{kind}: hit rate at pools of a share of the distinct tokens")
    table.add_column("policy", justify="right")
    for share in SHARES:
        table.add_column(f"{share:.0%}", justify="right")
    best = [max(column) for column in zip(*(rates[name] for name in POLICIES), strict=True)]
    for name, row in rates.items():
        if name == OPTIMUM:
            table.add_section()
        best_here = [name != OPTIMUM and rate >= top for rate, top in zip(row, best, strict=True)]
        cells = (
            f"[bold]{rate:.1%}[/]" if is_best else f"{rate:.1%}"
            for rate, is_best in zip(row, best_here, strict=True)
        )
        table.add_row(name, *cells)
    return table


OPTIMUM = "optimum"
TIE = 0.001
"""Hit rates closer than this count as equal."""


if __name__ == "__main__":
    main()

"""Who is admitted first of those who wait: the orders (policies), and the bound on overtaking.

The scheduler asks for an order once per step in which there is room. `LocalBackend(policy=...)`
takes the names of `WAITING_ORDERS`. An order is a value without state.

Every request has a rank, its place in the fair order: (-priority, arrival) under "priority",
(0, arrival) else. A request is *overtaken* when another that ranks behind it is admitted while it
waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stemma.backend.local.cache.radix_tree import RadixNode
from stemma.backend.local.memory import RequestMemory
from stemma.backend.local.request import Request

MAX_OVERTAKEN = 128
"""How often a waiting request is overtaken before nobody that ranks behind it is admitted."""

AGING_TOKENS = 4
"""What one overtaking is worth in the lpm order, in matched tokens. More brings the order nearer to
fcfs: in `benchmarks/scheduling.py` 64 costs up to 2.6 points of the hit rate, 4 up to 0.6.
"""

ORDERED_WINDOW = 256
"""How many of the first waiting requests, by rank, an order looks at; the others wait."""


class WaitingOrder(Protocol):
    """Orders waiting requests.

    by_priority: whether a request's priority is part of its rank.
    """

    @property
    def name(self) -> str: ...

    @property
    def by_priority(self) -> bool: ...

    def sort(self, waiting: Sequence[Request], memory: RequestMemory) -> list[Request]:
        """The requests, given by rank, in the order in which to admit them."""


class FirstComeFirstServed:
    """By arrival: key = (arrival). Nobody is overtaken."""

    name = "fcfs"
    by_priority = False

    def sort(self, waiting: Sequence[Request], memory: RequestMemory) -> list[Request]:
        return list(waiting)


class HighestPriorityFirst:
    """By what the requests are worth: key = (-priority, arrival).

    Strict: lower priorities wait for as long as higher ones come; nobody is overtaken, for this is
    the fair order itself. When memory runs out, the one that ranks last gives way. Source: the
    usual order of operating systems; vLLM has it with the sign turned around.
    """

    name = "priority"
    by_priority = True

    def sort(self, waiting: Sequence[Request], memory: RequestMemory) -> list[Request]:
        return list(waiting)


class LongestPrefixFirst:
    """Longest cached prefix first, with ageing: key = -(matched + aging * overtaken), then arrival.

    matched: cached tokens that the request begins with. Source: SGLang (Zheng et al. 2024, section
    3), whose theorem 3.1 is about this order without ageing: where the requests are all there from
    the beginning it visits the tree of their prompts depth first, and hits as much as any order
    can. Ageing is ours; 0 turns it off.
    """

    name = "lpm"
    by_priority = False

    def __init__(self, aging: int = AGING_TOKENS) -> None:
        self.aging = aging

    def sort(self, waiting: Sequence[Request], memory: RequestMemory) -> list[Request]:
        if len(waiting) < 2:
            return list(waiting)
        for request in waiting:
            request.matched = memory.found(request)
        return sorted(waiting, key=lambda r: -(r.matched + self.aging * r.overtaken))


class HeaviestSubtreeFirst:
    """Depth first through the radix tree, and at each node first where most requests wait.

    The weight of a node is the number of waiting requests whose cached prefix passes through it;
    children are visited by descending weight, those of equal weight by the arrival of their first
    request, and after its children come the requests that end at a node itself, by arrival. So
    requests that go on from the same place run one after the other, the popular ones first. Source:
    SGLang, `schedule_policy="dfs-weight"`.
    """

    name = "dfs-weight"
    by_priority = False

    def sort(self, waiting: Sequence[Request], memory: RequestMemory) -> list[Request]:
        if len(waiting) < 2:
            return list(waiting)
        weights: dict[RadixNode | None, int] = {None: 0}
        below: dict[RadixNode | None, list[RadixNode]] = {}
        ending: dict[RadixNode | None, list[Request]] = {}
        above: RadixNode | None
        for request in waiting:
            above = None
            for node in memory.path(request):
                if node not in weights:
                    weights[node] = 0
                    below.setdefault(above, []).append(node)
                weights[node] += 1
                above = node
            ending.setdefault(above, []).append(request)
        # Backwards, so that a node's own requests come up before its children: lightest first.
        backwards: list[Request] = []
        stack: list[RadixNode | None] = [None]
        while stack:
            above = stack.pop()
            backwards += reversed(ending.get(above, ()))
            stack += sorted(below.get(above, ()), key=lambda child: -weights[child])
        return backwards[::-1]


WAITING_ORDERS: dict[str, WaitingOrder] = {
    order.name: order
    for order in (
        LongestPrefixFirst(),
        HeaviestSubtreeFirst(),
        FirstComeFirstServed(),
        HighestPriorityFirst(),
    )
}
"""All orders by name."""


def depth_first(requests: Sequence[Request]) -> list[Request]:
    """The requests in depth-first order of the tree of their prompts; equal prompts as given.

    For requests that are all there from the beginning: with an LRU cache that holds the longest of
    them, every shared prefix is computed once, so no order hits more. Source: Zheng et al. 2024,
    theorem 3.1. Prompts sorted by their ids, token by token, are such an order. Cost: n log n
    comparisons of common prefixes.
    """
    return sorted(requests, key=lambda r: r.tokens.view(r.prompt_length).astype(">i4").tobytes())

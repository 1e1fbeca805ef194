"""Who owns which KV slot of a request, and every move of ownership. Called by the scheduler and
nobody else.

A request's table maps its positions to slots:

    position   0 ............ shared ............ computed ............ len(table)
               |  the tree's   |  private, filled  |  private, not yet filled |
               |  locked       |  freed with it    |  freed with it           |

`shared` is a multiple of the page size and grows only in `attach` (the tree had it) and `publish`
(we give it to the tree). While a step runs, positions computed..scheduled_end are being filled;
those below `shared` are pending nodes of the tree, filled by this request or by another one of the
same step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from stemma.backend.base import Namespace
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.radix_cache import Peek, PrefixMatch, RadixCache
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.backend.local.cache.radix_tree import RadixNode
from stemma.backend.local.pins import Clock, Pins
from stemma.backend.local.request import IntArray, Ints, Request
from stemma.lang.errors import EngineInvariantError

DECODE_RUN = 16
"""Slots a decoding request takes at once, so that its tail is one contiguous span."""


class RequestMemory:
    """The slots of all running requests, over one page allocator and one radix tree.

    max_pinned_share, clock: of the pins, see `Pins`.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        cache: RadixCache,
        *,
        prefix_cache: bool = True,
        max_pinned_share: float = 0.5,
        clock: Clock = time.monotonic,
    ) -> None:
        self.allocator = allocator
        self.cache = cache
        self.prefix_cache = prefix_cache
        self.pins = Pins(allocator, cache, max_share=max_pinned_share, clock=clock)
        self._attached: dict[int, Request] = {}

    # -- sizes, in tokens

    @property
    def page_size(self) -> int:
        return self.allocator.page_size

    @property
    def capacity(self) -> int:
        return self.allocator.capacity

    @property
    def available(self) -> int:
        """What could be handed out now: free slots, and cached ones that nobody uses."""
        return self.allocator.free_tokens + self.cache.evictable_tokens

    @property
    def private_tokens(self) -> int:
        return sum(len(r.table) - r.shared for r in self._attached.values())

    def floor(self, tokens: int) -> int:
        return tokens - tokens % self.page_size

    def ceil(self, tokens: int) -> int:
        return self.floor(tokens + self.page_size - 1)

    # -- the life of a request

    def found(self, request: Request) -> int:
        """How many tokens `match` would find; leaves no trace in the tree."""
        found = self.cache.peek(request.key)
        return self.floor(min(found.length, self._limit(request, found)))

    def path(self, request: Request) -> list[RadixNode]:
        """The nodes of what `found` counts, from the root down; leaves no trace in the tree."""
        return self.cache.path(request.key) if self._takes(request) else []

    def match(self, request: Request) -> PrefixMatch:
        """The longest cached prefix that leaves the rows whose logits are needed to this step."""
        key = request.key
        limit = self._limit(request, self.cache.peek(key))
        return self.cache.match_prefix(key, limit=limit, priority=request.priority)

    def continuation(self, request: Request, limit: int) -> IntArray:
        """What the tree has behind the request's tokens, at most `limit` tokens; leaves no trace
        there.
        """
        if not self._takes(request):
            return np.empty(0, dtype=np.int32)
        rest = request.tokens.view(request.known_end)[request.shared :]
        key = RadixKey(rest, request.namespace)
        return self.cache.continuation(self._node(request), key, limit)

    @staticmethod
    def unaligned(request: Request, match: PrefixMatch) -> int:
        """How many tokens behind the match are cached but do not fill a page, and could have been
        taken with pages of one.
        """
        return max(0, min(match.unaligned, request.logits_from - match.length))

    def _takes(self, request: Request) -> bool:
        """Whether the request takes from the tree at all."""
        return self.prefix_cache and request.cache != "off"

    def _limit(self, request: Request, found: Peek) -> int:
        """How much of the key may be taken from the tree, which has that much of it.

        Rows that are pending belong to this step, so they may be shared to the last one; of
        computed ones the match ends before the first row whose logits are needed.
        """
        if not self._takes(request):
            return 0
        needed = request.logits_from
        return needed if found.computed > needed else request.known_end

    def attach(self, request: Request, match: PrefixMatch) -> None:
        """Lock the match and make it the head of the table, in place of what the request held
        before.
        """
        self.cache.inc_lock_ref(match.node)
        self._drop(request)
        request.node = match.node
        request.table = Ints(match.slots)
        request.shared = match.length
        request.computed = match.computed
        self._attached[id(request)] = request

    def grow(self, request: Request, end: int, *, spare: int = 0) -> bool:
        """Make sure the table reaches `end`. `spare` more slots come along where they are free or
        cached ones can go for them: one eviction then does for many steps. False: no memory.
        """
        need = end - len(request.table)
        if need <= 0:
            return True
        allocator, cache = self.allocator, self.cache
        short = self.ceil(need + spare) - allocator.free_tokens
        if 0 < short <= cache.evictable_tokens:
            cache.evict(short)
        if self.ceil(need + spare) <= allocator.free_tokens:
            need += spare
        elif self.ceil(need) > allocator.free_tokens:
            self._reclaim_reserves(request)
            short = self.ceil(need) - allocator.free_tokens
            if short > 0 and (short > cache.evictable_tokens or cache.evict(short) < short):
                return False
        last = int(request.table.view()[-1]) if len(request.table) else None
        slots = allocator.alloc(need, after=last)
        if slots is None:
            return False
        request.table.extend(slots)
        return True

    def publish(self, request: Request, end: int) -> None:
        """Give the whole pages below `end` to the tree as pending, so that later requests of the
        step share them.
        """
        self._give(request, end, computed=False)

    def truncate(self, request: Request, end: int) -> None:
        """Forget the KV of positions from `end` on (their tokens are about to differ). Slots stay
        for reuse.
        """
        if end < request.shared:
            key = RadixKey(request.tokens.view(end), request.namespace)
            match = self.cache.match_prefix(key)
            self.attach(request, match)
        request.computed = min(request.computed, end)

    def release(self, request: Request) -> None:
        """Let go: what was computed stays in the tree as ordinary cache, the rest is freed, no lock
        remains.
        """
        if request.node is None:
            return
        self._give(request, request.computed, computed=True)
        self._forget(request)

    def discard(self, request: Request) -> None:
        """Let go after a failed step: nothing of it may enter the tree."""
        if request.node is not None:
            self._forget(request)

    def flush(self, namespace: Namespace | None = None) -> int:
        """Free what no running request uses and no pin keeps; returns how many tokens."""
        self.pins.expire()
        return self.cache.flush(namespace)

    # -- books

    def check(self) -> None:
        """Raise EngineInvariantError unless every slot has exactly one owner and the sizes add
        up.
        """
        self.cache.check()
        free = self.allocator.free_tokens
        total = (
            free + self.cache.evictable_tokens + self.cache.protected_tokens + self.private_tokens
        )
        if total != self.capacity:
            raise EngineInvariantError(
                f"slots do not add up: {free} free + {self.cache.evictable_tokens} evictable + "
                f"{self.cache.protected_tokens} protected + {self.private_tokens} private "
                f"!= {self.capacity}"
            )
        private = [r.table.view()[r.shared :] for r in self._attached.values()]
        owned = np.concatenate([self.cache.slots(), *private]) if private else self.cache.slots()
        if len(np.unique(owned)) != len(owned):
            raise EngineInvariantError("a KV slot has two owners")
        for request in self._attached.values():
            if request.shared % self.page_size or request.shared > len(request.table):
                raise EngineInvariantError(
                    f"request shares {request.shared} of {len(request.table)} slots"
                )

    def _give(self, request: Request, end: int, *, computed: bool) -> None:
        """Insert the whole pages below `end`, each kind of tokens as a part of its own."""
        if self.prefix_cache and request.cache == "read-write":
            for bound in sorted((request.prompt_length, request.own_start, end)):
                stop = min(bound, end)
                if self.floor(stop) > request.shared:
                    self._insert(request, self.floor(stop), computed=computed)

    def _insert(self, request: Request, end: int, *, computed: bool) -> None:
        key = RadixKey(request.tokens.view(end).copy(), request.namespace)
        slots = request.table.view(end).copy()
        insertion = self.cache.insert(
            key,
            slots,
            owned_from=request.shared,
            computed=computed,
            output=request.shared >= self.floor(request.prompt_length),
            own=request.shared >= self.floor(request.own_start),
            priority=request.priority,
        )
        self.cache.inc_lock_ref(insertion.node)
        self.cache.dec_lock_ref(self._node(request))
        request.node = insertion.node
        request.table.view()[:end] = insertion.slots
        request.shared = end

    def _forget(self, request: Request) -> None:
        self._drop(request)
        request.node = None
        request.table = Ints()
        request.shared = request.computed = request.scheduled_end = 0
        del self._attached[id(request)]

    def _drop(self, request: Request) -> None:
        if request.node is not None:
            self._free(request.table, request.shared)
            self.cache.dec_lock_ref(request.node)

    def _free(self, table: Ints, start: int) -> None:
        if len(table) > start:
            self.allocator.free(table.view()[start:].copy())
            table.truncate(start)

    def _reclaim_reserves(self, keep: Request) -> None:
        others: Iterable[Request] = (r for r in self._attached.values() if r is not keep)
        for request in others:
            used = max(request.computed, request.scheduled_end, request.shared)
            self._free(request.table, self.ceil(used))

    @staticmethod
    def _node(request: Request) -> RadixNode:
        if request.node is None:
            raise EngineInvariantError("a request without a place in the tree has slots to give")
        return request.node

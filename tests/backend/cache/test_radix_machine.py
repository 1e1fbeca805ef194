"""The radix cache in any interleaving of what callers do, against a model that knows only pages.

The model is a dictionary from (namespace, all tokens up to a page's end) to what is known of that
page. It has no nodes, no splits and no heap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, takewhile

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stemma.backend.base import Namespace
from stemma.backend.local.cache.eviction import LRU
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.radix_cache import RadixCache, RadixNode
from stemma.backend.local.cache.radix_key import Ints, RadixKey
from stemma.lang.errors import EngineInvariantError

Place = tuple[Namespace, tuple[int, ...]]
"""A namespace and a prefix of whole pages: the name of the prefix's last page."""

NAMESPACES = [Namespace(), Namespace(salt="ab", extra_key="c"), Namespace(salt="a", extra_key="bc")]
POOL_PAGES = 40


@dataclass
class ModelPage:
    slots: list[int]
    pending: bool
    used: int


@dataclass(eq=False)
class IdleBranch:
    """What is left of the pages that were cached of its text when it came to rest."""

    node: RadixNode
    pages: set[Place]


@dataclass(eq=False)
class Holder:
    """A request: its tokens, its table, how much of that is the tree's, and the lock it holds."""

    namespace: Namespace
    tokens: tuple[int, ...]
    table: Ints
    shared: int
    node: RadixNode

    @property
    def place(self) -> Place:
        return self.namespace, self.tokens[: self.shared]


class CacheMachine(RuleBasedStateMachine):
    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(POOL_PAGES * self.page_size, self.page_size)
        self.cache = RadixCache(self.allocator, eviction=LRU())
        self.pages: dict[Place, ModelPage] = {}
        self.holders: list[Holder] = []
        self.idle: list[IdleBranch] = []
        self.clock = 0
        self.evicted = 0

    # -- the model ------------------------------------------------------------------------

    def prefixes(self, namespace: Namespace, tokens: tuple[int, ...]) -> list[Place]:
        """The places of all whole pages of these tokens, shortest first."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tokens[:end]) for end in ends]

    def cached(self, namespace: Namespace, tokens: tuple[int, ...]) -> list[ModelPage]:
        found = []
        for place in self.prefixes(namespace, tokens):
            if place not in self.pages:
                break
            found.append(self.pages[place])
        return found

    def touch(self, pages: list[ModelPage]) -> None:
        self.clock += 1
        for page in pages:
            page.used = self.clock

    def locks(self) -> Counter[Place]:
        """How many requests hold each page."""
        return Counter(place for h in self.holders for place in self.prefixes(*h.place))

    def protected(self) -> set[Place]:
        waiting = [place for place, page in self.pages.items() if page.pending]
        return {above for place in waiting for above in self.prefixes(*place)} | set(self.locks())

    def forget_departed(self) -> set[Place]:
        """Bring the model to what the tree holds now; returns what is gone."""
        gone = set(self.pages) - set(self.contents())
        for place in gone:
            del self.pages[place]
        for branch in self.idle:
            branch.pages -= gone
        return gone

    def contents(self) -> dict[Place, tuple[list[int], bool, int]]:
        """The tree's pages as the model names them: slots, pending, last access."""
        found: dict[Place, tuple[list[int], bool, int]] = {}
        for node, place in self.places():
            first = len(place[1]) - node_start(node) - self.page_size
            slots = node.slots[first : first + self.page_size].tolist()
            found[place] = slots, node.pending, node.last_access
        return found

    def places(self) -> Iterator[tuple[RadixNode, Place]]:
        """All pages of the tree, each with the node it lies in."""
        prefix_of: dict[RadixNode | None, tuple[int, ...]] = {self.cache._tree.root: ()}
        for node in self.cache._tree.nodes():
            above = prefix_of[node.parent]
            prefix_of[node] = above + tuple(node.key.tolist())
            for end in range(self.page_size, len(node) + 1, self.page_size):
                yield node, (node.namespace, prefix_of[node][: len(above) + end])

    # -- what requests do -----------------------------------------------------------------

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def match(self, data: st.DataObject, namespace: Namespace) -> None:
        tokens = self.draw_prompt(data)
        limit = data.draw(st.none() | st.integers(-1, len(tokens) + 1))
        reach = tokens if limit is None else tokens[: max(limit, 0)]
        expected = self.cached(namespace, reach)
        key = RadixKey.of(tokens, namespace)
        assert self.cache.peek(key).length == len(self.cached(namespace, tokens)) * self.page_size
        match = self.cache.match_prefix(key, limit=limit)
        assert match.length == len(expected) * self.page_size
        assert match.slots.tolist() == [slot for page in expected for slot in page.slots]
        assert match.computed == sum(not page.pending for page in expected) * self.page_size
        assert match.length + match.unaligned == self.agreement(namespace, reach)
        self.touch(expected)

    def agreement(self, namespace: Namespace, tokens: tuple[int, ...]) -> int:
        """How many leading tokens agree with something that is cached, page borders or not."""
        longest = 0
        for space, cached in self.pages:
            if space == namespace:
                agrees = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, cached))  # noqa: B905
                longest = max(longest, sum(1 for _ in agrees))
        return longest

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def hold(self, data: st.DataObject, namespace: Namespace) -> None:
        """A branch comes to rest at the end of some text."""
        tokens = self.draw_prompt(data)
        node = self.cache.hold(RadixKey.of(tokens, namespace))
        there = len(self.cached(namespace, tokens))
        self.idle.append(IdleBranch(node, set(self.prefixes(namespace, tokens)[:there])))

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        branch = data.draw(st.sampled_from(self.idle))
        self.idle.remove(branch)
        self.cache.let_go(branch.node)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def open(self, data: st.DataObject, namespace: Namespace) -> None:
        self.admit(data, namespace)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), computed=st.booleans())
    def serve(self, data: st.DataObject, namespace: Namespace, computed: bool) -> None:
        """A request from its match to its end, its whole pages given to the tree."""
        holder = self.admit(data, namespace)
        if holder is not None:
            self.give(holder, len(holder.tokens) // self.page_size * self.page_size, computed)
            self.release(holder)

    def admit(self, data: st.DataObject, namespace: Namespace) -> Holder | None:
        """A request matches, locks and takes slots for the rest, evicting if it must."""
        tokens = self.draw_prompt(data)
        match = self.cache.match_prefix(RadixKey.of(tokens, namespace))
        self.touch(self.cached(namespace, tokens))
        self.cache.inc_lock_ref(match.node)
        holder = Holder(namespace, tokens, match.slots, match.length, match.node)
        self.holders.append(holder)
        rest = len(tokens) - match.length
        own = self.allocator.alloc(rest)
        if own is None:
            self.make_room(rest - self.allocator.free_tokens)
            own = self.allocator.alloc(rest)
        if own is None:
            self.cache.dec_lock_ref(match.node)
            self.holders.remove(holder)
            return None
        holder.table = np.concatenate((match.slots, own))
        return holder

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), computed=st.booleans())
    def insert(self, data: st.DataObject, computed: bool) -> None:
        """A request gives whole pages to the tree; the tree may have got them meanwhile."""
        holder = data.draw(st.sampled_from(self.holders))
        first, last = holder.shared // self.page_size, len(holder.tokens) // self.page_size
        self.give(holder, data.draw(st.integers(first, last)) * self.page_size, computed)

    def give(self, holder: Holder, end: int, computed: bool) -> None:
        tokens = holder.tokens[:end]
        there = self.cached(holder.namespace, tokens)
        done = self.cache.insert(
            RadixKey.of(tokens, holder.namespace),
            holder.table[:end],
            owned_from=holder.shared,
            computed=computed,
        )
        assert done.already == len(there) * self.page_size
        pending = not computed or any(page.pending for page in there)
        table = [slot for page in there for slot in page.slots]
        table += holder.table[len(table) : end].tolist()
        assert done.slots.tolist() == table
        self.touch(there)
        for place in self.prefixes(holder.namespace, tokens)[len(there) :]:
            stop = len(place[1])
            slots = table[stop - self.page_size : stop]
            self.pages[place] = ModelPage(slots, pending, self.clock)
        now = self.cached(holder.namespace, tokens)
        assert done.computed == sum(not page.pending for page in now) * self.page_size
        self.cache.inc_lock_ref(done.node)
        self.cache.dec_lock_ref(holder.node)
        holder.node, holder.shared = done.node, end
        holder.table = np.concatenate((done.slots, holder.table[end:]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(self.holders)))

    def release(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self.allocator.free(holder.table[holder.shared :])
        self.cache.dec_lock_ref(holder.node)

    def draw_prompt(self, data: st.DataObject) -> tuple[int, ...]:
        """Some head of what is cached, some pages that often agree or differ in one token, a tail.

        Each page is of ones but for its first or its last token.
        """
        size = self.page_size
        page = st.sampled_from([[1] * size, [1] * (size - 1) + [2], [3] + [1] * (size - 1)])
        known = [tokens for _, tokens in self.pages]
        head = data.draw(st.sampled_from(known)) if known else ()
        kept = data.draw(st.integers(0, len(head) // size)) * size
        pages = data.draw(st.lists(page, max_size=4))
        tail = data.draw(st.integers(0, size - 1))
        return (*head[:kept], *chain.from_iterable(pages), *[1] * tail)

    # -- what the engine does -------------------------------------------------------------

    def any_pending(self) -> bool:
        return any(page.pending for page in self.pages.values())

    @precondition(any_pending)
    @rule()
    def commit(self) -> None:
        self.cache.commit()
        for page in self.pages.values():
            page.pending = False

    @precondition(any_pending)
    @rule()
    def rollback(self) -> None:
        waiting = {place for place, page in self.pages.items() if page.pending}
        inside = [h for h in self.holders if waiting & set(self.prefixes(*h.place))]
        before = self.contents()
        if inside:
            with pytest.raises(EngineInvariantError, match="rolled back while it is locked"):
                self.cache.rollback()
            assert self.contents() == before
            self.cache.check()
        for holder in inside:
            self.release(holder)
        self.cache.rollback()
        assert self.forget_departed() == waiting

    @rule(tokens=st.integers(0, 6))
    def evict(self, tokens: int) -> None:
        self.make_room(tokens)

    def make_room(self, tokens: int) -> None:
        protected = self.protected()
        possible = (len(self.pages) - len(protected)) * self.page_size
        assert self.cache.evictable_tokens == possible
        used = {place: page.used for place, page in self.pages.items()}
        freed = self.cache.evict(tokens)
        gone = self.forget_departed()
        assert freed == len(gone) * self.page_size
        assert freed >= min(tokens, possible)
        assert tokens > 0 or freed == 0
        assert not gone & protected
        self.evicted += freed
        parents = {(space, tokens[: -self.page_size]) for space, tokens in self.pages}
        left = [used[p] for p in self.pages if p not in protected and p not in parents]
        if gone and left:
            assert max(used[place] for place in gone) <= min(left)

    @precondition(lambda self: len(self.pages) > POOL_PAGES // 3)
    @rule(namespace=st.none() | st.sampled_from(NAMESPACES))
    def flush(self, namespace: Namespace | None) -> None:
        there = {place for place in self.pages if namespace in (None, place[0])}
        expected = there - self.protected()
        assert self.cache.flush(namespace) == len(expected) * self.page_size
        assert self.forget_departed() == expected

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def unlock_what_is_not_locked(self, data: st.DataObject) -> None:
        nodes = [node for node in self.cache._tree.nodes() if node.lock_ref == 0]
        if nodes:
            with pytest.raises(EngineInvariantError, match="nobody holds"):
                self.cache.dec_lock_ref(data.draw(st.sampled_from(nodes)))

    # -- what holds always ----------------------------------------------------------------

    @invariant()
    def tree_is_what_the_model_says(self) -> None:
        self.cache.check()
        expected = {place: (p.slots, p.pending, p.used) for place, p in self.pages.items()}
        assert self.contents() == expected
        assert self.cache.evicted_tokens == self.evicted

    @invariant()
    def tables_point_at_the_trees_slots(self) -> None:
        for holder in self.holders:
            pages = self.cached(*holder.place)
            assert len(pages) * self.page_size == holder.shared
            slots = [slot for page in pages for slot in page.slots]
            assert holder.table[: holder.shared].tolist() == slots

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        private = [h.table[h.shared :] for h in self.holders]
        owned = np.concatenate([self.cache.slots(), *private])
        assert len(np.unique(owned)) == len(owned)
        assert self.allocator.free_tokens + len(owned) == self.allocator.capacity

    @invariant()
    def locks_are_those_of_the_requests(self) -> None:
        protected = self.protected()
        assert self.cache.protected_tokens == len(protected) * self.page_size
        if not self.any_pending():
            assert self.cache._tree.root.lock_ref == len(self.holders)

    @invariant()
    def pages_are_held_by_the_idle_branches_that_stand_on_them(self) -> None:
        expected = Counter(place for branch in self.idle for place in branch.pages)
        held = {place: node.held for node, place in self.places()}
        assert held == {place: expected[place] for place in self.pages}

    def teardown(self) -> None:
        """At idle no lock is left, and all can be evicted."""
        for holder in list(self.holders):
            self.release(holder)
        for branch in self.idle:
            self.cache.let_go(branch.node)
        assert self.cache._tree.root.held == 0
        self.cache.rollback()
        self.cache.check()
        assert self.cache.protected_tokens == 0
        cached = self.cache.cached_tokens
        assert self.cache.evict(self.allocator.capacity) == cached
        assert self.allocator.free_tokens == self.allocator.capacity
        self.cache.check()


def node_start(node: RadixNode) -> int:
    """How many tokens lie above a node."""
    length, above = 0, node.parent
    while above is not None:
        length += len(above)
        above = above.parent
    return length


class CacheMachine4(CacheMachine):
    page_size = 4


class CacheMachine16(CacheMachine):
    page_size = 16


class CacheMachine32(CacheMachine):
    page_size = 32


class CacheMachine64(CacheMachine):
    page_size = 64


TestPagesOfOne = CacheMachine.TestCase
TestPagesOfFour = CacheMachine4.TestCase
TestPagesOf16 = CacheMachine16.TestCase
TestPagesOf32 = CacheMachine32.TestCase
TestPagesOf64 = CacheMachine64.TestCase
MANY = settings(max_examples=100, stateful_step_count=50, deadline=None)
SOME = settings(MANY, max_examples=30)  # large pages are slow to compare one by one
TestPagesOfOne.settings = TestPagesOfFour.settings = MANY
TestPagesOf16.settings = TestPagesOf32.settings = TestPagesOf64.settings = SOME

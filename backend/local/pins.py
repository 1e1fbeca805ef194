"""Pins: prefixes that stay in the tree for a while, whether or not anybody uses them.

`Pins` owns a lock for each and lives on the engine's thread, called by `RequestMemory`, the engine
and `LocalBackend.pin`. `Pin` is what a user holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from stemma.backend.base import Namespace, Pending
from stemma.backend.local.cache.kv_pool import PageAllocator
from stemma.backend.local.cache.radix_cache import RadixCache
from stemma.backend.local.cache.radix_key import RadixKey
from stemma.backend.local.cache.radix_tree import RadixNode
from stemma.lang.errors import (
    EngineInvariantError,
    InvalidArgument,
    OutOfCacheMemory,
    StemmaError,
    UnsupportedByBackend,
)
from stemma.lang.sampling import SamplingParams

if TYPE_CHECKING:
    from stemma.backend.local.backend import LocalBackend
    from stemma.backend.local.request import Request

Clock = Callable[[], float]


class Pin:
    """A prefix of `tokens` cached tokens that eviction and `flush_cache` leave alone.

    Ends when its time to live is over, at `release()`, or at the end of a `with` block; dropping it
    ends nothing. deadline: in seconds of the backend's clock.
    """

    __slots__ = ("_clock", "_ended", "_release", "deadline", "tokens")

    def __init__(
        self, tokens: int, deadline: float, *, clock: Clock, release: Callable[[Pin], None]
    ) -> None:
        self.tokens = tokens
        self.deadline = deadline
        self._clock = clock
        self._release = release
        self._ended = False

    @property
    def active(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended and self._clock() < self.deadline

    def release(self) -> None:
        """End it now. Harmless when it has ended or the backend is closed."""
        self.end()
        self._release(self)

    def end(self) -> None:
        """It is over; `Pins` unlocks what it kept."""
        self._ended = True

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = f"{self.deadline - self._clock():.1f} s left" if self.active else "ended"
        return f"Pin({self.tokens} tokens, {state})"


class Pins:
    """The locks of all pins over one cache, at most `max_share` of its slots under them.

    A pin that is over is noticed when somebody looks (`expire`): before every step, and wherever
    sizes are reported. So it needs no timer, and no request either.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        cache: RadixCache,
        *,
        max_share: float = 0.5,
        clock: Clock = time.monotonic,
    ) -> None:
        if not 0 <= max_share < 1:
            raise InvalidArgument(
                f"max_pinned_share={max_share!r}: must be at least 0 and below 1, "
                "for requests need slots too"
            )
        self.clock = clock
        self.max_share = max_share
        self.max_tokens = int(max_share * allocator.capacity)
        self._allocator = allocator
        self._cache = cache
        self.ended = 0  # how many have ended so far, by which the scheduler sees that some did
        self._nodes: dict[Pin, RadixNode] = {}
        self._first_deadline = math.inf

    @property
    def tokens(self) -> int:
        """Slots under a pin, those under several counted once. Cost: the nodes under pins."""
        return sum(map(len, self._pinned()))

    def add(self, key: RadixKey, ttl: float, *, release: Callable[[Pin], None]) -> Pin | None:
        """Lock the whole pages of `key` for `ttl` seconds; None if they are not all cached yet.

        Raises OutOfCacheMemory if more than the share would be pinned, whether cached or not, and
        InvalidArgument if there is not one whole page.
        """
        self.expire()
        page = self._allocator.page_size
        length = len(key) - len(key) % page
        if length == 0:
            raise InvalidArgument(
                f"a prefix of {len(key)} is less than a page of {page} tokens: nothing to pin"
            )
        pinned = self._pinned()
        node = self._cache.hold(key)
        path = list(_upwards(node))
        more = length - sum(len(each) for each in path if each in pinned)
        there = sum(map(len, pinned))
        self._cache.let_go(node)
        if there + more > self.max_tokens:
            raise OutOfCacheMemory(
                f"pinning {more} more tokens, with {there} pinned already, exceeds the "
                f"{self.max_tokens} of {self._allocator.capacity} that max_pinned_share="
                f"{self.max_share} allows: release a pin, shorten the prefix, or raise the share",
                needed=there + more,
                limit=self.max_tokens,
            )
        if sum(map(len, path)) < length:
            return None
        self._cache.inc_lock_ref(node)
        pin = Pin(length, self.clock() + ttl, clock=self.clock, release=release)
        self._nodes[pin] = node
        self._first_deadline = min(self._first_deadline, pin.deadline)
        return pin

    def drop(self, pin: Pin) -> None:
        """Unlock a pin. Harmless if it has ended."""
        pin.end()
        node = self._nodes.pop(pin, None)
        if node is not None:
            self._cache.dec_lock_ref(node)
            self.ended += 1

    def clear(self) -> None:
        """Drop all pins."""
        for pin in list(self._nodes):
            self.drop(pin)

    def expire(self) -> None:
        """Drop the pins whose time is over."""
        now = self.clock()
        if now < self._first_deadline:
            return
        for pin in [pin for pin in self._nodes if pin.deadline <= now]:
            self.drop(pin)
        self._first_deadline = min((pin.deadline for pin in self._nodes), default=math.inf)

    def _pinned(self) -> set[RadixNode]:
        found: set[RadixNode] = set()
        for node in self._nodes.values():
            for each in _upwards(node):
                if each in found:
                    break
                found.add(each)
        return found


def pin_prefix(backend: LocalBackend, ids: list[int], *, ttl: float, namespace: Namespace) -> Pin:
    """Pin the whole pages of `ids`, computing them first where they are not cached; waits for that.

    See `LocalBackend.pin`. May be called on any thread but the engine's.
    """
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not ttl > 0:
        raise InvalidArgument(f"ttl={ttl!r}: must be a number of seconds above 0")
    engine, memory = backend.engine, backend.engine.scheduler.memory
    if not memory.prefix_cache:
        raise UnsupportedByBackend("nothing can be pinned: the backend has prefix_cache=False")
    engine.check_may_wait()
    handle: Pending[Pin] = Pending()

    def release(pin: Pin) -> None:
        engine.tell(lambda: memory.pins.drop(pin))

    def add() -> Pin | None:
        return memory.pins.add(key, ttl, release=release)

    def finish(_: Request) -> None:
        try:
            pin = add()
            if pin is None:
                raise EngineInvariantError("what was computed for a pin is not in the cache")
        except StemmaError as error:  # as a rule: another pin came first
            handle.fail(error)
        else:
            handle.finish(pin)

    request = backend.make_request(
        ids, SamplingParams(max_tokens=0), namespace, on_finish=finish, on_error=handle.fail
    )
    key = RadixKey.of(ids, request.namespace)
    pin = engine.call(add)
    if pin is not None:
        return pin
    backend.submit([request])
    try:
        return handle.result()
    except BaseException:
        engine.cancel([request])
        raise


def _upwards(node: RadixNode) -> Iterator[RadixNode]:
    """The node and those above it, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent

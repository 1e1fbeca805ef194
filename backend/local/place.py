"""`Place`: where an idle branch stands in the radix tree, as a hint for eviction.

Made by `LocalBranch` when a request of it has ended; forks share their parent's. Nothing is locked:
when memory is short, what open branches stand on goes last, and goes.
"""

from __future__ import annotations

from stemma.backend.local.cache.radix_key import RadixKey
from stemma.backend.local.cache.radix_tree import RadixNode
from stemma.backend.local.engine import Engine


class Place:
    """The end of a text, held from `settle` until nobody refers to the place any more.

    May be made and dropped on any thread, also by the garbage collector; the tree hears of its end
    between two steps.
    """

    __slots__ = ("_engine", "_node")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._node: RadixNode | None = None

    def settle(self, key: RadixKey) -> None:
        """Hold what is cached of `key`; once, on the engine's thread."""
        self._node = self._engine.scheduler.memory.cache.hold(key)

    def __del__(self) -> None:
        node, cache = self._node, self._engine.scheduler.memory.cache
        if node is not None:
            self._engine.tell(lambda: cache.let_go(node))

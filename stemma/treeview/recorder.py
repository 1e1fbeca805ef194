"""A recording: the tree of a backend at chosen moments, each compared with the one before.

Owns the moments and the names of edges. Used by examples and by `stemma tree`; `page.py` and
`text.py` show what it has recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from stemma.backend.local.cache.printing import count
from stemma.backend.local.cache.snapshot import TreeSnapshot
from stemma.treeview.marks import MarkedTree, compare
from stemma.treeview.names import Names
from stemma.treeview.text import as_rich

if TYPE_CHECKING:
    from stemma.backend.local.backend import LocalBackend
    from stemma.backend.local.metrics import Stats


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens since the moment before.

    computed: rows run through the model, of prompts and outputs. reused: of prompts, from the
    cache. output: sampled. evicted: gone from the cache to make room.
    """

    computed: int
    reused: int
    output: int
    evicted: int


@dataclass(frozen=True, slots=True)
class Moment:
    """The tree at one moment, and what has happened since the one before.

    number: of the moment in its recording, from 1. pool_tokens: how many the cache can hold.
    """

    number: int
    title: str
    caption: str
    tree: MarkedTree
    counts: Counts
    pool_tokens: int

    @property
    def numbers(self) -> str:
        """What it took, in words."""
        counts = self.counts
        return (
            f"{count(counts.computed, 'token')} computed, {counts.reused:,} reused, "
            f"{counts.evicted:,} evicted; {self.tree.total_tokens:,} of "
            f"{self.pool_tokens:,} in the cache"
        )

    def __rich__(self) -> Group:
        return Group(
            Text(f"\n{self.number}. {self.title}", style="bold"),
            *([Text(self.caption)] if self.caption else []),
            Text(self.numbers, style="dim"),
            as_rich(self.tree),
        )


class Recorder:
    """Records moments of a backend. Its first moment is compared with the tree at its making."""

    def __init__(self, backend: LocalBackend) -> None:
        self.moments: list[Moment] = []
        self._backend = backend
        self._names = Names()
        self._tree, self._stats = self._look()

    def note(self, title: str, caption: str = "") -> Moment:
        """Record how things are now, between two steps of the engine."""
        tree, stats = self._look()
        before = self._stats
        moment = Moment(
            number=len(self.moments) + 1,
            title=title,
            caption=caption,
            tree=compare(self._tree, tree, self._backend.decode, names=self._names),
            counts=Counts(
                computed=stats.computed_tokens - before.computed_tokens,
                reused=stats.cached_tokens - before.cached_tokens,
                output=stats.output_tokens - before.output_tokens,
                evicted=stats.evicted_tokens - before.evicted_tokens,
            ),
            pool_tokens=stats.pool_tokens,
        )
        self._tree, self._stats = tree, stats
        self.moments.append(moment)
        return moment

    def is_up_to_date(self) -> bool:
        """Whether the last moment shows the tree as it is: nothing in it was in use or is used
        since.
        """
        now, _ = self._look()
        return now.clock == self._tree.clock and not any(n.lock_ref for n in self._tree.nodes())

    def _look(self) -> tuple[TreeSnapshot, Stats]:
        """Tree and counters of the same moment."""
        backend = self._backend
        return backend.engine.call(lambda: (backend.tree(), backend.stats()))

"""The memory of the cache: which slots are free (PageAllocator), and what is in them (KVPool).

A slot holds the key and value of one token in every layer. Slots are handed out in whole pages, in
contiguous runs where possible, so that attention can read a run as a view. The tree and the
requests own what was handed out.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from stemma.backend.local.cache.radix_key import Ints
from stemma.lang.errors import EngineInvariantError, InvalidArgument


class PageAllocator:
    """Free pages as runs, kept by length. Slots are the integers 0..capacity-1.

    Neighbouring free runs are always joined. Runs are filed by size class (exact below 16 pages,
    then eight classes per power of two, as in the TLSF allocator, Masmano et al. 2004), and a bit
    mask tells which classes have any: a run that fits is found without a search. Every call costs
    time in the number of runs it takes or gives back, never in the size of the pool. A request of n
    pages is one run whenever a free run of 9n/8 pages exists.
    """

    def __init__(self, capacity: int, page_size: int) -> None:
        if page_size < 1 or capacity < page_size:
            raise InvalidArgument(
                f"a pool of {capacity} tokens cannot hold a page of {page_size}: "
                "give a page size of at least 1 and a capacity of at least one page"
            )
        pages = capacity // page_size
        self.page_size = page_size
        self.capacity = pages * page_size
        self._free_pages = pages
        self._used = np.zeros(pages, dtype=np.bool_)
        self._length_at: dict[int, int] = {}  # first page of a free run -> its length
        self._start_of: dict[int, int] = {}  # page after a free run -> its first page
        self._by_class: list[dict[int, None]] = [{} for _ in range(_size_class(pages) + 1)]
        self._filled = 0  # bit c is set when class c has a run
        self._add_run(0, pages)

    @property
    def free_tokens(self) -> int:
        """How many slots are free."""
        return self._free_pages * self.page_size

    def alloc(self, tokens: int, *, after: int | None = None) -> Ints | None:
        """Slots for `tokens` tokens, rounded up to pages (int32); None if too few are free.

        after: the caller's last slot. If the page behind it is free, the new slots start there.
        """
        pages = -(-tokens // self.page_size)
        if pages > self._free_pages:
            return None
        parts: list[Ints] = []
        if after is not None and pages > 0:
            behind = after // self.page_size + 1
            if behind in self._length_at:
                parts.append(self._take(behind, pages))
                pages -= len(parts[0]) // self.page_size
        while pages > 0:
            parts.append(self._take(self._choose_run(pages), pages))
            pages -= len(parts[-1]) // self.page_size
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def free(self, slots: Ints) -> None:
        """Give back whole pages, in any order.

        Raises EngineInvariantError, and frees nothing, if a slot is foreign, free already, given
        twice, or if the slots are not whole pages.
        """
        if len(slots) == 0:
            return
        pages = self._pages_of(slots)
        self._used[pages] = False
        self._free_pages += len(pages)
        gaps = np.flatnonzero(pages[1:] != pages[:-1] + 1)
        firsts = [int(pages[0]), *pages[gaps + 1].tolist()]
        lasts = [*pages[gaps].tolist(), int(pages[-1])]
        for first, last in zip(firsts, lasts, strict=True):
            self._give_back(first, last + 1)

    def check(self) -> None:
        """Raise EngineInvariantError unless all books agree. Cost: the whole pool."""
        used = np.ones_like(self._used)
        for start, length in self._length_at.items():
            if not used[start : start + length].all() or start in self._start_of:
                raise EngineInvariantError(f"free run at page {start} overlaps or touches another")
            if self._start_of.get(start + length) != start:
                raise EngineInvariantError(f"free run at page {start} has lost its end")
            if start not in self._by_class[_size_class(length)]:
                raise EngineInvariantError(f"free run at page {start} is filed under a wrong size")
            used[start : start + length] = False
        if not (len(self._start_of) == len(self._length_at) == sum(map(len, self._by_class))):
            raise EngineInvariantError("a free run is filed that does not exist")
        if self._filled != sum(1 << c for c, runs in enumerate(self._by_class) if runs):
            raise EngineInvariantError("the mask of size classes is wrong")
        if (used != self._used).any() or self._free_pages != int((~used).sum()):
            raise EngineInvariantError("the marks of used pages do not agree with the free runs")

    def owns(self, slots: Ints) -> bool:
        """Whether these are whole, distinct pages that are handed out now."""
        try:
            self._pages_of(slots)
        except EngineInvariantError:
            return False
        return True

    def _choose_run(self, pages: int) -> int:
        """Where a run starts: of the smallest class that surely fits, else of the largest class."""
        fitting = self._filled >> _fitting_class(pages)
        if fitting:
            size_class = _fitting_class(pages) + (fitting & -fitting).bit_length() - 1
        else:
            size_class = self._filled.bit_length() - 1
        runs = self._by_class[size_class]
        # popitem() passes over deleted entries once for all, next(reversed(runs)) at every call.
        start, _ = runs.popitem()
        runs[start] = None
        return start

    def _take(self, start: int, pages: int) -> Ints:
        """Hand out the first `pages` pages, or all if it has fewer, of the free run at `start`."""
        length = self._drop_run(start)
        taken = min(pages, length)
        if taken < length:
            self._add_run(start + taken, length - taken)
        stop = start + taken
        self._used[start:stop] = True
        self._free_pages -= taken
        return np.arange(start * self.page_size, stop * self.page_size, dtype=np.int32)

    def _give_back(self, start: int, stop: int) -> None:
        """Pages start..stop-1 are free again: join them with the free runs on both sides."""
        before = self._start_of.get(start)
        if before is not None:
            self._drop_run(before)
            start = before
        if stop in self._length_at:
            stop += self._drop_run(stop)
        self._add_run(start, stop - start)

    def _add_run(self, start: int, length: int) -> None:
        size_class = _size_class(length)
        self._length_at[start] = length
        self._start_of[start + length] = start
        self._by_class[size_class][start] = None
        self._filled |= 1 << size_class

    def _drop_run(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_of[start + length]
        size_class = _size_class(length)
        runs = self._by_class[size_class]
        del runs[start]
        if not runs:
            self._filled &= ~(1 << size_class)
        return length

    def _pages_of(self, slots: Ints) -> Ints:
        """The pages of these slots, sorted; raises unless they are whole, distinct, handed out."""
        if len(slots) % self.page_size:
            raise EngineInvariantError(
                f"{len(slots)} slots are not whole pages of {self.page_size}"
            )
        first = slots[:: self.page_size]
        if self.page_size > 1:
            whole = first[:, None] + np.arange(self.page_size, dtype=np.int32)
            if (first % self.page_size).any() or (slots != whole.ravel()).any():
                raise EngineInvariantError("the slots of a page are not in order")
        pages = np.sort(first // self.page_size)
        if len(pages) and (pages[0] < 0 or pages[-1] >= len(self._used)):
            raise EngineInvariantError(f"a slot lies outside the pool of {self.capacity}")
        if (pages[1:] == pages[:-1]).any():
            raise EngineInvariantError("a slot is given twice")
        if not self._used[pages].all():
            raise EngineInvariantError("a slot is free already")
        return pages


def _size_class(length: int) -> int:
    """The class of runs of `length` pages: their length below 16, then by four leading bits."""
    shift = max(length.bit_length() - 4, 0)
    return (shift << 3) + (length >> shift)


def _fitting_class(length: int) -> int:
    """The smallest class all of whose runs have at least `length` pages."""
    shift = max(length.bit_length() - 4, 0)
    return _size_class(length + (1 << shift) - 1)


class KVPool:
    """Keys and values of every slot: per layer two tensors [capacity, kv_heads, head_dim].

    heads_first: in memory the slots of one head follow each other, for who reads head by head; the
    shape is the same. A run of slots is a view, `pool.k[layer][start:stop]`. Starts as zeros, so an
    unwritten slot that is masked out never poisons a product with a NaN.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        heads_first: bool = False,
    ) -> None:
        self.allocator = PageAllocator(capacity, page_size)
        self.dtype = dtype
        self.device = torch.device(device)
        outer = [self.allocator.capacity, kv_heads]
        if heads_first:
            outer.reverse()

        def zeros() -> Tensor:
            made = _zeros((*outer, head_dim), dtype, self.device)
            return made.transpose(0, 1) if heads_first else made

        self.k = [zeros() for _ in range(layers)]
        self.v = [zeros() for _ in range(layers)]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [rows, kv_heads, head_dim], of the pool's dtype, at int64 slots [rows]."""
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)

    @staticmethod
    def bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """What one slot costs in all layers together."""
        return 2 * layers * kv_heads * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU numpy's, which take memory when written, where torch's take it at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    blank = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(blank).view(dtype).view(shape)

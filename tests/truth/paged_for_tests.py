"""The engine's parts below the scheduler, driven by hand: decoder, batch, attention, KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stemma.backend.local.attention.torch_attention import TorchAttention
from stemma.backend.local.batch import Entry, build_batch
from stemma.backend.local.cache.kv_pool import KVPool
from stemma.backend.local.model.loader import load_model


class Paged:
    """A model on a KV pool where each prefix has one slot, whichever lines share it."""

    def __init__(
        self, folder: Path, *, dtype: torch.dtype = torch.float32, capacity: int, scattered: bool
    ) -> None:
        """scattered: slots in random order, so that no span is a view; else in order of use."""
        self.model = load_model(folder, device="cpu", dtype=dtype)
        config = self.model.config
        self.pool = KVPool(
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            capacity=capacity,
            page_size=1,
            dtype=dtype,
            device="cpu",
        )
        for tensor in (*self.pool.k, *self.pool.v):
            tensor.fill_(7.0)  # a slot that is read before it is written shows
        self.attention = TorchAttention(
            self.pool, num_heads=config.num_heads, scale=config.attention_scale
        )
        order = np.arange(capacity)
        if scattered:
            np.random.default_rng(0).shuffle(order)
        self._unused = list(order[::-1])
        self._slots: dict[tuple[int, int], int] = {}  # (slot of the prefix before, token) -> slot
        self._computed: set[int] = set()

    def table(self, line: Sequence[int]) -> np.ndarray:
        """The slots of a line's positions, new ones where no other line had this prefix."""
        slots: list[int] = []
        before = -1
        for token in line:
            if (before, token) not in self._slots:
                self._slots[before, token] = int(self._unused.pop())
            before = self._slots[before, token]
            slots.append(before)
        return np.array(slots, dtype=np.int32)

    @torch.inference_mode()
    def step(self, lines: Sequence[Sequence[int]]) -> list[Tensor]:
        """One forward pass over what is not computed yet of each line; the logits of those rows.

        A line that is computed already computes its last position again.
        """
        entries = []
        for line in lines:
            table = self.table(line)
            known = [slot in self._computed for slot in table.tolist()]
            computed = min(known.index(False) if False in known else len(line), len(line) - 1)
            ids = np.array(line, dtype=np.int32)
            entries.append(Entry(token_ids=ids, table=table, computed=computed))
        batch = build_batch(entries)
        hidden = self.model.decoder(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.positions),
            self.attention.prepare(batch),
        )
        self._computed.update(batch.slots.tolist())
        rows = [torch.from_numpy(batch.rows_of(i)) for i in range(len(lines))]
        return [self.model.decoder.logits(hidden[own]) for own in rows]

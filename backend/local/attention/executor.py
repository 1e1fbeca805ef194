"""What the engine asks of attention, whoever executes it."""

from __future__ import annotations

from typing import Protocol

from stemma.backend.local.batch import Batch
from stemma.backend.local.model.decoder import Attend


class Attention(Protocol):
    """An executor of attention over the KV pool. kernel: the name of what does the work."""

    @property
    def kernel(self) -> str: ...

    def prepare(self, batch: Batch) -> Attend:
        """What is worked out once per step; the decoder calls the result once per layer."""
        ...

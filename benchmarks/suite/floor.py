"""The machine's limit, measured in the same run: how fast it multiplies and how fast it reads.

No engine that runs these rows through these weights can be faster, whatever its attention costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stemma.backend.local.model.config import DecoderConfig
from suite.work import Outcome


@dataclass(frozen=True, slots=True)
class Floor:
    """fp32, bf16, int8: multiplications and additions per second of large matrix products. reads:
    bytes per second from memory. int8 is None where torch has no such product.
    """

    fp32: float
    bf16: float
    int8: float | None
    reads: float

    @classmethod
    def measured(cls) -> Floor:
        fp32, bf16 = (
            rate(torch.randn(1024, 1024, dtype=x)) for x in (torch.float32, torch.bfloat16)
        )
        memory = torch.zeros(64 * 1024 * 1024)
        reads = 4 * memory.numel() / best_s(memory.sum)
        return cls(fp32, bf16, int8_rate(), reads)

    def best_of(self, other: Floor) -> Floor:
        """Of two measurements, one of which something else may have slowed down."""
        int8 = max(self.int8 or 0.0, other.int8 or 0.0) or None
        most = max(self.fp32, other.fp32), max(self.bf16, other.bf16)
        return Floor(*most, int8, max(self.reads, other.reads))

    def seconds(self, outcome: Outcome, config: DecoderConfig, *, int8: bool) -> float | None:
        """The least that an engine needs for the rows and steps that it took: all products, or
        reading the weights in every step. The head is needed for the rows only that are drawn from.
        """
        rate = self.int8 if int8 else self.fp32
        if rate is None or outcome.steps is None:
            return None
        layers, head = weights(config)
        products = 2 * (layers * outcome.rows + head * outcome.output_tokens) / rate
        reading = (1 if int8 else 4) * (layers + head) * outcome.steps / self.reads
        return max(products, reading)


def weights(config: DecoderConfig) -> tuple[int, int]:
    """How many there are in the products of all layers, and in the head."""
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + feed_forward), config.hidden_size * config.vocab_size


def rate(a: torch.Tensor) -> float:
    return 2 * len(a) ** 3 / best_s(lambda: a @ a)


def int8_rate() -> float | None:
    a = torch.randint(-8, 8, (1024, 1024), dtype=torch.int8)
    try:
        return 2 * 1024**3 / best_s(lambda: torch._int_mm(a, a.t()))
    except (AttributeError, RuntimeError):
        return None


def best_s(work: Callable[[], object], repeat: int = 20) -> float:
    def seconds() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return min(seconds() for _ in range(repeat))

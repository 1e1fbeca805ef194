"""A backend whose steps a test takes itself: it chooses what happens between which steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stemma.backend.base import CacheMode, Completion, Namespace, Pending
from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.request import Request
from stemma.lang.sampling import SamplingParams


class Stepped:
    """A float64 backend without a thread; its books are checked after every step.

    The calling thread is taken for the engine's: the engine starts none, and runs `call` at once.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.backend = LocalBackend(folder, dtype="float64", **options)
        self.engine = self.backend.engine
        self.engine.check_every_step = True
        self.engine._thread = threading.current_thread()
        self.requests: list[Request] = []
        self.handles: list[Pending[Completion]] = []

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        heal: np.ndarray | None = None,
        logprobs: bool = False,
        cache: CacheMode = "read-write",
    ) -> int:
        """Hand in a request; gives its number."""
        handle: Pending[Completion] = Pending()
        request = self.backend.make_request(
            prompt,
            params,
            Namespace(),
            on_finish=lambda request: handle.finish(request.completion()),
            on_error=handle.fail,
            seed=params.seed or 0,
            heal=heal,
            next_logprob=1 if logprobs else None,
            cache=cache,
        )
        self.requests.append(request)
        self.handles.append(handle)
        self.backend.submit([request])
        self.engine._read_inbox(wait=False)
        return len(self.handles) - 1

    def cancel(self, number: int) -> None:
        self.engine.cancel([self.requests[number]])
        self.engine._read_inbox(wait=False)

    @property
    def has_work(self) -> bool:
        return self.engine.scheduler.has_work

    def step(self) -> None:
        with torch.inference_mode():
            self.engine.step()

    def run(self, *, at_most: int) -> None:
        """Steps until nothing is left to do, which must not take more than `at_most`."""
        for _ in range(at_most):
            if not self.has_work:
                return
            self.step()
        left = [self.engine.scheduler.running, self.engine.scheduler.waiting]
        raise AssertionError(f"after {at_most} steps still {[len(some) for some in left]} to do")

    def close(self) -> None:
        self.backend.close()

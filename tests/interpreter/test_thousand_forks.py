"""Many live branches on the real engine: no thread each, and the shared text is computed once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import stemma as st
from stemma.backend.local.backend import LocalBackend

FORKS = 1000
PREFIX = "A stemma is the tree by which texts descend from a common ancestor. Number"


def test_a_thousand_forks_need_few_threads_and_compute_their_prefix_once(
    tiny_model: Callable[..., Path],
) -> None:
    most = 0

    @st.function
    def fan(s: st.ProgramState) -> list[str]:
        nonlocal most
        s += PREFIX
        branches = s.fork(FORKS)
        for i, branch in enumerate(branches):
            branch += f" {i}:" + st.gen("x", max_tokens=8, ignore_eos=True, heal=False)
            most = max(most, threading.active_count())
        found: list[str] = []
        for branch in branches:
            found.append(branch["x"])
            most = max(most, threading.active_count())
        return found

    with LocalBackend(tiny_model(), kv_tokens=60_000, dtype="float32") as backend:
        state = fan.run(backend=backend, seed=1)
        assert len(state.value) == FORKS
        assert len(set(state.value)) > FORKS // 2
        assert most < 50
        stats = backend.stats()
        shared = len(backend.encode(PREFIX)) - 1  # the last token may join with what follows
        assert stats.prompt_tokens - stats.cached_tokens < FORKS * 6 + 2 * shared
        assert stats.protected_tokens == stats.private_tokens == 0
        backend.check()

"""Loading a model leaves no threads behind that would slow the engine's down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stemma.backend.local.threads import on_own_thread
from tests.conftest import TinyModel

CODE = """
import os, sys, time, torch
from stemma.backend.local.backend import LocalBackend
torch.set_num_threads(4)
before = set(os.listdir("/proc/self/task"))
backend = LocalBackend(sys.argv[1], quantization=sys.argv[2] or None, dtype="float32", device="cpu")
backend.reload_weights(sys.argv[1])
left, stop = set(), time.monotonic() + 10
while len(left) != 1 and time.monotonic() < stop:  # those that end take a moment
    left = set(os.listdir("/proc/self/task")) - before
backend.generate([[3, 4, 5]])
print(len(left), len(set(os.listdir("/proc/self/task")) - before))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")
@pytest.mark.parametrize("quantization", ["", "int8"])
def test_only_the_engine_has_a_team(tiny_model: TinyModel, quantization: str) -> None:
    model = tiny_model(hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=528)
    command = [sys.executable, "-c", CODE, str(model), quantization]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    left, working = map(int, done.stdout.split())
    assert left == 1  # the engine, which swapped the weights
    assert working == 4  # the engine and its team


def test_results_and_errors_come_back() -> None:
    assert on_own_thread(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        on_own_thread(lambda: 1 // 0)

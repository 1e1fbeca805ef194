"""The process that builds: `python -m stemma.backend.local.compiled.worker MODEL QUANT FOLDER`.

Started by `build.start`. Works in a folder beside the final one and moves it there when all is
done, so that whoever looks finds all or nothing, or the reason in `failed.txt`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from stemma.backend.local.compiled.build import FAILED, KERNEL, build_kernel
from stemma.backend.local.compiled.functions import compile_functions
from stemma.backend.local.model.decoder import Decoder
from stemma.backend.local.model.loader import read_config
from stemma.backend.local.model.quantize import quantize

LIMIT = 1800
"""Seconds after which the process is ended by the system, whatever it hangs in."""


def main(model: Path, quantization: str, folder: Path) -> None:
    """Build for the model in `model`, unless that is done or another process is at it."""
    try:
        with FileLock(folder.with_suffix(".lock"), timeout=0):
            if not folder.exists():
                _build(model, quantization, folder)
    except Timeout:
        pass


def _build(model: Path, quantization: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as name:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(name) / "inductor")
        made = Path(name) / folder.name
        made.mkdir()
        try:
            build_kernel(made / KERNEL)
            compile_functions(_example(model, quantization), made)
        except Exception as error:
            (made / FAILED).write_text(f"{type(error).__name__}: {error}\n")
        made.rename(folder)


@torch.no_grad()
def _example(model: Path, quantization: str) -> Decoder:
    """Two layers of the model's shape, with any weights: those are arguments of what is built."""
    config = replace(read_config(model), num_layers=2)
    decoder = Decoder(config, torch.device("cpu"), torch.float32)
    for weight in decoder.parameters():
        weight.normal_()
    if quantization == "int8":
        quantize(decoder)
    return decoder


if __name__ == "__main__":
    os.nice(15)
    if hasattr(signal, "alarm"):
        signal.alarm(LIMIT)
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))

"""Where compiled functions are kept, whether they are there, and how they get there.

They are built in a process of their own, with low priority, that outlives this one: a program that
ends sooner leaves them to the next. Called by LocalBackend, `doctor` and the worker.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from stemma.backend.local.attention import ragged
from stemma.backend.local.compiled import functions
from stemma.backend.local.model import decoder, quantize
from stemma.backend.local.model.config import DecoderConfig
from stemma.backend.local.model.default_model import cache_folder

KERNEL = "ragged.so"
FAILED = "failed.txt"
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC"]


@cache
def compiler() -> Path | None:
    """The C++ compiler: CXX, or the first of g++ and clang++ on the PATH."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        found = shutil.which(name)
        if found:
            return Path(found)
    return None


def folder_of(config: DecoderConfig, quantization: str | None) -> Path:
    """Where the functions for such a model on this machine are, once they are built.

    Named after all that they depend on: the model's shape, torch, the compiler, the C library, the
    processor and our own sources.
    """
    sources = [Path(str(module.__file__)) for module in (decoder, quantize, functions)]
    shape = {**asdict(config), "num_layers": 0, "max_positions": 0, "eos_token_ids": ()}
    parts = [
        json.dumps(shape, sort_keys=True, default=str),
        str(quantization),
        torch.__version__,
        sys.version,
        _version_of(compiler()),
        " ".join(platform.libc_ver()),
        platform.machine(),
        _processor(),
        *(path.read_text() for path in (*sources, ragged.SOURCE)),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return cache_folder() / "compiled" / key


def is_ready(folder: Path) -> bool:
    return folder.is_dir() and not (folder / FAILED).exists()


def why_failed(folder: Path) -> str | None:
    """What the last attempt ran into, or None if there was none or it went well."""
    try:
        return (folder / FAILED).read_text().strip()
    except FileNotFoundError:
        return None


def start(model: Path, quantization: str | None, folder: Path) -> subprocess.Popen[bytes]:
    """Begin to build `folder` in another process: it ends when that is done, has failed (and left
    `failed.txt` there) or is under way in a third one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    worker = f"{__package__}.worker"
    return subprocess.Popen(
        [sys.executable, "-m", worker, str(model), str(quantization), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not meant for it
    )


def build_kernel(path: Path) -> None:
    """Compile the attention kernel. Raises RuntimeError with what the compiler says."""
    chosen = compiler()
    if chosen is None:
        raise RuntimeError("there is no C++ compiler: install g++, or name one in CXX")
    compiled = path.with_suffix(".o")
    try:
        _run([str(chosen), *_FLAGS, "-fopenmp", "-c", str(ragged.SOURCE), "-o", str(compiled)])
        # Linked against torch's own OpenMP library, or two pools of threads fight for the cores.
        theirs = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
        threads = str(theirs[0]) if theirs else "-fopenmp"
        _run([str(chosen), "-shared", str(compiled), threads, "-o", str(path)])
    finally:
        compiled.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} fails: {done.stderr[-2000:]}")


@cache
def _version_of(program: Path | None) -> str:
    if program is None:
        return ""
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True)
    return done.stdout.partition("\n")[0]


def _processor() -> str:
    """What the processor can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")

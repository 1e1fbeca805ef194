"""The kernels as a shared library: found in the user's cache folder, or built there in seconds.

Runs on torch's own OpenMP threads. Called by LocalBackend and `doctor`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from stemma.backend.local.model.default_model import cache_folder
from stemma.lang.errors import InvalidArgument, ModelLoadError

CompileMode = Literal["auto"] | bool

FOLDER = Path(__file__).parent
SOURCES = ("attention.cpp", "layers.cpp", "linears.cpp", "masks.cpp")
HEADERS = ("products.h", "vectors.h")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi"),
    # A product and a sum are one rounding wherever they can be: the same code gives the same bits.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)


def kernels(mode: CompileMode, device: torch.device, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The library, or None where it is not wanted or cannot be had and need not be.

    mode: "auto" takes it where it can be had, and listens to STEMMA_COMPILE (auto, on or off);
    True must have it; False goes without. It is for float32 on a CPU. Raises InvalidArgument for
    another mode, ModelLoadError where True cannot be had.
    """
    if mode not in ("auto", True, False):
        raise InvalidArgument(f"compile={mode!r}: must be 'auto', True or False")
    if mode == "auto":
        mode = mode_from_environment()
    if mode is False:
        return None
    if device.type != "cpu" or dtype != torch.float32:
        problem = f"it is for float32 on a CPU, and this is {dtype} on {device.type}"
    else:
        found = library()
        if not isinstance(found, str):
            return found
        problem = found
    if mode is True:
        raise ModelLoadError(f"compile=True: {problem}")
    return None


def mode_from_environment() -> CompileMode:
    """What "auto" means here. Raises InvalidArgument for a setting that there is not."""
    modes: dict[str, CompileMode] = {"auto": "auto", "on": True, "off": False}
    chosen = os.environ.get("STEMMA_COMPILE") or "auto"
    if chosen not in modes:
        raise InvalidArgument(f"STEMMA_COMPILE={chosen}: must be auto, on or off")
    return modes[chosen]


@cache
def library() -> ctypes.CDLL | str:
    """The loaded library, built if it is not there yet; or why there is none."""
    chosen = compiler()
    if chosen is None:
        return "there is no C++ compiler: install g++, or name one in CXX"
    path = library_path(chosen)
    try:
        if not path.exists():
            _build(chosen, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        return f"the kernels cannot be built or loaded: {error}"


def instructions(library: ctypes.CDLL) -> str:
    """What the int8 products run on: "AMX", "AVX-512 VNNI", ..."""
    library.stemma_products.restype = ctypes.c_char_p
    return str(library.stemma_products().decode())


def compiler() -> Path | None:
    """CXX, or the first of g++ and clang++ on the PATH."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return Path(found)
    return None


def library_path(compiler: Path) -> Path:
    """Named after all that the library depends on: our sources, the compiler, the processor."""
    parts = [
        *((FOLDER / name).read_text(encoding="utf-8") for name in (*SOURCES, *HEADERS)),
        *FLAGS,
        str(_openmp()),
        subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout,
        platform.machine(),
        _processor(),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / "kernels" / f"kernels-{key}.so"


def _build(compiler: Path, path: Path) -> None:
    """Raises OSError with what the compiler says. The file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as work:
        made = Path(work) / path.name
        sources = [str(FOLDER / name) for name in SOURCES]
        command = [str(compiler), *FLAGS, *sources, *_openmp(), "-o", str(made)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise OSError(f"{compiler} ends with {done.returncode}: {done.stderr[-2000:].strip()}")
        made.rename(path)


def _openmp() -> list[str]:
    """torch's own OpenMP library: with another one, two pools of threads fight for the cores."""
    return [str(path) for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))[:1]]


def _processor() -> str:
    """What the processor can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")

"""Switching an engine over to compiled functions: at once where they are there, else when they are.

Called by LocalBackend when it is made and when weights are reloaded.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Literal

import torch

from stemma.backend.local.attention.plan import KERNEL_COSTS
from stemma.backend.local.attention.ragged import RaggedKernel, works
from stemma.backend.local.compiled.build import (
    KERNEL,
    compiler,
    folder_of,
    is_ready,
    start,
    why_failed,
)
from stemma.backend.local.compiled.functions import load_functions
from stemma.backend.local.engine import Engine
from stemma.lang.errors import InvalidArgument, ModelLoadError

CompileMode = Literal["auto", "wait", False]

WORTH_IT = 20_000_000
"""Weights from which on "auto" compiles: a smaller model is done before its functions are."""


def check_compile(mode: CompileMode, device: torch.device, dtype: torch.dtype) -> CompileMode:
    """What was asked for; "auto" is False where nothing can be compiled. Raises InvalidArgument."""
    if mode not in ("auto", "wait", False):
        raise InvalidArgument(f"compile={mode!r}: must be 'auto', 'wait' or False")
    if device.type == "cpu" and dtype == torch.float32:
        return mode
    if mode == "wait":
        raise InvalidArgument(
            "compile='wait': is for device='cpu' and dtype='float32', and this is "
            f"{device.type} and {str(dtype).removeprefix('torch.')}"
        )
    return False


def compile_engine(
    engine: Engine, model: Path, quantization: str | None, mode: CompileMode
) -> None:
    """Have the engine use compiled functions: "wait" before its first step, "auto" as soon as they
    are there and if the model is worth it.

    Raises ModelLoadError where "wait" cannot be had; "auto" then goes on without.
    """
    decoder = engine.decoder
    large = sum(weight.numel() for weight in decoder.state_dict().values()) >= WORTH_IT
    if mode is False or (mode == "auto" and not (large and compiler())):
        return
    folder = folder_of(decoder.config, quantization)
    if not folder.exists():
        process = start(model, quantization, folder)
        if mode == "auto":

            def adopt() -> None:
                _adopt(engine, folder)

            def wait() -> None:
                process.wait()
                engine.tell(adopt)

            threading.Thread(target=wait, name="stemma-compile", daemon=True).start()
            return
        process.wait()
    problem = _adopt(engine, folder)
    if problem and mode == "wait":
        raise ModelLoadError(f"compile='wait': {problem}")


def _adopt(engine: Engine, folder: Path) -> str | None:
    """Between two steps: use what is there. Returns what is wrong with it, if anything is."""
    if not is_ready(folder):
        return why_failed(folder) or "another process builds the functions at this moment"
    decoder, attention = engine.decoder, engine.attention
    try:
        decoder.compiled = load_functions(decoder, folder)
        kernel = RaggedKernel(folder / KERNEL)
    except (OSError, RuntimeError) as error:
        problem = f"{folder} cannot be used: {error}; delete it, and it is built again"
        warnings.warn(problem, stacklevel=2)
        return problem
    config = decoder.config
    if works(kernel, config.num_heads, config.num_kv_heads, config.head_dim):
        attention.ragged, attention.costs = kernel, KERNEL_COSTS
    return None

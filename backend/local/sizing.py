"""Where a model runs and how many tokens its KV pool holds, when the user does not say; the pool
itself. Called by LocalBackend.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from stemma.backend.local.cache.kv_pool import KVPool
from stemma.backend.local.model.config import DecoderConfig
from stemma.lang.errors import InvalidArgument, OutOfCacheMemory

CPU_SHARE = 0.4
"""Share of the machine's available memory that the pool may take: programs need the rest."""

GPU_SHARE = 0.85
"""Share of the GPU's free memory, after the weights are loaded; activations need the rest."""

CONTEXTS = 32
"""More than this many full contexts (and more than MOST_TOKENS) are never useful enough to
reserve.
"""

MOST_TOKENS = 1 << 18


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, else the first GPU, else the CPU. InvalidArgument if torch cannot use
    it here.
    """
    wanted = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"device={device!r}: must be 'cpu' or 'cuda'") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(
            f"device={device!r}: this torch ({torch.__version__}) finds no usable GPU"
        )
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device={device!r}: must be 'cpu' or 'cuda'")
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype asked for, else bfloat16 on a GPU and float32 on a CPU (where bfloat16 is several
    times slower).
    """
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise InvalidArgument(f"dtype={dtype!r}: must be float64, float32, bfloat16 or float16")
    return chosen


def default_kv_tokens(bytes_per_token: int, device: torch.device, max_positions: int) -> int:
    """Tokens that fit into the share of memory above, at most CONTEXTS contexts or MOST_TOKENS
    tokens.
    """
    if device.type == "cuda":
        budget = GPU_SHARE * torch.cuda.mem_get_info(device)[0]
    else:
        budget = CPU_SHARE * available_memory()
    return int(min(budget // bytes_per_token, max(CONTEXTS * max_positions, MOST_TOKENS)))


def make_pool(
    config: DecoderConfig,
    kv_tokens: int | None,
    page_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    heads_first: bool = False,
) -> KVPool:
    """The pool asked for, see `KVPool`, or of the default size. Raises InvalidArgument if it cannot
    hold a page, OutOfCacheMemory, with what could be had, if the memory is not there.
    """
    layers, heads, dim = config.num_layers, config.num_kv_heads, config.head_dim
    per_token = KVPool.bytes_per_token(layers=layers, kv_heads=heads, head_dim=dim, dtype=dtype)
    affordable = default_kv_tokens(per_token, device, config.max_positions)
    if kv_tokens is None:
        kv_tokens = affordable
    if kv_tokens < page_size:
        raise InvalidArgument(
            f"kv_tokens={kv_tokens}: must hold at least one page of {page_size} tokens"
        )
    try:
        return KVPool(
            layers=layers,
            kv_heads=heads,
            head_dim=dim,
            capacity=kv_tokens,
            page_size=page_size,
            dtype=dtype,
            device=device,
            heads_first=heads_first,
        )
    except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
        mib = kv_tokens * per_token >> 20
        raise OutOfCacheMemory(
            f"kv_tokens={kv_tokens}: a KV pool of {mib:,} MiB cannot be had here; ask for less",
            needed=kv_tokens,
            limit=affordable,
        ) from error


def available_memory() -> int:
    """Bytes that this process may still take: the system's estimate, within the control group's
    limit.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        system = next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration):
        system = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return system
    return max(0, min(system, limit - used))

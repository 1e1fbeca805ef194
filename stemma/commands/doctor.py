"""`stemma doctor`: what is installed, where a model would run and how much it could hold.

Looks only, unless it is told to load the model. Whatever is missing is told with its remedy.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stemma.lang.errors import ModelLoadError, StemmaError

if TYPE_CHECKING:
    import torch

    from stemma.backend.chat import ChatFormat
    from stemma.backend.local.model.config import DecoderConfig

MIB = 1 << 20
DISTRIBUTION = "stemma-lm"
TOLD_VERSIONS = ("torch", "transformers", "tokenizers")


class Report:
    """What was found: facts in order, and what is missing with its remedy."""

    def __init__(self) -> None:
        self.facts: list[tuple[str, str]] = []
        self.problems: list[str] = []

    def fact(self, name: str, text: str) -> None:
        self.facts.append((name, text))

    @contextmanager
    def told(self) -> Iterator[None]:
        """An error of ours within is a problem, and ends what depends on it."""
        try:
            yield
        except StemmaError as error:
            self.problems.append(str(error))

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        previous = None
        for name, text in self.facts:
            table.add_row(name if name != previous else "", Text(text))
            previous = name
        return table


def examine(model: str | None, *, load: bool, console: Console | None = None) -> bool:
    """Print the report; True if nothing that is needed is missing."""
    console = console or Console()
    report = Report()
    check_libraries(report)
    if not report.problems:
        with report.told():
            check_engine(report, model, load=load)
    console.print(report)
    console.print()
    for problem in report.problems:
        console.print(Text.assemble(("missing: ", "bold red"), problem), soft_wrap=True)
    if not report.problems:
        console.print("Nothing is missing.", style="green")
    return not report.problems


# What needs no torch


def check_libraries(report: Report) -> None:
    """Versions of Stemma and of what it stands on; each that is missing or too old."""
    report.fact("stemma", f"{version(DISTRIBUTION)} in {Path(__file__).parent.parent}")
    report.fact("python", f"{platform.python_version()} at {sys.executable}")
    for requirement in requires(DISTRIBUTION) or []:
        needed, _, condition = requirement.partition(";")
        if condition:  # of an extra
            continue
        name, least = parse_requirement(needed)
        try:
            found = version(name)
        except PackageNotFoundError:
            report.problems.append(f'{name} is not installed: pip install "{needed.strip()}"')
            continue
        if numbers(found) < numbers(least):
            report.problems.append(f'{name} {found} is too old: pip install "{needed.strip()}"')
        if name in TOLD_VERSIONS:
            report.fact(name, found)


def parse_requirement(text: str) -> tuple[str, str]:
    """The name and the least version in "name>=1.2", which is "" where any will do."""
    name = re.match(r"[\w.-]+", text.strip())
    least = re.search(r"(?:>=|~=|==)\s*([\d.]+)", text)
    return (name[0] if name else text), (least[1] if least else "")


def numbers(text: str) -> tuple[int, ...]:
    """The release of a version as numbers: "2.13.0+cpu" is (2, 13, 0)."""
    release = re.match(r"[\d.]*", text)
    return tuple(int(part) for part in (release[0] if release else "").split(".") if part)


def folder_size(folder: Path) -> int:
    """Bytes of all files below."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except OSError:  # gone since it was listed
            continue
    return total


# What needs it


def check_engine(report: Report, model: str | None, *, load: bool) -> None:
    """Device, model and memory. Raises ModelLoadError and the like."""
    try:
        import torch  # noqa: F401 - whether that works is the question
    except (ImportError, OSError) as error:  # OSError: a library that it needs itself
        report.problems.append(f"torch is installed and cannot be imported: {error}")
        return
    from stemma.backend.local.model.default_model import cache_folder
    from stemma.backend.local.sizing import choose_device, choose_dtype

    device = choose_device(None)
    dtype = choose_dtype(None, device)
    report.fact("device", _device(device))
    if device.type == "cpu" and Path("/proc/driver/nvidia").exists():
        report.fact("device", "there is an NVIDIA GPU, which this build of torch cannot use")
    report.fact("memory", _memory(device))
    report.fact("dtype", str(dtype).removeprefix("torch."))
    report.fact("kernels", _kernels(device))
    cache = cache_folder()
    there = f"{folder_size(cache) / MIB:,.0f} MiB" if cache.is_dir() else "not made yet"
    chosen = " (STEMMA_CACHE)" if os.environ.get("STEMMA_CACHE") else ""
    report.fact("cache", f"{cache}{chosen}, {there}")
    if load:
        check_loaded(report, model)
    else:
        folder = find_model(report, model)
        if folder is not None:
            check_folder(report, folder, device, dtype)


def _device(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"cuda: {', '.join(names)}; the first is used"
    return f"cpu, {torch.get_num_threads()} threads of {os.cpu_count()} processors"


def _memory(device: torch.device) -> str:
    import torch

    from stemma.backend.local.sizing import available_memory

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return f"{free / MIB:,.0f} MiB of {total / MIB:,.0f} MiB on the GPU are free"
    return f"{available_memory() / MIB:,.0f} MiB are available"


def find_model(report: Report, model: str | None) -> Path | None:
    """The folder of the model that would be used; None, and told why, if it is not at hand."""
    from stemma.backend.local.model import default_model

    wanted = model or os.environ.get("STEMMA_MODEL")
    if not wanted:
        folder = default_model.cache_folder() / "models" / default_model.FOLDER_NAME
        if (folder / default_model.MANIFEST).is_file():
            report.fact("model", f"{default_model.DEFAULT_MODEL_NAME}, the default, in {folder}")
            return folder
        report.fact("model", f"{default_model.DEFAULT_MODEL_NAME}, the default, not here yet")
        report.problems.append(
            "the default model (93 MB) is fetched when it is first used; "
            "`stemma doctor --load` does it now"
        )
        return None
    source = default_model.resolve_model(wanted)
    chosen = "" if model else " (STEMMA_MODEL)"
    if isinstance(source, str):
        from stemma.backend.local.model.hub import find_cached

        folder_of_id = find_cached(source)
        there = f"in {folder_of_id}" if folder_of_id is not None else "not here yet"
        report.fact("model", f"{source}{chosen}, a hub id, {there}")
        if folder_of_id is None:
            report.problems.append(
                f"{source} is fetched when it is first used; `stemma doctor --load` does it now"
            )
        return folder_of_id
    report.fact("model", f"{source}{chosen}")
    if source.is_file():
        report.fact("model", "a GGUF file is converted once; --load tells the rest")
        return None
    return source


def _kernels(device: torch.device) -> str:
    from stemma.backend.local.native.build import (
        compiler,
        instructions,
        library,
        library_path,
        mode_from_environment,
    )

    if device.type != "cpu":
        return "of torch"
    if mode_from_environment() is False:
        return "of torch, which is slower: STEMMA_COMPILE=off"
    built = library()
    chosen = compiler()
    if isinstance(built, str) or chosen is None:
        return f"of torch, which is slower: {built}"
    return f"in C++, int8 on {instructions(built)}, built by {chosen}, in {library_path(chosen)}"


def check_folder(report: Report, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """What the files of a model say, without its weights. Raises ModelLoadError."""
    from stemma.backend.chat import ChatFormat
    from stemma.backend.local.attention.torch_attention import TorchAttention
    from stemma.backend.local.cache.kv_pool import KVPool
    from stemma.backend.local.model.loader import read_config, weight_files
    from stemma.backend.local.native.attention import kv_dtype, works
    from stemma.backend.local.native.build import kernels
    from stemma.backend.local.sizing import default_kv_tokens
    from stemma.backend.local.tokenizer import Tokenizer

    try:
        config = read_config(folder)
        size = sum(path.stat().st_size for path in weight_files(folder))
        text = Tokenizer.from_folder(folder)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder} cannot be loaded: {error}") from error
    report.fact("weights", f"{size / MIB:,.0f} MiB on the disk")
    built, held = kernels("auto", device, dtype), kv_dtype("int8" if config.quantized_as else None)
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    native = built is not None and works(built, *heads, dtype=held)
    per_token = KVPool.bytes_per_token(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=held if native else dtype,
    )
    tokens = default_kv_tokens(per_token, device, config.max_positions)
    small = KVPool(
        layers=1,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        capacity=1,
        page_size=1,
        dtype=dtype,
        device=device,
    )
    attention = TorchAttention(small, num_heads=config.num_heads, scale=1.0)
    try:
        if text.chat_template is None:
            raise ModelLoadError("the model has no chat template")
        chat = ChatFormat.from_template(
            text.chat_template, bos_token=text.bos_token, eos_token=text.eos_token
        )
    except ModelLoadError as error:
        chat = ChatFormat.absent(str(error))
    tell_model(report, config, "native" if native else attention.kernel, chat)
    if config.quantized_as:
        report.fact("products", f"int8 on a CPU, for the weights were {config.quantized_as}")
    pool = f"about {tokens:,} tokens, {tokens * per_token / MIB:,.0f} MiB, before the weights load"
    report.fact("KV pool", pool)


def check_loaded(report: Report, model: str | None) -> None:
    """Load the model and let it write. Raises ModelLoadError."""
    from stemma.backend.local.cache.kv_pool import KVPool
    from stemma.commands.loading import opened_backend
    from stemma.lang.sampling import SamplingParams

    started = time.perf_counter()
    with opened_backend(model, Console(stderr=True)) as backend:
        seconds = time.perf_counter() - started
        config = backend.config
        report.fact("model", f"{backend.model_name} in {backend.model_folder}")
        tell_model(report, config, backend.engine.attention.kernel, backend.chat)
        compiled = backend.engine.decoder.compiled is not None
        kind = backend.quantization or str(backend.dtype).removeprefix("torch.")
        report.fact("products", f"{kind}, by {'C++ kernels' if compiled else 'torch'}")
        per_token = KVPool.bytes_per_token(
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=backend.kv_dtype,
        )
        tokens = backend.stats().pool_tokens
        held = f"{tokens:,} tokens, {tokens * per_token / MIB:,.0f} MiB"
        report.fact("KV pool", f"{held}, {str(backend.kv_dtype).removeprefix('torch.')}")
        backend.warmup()
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        (written,) = backend.generate("Once upon a time", params)
        first, total = written.usage.ttft_s or 0.0, written.usage.total_s
        speed = (len(written.token_ids) - 1) / max(total - first, 1e-9)
        report.fact("loaded", f"in {seconds:.1f} s; one sequence writes {speed:,.0f} tokens/s")


def tell_model(report: Report, config: DecoderConfig, kernel: str, chat: ChatFormat) -> None:
    report.fact("context", f"{config.max_positions:,} tokens")
    executor = "C++ kernel" if kernel == "native" else f"torch, {kernel} kernel"
    report.fact("attention", executor)
    try:
        chat.begin("user")
    except StemmaError as error:
        report.fact("chat", f"not possible, plain text is: {error}")
        return
    differences = chat.differences()
    if not differences:
        report.fact("chat", "as the model's template writes it")
    for difference in differences:
        report.fact("chat", difference)

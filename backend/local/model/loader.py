"""From a model's name to a decoder with its weights in place.

Owns the one table that maps checkpoint names to the decoder's parameters. Called by LocalBackend.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stemma.backend.local.model.config import DecoderConfig
from stemma.backend.local.model.decoder import Decoder
from stemma.backend.local.model.quantize import (
    Quantization,
    QuantizationMode,
    chosen_quantization,
    quantize,
)
from stemma.lang.errors import ModelLoadError

_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder ready to run, and where it came from.

    folder: holds its config and tokenizer files. name: for people. version: changes whenever the
    files, the dtype or the quantization do; cached state of different versions must never be
    shared. quantization: how the decoder multiplies, None in its dtype.
    """

    decoder: Decoder
    config: DecoderConfig
    folder: Path
    name: str
    version: str
    quantization: Quantization | None


def load_model(
    source: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    quantization: QuantizationMode = None,
) -> LoadedModel:
    """Load a local folder of safetensors, a GGUF file (converted once) or a hub id (fetched once).

    Weights are converted to `dtype` on the way to `device`, then quantised. Raises ModelLoadError
    naming the source and what is wrong with it.
    """
    folder, name = _find(source)
    try:
        config = read_config(folder)
        files = weight_files(folder)
        version = f"{fingerprint(folder, files)}-{str(dtype).removeprefix('torch.')}"
        decoder = _empty_decoder(config, device, dtype)
        fill(decoder, files)
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot load {folder}: {error}") from error.__cause__
    chosen = chosen_quantization(quantization, decoder)
    if chosen is not None:
        quantize(decoder)
        version += f"-{chosen}"
    return LoadedModel(decoder, config, folder, name, version, chosen)


def read_config(folder: Path) -> DecoderConfig:
    """The decoder's configuration from config.json and, if there is one, generation_config.json."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; give the GGUF file itself: {', '.join(ggufs)}" if ggufs else ""
        raise ModelLoadError(f"it has no config.json{hint}")
    generation = folder / "generation_config.json"
    return DecoderConfig.from_dict(
        _read_json(folder / "config.json"), _read_json(generation) if generation.is_file() else None
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint: one, or those its index names."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index.name} has no weight_map")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise ModelLoadError(f"{index.name} names files that are not there: {_listed(absent)}")
        return files
    found = sorted(path.name for path in folder.glob("*.bin"))
    hint = f" ({_listed(found)} is not read: pickles can run code)" if found else ""
    raise ModelLoadError(f"it has no model.safetensors and no model.safetensors.index.json{hint}")


def fingerprint(folder: Path, files: list[Path]) -> str:
    """A cheap stand-in for the content: names, sizes and times of the weights, and the config."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in files:
        stat = path.stat()
        digest.update(f"\0{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}".encode())
    return digest.hexdigest()[:16]


def checkpoint_views(decoder: Decoder) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, as the parts of the decoder's parameters they fill."""
    config = decoder.config
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    views: dict[str, Tensor] = {
        "model.embed_tokens.weight": decoder.embedding,
        "model.norm.weight": decoder.norm.weight,
    }
    if not config.tied_embeddings:
        views[_HEAD] = decoder.head.weight
    for layer, block in enumerate(decoder.blocks):
        at = f"model.layers.{layer}"
        views[f"{at}.input_layernorm.weight"] = block.attention_norm.weight
        views[f"{at}.post_attention_layernorm.weight"] = block.mlp_norm.weight
        linears = (
            (block.qkv, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}),
            (block.out, {"self_attn.o_proj": config.hidden_size}),
            (block.gate_up, {"mlp.gate_proj": inner, "mlp.up_proj": inner}),
            (block.down, {"mlp.down_proj": config.hidden_size}),
        )
        for linear, parts in linears:
            for kind, parameter in linear.named_parameters():
                rows = torch.split(parameter, list(parts.values()))
                for name, view in zip(parts, rows, strict=True):
                    views[f"{at}.{name}.{kind}"] = view
    return views


def fill(decoder: Decoder, files: list[Path]) -> None:
    """Copy the checkpoint into the decoder, straight from the mapped files, no copy in between.

    Everything is checked before anything is copied. Raises ModelLoadError naming the tensors that
    are missing, unexpected, of another shape or not floating point.
    """
    views = checkpoint_views(decoder)
    with ExitStack() as stack:
        sources: dict[str, Any] = {}
        for path in files:
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"{path.name} cannot be read: {error}") from error
            sources.update(dict.fromkeys(opened.keys(), opened))
        tied = decoder.config.tied_embeddings
        _check_tensors(views, sources, spare={_HEAD} if tied else set())
        for name, view in views.items():
            view.copy_(sources[name].get_tensor(name))
        if tied and _HEAD in sources:
            head = sources[_HEAD].get_tensor(_HEAD).to(decoder.head.weight)
            if not torch.equal(head, decoder.head.weight):
                raise ModelLoadError(f"the embeddings are tied (config.json), but {_HEAD} differs")


def _check_tensors(views: dict[str, Tensor], sources: dict[str, Any], spare: set[str]) -> None:
    """Names, shapes and types; `spare` may be there or not."""
    missing = sorted(views.keys() - sources.keys())
    if missing:
        raise ModelLoadError(f"tensors are missing from the checkpoint: {_listed(missing)}")
    # Old checkpoints carry the rotary frequencies, which follow from the config.
    recomputed = {name for name in sources if name.endswith(".rotary_emb.inv_freq")}
    unexpected = sorted(sources.keys() - views.keys() - spare - recomputed)
    if unexpected:
        raise ModelLoadError(f"tensors that config.json has no place for: {_listed(unexpected)}")
    wrong = []
    for name, view in views.items():
        found = sources[name].get_slice(name)
        if found.get_shape() != list(view.shape):
            wrong.append(f"{name} is {found.get_shape()} instead of {list(view.shape)}")
        elif found.get_dtype() not in _FLOAT_TYPES:
            wrong.append(
                f"{name} has type {found.get_dtype()} instead of {', '.join(_FLOAT_TYPES)}"
            )
    if wrong:
        raise ModelLoadError(f"tensors that do not fit config.json: {_listed(wrong)}")


def _find(source: str | Path) -> tuple[Path, str]:
    """The folder that holds the model, made or fetched if need be, and the model's name."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve(), path.resolve().name
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is neither a folder nor a .gguf file")
        from stemma.backend.local.model.gguf import converted

        return converted(path), path.stem
    if isinstance(source, Path) or not _looks_like_hub_id(source):
        raise ModelLoadError(
            f"there is no {path}: a model is a local folder, a GGUF file or a hub id (owner/name)"
        )
    from stemma.backend.local.model.hub import download

    return download(source), source


def _looks_like_hub_id(source: str) -> bool:
    return (
        not source.startswith((".", "/", "~"))
        and not source.endswith(".gguf")
        and "\\" not in source
        and source.count("/") <= 1
    )


def _empty_decoder(
    config: DecoderConfig, device: torch.device | str, dtype: torch.dtype
) -> Decoder:
    try:
        return Decoder(config, torch.device(device), dtype)
    except (RuntimeError, AssertionError, TypeError) as error:  # out of memory, no such device
        weights = Decoder(config, torch.device("meta"), dtype).parameters()
        size = sum(weight.nbytes for weight in weights)
        raise ModelLoadError(
            f"its weights ({size / 1e9:.2f} GB as {dtype}) cannot be placed on {device}: {error}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} is not a JSON object")
    return value


def _listed(names: list[str], most: int = 5) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")

"""GGUF files of Llama-family models, converted once to a folder that the loader reads.

Owns the map from GGUF names to config and checkpoint names. The loader calls `converted`, which
keeps the result in Stemma's cache folder; `convert_gguf` also makes the default model.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from stemma.backend.local.model.config import QUANTIZED_AS, DecoderConfig
from stemma.backend.local.model.decoder import Decoder
from stemma.backend.local.model.default_model import CONVERSION, cache_folder
from stemma.backend.local.model.loader import checkpoint_views
from stemma.lang.errors import ModelLoadError

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

# Ways of cutting text before byte-level merges that transformers rebuilds from a GGUF file.
_TEXT_SPLITS = ("gpt-2", "smollm", "llama-bpe", "llama3", "llama-v3", "tekken", "qwen2")

_TOKENIZER_SPACE = 32_000_000  # bytes, more than the files of any tokenizer here take

Array = NDArray[Any]


def converted(path: Path) -> Path:
    """The folder made from a GGUF file, in Stemma's cache; made now if it is not there yet.

    Another file at the same path, or the same one changed, gets another folder.
    """
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{CONVERSION}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return convert_gguf(path, cache_folder() / "models" / f"{path.stem}-{key}")


def convert_gguf(gguf_path: Path, out_folder: Path) -> Path:
    """Write config, float32 weights and tokenizer of a GGUF file to `out_folder`; returns it.

    The folder appears whole or not at all; one that is there already is taken as it is. Memory: one
    tensor at a time. Raises ModelLoadError for what is no Llama-family GGUF or cannot be
    represented, and for a disk that is too full, with the folder and the bytes needed.
    """
    if not out_folder.is_dir():
        try:
            _convert(gguf_path, out_folder)
        except ModelLoadError as error:
            raise ModelLoadError(f"cannot convert {gguf_path}: {error}") from error.__cause__
    return out_folder


def _convert(gguf_path: Path, out_folder: Path) -> None:
    reader = _open(gguf_path)
    metadata = _Metadata(reader)
    config = _read_config(reader, metadata)
    _check_tokenizer(metadata)
    tensors = {_checkpoint_name(t.name): t for t in reader.tensors if t.name != _ROPE_FACTORS}
    _check_shapes(config, tensors)
    needed = sum(4 * int(t.n_elements) for t in tensors.values()) + _TOKENIZER_SPACE
    try:
        out_folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(out_folder.parent).free < needed:
            raise OSError(errno.ENOSPC, "not enough space")
        with tempfile.TemporaryDirectory(
            prefix=f".{out_folder.name}-", dir=out_folder.parent
        ) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            _write_tokenizer(gguf_path, made)
            _write_json(made / "config.json", config)
            _write_json(made / "generation_config.json", _generation_config(config))
            _write_weights(made / "model.safetensors", tensors, config)
            _move(made, out_folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelLoadError(
                f"{out_folder.parent} needs {needed:,} bytes of free space; free some, or set "
                "STEMMA_CACHE to a folder on another disk"
            ) from error
        raise ModelLoadError(f"{out_folder} cannot be written: {error}") from error


class _Metadata:
    """The key-value pairs of a GGUF file; `model(key)` reads one of the architecture's own."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def model(self, key: str, default: Any = None) -> Any:
        return self.get(f"llama.{key}", default)

    def token_id(self, kind: str) -> int | None:
        value = self.get(f"tokenizer.ggml.{kind}_token_id")
        return None if value is None else int(value)


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelLoadError(f"it cannot be read as GGUF: {error}") from error


def _read_config(reader: gguf.GGUFReader, metadata: _Metadata) -> dict[str, Any]:
    """The file's metadata as the config.json that transformers would write."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelLoadError(
            f"its architecture {architecture!r} is not supported; supported: llama"
        )
    if metadata.get("split.count", 0) > 1:
        raise ModelLoadError(
            "it is one of several parts; join them with `llama-gguf-split --merge`"
        )
    if metadata.model("expert_count", 0):
        raise ModelLoadError("llama.expert_count: mixtures of experts are not supported")
    shapes = {tensor.name: _shape(tensor) for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelLoadError("it has no tensor token_embd.weight")
    hidden, heads = metadata.model("embedding_length"), metadata.model("attention.head_count")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise ModelLoadError(
            "llama.embedding_length and llama.attention.head_count must be numbers"
        )
    head_dim = metadata.model("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.model(key, head_dim) != head_dim:
            raise ModelLoadError(
                f"llama.{key} {metadata.model(key)} is not supported; supported: the size of a "
                f"head, {head_dim}"
            )
    eos = [metadata.token_id(kind) for kind in ("eos", "eot", "eom")]  # each ends an output
    eos_ids = sorted({i for i in eos if i is not None})
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": metadata.model("feed_forward_length"),
        "num_hidden_layers": metadata.model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.model("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.model("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _read_rope(reader, metadata, head_dim),
        "max_position_embeddings": metadata.model("context_length"),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.token_id("bos"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": metadata.token_id("padding"),
        "dtype": "float32",
        QUANTIZED_AS: _quantized_as(reader),
    }


def _quantized_as(reader: gguf.GGUFReader) -> str | None:
    """The type of most of the weights, or None where that is a floating-point type."""
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    ((most, _),) = sizes.most_common(1)
    return None if most in ("F64", "F32", "F16", "BF16") else most


def _read_rope(reader: gguf.GGUFReader, metadata: _Metadata, head_dim: int) -> dict[str, Any]:
    theta = float(metadata.model("rope.freq_base", 10000.0))
    kind = metadata.model("rope.scaling.type", "none")
    factors = [t for t in reader.tensors if t.name == _ROPE_FACTORS]
    if factors and kind == "none":
        return _llama3_rope(theta, head_dim, np.asarray(factors[0].data, dtype=np.float64))
    factor = metadata.model("rope.scaling.factor", metadata.model("rope.scale_linear", 1.0))
    if kind == "none" and factor == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    if kind in ("none", "linear") and not factors:
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(factor)}
    raise ModelLoadError(f"llama.rope.scaling.type {kind!r} is not supported; supported: linear")


def _llama3_rope(theta: float, head_dim: int, factors: Array) -> dict[str, Any]:
    """The parameters behind the divisors of the rotary frequencies, which is all that GGUF keeps.

    The largest divisor is the factor; the other parameters are the same in all published models of
    this kind. Computing the divisors again checks that.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    kept = np.clip((original * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
    expected = 1 / ((1 - kept) / factor + kept)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ModelLoadError(
            f"{_ROPE_FACTORS} scales the rotary frequencies in another way than Llama 3, which is "
            "not supported; use the model's safetensors folder"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _check_tokenizer(metadata: _Metadata) -> None:
    model = metadata.get("tokenizer.ggml.model")
    split = metadata.get("tokenizer.ggml.pre")
    if model not in ("gpt2", "llama"):
        raise ModelLoadError(
            f"tokenizer.ggml.model {model!r} is not supported; supported: 'gpt2', 'llama'"
        )
    if model == "gpt2" and split not in _TEXT_SPLITS:
        raise ModelLoadError(
            f"tokenizer.ggml.pre {split!r} is not supported; supported: {', '.join(_TEXT_SPLITS)}"
        )


def _checkpoint_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    match name.split("."):
        case [kind, suffix] if kind in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[kind]}.{suffix}"
        case ["blk", layer, kind, suffix] if kind in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"
    raise ModelLoadError(f"tensor {name} has no place in a Llama decoder")


def _check_shapes(config: dict[str, Any], tensors: Mapping[str, gguf.ReaderTensor]) -> None:
    """Compare with what a decoder of this config takes, before gigabytes are written."""
    decoder = Decoder(DecoderConfig.from_dict(config), torch.device("meta"), torch.float32)
    expected = {name: list(view.shape) for name, view in checkpoint_views(decoder).items()}
    found = {name: _shape(tensor) for name, tensor in tensors.items()}
    names = expected.keys() | found.keys()
    wrong = [
        f"{name} (expected {expected.get(name)}, found {found.get(name)})"
        for name in sorted(names)
        if expected.get(name) != found.get(name)
    ]
    if wrong:
        raise ModelLoadError(f"its tensors do not fit its metadata: {', '.join(wrong[:5])}")


def _shape(tensor: gguf.ReaderTensor) -> list[int]:
    """Slowest dimension first, as everywhere but in GGUF."""
    return [int(n) for n in reversed(tensor.shape)]


def _float_tensor(tensor: gguf.ReaderTensor, config: Mapping[str, Any]) -> Array:
    """One tensor dequantised, its rows in the order of the checkpoint.

    GGUF interleaves the two halves of each query and key head (pairs 2i, 2i+1 are rotated there,
    pairs i, i + head_dim/2 here).
    """
    try:
        values: Array = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelLoadError(
            f"tensor {tensor.name} is quantised as {tensor.tensor_type.name}, which cannot be read"
        ) from error
    values = values.astype(np.float32, copy=False).reshape(_shape(tensor))
    kind = tensor.name.rsplit(".", 2)[-2]
    if kind not in ("attn_q", "attn_k"):
        return values
    heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
    paired = values.reshape(heads, config["head_dim"] // 2, 2, -1)
    return paired.swapaxes(1, 2).reshape(values.shape)


def _write_weights(
    path: Path, tensors: Mapping[str, gguf.ReaderTensor], config: Mapping[str, Any]
) -> None:
    """Write a safetensors file tensor by tensor: its library would want all of them in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * int(tensor.n_elements)
        header[name] = {"dtype": "F32", "shape": _shape(tensor), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(_float_tensor(tensor, config).astype("<f4", order="C", copy=False).data)


def _write_tokenizer(gguf_path: Path, folder: Path) -> None:
    # Imported here: transformers is slow to import and only a conversion needs it.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
        tokenizer.save_pretrained(str(folder), save_jinja_files=False)
    except OSError:
        raise
    except Exception as error:
        raise ModelLoadError(f"cannot convert the tokenizer of {gguf_path}: {error}") from error


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config[key] is not None}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _move(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster, with the same content
            raise

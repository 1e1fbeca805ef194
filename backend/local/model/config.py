"""The shape and constants of a Llama-family decoder, read from its `config.json`.

Owns the list of what is supported: everything else is refused by name, never ignored.
Read by the decoder, the loader and the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stemma.lang.errors import ModelLoadError

SUPPORTED = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
"""`model_type` to the one architecture of it that is a decoder with a language head."""

QUANTIZED_AS = "stemma_quantized_as"
"""The key of our own in the config.json of a converted GGUF file."""

# What the published models of a type mean where their config.json is silent (as in transformers).
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "mistral": 131072}
_DEFAULT_SLIDING_WINDOW = {"llama": None, "mistral": 4096}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: base wavelength and how it was stretched to longer contexts.

    kind "linear" divides every frequency by `factor`. kind "llama3" does so for wavelengths above
    original_max_positions / low_freq_factor, leaves those below original_max_positions /
    high_freq_factor alone and interpolates between (Llama 3.1). The other fields are unused by
    "default".
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A Llama-family decoder.

    num_kv_heads divides num_heads (grouped-query attention). attention_bias puts a bias on q, k, v
    and o, mlp_bias on gate, up and down. tied_embeddings: the head is the embedding matrix.
    max_positions: the context the model was made for, in tokens. eos_token_ids: the tokens that end
    an output, of generation_config.json where it names any. quantized_as: the GGUF type of the
    weights that were made floats, such as "Q4_1"; None for a checkpoint in floats.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_positions: int
    attention_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantized_as: str | None = field(default=None, compare=False)

    @property
    def attention_scale(self) -> float:
        """What the products of queries and keys are multiplied by before the softmax."""
        return float(self.head_dim**-0.5)

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> DecoderConfig:
        """Read the dicts of config.json and, if there is one, generation_config.json.

        Takes the spellings of transformers 4 (`rope_theta`, `rope_scaling`) and 5
        (`rope_parameters`). Raises ModelLoadError naming the architecture or field that is not
        supported, missing or malformed.
        """
        kind = _check_architecture(raw)
        max_positions = _count(raw, "max_position_embeddings", _DEFAULT_MAX_POSITIONS[kind])
        _check_refused_fields(raw, kind, max_positions)
        hidden_size = _count(raw, "hidden_size")
        num_heads = _count(raw, "num_attention_heads")
        num_kv_heads = _count(raw, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"num_attention_heads ({num_heads}) is not a multiple of "
                f"num_key_value_heads ({num_kv_heads})"
            )
        if raw.get("head_dim") is None and hidden_size % num_heads:
            raise ModelLoadError(
                f"hidden_size ({hidden_size}) is not a multiple of num_attention_heads "
                f"({num_heads}), and there is no head_dim"
            )
        head_dim = _count(raw, "head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise ModelLoadError(f"head_dim is {head_dim}; rotary embeddings need an even number")
        eos = _token_ids(generation or {}, "eos_token_id") or _token_ids(raw, "eos_token_id")
        return cls(
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=_count(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope=_read_rope(raw, max_positions),
            max_positions=max_positions,
            attention_bias=_flag(raw, "attention_bias"),
            mlp_bias=_flag(raw, "mlp_bias"),
            tied_embeddings=_flag(raw, "tie_word_embeddings"),
            bos_token_id=next(iter(_token_ids(raw, "bos_token_id")), None),
            eos_token_ids=eos,
            quantized_as=raw.get(QUANTIZED_AS),
        )


def _check_architecture(raw: Mapping[str, Any]) -> str:
    kind = raw.get("model_type")
    architectures = raw.get("architectures") or []
    supported = ", ".join(f"{a} (model_type {t!r})" for t, a in SUPPORTED.items())
    if kind not in SUPPORTED or any(name != SUPPORTED[kind] for name in architectures):
        named = ", ".join(map(str, architectures)) or "an unnamed architecture"
        raise ModelLoadError(
            f"{named} (model_type {kind!r}) is not supported; supported: {supported}"
        )
    return str(kind)


def _check_refused_fields(raw: Mapping[str, Any], kind: str, max_positions: int) -> None:
    """Refuse what would change the computation and is not implemented."""
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"hidden_act {activation!r} is not supported; supported: 'silu'")
    if raw.get("quantization_config") is not None:
        raise ModelLoadError(
            "a checkpoint with a quantization_config is not supported; use the model's float "
            "checkpoint or a GGUF file"
        )
    window = raw.get("sliding_window", _DEFAULT_SLIDING_WINDOW[kind])
    if window is not None and window < max_positions:
        raise ModelLoadError(
            f"sliding_window {window} is not supported; supported: null, or no less than "
            f"max_position_embeddings ({max_positions})"
        )


def _read_rope(raw: Mapping[str, Any], max_positions: int) -> Rope:
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise ModelLoadError("rope_parameters that differ between layers are not supported")
    rope = {**given}
    for key in ("rope_theta", "partial_rotary_factor"):
        if rope.get(key) is None:
            rope[key] = raw.get(key)
    if rope["partial_rotary_factor"] not in (None, 1, 1.0):
        raise ModelLoadError(
            f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported; supported: 1"
        )
    theta = _number(rope, "rope_theta", 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", _number(rope, "factor"))
    if kind == "llama3":
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        if not low < high:
            raise ModelLoadError(f"low_freq_factor ({low}) must be below high_freq_factor ({high})")
        return Rope(
            theta,
            "llama3",
            factor=_number(rope, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=_count(rope, "original_max_position_embeddings", max_positions),
        )
    raise ModelLoadError(
        f"rope_type {kind!r} is not supported; supported: 'default', 'linear', 'llama3'"
    )


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"{key} must be a positive whole number, not {value!r}")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelLoadError(f"{key} must be a positive number, not {value!r}")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = False if raw.get(key) is None else raw[key]
    if not isinstance(value, bool):
        raise ModelLoadError(f"{key} must be true or false, not {value!r}")
    return value


def _token_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One id, a list of ids or null."""
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelLoadError(f"{key} must be a token id or a list of them, not {value!r}")
    return tuple(ids)

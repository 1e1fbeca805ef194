"""Reading config.json: both spellings, the defaults, and a refusal by name for the rest."""

from __future__ import annotations

from typing import Any

import pytest

from stemma.backend.local.model.config import DecoderConfig, Rope
from stemma.lang.errors import ModelLoadError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 50000.0,
    "eos_token_id": 2,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes: Any) -> DecoderConfig:
    return DecoderConfig.from_dict({**LLAMA, **changes})


def test_a_config_of_transformers_4_is_read() -> None:
    assert read(rope_scaling=None) == DecoderConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        rope=Rope(theta=50000.0),
        max_positions=4096,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_both_spellings_of_scaled_rotary_embeddings_mean_the_same(kind: str) -> None:
    old = read(rope_scaling={"rope_type": kind, **SCALING})
    older = read(rope_scaling={"type": kind, **SCALING})
    new = {**LLAMA, "rope_parameters": {"rope_type": kind, "rope_theta": 50000.0, **SCALING}}
    del new["rope_theta"]
    assert old == older == DecoderConfig.from_dict(new)
    assert old.rope.kind == kind
    assert old.rope.theta == 50000.0
    assert old.rope.factor == 8.0


def test_what_an_old_config_leaves_out_has_the_defaults_of_transformers() -> None:
    left_out = ("num_key_value_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings")
    config = DecoderConfig.from_dict({k: v for k, v in LLAMA.items() if k not in left_out})
    assert config.num_kv_heads == 4
    assert config.rope == Rope(theta=10000.0)
    assert config.norm_eps == 1e-6
    assert config.max_positions == 2048
    assert not config.tied_embeddings


def test_an_explicit_head_size_wins_over_the_derived_one() -> None:
    assert read(head_dim=24).head_dim == 24
    assert read(head_dim=24).attention_scale == 24**-0.5
    assert read(head_dim=None).head_dim == 16


def test_end_tokens_are_those_of_the_generation_config_where_it_names_any() -> None:
    assert DecoderConfig.from_dict(LLAMA, {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    assert DecoderConfig.from_dict(LLAMA, {"temperature": 0.7}).eos_token_ids == (2,)
    assert read(eos_token_id=[7, 8]).eos_token_ids == (7, 8)
    assert read(eos_token_id=None).eos_token_ids == ()


def test_a_sliding_window_that_never_cuts_is_none() -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert read(**mistral, sliding_window=None).max_positions == 4096
    assert read(**mistral, sliding_window=4096).max_positions == 4096


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            r"GPT2LMHeadModel.*'gpt2'.*supported: LlamaForCausalLM",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*supported: 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'.*'llama3'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"sliding_window": 1024}, "sliding_window 1024"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\).*num_key_value_heads \(3\)"),
        ({"hidden_size": 66}, r"hidden_size \(66\)"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"vocab_size": None}, "vocab_size must be a positive whole number, not None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"intermediate_size": "128"}, "intermediate_size"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        read(**changes)


def test_mistral_without_a_word_on_its_window_has_one_and_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="sliding_window 4096"):
        read(
            model_type="mistral",
            architectures=["MistralForCausalLM"],
            max_position_embeddings=32768,
        )

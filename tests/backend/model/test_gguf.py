"""Converting GGUF files: the same weights, config and tokenizer come out, or nothing does."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer

from stemma.backend.local.model import gguf as conversion
from stemma.backend.local.model.default_model import FOLDER_NAME, cache_folder
from stemma.backend.local.model.gguf import convert_gguf
from stemma.backend.local.model.loader import load_model
from stemma.lang.errors import ModelLoadError

TEMPLATE = "{% for m in messages %}<|turn|>{{ m['content'] }}<|end|>{% endfor %}"
CONTROL = ["<|turn|>", "<|end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello"]

# The tokens of byte-level BPE: control tokens, one per byte, one per merge.
BYTES = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
BYTES += [chr(256 + n) for n in range(256 - len(BYTES))]
TOKENS = CONTROL + BYTES + [merge.replace(" ", "") for merge in MERGES]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, kind = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{NAMES[kind]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows, row by row: 0, d/2, 1, d/2 + 1, ... of each head."""
    size = len(values) // heads
    half = size // 2
    order = [
        head * size + i + part * half
        for head in range(heads)
        for i in range(half)
        for part in (0, 1)
    ]
    return values[order]


@dataclass
class Written:
    path: Path
    weights: dict[str, Tensor]


WriteGGUF = Callable[..., Written]


@pytest.fixture
def write_gguf(make_model: Any, tmp_path: Path) -> WriteGGUF:
    """write_gguf(variant, ...) -> a GGUF file of a tiny random Llama, and the weights it holds."""

    def write(
        variant: str = "grouped-query",
        *,
        name: str = "tiny.gguf",
        architecture: str = "llama",
        quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        pre: str = "smollm",
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
        **changes: Any,
    ) -> Written:
        reference = make_model(variant, vocab_size=len(TOKENS), **changes)
        config = reference.config
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_name("Tiny")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        types = [gguf.TokenType.CONTROL if t in CONTROL else gguf.TokenType.NORMAL for t in TOKENS]
        writer.add_token_types(types)
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template(TEMPLATE)
        for key, value in (metadata or {}).items():
            writer.add_key_value(key, value, _kind(value))
        weights = {}
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for checkpoint_name, tensor in reference.state_dict().items():
            if checkpoint_name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = tensor.numpy()
            file_name = gguf_name(checkpoint_name)
            as_stored = values
            if values.ndim == 2 and quantisation != gguf.GGMLQuantizationType.F32:
                packed = gguf.quantize(values, quantisation)
                values = gguf.dequantize(packed, quantisation)
            else:
                packed = None
            weights[checkpoint_name] = torch.from_numpy(values.copy())
            for kind, count in heads.items():
                if f".{kind}." in file_name:
                    as_stored = interleaved(as_stored, count)
            if packed is None:
                writer.add_tensor(file_name, as_stored)
            else:
                packed = gguf.quantize(as_stored, quantisation)
                writer.add_tensor(file_name, packed, raw_dtype=quantisation)
        for tensor_name, extra in (tensors or {}).items():
            writer.add_tensor(tensor_name, extra)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Written(path, weights)

    return write


def _kind(value: Any) -> gguf.GGUFValueType:
    kinds = {
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
    }
    return kinds[type(value)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """An empty cache folder, except for tests of the real default model."""
    folder = tmp_path / "cache"
    if "slow" not in request.keywords:
        monkeypatch.setenv("STEMMA_CACHE", str(folder))
    return folder


def equal_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("variant", ["plain", "grouped-query", "tied", "biases", "wide-heads"])
def test_weights_come_out_as_they_went_in(
    variant: str, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    written = write_gguf(variant)
    folder = convert_gguf(written.path, tmp_path / "out")
    assert equal_weights(load_file(folder / "model.safetensors"), written.weights)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "F16", "BF16"])
def test_quantised_weights_come_out_dequantised(
    kind: str, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    written = write_gguf("tied", quantisation=quantisation, intermediate_size=64)
    folder = convert_gguf(written.path, tmp_path / "out")
    assert equal_weights(load_file(folder / "model.safetensors"), written.weights)


@torch.inference_mode()
def test_a_gguf_file_loads_and_computes_what_its_source_does(
    write_gguf: WriteGGUF, make_model: Any, naive_attend: Any
) -> None:
    written = write_gguf("wide-heads")
    model = load_model(written.path, device="cpu", dtype=torch.float32)
    assert model.name == "tiny"
    attend = naive_attend(model.config.num_layers, model.config.attention_scale)
    tokens = torch.arange(50)
    logits = model.decoder.logits(model.decoder(tokens, tokens, attend))
    expected = make_model("wide-heads", vocab_size=len(TOKENS))(tokens[None]).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_the_folder_has_all_that_a_model_needs(write_gguf: WriteGGUF, tmp_path: Path) -> None:
    folder = convert_gguf(write_gguf().path, tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|turn|> hello!").tokens == ["<|turn|>", "Ġhello", "!"]
    assert tokenizer.decode(tokenizer.encode("hé hello").ids) == "hé hello"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == TEMPLATE
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 1}


def test_every_token_that_ends_an_output_is_kept(write_gguf: WriteGGUF, tmp_path: Path) -> None:
    written = write_gguf(metadata={"tokenizer.ggml.eot_token_id": 5})
    folder = convert_gguf(written.path, tmp_path / "out")
    model = load_model(folder, device="cpu", dtype=torch.float32)
    assert model.config.eos_token_ids == (1, 5)


def llama3_divisors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """What a GGUF file of Llama 3.1 stores, value by value from the description of its scaling."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / 1.0:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_scaling_is_found_again_from_the_stored_divisors(
    write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    divisors = llama3_divisors(32.0, 500000.0, 32)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    written = write_gguf(head_dim=32, rope_parameters=rope, tensors={"rope_freqs.weight": divisors})
    folder = convert_gguf(written.path, tmp_path / "out")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert equal_weights(load_file(folder / "model.safetensors"), written.weights)


def test_linear_scaling_is_kept(write_gguf: WriteGGUF, tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    folder = convert_gguf(write_gguf(metadata=scaling).path, tmp_path / "out")
    rope = load_model(folder, device="cpu", dtype=torch.float32).config.rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, 10000.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma' is not supported; supported: llama"),
        ({"pre": "viking"}, r"tokenizer\.ggml\.pre 'viking'.*'?gpt-2"),
        ({"metadata": {"llama.expert_count": 8}}, r"llama\.expert_count"),
        ({"metadata": {"split.count": 3}}, "one of several parts"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "'yarn' is not supported"),
        ({"tensors": {"rope_freqs.weight": np.float32([1, 2, 1, 2])}}, "another way than Llama 3"),
        ({"tensors": {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}}, "attn_q_norm"),
        (
            {"tensors": {"blk.0.attn_q.bias": np.ones(32, np.float32)}},
            r"self_attn\.k_proj\.bias \(expected \[16\], found None\)",
        ),
        ({"tensors": {"blk.3.ffn_up.weight": np.ones((56, 32), np.float32)}}, r"layers\.3"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name_and_leaves_nothing(
    options: dict[str, Any], said: str, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    written = write_gguf(**options)
    with pytest.raises(ModelLoadError, match=rf"cannot convert .*tiny\.gguf: .*{said}"):
        convert_gguf(written.path, tmp_path / "out" / "model")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content in (b"", b"not a model", b"GGUF" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"model\.gguf: it cannot be read as GGUF"):
            convert_gguf(path, tmp_path / "out")


def test_a_truncated_file_is_refused(write_gguf: WriteGGUF, tmp_path: Path) -> None:
    written = write_gguf()
    written.path.write_bytes(written.path.read_bytes()[:-2000])
    with pytest.raises(ModelLoadError, match="it cannot be read as GGUF"):
        convert_gguf(written.path, tmp_path / "out")


def test_a_second_load_uses_the_converted_folder(
    write_gguf: WriteGGUF, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_gguf()
    first = load_model(written.path, device="cpu", dtype=torch.float32)
    assert first.folder.parent == cache / "models"
    monkeypatch.setattr(conversion, "_convert", None)  # a conversion would fail
    second = load_model(written.path, device="cpu", dtype=torch.float32)
    assert (second.folder, second.version) == (first.folder, first.version)


def test_a_changed_file_is_converted_anew(write_gguf: WriteGGUF) -> None:
    first = load_model(write_gguf("plain").path, device="cpu", dtype=torch.float32)
    second = load_model(write_gguf("tied").path, device="cpu", dtype=torch.float32)
    assert first.folder != second.folder
    assert first.version != second.version
    assert second.config.tied_embeddings


def test_a_disk_without_room_is_told_before_anything_is_written(
    write_gguf: WriteGGUF, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_gguf()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ModelLoadError, match=rf"{tmp_path}/out needs [\d,]+ bytes of free space"):
        convert_gguf(written.path, tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_conversion_that_stops_halfway_leaves_nothing(
    error: BaseException,
    write_gguf: WriteGGUF,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = write_gguf()
    convert = conversion._float_tensor
    done = []

    def stop_at_the_fifth(*arguments: Any) -> Any:
        done.append(arguments)
        if len(done) == 5:
            raise error
        return convert(*arguments)

    monkeypatch.setattr(conversion, "_float_tensor", stop_at_the_fifth)
    expected = ModelLoadError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        convert_gguf(written.path, tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_faster_process_wins_and_its_folder_is_used(
    write_gguf: WriteGGUF, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, out = write_gguf(), tmp_path / "out" / "model"
    write_weights = conversion._write_weights

    def other_is_faster(*arguments: Any) -> None:
        write_weights(*arguments)
        out.mkdir()
        (out / "config.json").write_text("the other's")

    monkeypatch.setattr(conversion, "_write_weights", other_is_faster)
    assert convert_gguf(written.path, out) == out
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    assert (out / "config.json").read_text() == "the other's"


@pytest.mark.slow
@torch.inference_mode()
def test_the_default_model_is_no_further_from_float64_than_transformers(naive_attend: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder = cache_folder() / "models" / FOLDER_NAME
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"the default model has not been fetched to {folder}")
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert len(weights.keys()) == 272
    text = (
        "The radix tree keeps every shared prefix once. In 1994, 12% of 37 copies agreed; é, 日本."
    )
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(text * 4)["input_ids"])
    positions = torch.arange(len(tokens))
    logits = {}
    for dtype in (torch.float32, torch.float64):
        model = load_model(folder, device="cpu", dtype=dtype)
        attend = naive_attend(model.config.num_layers, model.config.attention_scale)
        logits[dtype] = model.decoder.logits(model.decoder(tokens, positions, attend)).double()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = reference(tokens[None]).logits[0].double()
    exact = logits[torch.float64]
    torch.testing.assert_close(theirs, exact, atol=1e-2, rtol=0)
    error, their_error = (logits[torch.float32] - exact).abs(), (theirs - exact).abs()
    assert error.max() <= 2 * their_error.max()
    assert error.mean() <= 2 * their_error.mean()

"""Loading checkpoints: what is accepted, and that every refusal names what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from stemma.backend.local.model.loader import LoadedModel, checkpoint_views, load_model
from stemma.lang.errors import ModelLoadError


def load(folder: Path | str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(folder, device="cpu", dtype=dtype)


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_every_checkpoint_tensor_lands_in_the_decoder(tiny_folder: Path) -> None:
    model = load(tiny_folder)
    stored = load_file(tiny_folder / "model.safetensors")
    views = checkpoint_views(model.decoder)
    assert views.keys() == stored.keys()
    assert all(torch.equal(views[name], stored[name]) for name in stored)
    filled = {view.untyped_storage().data_ptr() for view in views.values()}
    assert filled == {p.untyped_storage().data_ptr() for p in model.decoder.parameters()}
    assert sum(v.numel() for v in views.values()) == sum(
        p.numel() for p in model.decoder.parameters()
    )
    assert model.name == "tiny"
    assert model.folder == tiny_folder


def test_a_sharded_checkpoint_gives_the_same_weights(make_model: Any, tmp_path: Path) -> None:
    reference = make_model("grouped-query")
    reference.save_pretrained(tmp_path / "whole")
    reference.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    whole = load(tmp_path / "whole").decoder.state_dict()
    sharded = load(tmp_path / "sharded").decoder.state_dict()
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_weights_are_converted_to_the_type_asked_for(tiny_folder: Path) -> None:
    exact = load(tiny_folder).decoder
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        decoder = load(tiny_folder, dtype).decoder
        for parameter, source in zip(decoder.parameters(), exact.parameters(), strict=True):
            assert torch.equal(parameter, source.to(dtype))


def test_a_half_precision_checkpoint_is_widened_exactly(make_model: Any, tmp_path: Path) -> None:
    make_model().to(torch.bfloat16).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    views = checkpoint_views(load(tmp_path).decoder)
    assert all(torch.equal(views[name], stored[name].float()) for name in stored)


def test_parameters_take_no_gradient(tiny_folder: Path) -> None:
    assert not any(p.requires_grad for p in load(tiny_folder).decoder.parameters())


def test_a_missing_tensor_is_named(tiny_folder: Path) -> None:
    edit_weights(tiny_folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))  # type: ignore[arg-type,return-value]
    with pytest.raises(ModelLoadError, match=r"missing.*: model\.layers\.1\.mlp\.up_proj\.weight$"):
        load(tiny_folder)


def test_an_unexpected_tensor_is_named(tiny_folder: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    edit_weights(tiny_folder, lambda t: t.update({name: torch.ones(8)}))
    with pytest.raises(ModelLoadError, match=r"no place for: .*q_norm\.weight$"):
        load(tiny_folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tiny_folder: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    edit_weights(tiny_folder, lambda t: t.update({name: torch.ones(32, 32)}))
    with pytest.raises(ModelLoadError, match=r"2\.self_attn\.k_proj.*\[32, 32\].*\[16, 32\]"):
        load(tiny_folder)


def test_an_integer_tensor_is_refused(tiny_folder: Path) -> None:
    name = "model.norm.weight"
    edit_weights(tiny_folder, lambda t: t.update({name: torch.ones(32, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has type I8"):
        load(tiny_folder)


def test_more_layers_in_the_config_than_in_the_checkpoint_are_refused(tiny_folder: Path) -> None:
    edit_config(tiny_folder, num_hidden_layers=4)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.3.* and \d more"):
        load(tiny_folder)


def test_biases_that_the_config_does_not_announce_are_refused(
    make_model: Any, tmp_path: Path
) -> None:
    make_model("biases").save_pretrained(tmp_path)
    edit_config(tmp_path, mlp_bias=False)
    with pytest.raises(ModelLoadError, match=r"no place for: .*down_proj\.bias"):
        load(tmp_path)


def test_stored_rotary_frequencies_of_old_checkpoints_are_passed_over(tiny_folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(tiny_folder, lambda t: t.update({name: torch.ones(4)}))
    assert load(tiny_folder).config.num_layers == 3


def test_a_head_beside_tied_embeddings_must_equal_them(make_model: Any, tmp_path: Path) -> None:
    make_model("tied").save_pretrained(tmp_path)
    decoder = load(tmp_path).decoder
    assert decoder.head.weight is decoder.embedding
    embedding = decoder.embedding
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    assert load(tmp_path).config.tied_embeddings
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ModelLoadError, match=r"tied.*lm_head\.weight differs"):
        load(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"give the GGUF file itself: model\.gguf"):
        load(tmp_path)


def test_pickled_weights_are_not_read(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").rename(tiny_folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no model\.safetensors.*pytorch_model\.bin"):
        load(tiny_folder)


def test_an_absent_shard_is_named(make_model: Any, tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        load(tmp_path)


def test_broken_files_are_named(tiny_folder: Path) -> None:
    weights = tiny_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read"):
        load(tiny_folder)
    (tiny_folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        load(tiny_folder)


def test_what_is_no_model_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"there is no nowhere/model\.gguf"):
        load("nowhere/model.gguf")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelLoadError, match=r"neither a folder nor a \.gguf file"):
        load(tmp_path / "weights.bin")


@pytest.mark.parametrize("device", ["cuda:99", "no-such-device"])
def test_a_device_that_is_not_there_is_named_with_the_size(tiny_folder: Path, device: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"GB as torch.float32.*{device}"):
        load_model(tiny_folder, device=device, dtype=torch.float32)


def test_the_version_changes_with_all_that_the_cache_depends_on(tiny_folder: Path) -> None:
    first = load(tiny_folder).version
    assert load(tiny_folder).version == first
    assert load(tiny_folder, torch.float64).version != first
    eight = load_model(tiny_folder, device="cpu", dtype=torch.float32, quantization="int8")
    assert eight.version != first
    edit_weights(tiny_folder, lambda t: t["model.norm.weight"].add_(1))  # type: ignore[arg-type,return-value]
    second = load(tiny_folder).version
    edit_config(tiny_folder, rms_norm_eps=1e-3)
    third = load(tiny_folder).version
    os.utime(tiny_folder / "model.safetensors", ns=(1, 1))
    fourth = load(tiny_folder).version
    assert len({first, second, third, fourth}) == 4


def test_loading_a_folder_imports_neither_transformers_nor_the_hub(tiny_folder: Path) -> None:
    code = (
        "import sys, torch\n"
        "from stemma.backend.local.model.loader import load_model\n"
        f"load_model({str(tiny_folder)!r}, device='cpu', dtype=torch.float32)\n"
        "print([m for m in ('transformers', 'huggingface_hub', 'gguf') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


class FakeHub:
    """Stands in for huggingface_hub's functions, with one model and an empty cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.error: Exception | None = None
        self.no_connection: Exception | None = None
        self.cached = False
        self.calls: list[str] = []

    def get_hf_file_metadata(self, url: str, *, timeout: float) -> None:
        assert url.endswith("/resolve/main/config.json")
        if self.no_connection is not None:
            raise self.no_connection

    def hf_hub_download(self, repo_id: str, filename: str) -> str:
        self.calls.append(filename)
        if self.error is not None:
            raise self.error
        return str(self.folder / filename)

    def snapshot_download(
        self, repo_id: str, *, allow_patterns: list[str], local_files_only: bool = False
    ) -> str:
        if local_files_only:
            if not self.cached:
                raise LocalEntryNotFoundError("not in the cache")
        else:
            self.calls.append("snapshot")
        return str(self.folder)


@pytest.fixture
def hub(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tiny_folder)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fake.get_hf_file_metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_a_hub_id_is_fetched_and_keeps_its_name(hub: FakeHub) -> None:
    model = load("someone/tiny-llama")
    assert model.name == "someone/tiny-llama"
    assert model.folder == hub.folder
    assert hub.calls == ["config.json", "snapshot"]


def test_a_hub_model_that_was_fetched_before_needs_no_network(hub: FakeHub) -> None:
    hub.cached = True
    (hub.folder / "tokenizer.json").touch()
    assert load("someone/tiny-llama").folder == hub.folder
    assert hub.calls == []


@pytest.mark.parametrize("absent", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_interrupted_fetch_is_taken_up_again(hub: FakeHub, absent: str) -> None:
    hub.cached = True
    (hub.folder / "tokenizer.json").touch()
    (hub.folder / absent).unlink()
    hub.error = LocalEntryNotFoundError("no connection")
    with pytest.raises(ModelLoadError, match="hub cannot be reached"):
        load("someone/tiny-llama")
    assert hub.calls == ["config.json"]


def test_an_unsupported_hub_model_is_refused_before_its_weights_are_fetched(hub: FakeHub) -> None:
    edit_config(hub.folder, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    with pytest.raises(ModelLoadError, match=r"someone/gpt.*GPT2LMHeadModel"):
        load("someone/gpt")
    assert hub.calls == ["config.json"]


def hub_answers(kind: type[Exception]) -> Exception:
    """The error without the HTTP response it wraps, whose class depends on the hub's version."""
    return kind.__new__(kind, "no")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LocalEntryNotFoundError("no connection"), "hub cannot be reached"),
        (hub_answers(RepositoryNotFoundError), "knows no model of that name"),
        (hub_answers(GatedRepoError), "access to it is restricted.*log in"),
        (HFValidationError("bad id"), "neither a local path nor a hub id"),
    ],
)
def test_each_failure_of_the_hub_says_what_to_do(hub: FakeHub, error: Exception, said: str) -> None:
    hub.error = error
    with pytest.raises(ModelLoadError, match=f"cannot fetch someone/model: .*{said}") as raised:
        load("someone/model")
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [OSError("no route"), RuntimeError("no route"), OfflineModeIsEnabled("no route")]
)
def test_a_hub_that_does_not_answer_is_asked_for_no_file(hub: FakeHub, error: Exception) -> None:
    hub.no_connection = error
    with pytest.raises(ModelLoadError, match=r"cannot be reached \(no route\); .*a GGUF file"):
        load("someone/model")
    assert hub.calls == []


def test_what_the_hub_answers_is_left_to_the_download(hub: FakeHub) -> None:
    hub.no_connection = hub_answers(HfHubHTTPError)
    assert load("someone/tiny-llama").folder == hub.folder


def test_without_a_network_the_error_comes_within_seconds() -> None:
    code = """
import time
from stemma.backend.local.model.hub import download
from stemma.lang.errors import ModelLoadError
started = time.perf_counter()
try:
    download("someone/model-that-is-not-there")
except ModelLoadError as error:
    print(time.perf_counter() - started, error)
"""
    # Nobody listens on this port: the connection is refused.
    offline = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=offline)
    seconds, _, told = ran.stdout.partition(" ")
    assert "the hub cannot be reached" in told
    assert float(seconds) < 10  # with its retries the hub's library takes 23 s
    assert ran.stderr == ""

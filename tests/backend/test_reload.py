"""Weights that are loaded again: nothing that the old ones computed is found any more."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stemma.backend.base import Namespace
from stemma.backend.local.backend import LocalBackend
from stemma.lang.errors import Cancelled, InvalidArgument, ModelLoadError
from stemma.lang.sampling import SamplingParams
from tests.backend.conftest import Make

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = list(range(5, 45))


def test_loading_changed_files_gives_another_version(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    with LocalBackend(folder, kv_tokens=512) as first, LocalBackend(folder, kv_tokens=512) as same:
        assert first.model_version == same.model_version
    shutil.copy(tiny_model(seed=1) / "model.safetensors", folder / "model.safetensors")
    with LocalBackend(folder, kv_tokens=512) as changed:
        assert changed.config == first.config
        assert changed.model_version != first.model_version
    with LocalBackend(folder, kv_tokens=512, dtype="float64") as wider:
        assert wider.model_version != changed.model_version


def test_reloaded_weights_find_nothing_of_the_old_and_write_their_own_text(
    make: Make, tiny_model: Callable[..., Path]
) -> None:
    expected = {}
    for seed in (0, 1):
        with LocalBackend(tiny_model(seed=seed), dtype="float64", kv_tokens=512) as fresh:
            expected[seed] = fresh.generate([PROMPT], GREEDY)[0].token_ids
    assert expected[0] != expected[1]
    backend = make()
    versions = [backend.model_version]
    backend.generate([PROMPT], GREEDY)
    for seed in (1, 0, 1):
        backend.reload_weights(tiny_model(seed=seed))
        versions.append(backend.model_version)
        assert backend.tree().total_tokens == 0
        found = backend.generate([PROMPT], GREEDY)[0]
        assert (found.token_ids, found.usage.cached_tokens) == (expected[seed], 0)
        assert backend.generate([PROMPT], GREEDY)[0].usage.cached_tokens == len(PROMPT) - 1
    assert len(set(versions)) == 4
    backend.check()


def test_reloading_the_same_files_is_a_new_version_too(make: Make) -> None:
    backend = make()
    first = backend.model_version
    expected = backend.generate([PROMPT], GREEDY)[0].token_ids
    backend.reload_weights()
    assert backend.model_version != first
    found = backend.generate([PROMPT], GREEDY)[0]
    assert (found.token_ids, found.usage.cached_tokens) == (expected, 0)


def test_request_made_before_a_reload_shares_nothing_with_those_made_after(make: Make) -> None:
    backend = make()
    late = backend.make_request(PROMPT, GREEDY, Namespace(), on_finish=print, on_error=print)
    backend.reload_weights()
    early = backend.make_request(PROMPT, GREEDY, Namespace(), on_finish=print, on_error=print)
    assert late.namespace != early.namespace


def test_open_branch_goes_on_with_the_new_weights(
    make: Make, tiny_model: Callable[..., Path]
) -> None:
    backend = make()
    branch = backend.open()
    branch.append("The quick brown fox")
    branch.generate(GREEDY).result(30)
    ids = branch.token_ids()
    backend.reload_weights(tiny_model(seed=1))
    assert branch.token_ids() == ids
    found = branch.generate(GREEDY, heal=False).result(30)
    with LocalBackend(tiny_model(seed=1), dtype="float64", kv_tokens=512) as fresh:
        assert found.token_ids == fresh.generate([ids], GREEDY)[0].token_ids
    branch.close()
    backend.check()


def test_pins_end_with_the_weights_that_computed_them(make: Make) -> None:
    backend = make()
    pin = backend.pin(PROMPT, ttl=60)
    backend.reload_weights()
    assert not pin.active
    stats = backend.stats()
    assert stats.pinned_tokens == stats.protected_tokens == 0
    assert stats.free_tokens == stats.pool_tokens
    pin.release()
    backend.check()


def test_other_shape_is_refused_and_changes_nothing(
    make: Make, tiny_model: Callable[..., Path]
) -> None:
    backend = make()
    expected = backend.generate([PROMPT], GREEDY)[0].token_ids
    version = backend.model_version
    with pytest.raises(ModelLoadError, match="another shape"):
        backend.reload_weights(tiny_model(num_hidden_layers=3))
    with pytest.raises(ModelLoadError):
        backend.reload_weights("/nowhere/at/all")
    assert backend.model_version == version
    found = backend.generate([PROMPT], GREEDY)[0]
    assert (found.token_ids, found.usage.cached_tokens) == (expected, len(PROMPT) - 1)


def test_weights_that_would_run_otherwise_are_refused(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalBackend(tiny_model(), kv_tokens=512, quantization="int8") as backend:
        expected = backend.generate([PROMPT], GREEDY)[0].token_ids
        monkeypatch.setattr(backend, "_quantization", None)
        with pytest.raises(ModelLoadError, match=r"not quantised.*int8.*new LocalBackend"):
            backend.reload_weights(tiny_model(seed=1))
        assert backend.generate([PROMPT], GREEDY)[0].token_ids == expected


def test_reload_waits_for_nobody_and_harms_nobody(make: Make) -> None:
    backend = make()
    branch = backend.open()
    branch.append("The quick brown fox")
    generation = branch.generate(SamplingParams(max_tokens=900, seed=1, ignore_eos=True))
    with pytest.raises(InvalidArgument, match="under way"):
        backend.reload_weights()
    generation.cancel()
    with pytest.raises(Cancelled):
        generation.result(30)
    backend.reload_weights()
    backend.check()

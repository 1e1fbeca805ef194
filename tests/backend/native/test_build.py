"""Building the kernels: once, and every way that it can go wrong."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.native import build
from stemma.lang.errors import InvalidArgument, ModelLoadError
from stemma.lang.sampling import SamplingParams
from tests.conftest import TinyModel

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing built yet, in this process or on disk."""
    monkeypatch.setenv("STEMMA_CACHE", str(tmp_path / "cache"))
    build.library.cache_clear()
    yield tmp_path / "cache"
    build.library.cache_clear()


def test_it_is_built_once(
    library: ctypes.CDLL, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(build.library(), ctypes.CDLL)
    (made,) = own_cache.glob("kernels/*")
    assert made.suffix == ".so"
    assert own_cache.joinpath("kernels").stat().st_mode & 0o077 == 0
    build.library.cache_clear()
    monkeypatch.setattr(build, "_build", None)
    assert isinstance(build.library(), ctypes.CDLL)


def test_a_compiler_that_fails_is_said_and_leaves_nothing(
    tiny_model: TinyModel, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ModelLoadError, match=r"compile=True: .* cannot be built .*false ends with"):
        build.kernels(True, CPU, torch.float32)
    assert not list(own_cache.glob("kernels/*"))
    backend = LocalBackend(tiny_model(), device="cpu", dtype="float32", kv_tokens=500)
    assert backend.engine.attention.kernel != "native"
    assert len(backend.generate([[3]], GREEDY)[0].token_ids) == 8
    backend.close()


def test_no_compiler_is_said(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(ModelLoadError, match=r"there is no C\+\+ compiler: install g\+\+"):
        build.kernels(True, CPU, torch.float32)
    assert build.kernels("auto", CPU, torch.float32) is None


def test_a_file_that_is_no_library_is_said(
    library: ctypes.CDLL, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = build.compiler()
    assert compiler is not None
    path = build.library_path(compiler)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nothing of use")
    with pytest.raises(ModelLoadError, match=f"loaded: .*{path.name}"):
        build.kernels(True, CPU, torch.float32)


def test_another_source_or_processor_is_another_library(
    library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = build.compiler()
    assert compiler is not None
    own = build.library_path(compiler)
    with monkeypatch.context() as patch:
        patch.setattr(build, "_processor", lambda: "another one")
        assert build.library_path(compiler) != own
    for name in (*build.SOURCES, *build.HEADERS):
        (tmp_path / name).write_text((build.FOLDER / name).read_text() + "\n")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    assert build.library_path(compiler) != own


def test_it_shares_the_threads_of_torch(library: ctypes.CDLL) -> None:
    if not build._openmp():
        pytest.skip("this torch brings no OpenMP library of its own")
    maps = Path("/proc/self/maps").read_text()
    loaded = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line}
    assert len(loaded) == 1


@pytest.mark.parametrize("mode", ["yes", 1.5, None, "wait"])
def test_modes_that_do_not_exist_are_refused(mode: Any) -> None:
    with pytest.raises(InvalidArgument, match="must be 'auto', True or False"):
        build.kernels(mode, CPU, torch.float32)


def test_what_they_are_not_for_goes_without_or_is_said() -> None:
    assert build.kernels("auto", CPU, torch.float64) is None
    assert build.kernels(False, CPU, torch.float32) is None
    with pytest.raises(ModelLoadError, match=r"float32 on a CPU, and this is torch\.float64"):
        build.kernels(True, CPU, torch.float64)


def test_the_environment_decides_where_the_program_does_not(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEMMA_COMPILE", "off")
    assert build.kernels("auto", CPU, torch.float32) is None
    assert build.kernels(True, CPU, torch.float32) is build.library()
    monkeypatch.setenv("STEMMA_COMPILE", "on")
    assert build.kernels("auto", CPU, torch.float32) is build.library()
    monkeypatch.setenv("STEMMA_COMPILE", "sometimes")
    with pytest.raises(InvalidArgument, match="must be auto, on or off"):
        build.kernels("auto", CPU, torch.float32)


def test_the_sources_compile_without_a_warning(library: ctypes.CDLL, tmp_path: Path) -> None:
    compiler = build.compiler()
    assert compiler is not None
    for name in build.SOURCES:
        command = [str(compiler), *build.FLAGS, "-Wall", "-Wextra", "-c", str(build.FOLDER / name)]
        done = subprocess.run(
            [*command, "-o", str(tmp_path / "out.o")], capture_output=True, text=True
        )
        assert done.returncode == 0
        assert not done.stderr

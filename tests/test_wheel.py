"""The wheel is the whole house: it has every module and imports without the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("stemma", "interpreter", "backend", "lang")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that installing the wheel would fill."""
    # A copy: in the sources an old build/ would lend the wheel modules that are gone.
    copy = tmp_path_factory.mktemp("sources")
    for name in FLOORS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(copy / "dist"), str(copy)],
        check=True,
    )
    (wheel,) = (copy / "dist").glob("stemma_lm-*.whl")
    target = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def modules(folder: Path) -> set[str]:
    names = {
        ".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.py")
    }
    return {name.removesuffix(".__init__") for name in names}


@pytest.mark.slow
def test_the_wheel_has_every_module_and_no_other(unpacked: Path) -> None:
    expected = modules(ROOT / "stemma")
    expected = {"stemma" if name == "__init__" else f"stemma.{name}" for name in expected}
    for floor in ("interpreter", "backend", "lang"):
        for name in modules(ROOT / floor):
            expected.add(f"stemma.{floor}" if name == "__init__" else f"stemma.{floor}.{name}")
    assert modules(unpacked) == expected
    assert (unpacked / "stemma" / "py.typed").exists()
    assert (unpacked / "stemma" / "treeview" / "assets" / "page.html").exists()


@pytest.mark.slow
def test_every_module_of_the_wheel_imports(unpacked: Path, tmp_path: Path) -> None:
    names = sorted(modules(unpacked) - {"stemma.__main__"})
    code = (
        "import importlib, stemma\n"
        f"for name in {names!r}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(unpacked)!r}), module.__file__\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

"""Imports go down only: stemma -> interpreter -> backend -> lang; the door loads no engine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FLOORS = ("stemma", "interpreter", "backend", "lang")  # from the top down
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub"}
# What `lang` must not reach for: it is values and syntax.
INPUT_OUTPUT = {
    "asyncio",
    "http",
    "io",
    "os",
    "pathlib",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "urllib",
}


def source_files(floor: str) -> list[Path]:
    return sorted((ROOT / floor).rglob("*.py"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module name that an import statement anywhere in the file mentions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "stemma":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else "stemma"


ALL_FILES = [(floor, path) for floor in FLOORS for path in source_files(floor)]


@pytest.mark.parametrize(
    ("floor", "path"), ALL_FILES, ids=[str(path.relative_to(ROOT)) for _, path in ALL_FILES]
)
def test_a_file_imports_only_from_its_floor_and_those_below(floor: str, path: Path) -> None:
    allowed = FLOORS[FLOORS.index(floor) :]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {
        module for module in imported_modules(tree) if floor_of(module) not in (None, *allowed)
    }
    # `from stemma.lang import ops` mentions `stemma.lang` and `stemma.lang.ops`, never `stemma`.
    assert found == set()


@pytest.mark.parametrize("path", source_files("lang"), ids=lambda path: path.name)
def test_lang_imports_no_model_library_and_does_no_input_or_output(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tops = {module.split(".")[0] for module in imported_modules(tree)}
    assert tops & (HEAVY | INPUT_OUTPUT) == set()
    calls = {
        n.func.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    assert calls & {"open", "print", "input"} == set()


def test_importing_stemma_loads_no_model_library() -> None:
    code = f"import sys, stemma; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"


def test_the_command_line_starts_without_a_model_library() -> None:
    code = f"import sys, stemma.cli; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    imported = {
        module.split(".")[0]
        for _, path in ALL_FILES
        if path.name != "pytest_plugin.py"  # which is loaded by pytest, where that is installed
        for module in imported_modules(ast.parse(path.read_text(encoding="utf-8")))
    }
    owners = packages_distributions()
    foreign = imported - sys.stdlib_module_names - {"stemma"}
    needed = {normal(owners[name][0]) for name in foreign}
    declared = {
        normal(re.split(r"[^\w.-]", line)[0]) for line in PROJECT["project"]["dependencies"]
    }
    assert needed == declared


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_folder_of_code_is_installed() -> None:
    there = set()
    for floor in FLOORS:
        for path in source_files(floor):
            inside = path.parent.relative_to(ROOT).parts
            there.add(".".join(inside if floor == "stemma" else ("stemma", *inside)))
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == there


@pytest.mark.parametrize("floor", FLOORS)
def test_every_folder_of_code_is_a_package(floor: str) -> None:
    folders = {path.parent for path in source_files(floor)}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()

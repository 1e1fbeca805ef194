"""Finds the program that `stemma run FILE.py[:program]` means.

Loads the file as a module, as `python FILE.py` would find its neighbours, but without running what
stands under `if __name__ == "__main__"`.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import typer

from stemma.interpreter.program import Program

MODULE = "stemma_program"


def split_target(target: str) -> tuple[Path, str | None]:
    """The file and, after a colon, the program's name. Raises BadParameter without such a file."""
    path, name = Path(target), None
    if not path.exists() and ":" in target:
        head, _, name = target.rpartition(":")
        path = Path(head)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise bad_file(f"{path} {what}: give a Python file that defines a program")
    return path.absolute(), name or None


def load_file(path: Path) -> ModuleType:
    """Run the file's top level. Raises what it raises."""
    sys.path.insert(0, str(path.parent))
    loader = SourceFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # where annotations and dataclasses look for the names in it
    loader.exec_module(module)
    return module


def choose_program(module: ModuleType, path: Path, name: str | None) -> Program:
    """The program of that name, or the only one. Raises BadParameter that names the choices."""
    found = {key: value for key, value in vars(module).items() if isinstance(value, Program)}
    if name is not None:
        if name in found:
            return found[name]
        raise bad_file(f"{path.name} has no program {name!r}; it has {_listed(found)}")
    own = {key: p for key, p in found.items() if p.body.__module__ == MODULE}
    public = {key: program for key, program in own.items() if not key.startswith("_")}
    for names in (public, own, found):
        if len(set(map(id, names.values()))) == 1:
            return next(iter(names.values()))
        if names:
            choices = " or ".join(f"{path.name}:{key}" for key in names)
            raise bad_file(f"{path.name} has {len(names)} programs: say which, {choices}")
    raise bad_file(f"{path.name} has no program: decorate a function with @stemma.function")


def bad_file(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="FILE")


def _listed(names: dict[str, Program]) -> str:
    return ", ".join(names) or "none"

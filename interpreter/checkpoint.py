"""The checkpoint of a batch: a file of JSON lines that tells what its finished items came to.

Used by `batch.py`; `stemma batch` gives it records of its own. The first line says which batch it
is, each other line is one item. A line is written as soon as its item is finished, so whatever ends
the process, the next run of the same batch goes on from there.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import pickle
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, BinaryIO

from stemma.backend.base import Backend
from stemma.backend.one_writer import take
from stemma.interpreter.finished import record_of, restore
from stemma.interpreter.json_values import encode
from stemma.interpreter.lasting_shapes import refuse_lost_shape
from stemma.interpreter.state import ProgramState
from stemma.lang.errors import InvalidArgument

FORMAT = 1
_BEGINS = b'{"stemma_batch"'

# Options that change no text; the seed of the batch is in the first line.
_CHANGE_NO_TEXT = {"timeout", "salt", "cache", "priority", "stream", "record", "replay"}


class Checkpoint:
    """Records of finished items, read when it is opened and added to as they finish.

    path: the file; it is made where it is not there. seed: of the batch, once it is open.
    encode: the record of a finished state, in JSON's types.
    decode: a state that was opened for the item, and such a record, as the item's result.
    check_shape: refuses a generation whose value the record could not hold; None where all can.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        encode: Callable[[ProgramState], Any] = record_of,
        decode: Callable[[ProgramState, Any], Any] = restore,
    ) -> None:
        self.check_shape = refuse_lost_shape if encode is record_of else None
        self.path = Path(path)
        self.seed: int | None = None
        self._encode, self._decode = encode, decode
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._records: dict[tuple[int, str], tuple[int, Any]] = {}
        self._indices: set[int] = set()
        self._warned = False

    def __len__(self) -> int:
        """How many items it has records of."""
        return len(self._indices)

    def open(
        self, *, program: str, code: str, backend: Backend, seed: int | None, new_seed: int
    ) -> int:
        """Read the file, or begin it; the seed of the batch.

        program, code: the name, and the key of the body. backend: whose answers they are.
        seed: what the batch must have, None: that of the file. new_seed: of a file that begins now.
        Raises InvalidArgument for the file of another batch, for one that is no checkpoint, and
        while another run writes to it; OSError.
        """
        self._file = file = _opened(self.path)
        try:
            lines = self._whole_lines(file)
            told = {"program": program, "code": code}
            told |= {"model": backend.model_name, "weights": backend.identity()}
            if not lines:
                self.seed = new_seed if seed is None else seed
                self._write({"stemma_batch": FORMAT, **told, "seed": self.seed})
                return self.seed
            recorded = self._loaded(lines[0], 1)
            self._check_same(recorded, told if seed is None else {**told, "seed": seed})
            for number, line in enumerate(lines[1:], 2):
                self._note(number, self._loaded(line, number))
            self.seed = int(recorded["seed"])
            return self.seed
        except BaseException:
            self.close()
            raise

    def find(self, index: int, key: str) -> bool:
        """Whether there is a record of the item; warns once where it was another item then."""
        with self._lock:
            found = (index, key) in self._records
            warn = not found and index in self._indices and not self._warned
            self._warned = self._warned or warn
        if warn:
            warnings.warn(
                f"{self.path}: item {index} has other arguments or options than when it was "
                "recorded; it is run anew, and so are all others that have changed",
                RuntimeWarning,
                stacklevel=2,
            )
        return found

    def result(self, index: int, key: str, state: ProgramState) -> Any:
        """What the item came to; `state` was opened for it."""
        number, record = self._records[index, key]
        try:
            return self._decode(state, record)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._unreadable(number, f"{type(error).__name__}: {error}") from error

    def add(self, index: int, key: str, state: ProgramState) -> None:
        """Write down that an item is finished. Raises InvalidArgument where JSON cannot hold it.

        Nothing once it was closed: the batch was given up, and nobody waits for the item.
        """
        record = self._encode(state)
        with self._lock:
            if self._file is not None:
                self._write({"index": index, "key": key, "result": record})
                self._indices.add(index)

    def close(self) -> None:
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                with self._naming_the_file():
                    file.close()

    # The file

    def _whole_lines(self, file: BinaryIO) -> list[bytes]:
        """The lines; what is half written at the end is cut off."""
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        begin = content[: len(_BEGINS)]
        if content and not (content.startswith(_BEGINS) if whole else _BEGINS.startswith(begin)):
            raise InvalidArgument(
                f"checkpoint {self.path}: is there, and no checkpoint of a batch: give another path"
            )
        file.truncate(len(whole))
        file.seek(len(whole))
        return whole.splitlines()

    def _loaded(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            loaded = json.loads(line.decode("utf-8", "surrogatepass"))
        except ValueError as error:
            raise self._unreadable(number, str(error)) from error
        if not isinstance(loaded, dict):
            raise self._unreadable(number, "it is no object")
        return loaded

    def _note(self, number: int, line: dict[str, Any]) -> None:
        try:
            index, key, record = line["index"], line["key"], line["result"]
        except KeyError as error:
            raise self._unreadable(number, f"it has no {error}") from error
        self._records[index, key] = number, record
        self._indices.add(index)

    def _unreadable(self, number: int, why: str) -> InvalidArgument:
        return InvalidArgument(
            f"checkpoint {self.path}, line {number}: cannot be read ({why}): remove the line, or "
            "the file to begin anew"
        )

    def _check_same(self, recorded: dict[str, Any], now: dict[str, Any]) -> None:
        if recorded.get("stemma_batch") != FORMAT:
            raise InvalidArgument(
                f"checkpoint {self.path}: was written by another version of Stemma: give another "
                "path, or remove it to begin anew"
            )
        for name, value in now.items():
            if recorded.get(name) != value:
                which = f"{name} {recorded.get(name)!r}, and now it is {value!r}"
                if name == "code":
                    which = f"another source text of program {now['program']!r}"
                elif name == "weights":
                    which = f"other weights of {now['model']}, or computed in another way"
                raise InvalidArgument(
                    f"checkpoint {self.path}: belongs to a batch with {which}: give another path, "
                    "or remove it to begin anew"
                )

    def _write(self, line: dict[str, Any]) -> None:
        """One line, which has left the process when this returns."""
        assert self._file is not None
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        with self._naming_the_file():
            self._file.write(text.encode("utf-8", "surrogatepass") + b"\n")
            self._file.flush()

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """Of what the system has refused, a full disk or a limit, say of which file."""
        try:
            yield
        except OSError as error:
            if error.filename is None:
                error.filename = str(self.path)
            raise


def _opened(path: Path) -> BinaryIO:
    """The file, for reading and writing, and for no other run meanwhile."""
    if not path.absolute().parent.is_dir():
        raise InvalidArgument(f"checkpoint {path}: there is no folder {path.absolute().parent}")
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no file that keeps what is written"
        raise InvalidArgument(f"checkpoint {path}: is {what}: give the path of a file")
    # "r+" does not make the file, "a+" writes at its end wherever one seeks, "w+" empties it.
    file = os.fdopen(
        os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b"
    )
    if not take(file.fileno()):
        file.close()
        raise InvalidArgument(
            f"checkpoint {path}: another batch is writing to it; wait for its end, or give another "
            "path"
        )
    return file


def code_key(body: Callable[..., Any]) -> str:
    """A hash of a body's source text, comments and spaces aside; not of what it calls."""
    inner = inspect.unwrap(body)
    while hasattr(inner, "func"):  # a partial, as methods are
        inner = inner.func
    if not inspect.isroutine(inner):
        inner = type(inner).__call__
    if getattr(inner, "__name__", "") == "<lambda>":  # whose source is the whole statement
        return _hash(_of_code(inner.__code__).encode())
    try:
        text = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(inner))))
    except (OSError, TypeError, SyntaxError):  # typed in, or not written in Python
        code = getattr(inner, "__code__", None)
        text = _of_code(code) if code is not None else repr(inner)
    return _hash(text.encode("utf-8", "surrogatepass"))


def _of_code(code: CodeType) -> str:
    inner = [
        _of_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts
    ]
    return f"{code.co_code.hex()} {inner} {code.co_names}"


def item_key(index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """A hash of what an item is run with. Raises InvalidArgument for what has no lasting form."""
    told: list[Any] = [
        _lasting(each, f"argument {i} of item {index}") for i, each in enumerate(args)
    ]
    told += [
        [name, _lasting(kwargs[name], f"{name}= of item {index}")]
        for name in sorted(kwargs)
        if name not in _CHANGE_NO_TEXT
    ]
    return _hash(json.dumps(told).encode())


def _lasting(value: Any, what: str) -> Any:
    """The value in a form that is the same in another process."""
    if isinstance(value, Backend):
        return [value.model_name, value.identity()]
    try:
        return encode(value, what)
    except InvalidArgument:
        pass
    try:
        return _hash(pickle.dumps(value, protocol=4))
    except Exception as error:
        raise InvalidArgument(
            f"{what}: a checkpoint must know it again in another process, and a "
            f"{type(value).__qualname__} cannot be pickled ({error}): give text, numbers, lists or "
            "dicts, or leave out checkpoint="
        ) from error


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()

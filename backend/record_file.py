"""The file of a record: JSON lines, the first of which says what was recorded, each other one thing
that a backend was asked and what it answered.

Owns the lines. `Recording` writes them, for `recording.py`; `read_record` reads them, for
`replay.py`.

    {"stemma_record": 1, "program": "tips", "model": "...", "seed": 7, ...}
    {"turn": "begin", "role": "user", "previous": ["system"], "text": "<|im_start|>user\n"}
    {"prompt": "9f..", "after": "", "parts": [["literal", "The capital of France is"]]}
    {"prompt": "c0..", "after": "", "like": ["9f..", 0, 15], "parts": [["literal", "Peru is"]]}
    {"call": "generate", "prompt": "9f..", "ask": {"params": {...}}, "answer": {"text": ...}}

What a long prompt shares with one shortly before is not written again: `like` says with which, how
many whole parts, and how many characters of the next.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stemma.backend import one_writer
from stemma.backend.base import Backend
from stemma.backend.sent import Part, Sent
from stemma.lang.errors import InvalidArgument, StemmaError

FORMAT = 1
_MARK = "stemma_record"

# Characters; what is shorter is written again, which is easier to read.
_WORTH_SHARING = 400

# Of how many long prompts what they share is looked for.
_LOOK_BACK = 8

Key = tuple[str, str, str]
"""What a call is found by: its kind, its prompt, and what is asked of it, as text."""


def key_of(call: str, prompt: str, ask: Mapping[str, Any]) -> Key:
    return call, prompt, json.dumps(ask, sort_keys=True, default=repr)


def as_written(ask: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked, as a record gives it back: lists for tuples."""
    written: dict[str, Any] = json.loads(json.dumps(ask, default=repr))
    return written


class Recording:
    """A record that is being written. Any thread may write; a line is in the file when it returns.

    path: a record that is there is written anew; another file is refused with InvalidArgument, and
    so is a path that cannot be written, and a file into which somebody records just now. seed: what
    `replay` runs with.
    Nobody else may record into the file until whoever made this, and all who `hold` it, have called
    `let_go`.
    """

    def __init__(self, path: str | os.PathLike[str], *, seed: int | None) -> None:
        self.path = Path(path)
        self.seed = seed
        self._lock = threading.Lock()
        self._holders = 1
        self._written: set[object] = set()
        self._long: deque[tuple[str, tuple[Part, ...]]] = deque(maxlen=_LOOK_BACK)
        try:
            if not may_be_written(self.path):
                raise InvalidArgument(
                    f"record={str(self.path)!r}: the file is there and is no record of Stemma's: "
                    "name another, or remove it"
                )
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = os.open(self.path, flags, 0o666)
            weakref.finalize(self, os.close, self._file)
            if not one_writer.take(self._file):
                raise InvalidArgument(
                    f"record={str(self.path)!r}: another run is being recorded into it: give each "
                    "its own file, or record them as one batch"
                )
            os.ftruncate(self._file, 0)
        except OSError as error:
            raise InvalidArgument(
                f"record={str(self.path)!r}: cannot be written: {error.strerror or error}"
            ) from error

    def hold(self) -> Recording:
        """One more run writes to it."""
        with self._lock:
            self._holders += 1
        return self

    def let_go(self) -> None:
        """One fewer does; after the last the file is anybody's."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                one_writer.give_back(self._file)

    def begin(self, program: str, backend: Backend) -> None:
        """Write the first line, if no run before has."""
        tokens = backend.control_tokens
        self.write_once(
            "header",
            {
                _MARK: FORMAT,
                "program": program,
                "model": backend.model_name,
                "seed": self.seed,
                "reasoning_marks": backend.reasoning_marks,
                "control_tokens": None if tokens is None else sorted(tokens),
            },
        )

    def call(self, call: str, sent: Sent, ask: Mapping[str, Any], **answer: Any) -> None:
        """Write a call and its answer, and before them the prompt, if that is new."""
        prompt = sent.id
        with self._lock:
            if prompt not in self._written:
                self._written.add(prompt)
                self._write_line({"prompt": prompt, "after": sent.after, **self._parts(sent)})
                if sum(len(part.text) for part in sent.parts) >= _WORTH_SHARING:
                    self._long.append((prompt, sent.parts))
            self._write_line({"call": call, "prompt": prompt, "ask": ask, **answer})

    def _parts(self, sent: Sent) -> Mapping[str, Any]:
        """The parts, without a long beginning that one of the last long prompts had, too."""
        parts = [part.as_json() for part in sent.parts]
        shared = [(*_shared_by(sent.parts, before), prompt) for prompt, before in self._long]
        length, whole, some, prompt = max(shared, default=(0, 0, 0, ""))
        if length < _WORTH_SHARING:
            return {"parts": parts}
        rest = parts[whole:]
        if some:
            rest[0] = [sent.parts[whole].kind, sent.parts[whole].text[some:]]
        return {"like": [prompt, whole, some], "parts": rest}

    def write_once(self, key: object, line: Mapping[str, Any]) -> None:
        """Write a line unless one of that key was written."""
        with self._lock:
            if key in self._written:
                return
            self._written.add(key)
            self._write_line(line)

    def _write_line(self, line: Mapping[str, Any]) -> None:
        data = (json.dumps(line, ensure_ascii=False, default=repr) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise StemmaError(
                f"the record {str(self.path)!r} cannot be written: {error.strerror or error}"
            ) from error


@dataclass(slots=True)
class RecordedCall:
    """A call of the record and its answer.

    seconds: of one that was cancelled, after how many. line: where it stands in the file.
    """

    call: str
    prompt: str
    ask: dict[str, Any]
    answer: dict[str, Any] | None
    error: dict[str, Any] | None
    pieces: list[str]
    seconds: float
    line: int


@dataclass(slots=True)
class Record:
    """What a file says.

    turns: ("begin" or "end", role, roles before) -> its text, or why it is refused.
    """

    path: Path
    program: str = ""
    model: str = ""
    seed: int | None = None
    reasoning_marks: tuple[str, str] = ("", "")
    control_tokens: list[str] | None = None
    turns: dict[tuple[str, str, tuple[str, ...]], dict[str, str]] = field(default_factory=dict)
    prompts: dict[str, Sent] = field(default_factory=dict)
    calls: dict[Key, list[RecordedCall]] = field(default_factory=dict)

    def text(self, sent: Sent) -> str:
        """All the text of a prompt, from the start on."""
        found: list[str] = []
        while True:
            found += (part.text for part in reversed(sent.parts))
            if sent.after not in self.prompts:
                return "".join(reversed(found))
            sent = self.prompts[sent.after]


def read_record(path: str | os.PathLike[str]) -> Record:
    """Raises InvalidArgument for a file that is none, or not whole but for its last line."""
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidArgument(
            f"replay={str(path)!r}: cannot be read: {error.strerror or error}; record one by "
            f"run(record={str(path)!r})"
        ) from error
    lines.pop()  # what stands behind the last line end is half a line: the run was cut short
    record = Record(path)
    for number, line in enumerate(lines, 1):
        try:
            _take(record, json.loads(line), number)
        except InvalidArgument:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = "is no record of Stemma's" if number == 1 else f"is damaged in line {number}"
            raise InvalidArgument(
                f"replay={str(path)!r}: the file {what} ({type(error).__name__}: {error}); record "
                "the program again"
            ) from error
    if not lines:
        raise InvalidArgument(
            f"replay={str(path)!r}: nothing is recorded in the file; record the program again"
        )
    return record


def _take(record: Record, line: dict[str, Any], number: int) -> None:
    if number == 1:
        if line[_MARK] > FORMAT:
            raise InvalidArgument(
                f"replay={str(record.path)!r}: written by a newer Stemma; record the program again"
            )
        record.program, record.model, record.seed = line["program"], line["model"], line["seed"]
        opened, closed = line["reasoning_marks"]
        record.reasoning_marks = opened, closed
        record.control_tokens = line["control_tokens"]
    elif _MARK in line:
        raise InvalidArgument(
            f"replay={str(record.path)!r}: two runs were recorded into the file at once (line "
            f"{number}): record each into its own, or both as a batch"
        )
    elif "turn" in line:
        record.turns[line["turn"], line["role"], tuple(line["previous"])] = line
    elif "call" in line:
        call, prompt, ask = line["call"], line["prompt"], line["ask"]
        answer, error, pieces = line.get("answer"), line.get("error"), line.get("pieces", [])
        seconds = float(line.get("seconds", 0.0))
        found = RecordedCall(call, prompt, ask, answer, error, pieces, seconds, number)
        record.calls.setdefault(key_of(call, prompt, ask), []).append(found)
    else:
        parts = tuple(map(Part.from_json, line["parts"]))
        if "like" in line:
            like, whole, some = line["like"]
            parts = _with_shared(record.prompts[like].parts, whole, some, parts)
        record.prompts[line["prompt"]] = Sent(line["after"], parts)


def _with_shared(
    before: tuple[Part, ...], whole: int, some: int, parts: tuple[Part, ...]
) -> tuple[Part, ...]:
    """The parts of a prompt behind those that it shares with the one before."""
    if some:
        joined = Part(parts[0].kind, before[whole].text[:some] + parts[0].text)
        parts = (joined, *parts[1:])
    return (*before[:whole], *parts)


def _shared_by(parts: tuple[Part, ...], before: tuple[Part, ...]) -> tuple[int, int, int]:
    """How many characters two prompts share from their start on: in so many whole parts, and in the
    next.
    """
    length = whole = 0
    for part, other in zip(parts, before, strict=False):
        if part != other:
            may_share = part.kind == other.kind and part.kind in ("literal", "control")
            some = common_length(part.text, other.text) if may_share else 0
            return length + some, whole, some
        length += len(part.text)
        whole += 1
    return length, whole, 0


def common_length(a: str, b: str) -> int:
    """How many characters two texts share at their beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def may_be_written(path: Path) -> bool:
    """False for a file that has something in it and is no record. Raises OSError."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        return file.read(len(_MARK) + 3).decode(errors="replace") == f'{{"{_MARK}"'

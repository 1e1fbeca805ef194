"""What of a Markdown document can be tested: its Python blocks, its links and its tables.

A document's Python blocks run in order in one namespace. A comment on the line before a block says
on what:

    <!-- test: mock -->   a scripted backend that answers " said" is the default; also without a
                          comment
    <!-- test: slow -->   the default model is the default backend

A block that says ```text directly after a Python block is what that block prints. Blocks of other
languages are not run; `test_cli_docs.py` runs those of language console. Used by it, by
`test_docs.py` and by `interpreter/test_from_sglang.py`.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^```(\w*)\s*$")
_COMMENT = re.compile(r"^<!--\s*test:\s*(.*?)\s*-->\s*$")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE_SPAN = re.compile(r"`[^`]*`")
_KINDS = ("mock", "slow")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. line: of its first line of code, counted from 1. prints: what a Python block
    is said to print."""

    file: Path
    line: int
    language: str
    code: str
    kind: str = "mock"
    prints: str | None = None

    def run(self, namespace: dict[str, Any]) -> None:
        """Execute the code. Raises AssertionError that begins with file and line of the failure."""
        printed = StringIO()
        try:
            # Behind as many empty lines as there are in the document: tracebacks then show it.
            code = compile("\n" * (self.line - 1) + self.code, str(self.file), "exec")
            with redirect_stdout(printed):
                exec(code, namespace)
        except Exception as error:
            line = self._line_of(error)
            what = f"{type(error).__name__}: {error}"
            raise AssertionError(f"{self.file}:{line}: the block raises {what}") from error
        if self.prints is not None and printed.getvalue().rstrip() != self.prints.rstrip():
            raise AssertionError(
                f"{self.file}:{self.line}: the block prints\n{printed.getvalue()}\n"
                f"and the document says\n{self.prints}"
            )

    def _line_of(self, error: Exception) -> int:
        if isinstance(error, SyntaxError) and error.lineno is not None:
            return error.lineno
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self.file)]
        return lines[-1] if lines and lines[-1] is not None else self.line


def python_blocks(file: Path) -> list[Block]:
    """The Python blocks of a document, in order, each with what it is said to print."""
    found: list[Block] = []
    previous: Block | None = None
    for block in fenced(file):
        if block.language == "python":
            found.append(block)
        elif block.language == "text" and previous is not None and _follows(block, previous):
            found[-1] = Block(
                file, previous.line, "python", previous.code, previous.kind, block.code
            )
        previous = block if block.language == "python" else None
    return found


def fenced(file: Path) -> Iterator[Block]:
    """All fenced blocks of a document, in order."""
    lines = file.read_text(encoding="utf-8").splitlines()
    kind, kind_at = "mock", -1
    start: int | None = None
    language = ""
    for i, line in enumerate(lines):
        if start is not None:
            if line.rstrip() == "```":
                code = "\n".join(lines[start:i])
                said = kind if kind_at == start - 2 else "mock"
                yield Block(file, start + 1, language, code, said)
                start = None
        elif match := _FENCE.match(line):
            language, start = match[1], i + 1
        elif match := _COMMENT.match(line):
            kind, kind_at = match[1], i
            if kind not in _KINDS:
                raise AssertionError(f"{file}:{i + 1}: a block is of {_KINDS}, not {kind!r}")
    if start is not None:
        raise AssertionError(f"{file}:{start}: the block is never closed")


def _follows(block: Block, previous: Block) -> bool:
    """Whether only empty lines are between the two."""
    end = previous.line + len(previous.code.splitlines())  # the closing fence
    between = block.file.read_text(encoding="utf-8").splitlines()[end : block.line - 2]
    return not any(line.strip() for line in between)


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """The lines of a document that are in no fenced block, with their numbers."""
    inside = False
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def links(file: Path) -> Iterator[tuple[int, str]]:
    """The targets of a document's links, with their lines."""
    for number, line in prose(file):
        for target in _LINK.findall(_CODE_SPAN.sub("``", line)):
            yield number, target


def anchors(file: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: set[str] = set()
    for _, line in prose(file):
        if match := re.match(r"^#{1,6}\s+(.*?)\s*$", line):
            words = re.sub(r"[^\w\- ]", "", match[1].lower()).replace(" ", "-")
            n, anchor = 1, words
            while anchor in found:
                anchor = f"{words}-{n}"
                n += 1
            found.add(anchor)
    return found


def table_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The cells of every row of every table, headings and rules left out."""
    before: list[str] | None = None
    in_body = False
    for number, line in prose(file):
        if not line.startswith("|"):
            before, in_body = None, False
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if in_body:
            yield number, cells
        elif before is not None:  # this is the rule under the headings
            in_body = True
        before = cells

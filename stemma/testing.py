"""For tests of programs: a scripted backend, and snapshots of what is sent to a model.

    from stemma.testing import MockBackend, assert_prompt

In pytest the fixtures `scripted` and `prompt_snapshot` are there by themselves, see
`pytest_plugin.py`. Loads no model library.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from difflib import unified_diff
from pathlib import Path

from stemma.backend.base import Namespace
from stemma.backend.mock import MockBackend
from stemma.backend.script import Broken, Call
from stemma.interpreter.state import ProgramState
from stemma.lang.errors import InvalidArgument
from stemma.lang.sampling import SamplingParams

__all__ = ["UPDATE", "Broken", "Call", "MockBackend", "assert_prompt", "prompt_text"]

UPDATE = "STEMMA_UPDATE_PROMPTS"
"""The environment variable that, set to 1, has snapshots written instead of compared."""

Sent = MockBackend | ProgramState | str | Iterable[str]

# Shown instead of what editors and Git change or hide.
_SPACE, _RETURN = "\N{OPEN BOX}", "\N{SYMBOL FOR CARRIAGE RETURN}"


def assert_prompt(
    sent: Sent, snapshot: str | os.PathLike[str], *, update: bool | None = None
) -> None:
    """Compare what was sent to a model with a file that says what should be.

    sent: a scripted backend, for all requests that it has had, or a state, for the text of its
        branch; also texts themselves. See `prompt_text` for what is written of them.
    snapshot: the file; a relative path is beside the file that calls.
    update: write the file instead; None does so where the environment variable
        STEMMA_UPDATE_PROMPTS is 1, as `pytest --update-prompts` sets it.

    Raises AssertionError with the difference, or where there is no such file.
    """
    __tracebackhide__ = True
    path = Path(snapshot)
    if not path.is_absolute():
        caller = sys._getframe(1).f_globals.get("__file__")
        path = Path(caller).resolve().parent / path if caller else path.absolute()
    now = prompt_text(sent)
    if os.environ.get(UPDATE, "0") not in ("", "0") if update is None else update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(now, encoding="utf-8", newline="\n")
        return
    how = f"pytest --update-prompts, or {UPDATE}=1, writes it"
    if not path.exists():
        raise AssertionError(f"there is no snapshot {path} yet: {how}. It would be\n{now}")
    then = path.read_text(encoding="utf-8")
    if then != now:
        lines = unified_diff(
            then.splitlines(), now.splitlines(), "in the snapshot", "sent now", lineterm=""
        )
        told = "\n".join(lines) or "only the line ends of the file differ"
        raise AssertionError(
            f"what is sent is not what the snapshot {path} says:\n{told}\nIf that is meant, {how} "
            "anew."
        )


def prompt_text(sent: Sent) -> str:
    """What was sent, as a text to read and to compare.

    Of a backend the requests, each with its settings but for the seed. They stand in the order of
    their texts, whichever was first: one that goes on from another stands behind it, and only what
    is new of it is written. A bar begins each line; white space at the end of a line is made
    visible.
    """
    if isinstance(sent, ProgramState | str):
        return _lines(sent if isinstance(sent, str) else sent.text())
    requests = _requests(sent)
    parts: list[str] = []
    before: list[str] = []  # the texts that this one may go on from, the longest last
    numbers: dict[str, int] = {}
    for number, ((text, what), times) in enumerate(sorted(Counter(requests).items()), 1):
        while before and not text.startswith(before[-1]):
            before.pop()
        again = f", {times} times" if times > 1 else ""
        since = before[-1] if before else ""
        origin = f", after the text of {numbers[since]}" if before else ""
        parts.append(f"{number}: {what}{again}{origin}\n{_lines(text[len(since) :])}")
        if text and since != text:
            before.append(text)
            numbers[text] = number
    return "\n".join(parts)


def _requests(sent: MockBackend | Iterable[str]) -> list[tuple[str, str]]:
    """The texts, each with a description of what was asked for after it."""
    if isinstance(sent, MockBackend):
        return [(call.prompt, _described(call)) for call in sent.calls]
    texts = list(sent) if isinstance(sent, Iterable) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(
            f"{sent!r} is nothing that was sent: give a MockBackend, a state, or texts"
        )
    return [(str(text), "text") for text in texts]


def _lines(text: str) -> str:
    """Each line behind a bar."""
    shown = []
    for line in text.replace("\r", _RETURN).split("\n"):
        bare = line.rstrip(" \t")
        spaces = line[len(bare) :].replace(" ", _SPACE).replace("\t", "\\t")
        shown.append(f"| {bare}{spaces}".rstrip(" ") + "\n")
    return "".join(shown)


def _described(call: Call) -> str:
    """What a request asks for, and its settings that are not the usual ones."""
    settings = []
    if call.params is not None:
        what = "gen"
        settings = [
            call.params.constraint.label
            if f.name == "constraint" and call.params.constraint is not None
            else f"{f.name}={getattr(call.params, f.name)!r}"
            for f in fields(SamplingParams)
            if f.name != "seed" and getattr(call.params, f.name) != f.default
        ]
    else:
        what = f"select of {', '.join(map(repr, call.choices))}"
    if not call.heal:
        settings.append("heal=False")
    if call.cache != "read-write":
        settings.append(f"cache={call.cache!r}")
    if call.priority:
        settings.append(f"priority={call.priority}")
    if call.namespace != Namespace():
        settings += [
            f"{f.name}={value!r}"
            for f in fields(Namespace)
            if (value := getattr(call.namespace, f.name)) != f.default
        ]
    return " ".join([what, *settings])

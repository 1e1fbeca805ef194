"""What a branch has come to say: its text in pieces, and the messages that they form.

Grown by the executor; read by `text()`, `messages()`, late readers of a stream and `picture.py`. A
fork shares its parent's pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypedDict

from stemma.backend.base import Usage

Kind = Literal[
    "literal", "control", "begin", "end", "generated", "reasoning", "mark", "selected", "score"
]


class Message(TypedDict):
    """One message of a conversation, its content as it was written."""

    role: str
    content: str


class Piece(NamedTuple):
    """Some text, and what it is.

    kind: "begin" and "end" are the template's text around a message of `role`; "mark" stands around
    a reasoning that is kept apart. variable: the one that the text belongs to.
    reads: variables that are there from here on, with their values.
    usage: on the last piece of an operation that needed the model, what that took. note: how it
    ended, in words. broken: it failed after writing this.

    A named tuple, since one is made with every append and kept: a third of the time of a frozen
    dataclass. It holds no operation and no meta, whose log-probabilities may be large.
    """

    text: str
    kind: Kind = "literal"
    variable: str | None = None
    role: str | None = None
    reads: tuple[tuple[str, Any], ...] = ()
    usage: Usage | None = None
    note: str = ""
    broken: bool = False


class Transcript:
    """The pieces of a branch; before them come the first `shared` of its parent's own.

    label: of the branch. fork: a number that the branches of one fork share. usages: what its work
    took, request by request. failure: why it stands still for good, in words: the error itself
    would keep its traceback's frames alive.
    """

    __slots__ = ("failure", "fork", "label", "own", "parent", "shared", "usages")

    def __init__(self, label: str, parent: Transcript | None = None, fork: int = 0) -> None:
        self.label = label
        self.parent = parent
        self.fork = fork
        self.shared = len(parent.own) if parent is not None else 0
        self.own: list[Piece] = []
        self.usages: list[Usage] = []
        self.failure: str | None = None

    def __iter__(self) -> Iterator[Piece]:
        yield from self.inherited()
        yield from self.own

    def inherited(self) -> list[Piece]:
        """The pieces before its own: those of its ancestors, up to each fork."""
        stretches: list[list[Piece]] = []
        node = self
        while node.parent is not None:  # a loop: forks of forks may be thousands deep
            stretches.append(node.parent.own[: node.shared])
            node = node.parent
        return [piece for stretch in reversed(stretches) for piece in stretch]

    def text(self) -> str:
        return "".join(piece.text for piece in self)

    def since_message(self) -> str:
        """The text since the last message began, its template included; without messages all."""
        texts: list[str] = []
        for piece in self:
            if piece.kind == "begin":
                texts.clear()
            texts.append(piece.text)
        return "".join(texts)

    def messages(self) -> list[Message]:
        """The messages, also one that is still open. Text outside of messages belongs to none, nor
        does reasoning that is kept apart.
        """
        messages: list[Message] = []
        inside = False
        for piece in self:
            if piece.kind == "begin" and piece.role is not None:
                messages.append({"role": piece.role, "content": ""})
                inside = True
            elif piece.kind == "end":
                inside = False
            elif inside and piece.kind not in ("mark", "reasoning"):
                messages[-1]["content"] += piece.text
        return messages

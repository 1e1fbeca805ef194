"""What a branch has come to say: its text in pieces, and the messages that they form.

Grown by the executor; read by `text()`, `messages()` and late readers of a stream. A fork shares
its parent's pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypedDict

from stemma.lang.ops import Role


class Message(TypedDict):
    """One message of a conversation, its content as it was written."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text: a literal, a variable's text, or the template's text at an edge of a message.

    broken: the variable failed after writing this.
    """

    text: str
    variable: str | None = None
    edge: Literal["begin", "end"] | None = None
    role: Role | None = None
    broken: bool = False


class Transcript:
    """The pieces of a branch; before them come the first `shared` of its parent's own."""

    __slots__ = ("own", "parent", "shared")

    def __init__(self, parent: Transcript | None = None) -> None:
        self.parent = parent
        self.shared = len(parent.own) if parent is not None else 0
        self.own: list[Piece] = []

    def __iter__(self) -> Iterator[Piece]:
        stretches: list[list[Piece]] = []
        node, stop = self, len(self.own)
        while True:  # a loop: forks of forks may be thousands deep
            stretches.append(node.own[:stop])
            if node.parent is None:
                break
            node, stop = node.parent, node.shared
        for stretch in reversed(stretches):
            yield from stretch

    def text(self) -> str:
        return "".join(piece.text for piece in self)

    def messages(self) -> list[Message]:
        """The messages, also one that is still open. Text outside of messages belongs to none."""
        messages: list[Message] = []
        inside = False
        for piece in self:
            if piece.edge == "begin" and piece.role is not None:
                messages.append({"role": piece.role, "content": ""})
                inside = True
            elif piece.edge == "end":
                inside = False
            elif inside:
                messages[-1]["content"] += piece.text
        return messages

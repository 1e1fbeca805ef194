"""What a branch has come to say: its text in pieces, and the messages that they form.

Grown by the executor; read by `text()`, `messages()`, late readers of a stream and `picture.py`. A
fork shares its parent's pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from stemma.backend.base import Usage
from stemma.interpreter.meta import Meta, ScoreMeta, SelectMeta
from stemma.lang.ops import Gen, Operation, RoleBegin, RoleEnd, Score, Select, Text

Kind = Literal[
    "literal", "control", "template", "generated", "reasoning", "mark", "selected", "score"
]


class Message(TypedDict):
    """One message of a conversation, its content as it was written."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text, and the operation that wrote it.

    variable: the one that the text belongs to. part: of a generation whose reasoning is kept apart.
    reads: variables that are there from here on, with their values. metas: on the last piece of an
    operation that needed the model, how it came about, sample by sample.
    broken: the operation failed after writing this.
    """

    text: str
    operation: Operation
    variable: str | None = None
    part: Literal["answer", "reasoning", "mark"] = "answer"
    reads: tuple[tuple[str, Any], ...] = ()
    metas: tuple[Meta | SelectMeta | ScoreMeta, ...] = ()
    broken: bool = False

    @property
    def kind(self) -> Kind:
        match self.operation:
            case Text(control=control):
                return "control" if control else "literal"
            case RoleBegin() | RoleEnd():
                return "template"
            case Gen():
                return "generated" if self.part == "answer" else self.part
            case Select():
                return "selected"
            case Score():
                return "score"
        raise NotImplementedError(f"no text of {self.operation!r}")


class Transcript:
    """The pieces of a branch; before them come the first `shared` of its parent's own.

    label: of the branch. usages: what its work took, request by request. failure: why it stands
    still for good, in words: the error itself would keep its traceback's frames alive.
    """

    __slots__ = ("failure", "label", "own", "parent", "shared", "usages")

    def __init__(self, label: str, parent: Transcript | None = None) -> None:
        self.label = label
        self.parent = parent
        self.shared = len(parent.own) if parent is not None else 0
        self.own: list[Piece] = []
        self.usages: list[Usage] = []
        self.failure: str | None = None

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

    def since_message(self) -> str:
        """The text since the last message began, its template included; without messages all."""
        texts: list[str] = []
        for piece in self:
            if isinstance(piece.operation, RoleBegin):
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
            match piece.operation:
                case RoleBegin(role=role):
                    messages.append({"role": role, "content": ""})
                    inside = True
                case RoleEnd():
                    inside = False
                case _:
                    if inside and piece.part == "answer":
                        messages[-1]["content"] += piece.text
        return messages

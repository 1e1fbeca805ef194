"""`Sent`: what a branch has been told so far, as a value that can be compared, kept and written.

Used by the backends that stand in for a model (`replay.py`) or around one (`wrapping.py`): two
branches that were told the same are told the same thing next. No tokenizer is needed for it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from stemma.backend.base import ChoiceScore, Completion

Kind = Literal["literal", "control", "output", "choice"]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a branch. ids, rest: of what the model wrote, those that were kept, and the end
    of the text that they do not cover.
    """

    kind: Kind
    text: str
    ids: tuple[int, ...] = ()
    rest: str = ""

    def as_json(self) -> list[object]:
        return [self.kind, self.text, *([list(self.ids), self.rest] if self.ids else [])]

    @classmethod
    def from_json(cls, value: list[object]) -> Part:
        kind, text, *more = value
        ids, rest = more if more else ((), "")
        return cls(kind, text, tuple(ids), rest)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Sent:
    """after: the id of the prompt that the model last wrote to, "" at the start. parts: since then,
    literals that touch as one.
    """

    after: str = ""
    parts: tuple[Part, ...] = ()

    def text(self, text: str, *, control: bool) -> Sent:
        """With more text."""
        kind: Kind = "control" if control else "literal"
        if not text:
            return self
        if self.parts and self.parts[-1].kind == kind:
            return Sent(self.after, (*self.parts[:-1], Part(kind, self.parts[-1].text + text)))
        return Sent(self.after, (*self.parts, Part(kind, text)))

    def output(self, completion: Completion) -> Sent:
        """With what the model has written here."""
        part = Part("output", completion.text, completion.token_ids, completion.rest)
        return Sent(self.id, (part,))

    def choice(self, choice: ChoiceScore) -> Sent:
        """With a choice that was scored here."""
        return Sent(self.id, (Part("choice", choice.text, choice.token_ids),))

    @property
    def id(self) -> str:
        """A hash of all that was sent, from the start on."""
        parts = [part.as_json() for part in self.parts]
        content = json.dumps([self.after, parts], ensure_ascii=False).encode()
        return hashlib.blake2b(content, digest_size=12).hexdigest()

    @property
    def pending(self) -> tuple[tuple[str, str], ...]:
        """The text that no model has answered yet: (kind, text) of its parts."""
        texts = [
            (part.kind, part.text) if part.kind in ("literal", "control") else ("rest", part.rest)
            for part in self.parts
        ]
        return tuple((kind, text) for kind, text in texts if text)

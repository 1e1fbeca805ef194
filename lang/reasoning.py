"""What of an output is reasoning: the marks that models put around it, and the split of a text by
them as it grows.

`gen(reasoning=...)` asks for it, a backend knows its model's marks, and the interpreter splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stemma.lang.errors import InvalidArgument, UnsupportedByBackend

Marks = tuple[str, str]

THINK: Marks = ("<think>", "</think>")
# Those that models are known to write; a backend looks for them in this order.
KNOWN_MARKS: tuple[Marks, ...] = (
    THINK,
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)

# SGLang's names of model families. None: what these write is not one block between two marks.
_FAMILIES: dict[str, Marks | None] = {
    **dict.fromkeys(("deepseek-r1", "deepseek-v3", "glm45", "interns1", "kimi_k2", "mimo"), THINK),
    **dict.fromkeys(("minimax", "nano_v3", "olmo3", "qwen3", "qwen3-thinking"), THINK),
    **dict.fromkeys(("step3", "step3p5"), THINK),
    "kimi": ("◁think▷", "◁/think▷"),
    "mistral": ("[THINK]", "[/THINK]"),
    **dict.fromkeys(("gemma4", "gpt-oss", "minimax-append-think"), None),
}


@dataclass(frozen=True, slots=True)
class Part:
    """Some of an output: a mark, what stands between marks, or what stands outside of them."""

    kind: Literal["mark", "reasoning", "answer"]
    text: str


class ReasoningSplit:
    """Splits an output by its marks while it comes in pieces; the parts joined are the output.

    inside: the reasoning has begun before the output does. A mark may come in any number of pieces,
    so what could be the beginning of one is held back until it is known.

    >>> split = ReasoningSplit(("<think>", "</think>"))
    >>> [part.text for part in (*split.feed("<think>why</th"), *split.feed("ink>so"))]
    ['<think>', 'why', '</think>', 'so']
    """

    def __init__(self, marks: Marks, *, inside: bool = False) -> None:
        self._marks = marks
        self._inside = inside
        self._held = ""

    def feed(self, piece: str) -> list[Part]:
        """More of the output; the parts that are certain now."""
        text, parts = self._held + piece, []
        while True:
            mark = self._marks[1] if self._inside else self._marks[0]
            before, found, after = text.partition(mark)
            if not found:
                break
            parts += self._part(before)
            parts.append(Part("mark", mark))
            self._inside = not self._inside
            text = after
        held = _beginning_at_end(text, mark)
        self._held = text[len(text) - held :]
        return parts + self._part(text[: len(text) - held])

    def end(self) -> list[Part]:
        """The output has ended: what was held back is no mark."""
        held, self._held = self._held, ""
        return self._part(held)

    def _part(self, text: str) -> list[Part]:
        return [Part("reasoning" if self._inside else "answer", text)] if text else []


def is_open(text: str, marks: Marks) -> bool:
    """Whether a text leaves the reasoning open: behind it stands what a model goes on thinking."""
    opened = text.rfind(marks[0])
    return opened >= 0 and text.find(marks[1], opened + len(marks[0])) < 0


def checked_marks(marks: object) -> Marks:
    """The two marks as a tuple. Raises InvalidArgument."""
    both = tuple(marks) if isinstance(marks, list | tuple) else ()
    if len(both) != 2 or not all(isinstance(mark, str) and mark for mark in both):
        raise InvalidArgument(
            f"reasoning_marks={marks!r}: must be two non-empty strings, as in "
            '("<think>", "</think>")'
        )
    return both[0], both[1]


def marks_of_family(name: str) -> Marks:
    """The marks of a family of models by SGLang's name. Raises InvalidArgument,
    UnsupportedByBackend."""
    if name.lower() not in _FAMILIES:
        raise InvalidArgument(
            f"model_type={name!r}: must be one of {', '.join(_FAMILIES)}, or None"
        )
    marks = _FAMILIES[name.lower()]
    if marks is None:
        raise UnsupportedByBackend(
            f"model_type={name!r}: its reasoning does not stand between two marks that can be named"
        )
    return marks


def _beginning_at_end(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0

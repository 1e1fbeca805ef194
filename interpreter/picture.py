"""What was sent and written on a branch, segment by segment, as a value that prints.

Made by `state.picture()` from transcripts; `show_rich.py` draws it in a terminal, `show_html.py` in
a notebook.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple

from stemma.backend.base import Usage
from stemma.interpreter.transcript import Piece, Transcript

if TYPE_CHECKING:
    from rich.tree import Tree

# Forks of forks deeper than this are counted, not drawn, and so are further branches of one fork.
DRAWN_DEPTH = 8
DRAWN_BRANCHES = 50

SegmentKind = Literal[
    "literal", "control", "template", "generated", "reasoning", "mark", "selected", "score"
]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of text of one kind; literals that touch are one, as they are for the tokenizer.

    usage: of what the model did for it; None where it did nothing. note: how that ended. broken:
    the operation failed after writing this.
    """

    kind: SegmentKind
    text: str
    variable: str | None = None
    usage: Usage | None = None
    note: str = ""
    broken: bool = False

    def took(self) -> str:
        """What the model did for it and how that ended, in words; nothing for a literal."""
        usage = in_words(self.usage) if self.usage is not None else ""
        return "; ".join(words for words in (usage, self.note) if words)


@dataclass(frozen=True, slots=True)
class Split:
    """A fork: the branches that went on from here, each with its own text only."""

    branches: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """One branch. usage: of its own work. of_run: of all branches, on the main one. failure: why it
    stands still, in words. left_out: how many branches went on from it and are not in the picture.

    Prints in a terminal (`print`, `rich.print`) and in a notebook.
    """

    label: str
    parts: tuple[Segment | Split, ...]
    usage: Usage
    of_run: Usage | None = None
    failure: str | None = None
    left_out: int = 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The text of this branch, without those that went on from it."""
        return tuple(part for part in self.parts if isinstance(part, Segment))

    def __rich__(self) -> Tree:
        from stemma.interpreter.show_rich import tree_of

        return tree_of(self)

    def __str__(self) -> str:
        from stemma.interpreter.show_rich import plain_text

        return plain_text(self)

    def _repr_html_(self) -> str:
        from stemma.interpreter.show_html import html_of

        return html_of(self)


def picture_of(
    transcript: Transcript,
    *,
    record: Iterable[Transcript] = (),
    of_run: Usage | None = None,
    limit: int | None = None,
) -> Picture:
    """The whole text of a branch; with a record of transcripts also what went on from it.

    limit: longer texts are shortened to so many characters.
    """
    below: dict[int, list[_Child]] = {}
    for child in reversed(list(record)):  # children come behind their parents
        if child is not transcript:
            drawn = _draw(child, [], below.pop(id(child), []), limit)
            below.setdefault(id(child.parent), []).insert(0, _Child(child, drawn))
    drawn = _draw(transcript, transcript.inherited(), below.get(id(transcript), []), limit)
    return replace(drawn, of_run=of_run)


class _Child(NamedTuple):
    transcript: Transcript
    picture: Picture


def _draw(
    transcript: Transcript, inherited: list[Piece], children: list[_Child], limit: int | None
) -> Picture:
    """The branch with what it has inherited, or without; children: in the order of their forks."""
    pieces, done = [*inherited, *transcript.own], 0
    parts: list[Segment | Split] = []
    for _, siblings in groupby(children, key=lambda child: child.transcript.fork):
        branches = list(siblings)
        at = len(inherited) + branches[0].transcript.shared
        parts += _segments(pieces[done:at], limit)
        parts.append(Split(tuple(branch.picture for branch in branches)))
        done = at
    parts += _segments(pieces[done:], limit)
    usage = sum(transcript.usages, Usage())
    return Picture(transcript.label, tuple(parts), usage, failure=transcript.failure)


def _segments(pieces: list[Piece], limit: int | None) -> Iterator[Segment]:
    """Texts of one kind that touch are one, unless a model wrote them."""
    for kind, run in groupby(pieces, key=_kind):
        if kind in ("literal", "control", "template"):
            yield Segment(kind, shortened("".join(piece.text for piece in run), limit))
        else:
            yield from (
                Segment(
                    kind,
                    shortened(piece.text, limit),
                    piece.variable,
                    piece.usage,
                    "failed here" if piece.broken else piece.note,
                    piece.broken,
                )
                for piece in run
                if piece.text or piece.usage is not None
            )


def _kind(piece: Piece) -> SegmentKind:
    return "template" if piece.kind == "begin" or piece.kind == "end" else piece.kind


def shortened(text: str, limit: int | None) -> str:
    """At most about `limit` characters: of a longer text the middle is left out, and said so."""
    if limit is None or len(text) <= limit:
        return text
    head, tail = limit - limit // 3, limit // 3
    left_out = len(text) - head - tail
    return f"{text[:head]} […{left_out:,} characters…] {text[len(text) - tail :]}"


def in_words(usage: Usage) -> str:
    """What the work took, as a sentence without its end."""
    words = (
        f"{usage.prompt_tokens:,} prompt tokens: {usage.cached_tokens:,} from the cache, "
        f"{usage.computed_tokens:,} computed"
    )
    if usage.output_tokens:
        words += f"; {usage.output_tokens:,} written"
    if usage.total_s:
        words += f"; {usage.total_s:.2f} s"
    return words

"""The pending literal of a branch: text that was appended and is not tokenised yet.

Owns the memory of what of it is tokenised already, which forks share. Held by the local backend's
branches.
"""

from __future__ import annotations

from collections.abc import Iterator

from stemma.backend.local.text_cuts import last_cut
from stemma.backend.local.tokenizer import Piece, Tokenizer

_SETTLE_CHARACTERS = 256  # a tail shorter than this is encoded again rather than cut


class Literal:
    """An immutable text of plain and control pieces whose `ids()` equal encoding all of it at once.

    Appending gives a new value. The text up to the last safe cut is tokenised once, when more is
    appended to a long literal, and remembered with it: of a long text under many forks each child
    encodes only its own end. Any number of threads may use one value; at worst two of them do the
    same work.
    """

    __slots__ = (
        "_blocks",
        "_control_first",
        "_first",
        "_ids",
        "_pieces",
        "_settle_at",
        "_settled",
        "_tokenizer",
        "open_characters",
    )

    def __init__(self, tokenizer: Tokenizer, *, first: bool) -> None:
        """An empty literal. first: nothing precedes it in its branch."""
        self._tokenizer = tokenizer
        self._first = first
        self._control_first: bool | None = None
        self._blocks: tuple[
            list[int], ...
        ] = ()  # ids of what was settled; the lists are never changed
        self._pieces: tuple[Piece, ...] = ()  # what follows it
        self.open_characters = 0  # its length: what the next `append` or `ids` may have to encode
        self._settle_at = _SETTLE_CHARACTERS
        self._settled: Literal | None = None
        self._ids: list[int] | None = None

    def append(self, text: str, *, control: bool = False) -> Literal:
        """The literal with `text` behind it. Only with `control` do added tokens in it become
        control tokens."""
        if not text:
            return self
        base = self._settle()
        pieces, length = base._pieces, base.open_characters + len(text)
        if pieces and pieces[-1].control == control:
            pieces, text = pieces[:-1], pieces[-1].text + text
        grown = base._with(base._blocks, (*pieces, Piece(text, control)), length, base._settle_at)
        if grown._control_first is None:
            grown._control_first = control
        return grown

    def ids(self) -> list[int]:
        """The ids of the whole text, without BOS. The list is the caller's."""
        if self._ids is None:
            last = self._tokenizer.encode(self._pieces, first=self._first and not self._blocks)
            self._ids = [*(i for block in self._blocks for i in block), *last]
        return list(self._ids)

    def open_ids(self) -> list[int]:
        """The ids as they are where more text follows.

        At the very end of a text, tokenizers make one token of a run of white space that they
        divide before a word: "sea\\n\\n" ends in one token, "sea\\n\\nThe" has two. A model that is
        to go on has seen the second kind. Same text as `ids()`.
        """
        if not self._pieces or self._pieces[-1].control or not self._pieces[-1].text[-1:].isspace():
            return self.ids()
        *within, last = self.append("a").ids()
        spelled = self._tokenizer.bytes_of(last)
        if not spelled.endswith(b"a"):
            return self.ids()
        taken = spelled[:-1]  # the white space that goes into the token of the word
        alone = self._tokenizer.encode([Piece(taken.decode(errors="replace"))], first=False)
        ids = [*within, *alone]
        same = len(alone) <= 1 and self._spell(ids) == self._spell(self.ids())
        return ids if same else self.ids()

    def _spell(self, ids: list[int]) -> bytes:
        return b"".join(map(self._tokenizer.bytes_of, ids))

    def __bool__(self) -> bool:
        return self._control_first is not None

    @property
    def wants_bos(self) -> bool:
        """Whether BOS goes in front: the branch starts here, not with control text, and the model
        expects it."""
        return self._first and not self._control_first and self._tokenizer.adds_bos

    @property
    def can_heal(self) -> bool:
        """Whether the last token lies wholly in plain text, so that a generation may draw it
        again."""
        if not self._pieces or self._pieces[-1].control:
            return False
        last = self.open_ids()[-1]
        spelled = self._tokenizer.bytes_of(last)
        return bool(spelled) and self._pieces[-1].text.encode().endswith(spelled)

    def _settle(self) -> Literal:
        """The same text, tokenised up to its last safe cut where it is long."""
        if self.open_characters < self._settle_at:
            return self
        if self._settled is None:
            self._settled = self._cut()
        return self._settled

    def _cut(self) -> Literal:
        for head, tail in self._possible_cuts():
            ids = self._tokenizer.encode(head, first=self._first and not self._blocks)
            left = sum(len(piece.text) for piece in tail)
            return self._with((*self._blocks, ids), tail, left, max(_SETTLE_CHARACTERS, 2 * left))
        # Nowhere to cut: look again only when the text has doubled, so that looking stays linear.
        return self._with(
            self._blocks, self._pieces, self.open_characters, 2 * self.open_characters
        )

    def _possible_cuts(self) -> Iterator[tuple[tuple[Piece, ...], tuple[Piece, ...]]]:
        """Pieces before and after each plain piece's last safe cut, the last piece first.

        Control pieces stay whole: what follows one may still lengthen an added token at its end.
        """
        for n in reversed(range(len(self._pieces))):
            piece = self._pieces[n]
            at = None if piece.control else last_cut(piece.text, self._tokenizer.cuts)
            if at is not None:
                head, tail = Piece(piece.text[:at]), Piece(piece.text[at:])
                yield (*self._pieces[:n], head), (tail, *self._pieces[n + 1 :])

    def _with(
        self, blocks: tuple[list[int], ...], pieces: tuple[Piece, ...], length: int, settle_at: int
    ) -> Literal:
        other = Literal(self._tokenizer, first=self._first)
        other._control_first = self._control_first
        other._blocks, other._pieces = blocks, pieces
        other.open_characters, other._settle_at = length, settle_at
        return other

"""The output of one request as text: from sampled ids to what the program sees and what the branch
keeps.

Owns the bytes of an output, its stops and its end. One `OutputText` per request, driven by the
engine's loop.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from stemma.backend.local.stops import StopWatch
from stemma.backend.local.tokenizer import Tokenizer
from stemma.lang.errors import EngineInvariantError
from stemma.lang.expressions import compile_stop_regex
from stemma.lang.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """What an output comes to.

    text: as the program sees it.
    kept: how many of the pushed tokens, from the first on, stay.
    rest: the end of `text` that they do not cover: whole characters of a token that a stop cut, or
        that ends in half a character. Where a healed token is not kept (kept == 0), the literal
        token that it stood for stays, and `rest` follows it.
    matched_stop: the stop string, the expression's match or the token id that ended it.
    """

    text: str
    kept: int
    rest: str
    matched_stop: str | int | None


class OutputText:
    """Takes an output's tokens one by one and says when it ends.

    Whole characters become visible, never parts; bytes that cannot become a character are U+FFFD;
    bytes at the end that still could are dropped, with their tokens. A stop may begin only after
    `params.min_tokens` tokens. End-of-text tokens and `stop_token_ids` are not kept, except the
    latter under `include_stop`. Raises ConstraintError for a `stop_regex` that takes too long.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        end_ids: frozenset[int] | None = None,
        skip: bytes = b"",
    ) -> None:
        """end_ids: the tokens that end a text; None takes the tokenizer's `eos_ids`.

        skip: the bytes of the literal token that the first token stands for; not output.
        """
        self._tokenizer = tokenizer
        self._params = params
        self._skip = skip
        ends = tokenizer.eos_ids if end_ids is None else end_ids
        self._eos = frozenset() if params.ignore_eos else ends
        expression = (
            compile_stop_regex(params.stop_regex) if params.stop_regex is not None else None
        )
        self._watch = StopWatch(params.stop, expression) if params.stop or expression else None

        self._token_ends = array("q")  # bytes of output up to the end of each token
        self._char_ends = array("q")  # and of each visible character
        self._pending = b""  # the beginning of a character
        self._torn = False  # what is pending began within the first `min_tokens` tokens
        self._text: list[str] = []
        self._unread: list[str] = []
        self._read = 0  # characters that `take_increment` gave
        self._cut: int | None = None  # characters that the program sees, known at a stop
        self._matched: str | int | None = None
        self.ended = False

    @property
    def num_tokens(self) -> int:
        """Tokens pushed, without one that ended the output as a token."""
        return len(self._token_ends)

    def stand_for(self, literal_id: int) -> None:
        """Let the first token replace a literal one (healing), whose bytes are not output."""
        self._skip = self._tokenizer.bytes_of(literal_id)

    def new_bytes(self, token_id: int) -> bytes:
        """The bytes of output that a token would add."""
        data = self._tokenizer.bytes_of(token_id)
        return data if self._token_ends else data[len(self._skip) :]

    def push(self, token_id: int) -> bool:
        """Take the next token; True if the output ends with it."""
        if self.ended:
            raise EngineInvariantError("a token was pushed to an output that has ended")
        if self.num_tokens >= self._params.min_tokens and self.is_stop(token_id):
            if self._params.include_stop and token_id in self._params.stop_token_ids:
                self._add(token_id)
            self._matched, self.ended = token_id, True
            return True
        new = self._add(token_id)
        if self._watch is None:
            return False
        if self._guarded(new):
            self._watch.pass_over(new)
            return False
        match = self._watch.feed(new)
        if match is not None:
            self._cut = match.end if self._params.include_stop else match.start
            self._matched, self.ended = match.text, True
        return self.ended

    def take_increment(self) -> str:
        """The text since the last call that is certain to stay. After the end: all that was not
        given yet."""
        if self.ended:
            certain = len(self._char_ends) if self._cut is None else self._cut
        else:
            certain = self._watch.settled if self._watch is not None else len(self._char_ends)
        unread = "".join(self._unread)
        given, left = unread[: certain - self._read], unread[certain - self._read :]
        self._unread = [left] if left else []
        self._read += len(given)
        return given

    def finish(self) -> OutputEnd:
        """The end: after a stop, or here and now (`max_tokens`, cancelled). May be called again."""
        self.ended = True
        length = len(self._char_ends) if self._cut is None else self._cut
        text = "".join(self._text)[:length]
        end = self._char_ends[length - 1] if length else 0
        kept = bisect_right(self._token_ends, end)
        while kept and not self._is_boundary(self._token_ends[kept - 1]):
            kept -= 1
        covered = bisect_right(self._char_ends, self._token_ends[kept - 1]) if kept else 0
        return OutputEnd(text, kept, text[covered:], self._matched)

    def is_stop(self, token_id: int) -> bool:
        """Whether the token says that the text ends."""
        return token_id in self._eos or token_id in self._params.stop_token_ids

    def _is_boundary(self, end: int) -> bool:
        """Whether a character ends (and the next begins) after `end` bytes."""
        at = bisect_left(self._char_ends, end)
        return end == 0 or (at < len(self._char_ends) and self._char_ends[at] == end)

    def _guarded(self, new: str) -> bool:
        """Whether no stop may begin in the text of the token just added."""
        guarded = self.num_tokens <= self._params.min_tokens or self._torn
        self._torn = (
            guarded
            and bool(self._pending)
            and (self.num_tokens <= self._params.min_tokens or not new)
        )
        return guarded

    def _add(self, token_id: int) -> str:
        """Record a token; returns the characters that it made visible."""
        data = self._tokenizer.bytes_of(token_id)
        if not self._token_ends and self._skip:
            if not data.startswith(self._skip):
                raise EngineInvariantError(
                    f"healing drew {data!r}, which does not begin with {self._skip!r}"
                )
            data = data[len(self._skip) :]
        before = self._token_ends[-1] if self._token_ends else 0
        self._token_ends.append(before + len(data))
        new = self._decode(self._pending + data)
        if new:
            self._text.append(new)
            self._unread.append(new)
        return new

    def _decode(self, data: bytes) -> str:
        """The whole characters of `data`; a beginning of one at its end becomes `_pending`."""
        self._pending = b""
        new = ""
        while data:
            try:
                good, bad, data = data.decode(), b"", b""
            except UnicodeDecodeError as error:
                good = data[: error.start].decode()
                if error.reason == "unexpected end of data":
                    self._pending, bad, data = data[error.start :], b"", b""
                else:
                    bad, data = data[error.start : error.end], data[error.end :]
            self._extend_ends(len(character.encode()) for character in good)
            new += good
            if bad:
                self._extend_ends([len(bad)])
                new += "\ufffd"
        return new

    def _extend_ends(self, lengths: Iterable[int]) -> None:
        end = self._char_ends[-1] if self._char_ends else 0
        for length in lengths:
            end += length
            self._char_ends.append(end)

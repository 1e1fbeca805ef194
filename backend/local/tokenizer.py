"""Text to token ids and back, on the `tokenizers` library alone.

Owns the rule what in a text may become a control token: only what templates and `control` say.
Called by the local backend's branches and by the engine's detokeniser; built once per model.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from stemma.backend.local.text_cuts import safe_cuts
from stemma.backend.local.tokenizer_files import (
    DummyPrefix,
    TokenizerFiles,
    plain_model,
    read_tokenizer_files,
    token_bytes,
    whole_spec,
    without_dummy_prefix,
)

# Any tokenizer pipeline can be built around this model; the real model, which is large, is then put
# in its place.
_TINY_MODEL = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text. Only in a control piece do added tokens become control tokens."""

    text: str
    control: bool = False


class Tokenizer:
    """The tokenizer of one model.

    vocab_size: one more than the largest id.
    bos_token, eos_token: their text, None where the model has none. bos_id: the id of the former.
    eos_ids: every id that ends a text, by generation_config.json, config.json and the tokenizer.
    adds_bos: whether the model expects BOS before plain text. The rule: a branch puts `bos_id` in
        front iff `adds_bos` and its first text is not a control piece (`Literal.wants_bos`); the
        first control piece of a chat template spells BOS itself, if the model wants one.
    chat_template: its Jinja source, or None.
    token_bytes: the bytes of every id: those of its text for a control token, none if unused.
    cuts: characters before which, between letters, a text may be cut without changing its ids.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        spec = files.spec
        self.bos_token, self.eos_token = files.bos_token, files.eos_token
        self.chat_template = files.chat_template
        self.token_bytes: list[bytes] = token_bytes(files)
        self.vocab_size = len(self.token_bytes)
        self._control: dict[int, str] = {token["id"]: token["content"] for token in files.control}
        ids = {text: token_id for token_id, text in self._control.items()}
        self.bos_id: int | None = ids.get(files.bos_token) if files.bos_token is not None else None
        eos_id = ids.get(files.eos_token) if files.eos_token is not None else None
        self.eos_ids = files.eos_ids | ({eos_id} if eos_id is not None else frozenset())

        self.dummy_prefix = DummyPrefix.of(spec)
        model = plain_model(files)
        self._bare = self._with_prefix = self._plain(spec, files, model)
        bare_spec = without_dummy_prefix(spec)
        if self.dummy_prefix is not DummyPrefix.NEVER:
            self._bare = self._plain(bare_spec, files, model)

        always = self.dummy_prefix is DummyPrefix.ALWAYS
        self.cuts = (  # with both, a text that goes on after white space would get a prefix there
            frozenset() if always and files.white_space else safe_cuts(self._bare, bare_spec)
        )
        self._splitter = _pipeline({"normalizer": spec.get("normalizer")})
        self._control_ids = _add_tokens(self._splitter, files.control)
        self._split_control = lru_cache(maxsize=4096)(self._split_control_text)
        self.adds_bos = self.bos_id is not None and _puts_in_front(files, self.bos_id)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read a model's folder. Raises ModelLoadError that names the file and the remedy."""
        return cls(read_tokenizer_files(folder))

    @staticmethod
    def _plain(spec: dict[str, Any], files: TokenizerFiles, model: Any) -> tokenizers.Tokenizer:
        """The tokenizer for plain text: no control tokens, nothing put in front or behind."""
        plain = _pipeline({key: spec.get(key) for key in ("normalizer", "pre_tokenizer")})
        plain.model = model
        _add_tokens(plain, files.white_space)
        return plain

    def encode(self, pieces: Iterable[Piece], *, first: bool) -> list[int]:
        """The ids of the joined pieces, equal to the full tokenizer's where control pieces spell
        its added tokens.

        first: nothing precedes; only then does a SentencePiece-like tokenizer put its dummy prefix
        in front of leading plain text. BOS is not added.
        """
        ids: list[int] = []
        prefix = first and self.dummy_prefix is not DummyPrefix.NEVER
        for part in self._split(pieces):
            if isinstance(part, int):
                ids.append(part)
                prefix = self.dummy_prefix is DummyPrefix.ALWAYS
            else:
                plain = self._with_prefix if prefix else self._bare
                ids += plain.encode(part, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids as they stand; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of an id; none for ids beyond the vocabulary, which a model's padded head can
        produce."""
        return self.token_bytes[token_id] if token_id < self.vocab_size else b""

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """The texts of all tokens that plain text never gives."""
        return tuple(self._control.values())

    def is_control(self, token_id: int) -> bool:
        """Whether the id is an added token (special or not) that plain text never gives."""
        return token_id in self._control

    def ids_starting_with(self, prefix: bytes) -> np.ndarray:
        """Ids (int32, ascending) of all tokens but control tokens whose bytes start with
        `prefix`."""
        keys, ids = self._by_bytes
        start = bisect_left(keys, prefix)
        above = prefix.rstrip(b"\xff")
        stop = bisect_left(keys, above[:-1] + bytes([above[-1] + 1]), start) if above else len(keys)
        return np.sort(ids[start:stop])

    @cached_property
    def _by_bytes(self) -> tuple[list[bytes], np.ndarray]:
        ordinary = ((b, i) for i, b in enumerate(self.token_bytes) if b and i not in self._control)
        pairs = sorted(ordinary)
        return [b for b, _ in pairs], np.array([i for _, i in pairs], dtype=np.int32)

    def _split(self, pieces: Iterable[Piece]) -> list[int | str]:
        """Control ids and the stretches of plain text between them, those of adjoining pieces
        joined."""
        parts: list[int | str] = []
        filled = (piece for piece in pieces if piece.text)
        for control, run in groupby(filled, key=lambda piece: piece.control):
            text = "".join(piece.text for piece in run)
            for part in self._split_control(text) if control else (text,):
                last = parts[-1] if parts else None
                if isinstance(part, str) and isinstance(last, str):
                    parts[-1] = last + part
                else:
                    parts.append(part)
        return parts

    def _split_control_text(self, text: str) -> tuple[int | str, ...]:
        """Cut out the added tokens as the library does: its matching, its stripping, its
        normalisation."""
        encoding = self._splitter.encode(text, add_special_tokens=False)
        parts: list[int | str] = []
        done = 0
        for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._control_ids:
                if start > done:
                    parts.append(text[done:start])
                parts.append(self._control_ids[token])
                done = stop
        if done < len(text):
            parts.append(text[done:])
        return tuple(parts)


def _pipeline(spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer of the given components around the tiny model."""
    return tokenizers.Tokenizer.from_str(json.dumps(whole_spec(_TINY_MODEL, **spec)))


def _add_tokens(target: tokenizers.Tokenizer, tokens: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Add tokens; returns the id each got in `target` -> its id in the model."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for token in tokens:
        chosen = {flag: token[flag] for flag in flags if flag in token}
        target.add_tokens([tokenizers.AddedToken(token["content"], **chosen)])
    ids = {token["id"]: target.token_to_id(token["content"]) for token in tokens}
    return {new: token_id for token_id, new in ids.items() if new is not None}


def _puts_in_front(files: TokenizerFiles, bos_id: int) -> bool:
    """Whether the post-processor starts a text with BOS; without one, what tokenizer_config.json
    says."""
    post_processor = files.spec.get("post_processor")
    if post_processor is None:
        return files.add_bos_token
    encoding = _pipeline({"post_processor": post_processor}).encode("?")
    return encoding.special_tokens_mask[0] == 1 and encoding.ids[0] == bos_id

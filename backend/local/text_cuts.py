"""Where a text may be cut so that tokenising the two parts gives the ids of the whole.

Owns one conservative rule and its test on a tokenizer. Called by `tokenizer.py`; `literal.py` cuts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any

import tokenizers

_CANDIDATES = " \n\u3002\uff0c\u3001"  # the last three: ideographic full stop and commas
# What is known to work on each character, with its combining marks, alone.
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Replace"}
_PRE_TOKENIZERS = {"ByteLevel", "Split", "Digits", "Punctuation", "Metaspace"}
_PRE_TOKENIZERS |= {"Whitespace", "WhitespaceSplit"}
# Texts that end, and begin, with a letter; near by, what pre-tokenizers treat in special ways.
_LEFT = ["a", "the quick", "don't", "we'll", "x1y", "12a", "  ab", "\n\nab", "A  b", "HELLO", "aB"]
_LEFT += [
    "naïve",
    "привет",
    "中文",
    "한국",
    "かな",
    "'s",
    "...a",
    "a.b",
    "\tz",
    "a\r\nb",
    "e\u0301a",
]
_LEFT += ["a-b", "🙂x", "x。y"]
_RIGHT = ["b", "World", "it's", "s", "ll'", "中文字 x", "яб", "a  b", "Ab1", "B\n\nc", "b c d"]
_RIGHT += ["t\u0301", "x。y"]


def safe_cuts(tokenizer: tokenizers.Tokenizer, spec: dict[str, Any]) -> frozenset[str]:
    """The characters c before which every text may be cut where letters stand on both sides of c.

    `tokenizer` has neither control tokens nor dummy prefix; `spec` is its JSON. Two arguments are
    accepted, else nothing is safe. A pre-tokenizer of known kinds splits before c in every probe
    and treats the two parts as it treats them alone. Or it never splits, but no vocabulary entry of
    the BPE has a space after another character, so that no merge crosses the cut.
    """
    known = all(
        part["type"] in _NORMALIZERS for part in _flat(spec.get("normalizer"), "normalizers")
    )
    known &= all(
        part["type"] in _PRE_TOKENIZERS
        for part in _flat(spec.get("pre_tokenizer"), "pretokenizers")
    )
    if not known:
        return frozenset()
    whole = {left: _words(tokenizer, left) for left in _LEFT}
    if all(len(_words(tokenizer, f"{left} {right}")) == 1 for left in _LEFT for right in _RIGHT):
        return frozenset(" " if _merges_stop_at_spaces(tokenizer, spec["model"]) else ())
    return frozenset(
        cut
        for cut in _CANDIDATES
        if all(
            _words(tokenizer, left + cut + right) == whole[left] + tail
            for right in _RIGHT
            for tail in [_words(tokenizer, cut + right)]
            for left in _LEFT
        )
    )


def last_cut(text: str, cuts: frozenset[str]) -> int | None:
    """The last place where `text` may be cut; None if there is none."""
    for at in range(len(text) - 2, 0, -1):
        if text[at] in cuts and _is_letter(text[at - 1]) and _is_letter(text[at + 1]):
            return at
    return None


def _is_letter(character: str) -> bool:
    """A letter that was one in Unicode 3.2 already, so that every library's tables agree."""
    return unicodedata.ucd_3_2_0.category(character)[0] == "L"


def _words(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
    normalizer, pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    normal = normalizer.normalize_str(text) if normalizer is not None else text
    if pre_tokenizer is None:
        return [normal]
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(normal)]


def _merges_stop_at_spaces(tokenizer: tokenizers.Tokenizer, model: dict[str, Any]) -> bool:
    if model["type"] != "BPE" or model.get("ignore_merges") or model.get("dropout"):
        return False
    mark, vocab = "".join(_words(tokenizer, " ")), model["vocab"]
    return (
        len(mark) == 1 and mark in vocab and not any(mark in entry.lstrip(mark) for entry in vocab)
    )


def _flat(part: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """The components of a pipeline, those of sequences one by one."""
    if part is not None and inner in part:
        for each in part[inner]:
            yield from _flat(each, inner)
    elif part is not None:
        yield part

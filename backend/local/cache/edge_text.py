"""The text of a run of tokens that may begin or end within a character. Used by snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids to text; bytes that are no whole character become U+FFFD."""

LONGEST_BEGINNING = 3
"""Bytes, so also tokens, of a UTF-8 character that lacks only its last one."""


def readable(decode: Decode, token_ids: list[int], *, ends: bool) -> tuple[str, list[int]]:
    """The text of the tokens, and those of them at the end that only begin a character.

    The latter belong in front of the tokens that go on. ends: none go on, and the beginning of a
    character is shown as U+FFFD.
    """
    text = decode(token_ids)
    if not ends and text.endswith("\ufffd"):
        for held in range(1, min(LONGEST_BEGINNING, len(token_ids)) + 1):
            shorter = decode(token_ids[:-held])
            if not shorter.endswith("\ufffd"):
                return shorter, token_ids[-held:]
    return text, []

"""Short names for places in the tree, by which a person follows an edge from moment to moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from hashlib import blake2b
from string import ascii_lowercase

import numpy as np

from stemma.backend.base import Namespace


class Names:
    """a, b, ... z, aa, ... in the order of asking; the same place always has the same name.

    A place is known by its namespace and a 128-bit digest of all tokens before it: what was evicted
    and comes again has its old name.
    """

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}

    def of(self, edges: Iterable[tuple[int, Namespace, Sequence[int]]]) -> list[str]:
        """The names of the places where edges end.

        An edge is the number of its parent, which comes before it (-1: none), its namespace and its
        tokens.
        """
        ends: list[blake2b] = []
        for parent, namespace, tokens in edges:
            start = blake2b(repr(astuple(namespace)).encode(), digest_size=16)
            end = ends[parent].copy() if parent >= 0 else start
            end.update(np.array(tokens, dtype=np.int32).tobytes())
            ends.append(end)
        return [self._names.setdefault(e.digest(), letters(len(self._names))) for e in ends]


def letters(number: int) -> str:
    """0, 1, ... as a, b, ... z, aa, ab, ..."""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, len(ascii_lowercase))
        text = ascii_lowercase[digit] + text
    return text

"""What the radix tree is asked with: token ids in a namespace, and how runs of them compare.

Values and pure functions; used by the tree and by whoever looks something up in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stemma.backend.base import Namespace
from stemma.lang.errors import EngineInvariantError

Ints: TypeAlias = npt.NDArray[np.int32]
Page: TypeAlias = int | bytes
"""One page's tokens as a dictionary key: the token itself for pages of one, else their bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class RadixKey:
    """Token ids (int32, 1-D) in a namespace. The tree copies what it keeps of them."""

    token_ids: Ints
    namespace: Namespace

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.token_ids.dtype != np.int32:
            raise EngineInvariantError(
                "a radix key is a 1-D int32 array, "
                f"got {self.token_ids.ndim}-D {self.token_ids.dtype}"
            )

    @classmethod
    def of(cls, token_ids: Sequence[int], namespace: Namespace) -> RadixKey:
        """A key from any sequence of ids; an id that does not fit 32 bits raises OverflowError."""
        return cls(np.array(token_ids, dtype=np.int32), namespace)

    def __len__(self) -> int:
        return len(self.token_ids)

    def head(self, length: int) -> RadixKey:
        """The key of the first `length` tokens; a view."""
        return RadixKey(self.token_ids[:length], self.namespace)


def page_at(token_ids: Ints, start: int, page_size: int) -> Page:
    """The page of tokens that begins at `start`. Equal pages, and only those, give equal values."""
    if page_size == 1:
        return int(token_ids[start])
    return token_ids[start : start + page_size].tobytes()


def common_prefix(a: Ints, b: Ints) -> int:
    """How many leading tokens of `a` and `b` are equal."""
    length = min(len(a), len(b))
    if length == 0:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length

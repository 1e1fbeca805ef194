"""In which order a batch begins its items. Used by `batch.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

BatchItem = Mapping[str, Any] | tuple[Any, ...] | list[Any]


def depth_first(items: Sequence[BatchItem]) -> Iterator[tuple[int, BatchItem]]:
    """The items and their places in the batch, those with equal arguments one after the other.

    So what their prompts share is computed once and used while it is still cached; the prompts
    themselves are not known before the bodies run. Arguments are compared in the order of how much
    text is repeated in them, so a long document that many items share goes before a question that
    is asked of each. On the prompts themselves this is the order that hits most, see `depth_first`
    of the local engine.
    """
    rows = [_arguments(item) for item in items]
    values: dict[int | str, Counter[str]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, Counter())[value] += 1
    repeated = {
        name: sum(len(value) * (times - 1) for value, times in found.items())
        for name, found in values.items()
    }
    names = sorted(repeated, key=lambda name: -repeated[name])
    places = sorted(range(len(items)), key=lambda i: [rows[i].get(name, "") for name in names])
    return ((place, items[place]) for place in places)


def _arguments(item: object) -> dict[int | str, str]:
    """The arguments of an item as texts, by name or place; none of what cannot be an item."""
    if isinstance(item, Mapping):
        given: Iterable[tuple[Any, Any]] = item.items()
    else:
        given = enumerate(item) if isinstance(item, tuple | list) else ()
    return {name: value if isinstance(value, str) else repr(value) for name, value in given}

"""What a batch makes of an item that has failed: whether to try it again, and what its error says.

Used by `batch.py`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from contextlib import suppress

from stemma.interpreter.tasks import MOST_NOTES
from stemma.lang.errors import Cancelled, StemmaError, Timeout

# How an error names its item.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxdict = 8
_ITEM = "run_batch: item "


def may_pass(error: BaseException) -> bool:
    """Whether the same item with the same seed may do better next time.

    So it is after a Timeout; an OSError, such as a lost connection or a full disk; and what an
    operation met in the backend and is no refusal of ours. Any other error of the body's is a
    matter of what was written, and the same seed writes the same.
    """
    if isinstance(error, StemmaError):
        return isinstance(error, Timeout)
    return isinstance(error, OSError) or getattr(error, "site", None) is not None


def note_item(error: BaseException, index: int, item: object) -> None:
    """Say which item it was; of an error that several items share, the first that came by."""
    notes: list[str] = getattr(error, "__notes__", [])
    if not any(note.startswith(_ITEM) for note in notes):
        error.add_note(f"{_ITEM}{index}, {_SHORT.repr(item)}")


def hand_on_all(stopped: Iterable[tuple[int, Cancelled]], error: BaseException) -> None:
    """Say on `error`, by which a batch was interrupted, how far the items were that it stopped:
    `partials` by item and branch, and notes.
    """
    partials: dict[str, str] = {}
    notes: list[str] = []
    for index, told in stopped:
        partials |= {f"item {index}, {label}": text for label, text in told.partials.items()}
        notes += [
            f"item {index}: {note}"
            for note in getattr(told, "__notes__", ())
            if not note.startswith(_ITEM)
        ]
    if not partials and not notes:
        return
    with suppress(AttributeError):  # an exception of somebody else's, with slots
        error.partials = partials  # type: ignore[attr-defined]
        for note in notes[:MOST_NOTES]:
            error.add_note(note)

"""What a batch makes of an item that has failed: whether to try it again, and what its error says.

Used by `batch.py`.
"""

from __future__ import annotations

import reprlib

from stemma.lang.errors import StemmaError, Timeout

# How an error names its item.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxdict = 8


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
    if not any(note.startswith("run_batch: item ") for note in notes):
        error.add_note(f"run_batch: item {index}, {_SHORT.repr(item)}")

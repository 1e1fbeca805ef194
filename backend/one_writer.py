"""A file that only one writes to at a time. Used for records and for checkpoints of batches."""

from __future__ import annotations


def take(file: int) -> bool:
    """Take an open file, until it is closed or given back; False where somebody else has it.

    file: its descriptor. Where the system, or the file's, knows no locks nobody is kept out.
    """
    try:
        import fcntl
    except ImportError:  # not on every system
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def give_back(file: int) -> None:
    """Let the next one write."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)
    except (ImportError, OSError):
        return

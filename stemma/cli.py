"""The console script. Owns Ctrl-C: the process ends at once, with status 130 and no traceback.

Imports little, so that this holds from the start; the commands are in `stemma/commands/app.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


class Interrupt:
    """The handler of SIGINT: once KeyboardInterrupt, so that a command can clean up, then the end.

    came: somebody has pressed Ctrl-C. over: nothing is left to clean up.
    """

    def __init__(self) -> None:
        self.came = False
        self.over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came or self.over:
            leave()
        self.came = True
        raise KeyboardInterrupt


def main() -> None:
    """Run the command line and end the process.

    After Ctrl-C nothing waits for the engine's step, for other threads or for the end of libraries;
    and what an interrupted import raises in place of KeyboardInterrupt is not worth telling.
    """
    interrupt = Interrupt()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else we run under nohup
        signal.signal(signal.SIGINT, interrupt)
    try:
        from stemma.commands.app import app

        app()
    except BaseException as end:
        # typer turns KeyboardInterrupt into this status.
        status = end.code if isinstance(end, SystemExit) else None
        if interrupt.came or isinstance(end, KeyboardInterrupt) or status == INTERRUPTED:
            leave()
        raise
    finally:
        interrupt.over = True


def leave() -> NoReturn:
    """End the process now, with everything that was printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more, or it is closed
            continue
    os._exit(INTERRUPTED)

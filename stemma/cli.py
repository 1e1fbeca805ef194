"""The console script. Owns the end of the process: at once, and after Ctrl-C with status 130.

Imports little, so that this holds from the start; the commands are in `stemma/commands/app.py`.
"""

from __future__ import annotations

import atexit
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
            leave(INTERRUPTED)
        self.came = True
        raise KeyboardInterrupt


def main() -> None:
    """Run the command line and end the process.

    What others have registered to be done at the end is done; the memory of a model is not given
    back piece by piece, nor are libraries taken down, which takes a second and can go wrong. After
    Ctrl-C nothing waits for the engine's step or for other threads either; and what an interrupted
    import raises in place of KeyboardInterrupt is not worth telling.
    """
    interrupt = Interrupt()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else we run under nohup
        signal.signal(signal.SIGINT, interrupt)
    status = 1  # of an exception that nobody expects
    atexit.register(lambda: leave(status))  # what is registered first is called last
    try:
        from stemma.commands.app import app

        app(prog_name="stemma")
        status = 0
    except BaseException as end:
        if isinstance(end, SystemExit):
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        # typer turns KeyboardInterrupt into this status.
        if interrupt.came or isinstance(end, KeyboardInterrupt) or status == INTERRUPTED:
            leave(INTERRUPTED)
        raise
    finally:
        interrupt.over = True


def leave(status: int) -> NoReturn:
    """End the process now, with everything that was printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more, or it is closed
            continue
    os._exit(status)

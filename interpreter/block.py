"""`with s.user(): ...`: operations around what a block appends; messages do not nest.

Used by `ProgramState`.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

from stemma.lang.errors import InvalidArgument
from stemma.lang.ops import Operation

if TYPE_CHECKING:
    from stemma.interpreter.state import ProgramState


class Block:
    """`with s.user(): ...`: one operation before what the block appends, one after it."""

    __slots__ = ("begin", "end", "state", "used")

    def __init__(self, state: ProgramState, begin: Operation, end: Operation) -> None:
        self.state, self.begin, self.end = state, begin, end
        self.used = False

    def __del__(self) -> None:
        """Without its `with` it has done nothing, which is never meant."""
        if not self.used:
            site = self.begin.site
            what = "a block (s.user() without content, s.var_scope(...)) that no `with` has opened"
            warnings.warn_explicit(f"{what} appends nothing", RuntimeWarning, site.file, site.line)

    def __enter__(self) -> ProgramState:
        self.used = True
        self.state.append(self.begin)
        return self.state

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Also after an error: a program that catches it goes on outside of the block."""
        if error is None:
            self.state.append(self.end)
        else:
            with suppress(Exception):  # a branch that failed takes no end; the error says why
                self.state.append(self.end)


def check_begins(role: str, inside: str | None) -> None:
    if inside is not None:
        raise InvalidArgument(
            f"{_a_message(role)} begins inside {_a_message(inside)}: messages do not nest; close "
            f"it with st.{inside}_end() first, or at the end of its block"
        )


def check_ends(role: str, inside: str | None) -> None:
    if inside is None:
        raise InvalidArgument(
            f"{_a_message(role)} ends outside of any message: open it with st.{role}_begin() first"
        )
    if inside != role:
        raise InvalidArgument(
            f"{_a_message(role)} ends inside {_a_message(inside)}: close it with st.{inside}_end()"
        )


def _a_message(role: str) -> str:
    return f"{'an' if role[0] in 'aeio' else 'a'} {role} message"

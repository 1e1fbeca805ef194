"""`st.control(text)`: refused where the model has no control token that the text spells.

Used by `ProgramState`, of backends that know their control tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from stemma.lang.errors import InvalidArgument


def check_control(text: str, known: Collection[str] | None) -> None:
    """Raises InvalidArgument for a text without any of the known control tokens."""
    if known is None or any(token in text for token in known):
        return
    near = get_close_matches(text.strip(), known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise InvalidArgument(
        f"control({text!r}): the model has no control token in it, so it would be plain text{meant}"
    )

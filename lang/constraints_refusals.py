"""What llguidance has against a JSON Schema, in the user's terms and with its place.

Used by `constraints_schema.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from stemma.lang.constraints_limits import meaning
from stemma.lang.constraints_references import placed_schemas
from stemma.lang.errors import InvalidArgument

_TRIED_CHARACTERS = 500_000  # of all that is compiled to find a place


def refuse_compiled(
    message: str, prepared: object, named: str, admits: Callable[[object], bool]
) -> NoReturn:
    """Raise InvalidArgument for a schema that llguidance refuses, that admits nothing (whose
    message is "nothing"), or that exceeds a limit.

    admits: whether a changed schema is taken and admits something.
    """
    said = in_our_words(message)
    place = _place_of(message, prepared)
    if said.startswith(_NOTHING):
        place = f"at {_admitting_nothing(prepared, admits)}: "
    raise InvalidArgument(f"{named}: {place}{said}")


def _admitting_nothing(root: object, admits: Callable[[object], bool]) -> str:
    """Where a schema stands that is the reason why the whole admits nothing: the deepest without
    which it would admit something; of several in one allOf the one that holds them. "#" where no
    other is the reason by itself, or too much would have to be tried."""
    found = [(place, one) for place, one in placed_schemas(root) if isinstance(one, dict)]
    found.sort(key=lambda each: -each[0].count("/"))
    reasons: list[str] = []
    for place, one in found[: _TRIED_CHARACTERS // len(repr(root))]:
        if reasons and place.count("/") < reasons[0].count("/"):
            break
        kept = dict(one)
        one.clear()
        if place != "#" and admits(root):
            reasons.append(place)
        one.update(kept)
    together = {re.sub(r"(/allOf/\d+)+$", "", place) for place in reasons}
    if len(reasons) > 1 and len(together) == 1:
        return together.pop()
    return reasons[0] if reasons else "#"


_NOTHING = "the schema admits nothing"


def _place_of(message: str, prepared: object) -> str:
    """Where in a schema stands what llguidance refuses without saying where, if that is plain."""
    if message.startswith("oneOf constraints"):
        key = "oneOf"
    elif message.startswith("patternProperty regexes"):
        key = "patternProperties"
    else:
        return ""
    places = [f"{place}/{key}" for place, schema in placed_schemas(prepared) if key in schema]
    return f"at {places[0]}: " if len(places) == 1 else f"at one of {', '.join(places[:5])}: "


def in_our_words(message: str) -> str:
    """llguidance's message or that of a limit, without its own options and with the remedy."""
    if message == "nothing":
        return _NOTHING
    if message.startswith("oneOf constraints"):
        return (
            "'oneOf' is supported only where its schemas evidently exclude each other (by type, or "
            "by a constant property): use anyOf"
        )
    if "Regex is empty" in message:
        return f"{_NOTHING}: what it says of a string or a number has no text in common"
    if found := re.match(r"patternProperty regexes (.*) are not disjoint", message):
        return f"'patternProperties' is supported only where no name fits two of them: {found[1]}"
    if message.startswith("Unsatisfiable schema: "):
        return f"{_NOTHING}: {message.removeprefix('Unsatisfiable schema: ')}"
    if found := re.match(r"Resource '([^']*)' is not present", message):
        return f"'$ref' to another document ({found[1]}) is not supported: put it into $defs"
    if found := re.match(r"Pointer '([^']*)' does not exist", message):
        return f"'$ref' leads nowhere: there is no {found[1]}"
    return meaning(message)

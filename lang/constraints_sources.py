"""Sources of constraints, and texts that are asked about: what of them is no text at all.

Used by `constraints.py`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from stemma.lang.constraints_places import pointed
from stemma.lang.errors import InvalidArgument

MOST_CHARACTERS = 256 * 1024  # of a regular expression, a schema in a string or a grammar


def check_source(named: str, text: object) -> None:
    """Raise InvalidArgument for what is not a string, is too long, or is no text."""
    if isinstance(text, re.Pattern) and isinstance(text.pattern, str):
        flags = "".join(letter for letter in "imsx" if text.flags & re.RegexFlag[letter.upper()])
        plain = f"(?{flags})" * bool(flags) + text.pattern
        raise InvalidArgument(f"{named}={text!r:.100}: must be a string: give {plain!r:.100}")
    if not isinstance(text, str):
        raise InvalidArgument(f"{named}={text!r:.100}: must be a string")
    if len(text) > MOST_CHARACTERS:
        raise InvalidArgument(
            f"{named}: has {len(text):,} characters; at most {MOST_CHARACTERS:,} are taken"
        )
    if not text.isascii() and utf8(text) is None:
        raise InvalidArgument(f"{named}: has half of a surrogate pair, which no text can contain")


def schema_of_text(text: str) -> Any:
    """What a JSON Schema says that is given as a string. Raises InvalidArgument with the place."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"json_schema: the string is no JSON: {error.msg}\n"
            f"{pointed(text, error.lineno, error.colno)}"
        ) from error
    except RecursionError as error:
        raise InvalidArgument("json_schema: the string is nested too deep") from error


def utf8(text: str) -> bytes | None:
    """The bytes of a text; None where it has half of a surrogate pair."""
    if not isinstance(text, str):
        raise InvalidArgument(f"a text is a string, not {text!r:.100}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None

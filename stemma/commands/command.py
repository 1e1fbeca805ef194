"""`Command` and `Group`: typer's, with help that reads well. Used by `app.py` and `arguments.py`.

A flag takes nothing, so no type stands next to it, and a text is wrapped where the screen ends and
not where the source's lines do.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

_ITEM = re.compile(r"\s*(?:[-*•]|\d+[.)])\s")


def unwrapped(text: str) -> str:
    """The text with each paragraph and each item of a list on one line, indented lines kept."""
    return "\n\n".join(
        "\n".join(_unwrapped_lines(paragraph)) for paragraph in re.split(r"\n\s*\n", text)
    )


def _unwrapped_lines(paragraph: str) -> list[str]:
    lines: list[str] = []
    for line in paragraph.splitlines():
        of_its_own = line[:1].isspace() and not (lines and _ITEM.match(lines[-1]))
        if lines and not of_its_own and not _ITEM.match(line):
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return lines


class Command(TyperCommand):
    """One command."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.help = unwrapped(self.help or "")

    def get_params(self, context: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(context))

    def collect_usage_pieces(self, context: Any) -> list[str]:
        """What may follow the command's name; some versions of typer put braces around words."""
        pieces = [piece.strip("{}") for piece in super().collect_usage_pieces(context)]
        return [*pieces, "[--ARGUMENT VALUE]..."] if context.allow_extra_args else pieces


class Group(TyperGroup):
    """The commands together."""

    def get_params(self, context: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(context))


def _without_types_of_flags(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters

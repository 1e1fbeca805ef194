"""A picture of a branch in a notebook: its text in one flow, each segment coloured by its kind.

Used by `picture.py` only. Self-contained: inline styles, no script, everything escaped. Colours are
translucent, so that they suit light and dark pages.
"""

from __future__ import annotations

from html import escape

from stemma.interpreter.picture import DRAWN_BRANCHES, DRAWN_DEPTH, Picture, Segment, in_words

_STYLES = {
    "literal": "",
    "template": "opacity:.55",
    "control": "background:rgba(214,158,46,.3)",
    "generated": "background:rgba(56,161,105,.3)",
    "reasoning": "background:rgba(159,122,234,.3);font-style:italic",
    "mark": "background:rgba(159,122,234,.3);opacity:.55",
    "selected": "background:rgba(49,151,197,.3)",
    "score": "background:rgba(66,99,235,.2)",
}
_LEGEND = {
    "template": "template",
    "control": "control",
    "generated": "generated",
    "reasoning": "reasoning",
    "selected": "selected",
}
_BROKEN = "background:rgba(229,62,62,.3)"
_SMALL = "font-size:75%;opacity:.65"
_FLOW = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;line-height:1.5"
_BELOW = "margin:.2em 0 .2em 1em;padding-left:.6em;border-left:2px solid rgba(128,128,128,.4)"


def html_of(picture: Picture) -> str:
    """The picture as one `<div>`; the branches of a fork can be folded away."""
    kinds = {segment.kind for segment in picture.segments}
    legend = " ".join(
        f'<span style="{_STYLES[kind]};padding:0 .4em">{name}</span>'
        for kind, name in _LEGEND.items()
        if kind in kinds
    )
    return (
        f'<div style="max-height:40em;overflow:auto">{_heading(picture)}'
        f'<div style="{_SMALL}">{legend}</div>{_flow(picture, 1)}</div>'
    )


def _heading(picture: Picture) -> str:
    words = [in_words(picture.usage)] if picture.usage.prompt_tokens else []
    if picture.of_run is not None and picture.of_run != picture.usage:
        words.append(f"all branches: {in_words(picture.of_run)}")
    return f"<b>{escape(picture.label)}</b> {_small('<br>'.join(map(escape, words)))}"


def _flow(picture: Picture, depth: int) -> str:
    inner: list[str] = []
    for part in picture.parts:
        if isinstance(part, Segment):
            inner.append(_span(part))
        elif depth > DRAWN_DEPTH:
            inner.append(_small(f" … fork into {len(part.branches)}, and what is below "))
        else:
            inner += (
                f'<details open style="{_BELOW}"><summary>{_heading(branch)}</summary>'
                f"{_flow(branch, depth + 1)}</details>"
                for branch in part.branches[:DRAWN_BRANCHES]
            )
            if len(part.branches) > DRAWN_BRANCHES:
                inner.append(_small(f" … {len(part.branches) - DRAWN_BRANCHES} more "))
    if picture.failure is not None:
        inner.append(f'<div style="{_BROKEN}">{escape(picture.failure)}</div>')
    return f'<div style="{_FLOW}">{"".join(inner)}</div>'


def _span(segment: Segment) -> str:
    style = _BROKEN if segment.broken else _STYLES[segment.kind]
    what = f"{segment.kind} {segment.variable}" if segment.variable else segment.kind
    took = segment.took()
    note = _small(f" {escape(segment.variable or segment.kind)}: {escape(took)} ") if took else ""
    text, style = escape(segment.text), f"unicode-bidi:isolate;{style}"
    return f'<span style="{style}" title="{escape(what)}">{text}</span>{note}'


def _small(html: str) -> str:
    return f'<span style="{_SMALL}">{html}</span>' if html else ""

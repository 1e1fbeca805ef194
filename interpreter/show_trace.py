"""A trace in a terminal: a tree of operations, literals shortened, drawn with rich.

Used by `trace.py` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text as Line
from rich.tree import Tree

from stemma.interpreter.picture import DRAWN_BRANCHES, DRAWN_DEPTH, shortened
from stemma.interpreter.show_rich import spelled
from stemma.interpreter.trace import ForkOutline, Outline, Trace
from stemma.lang.choices import token_length_normalized
from stemma.lang.ops import (
    Gen,
    Operation,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Score,
    Select,
    Text,
)

TEXT_WIDTH = 60
ARGUMENT_WIDTH = 30


def tree_of(trace: Trace) -> Tree:
    """The outline as a tree; messages and scopes enclose what they contain."""
    arguments = ", ".join(
        f"{name}={_shown(repr(value), ARGUMENT_WIDTH)}" for name, value in trace.arguments.items()
    )
    title = Line.assemble((_shown(trace.name), "bold"), f"({arguments})")
    tree = Tree(title, guide_style="dim")
    _grow(tree, trace.outline, 1)
    if trace.error is not None:
        kind = type(trace.error).__name__
        tree.add(Line(f"the outline ends here: {kind}: {spelled(str(trace.error))}", style="red"))
    return tree


def _grow(root: Tree, outline: Outline, depth: int) -> None:
    open_nodes: list[tuple[type[Operation], Tree]] = []
    for step in _with_short_messages(outline.steps):
        node = open_nodes[-1][1] if open_nodes else root
        match step:
            case ForkOutline():
                _grow_fork(node, step, depth)
            case RoleBegin() | ScopeBegin():
                closing = RoleEnd if isinstance(step, RoleBegin) else ScopeEnd
                open_nodes.append((closing, node.add(_line(step))))
            case RoleEnd() | ScopeEnd():
                if open_nodes and isinstance(step, open_nodes[-1][0]):
                    open_nodes.pop()
                else:  # it was opened before the fork
                    node.add(_line(step))
            case _:
                node.add(step if isinstance(step, Line) else _line(step))


def _grow_fork(node: Tree, fork: ForkOutline, depth: int) -> None:
    count = len(fork.branches)
    if depth > DRAWN_DEPTH:
        node.add(Line(f"… fork into {count}, and what is below", style="dim"))
        return
    below = node.add(Line(f"fork into {count}", style="bold")) if count > 1 else node
    for branch in fork.branches[:DRAWN_BRANCHES]:
        _grow(below.add(Line(_shown(branch.label), style="bold")), branch, depth + 1)
    if count > DRAWN_BRANCHES:
        below.add(Line(f"… {count - DRAWN_BRANCHES} more", style="dim"))


def _with_short_messages(steps: Any) -> Iterator[Any]:
    """The steps, a message of one literal as one line."""
    at = 0
    while at < len(steps):
        match steps[at : at + 3]:
            case [RoleBegin() as begin, Text() as text, RoleEnd()]:
                yield Line.assemble(_line(begin), " ", _line(text))
                at += 3
            case _:
                yield steps[at]
                at += 1


def _line(operation: Operation) -> Line:
    match operation:
        case Text(text=text, control=control):
            line = Line(f"“{_shown(text)}”", style="yellow" if control else "")
            return Line.assemble(("control ", "dim"), line) if control else line
        case RoleBegin(role=role):
            return Line(_shown(role), style="bold blue")
        case RoleEnd(role=role):
            return Line(f"end of {_shown(role)}", style="bold blue")
        case ScopeBegin(name=name):
            return Line.assemble(("var ", "dim"), (_shown(name), "bold"))
        case ScopeEnd(name=name):
            return Line.assemble(("end of var ", "dim"), (_shown(name), "bold"))
        case Gen():
            return Line.assemble(*_named("gen", operation.name), (_settings(operation), "dim"))
        case Select(choices=choices, method=method):
            told = " | ".join(repr(choice) for choice in choices)
            if method is not token_length_normalized:
                told += f"  {method}"
            return Line.assemble(*_named("select", operation.name), _shown(told, 2 * TEXT_WIDTH))
        case Score(text=text):
            return Line.assemble(*_named("score", operation.name), f"“{_shown(text)}”")
    return Line(_shown(repr(operation)))


def _named(what: str, name: str | None) -> list[tuple[str, str]]:
    named = [(_shown(name), "bold"), ("  ", "")] if name is not None else []
    return [(f"{what} ", "green"), *named]


def _settings(operation: Gen) -> str:
    """What the operation says itself."""
    shape = operation.params.constraint
    said = [
        shape.label
        if shape is not None and name == "constraint"
        else f"{name}={getattr(operation.params, name)!r}"
        for name in sorted(operation.given)
    ]
    if operation.reasoning is not None:
        said.append(f"reasoning={operation.reasoning!r}")
    if not operation.heal:
        said.append("heal=False")
    if operation.timeout is not None:
        said.append(f"timeout={operation.timeout:g}")
    return _shown(" ".join(said), 2 * TEXT_WIDTH)


def _shown(text: str, width: int = TEXT_WIDTH) -> str:
    """On one line, shortened in its middle."""
    return spelled(shortened(text, width)).replace("\n", "")

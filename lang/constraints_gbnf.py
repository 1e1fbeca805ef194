"""GBNF, the grammars of llama.cpp, in the words of Lark.

In GBNF every character is a step of the grammar; llguidance has a lexer, whose terminals take all
that they can. Here every terminal is one character, so that none takes what another needs.
What is wrong is said in the user's own lines. Used by `constraints_grammar.py`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from stemma.lang.constraints_limits import MOST_COUNT, MOST_LEAST
from stemma.lang.constraints_places import place
from stemma.lang.errors import InvalidArgument

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|\#[^\n]*)
    |(?P<newline>\n)
    |(?P<text>"(?:\\.|[^"\\])*")
    |(?P<set>\[(?:\\.|[^\]\\])*\])
    |(?P<head>[\w-]+)(?=[ \t]*::=)
    |(?P<is>::=)
    |(?P<name>[\w-]+)
    |(?P<repeat>[*+?]|\{[\w, \t]*\})
    |(?P<special><[^<>\n]*>)
    |(?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)
_COUNT = re.compile(r"\{\s*([0-9]+)\s*(,\s*([0-9]+)?)?\s*\}")
_ESCAPE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[nrt\\\"\[\]]")
_ESCAPES = r"\n \r \t \\ \" \[ \] \xHH \uHHHH \UHHHHHHHH"
_DIGITS = {"x": "two", "u": "four", "U": "eight"}
_REPEATS = "a repeat is written {3}, {3,}, {3,5} or {0,5}"
_PLAIN = {"n": "\n", "r": "\r", "t": "\t"}
_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF
_DEEPEST = 100  # groups in groups
_LONGEST = 100  # rules in a row that begin alternatives

_Way = tuple[str, ...]  # the parts of an alternative, in Lark


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class Gbnf:
    """A grammar in GBNF as Lark, and where in the source each of its rules stands.

    source: as the user wrote it. lark: the same, with names of our own. shared: the rules of it
    that hold how alternatives go on that begin alike.
    Raises InvalidArgument with the line and a caret for what is malformed or undefined.
    """

    named = "grammar (GBNF)"

    def __init__(self, source: str) -> None:
        self.source = source
        self.heads: dict[str, int] = {}
        self.shared: set[str] = set()
        self._tokens = list(self._read())
        self._index = 0
        self._opened: list[int] = []  # places of brackets
        self._owner = ""  # the user's rule that is read
        if "root" not in self.heads:
            raise InvalidArgument(f"{self.named}: there is no rule named 'root'")
        self._named = {name: f"r{number}" for number, name in enumerate(self.heads)}
        self._named["root"] = "start"
        self._lines: list[str] = []
        self._owners: list[str] = []  # the user's rule of each line
        while self._token.kind != "end":
            self._rule()
        self.lark = "".join(self._lines)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def refuse(self, at: int, message: str) -> NoReturn:
        raise InvalidArgument(f"{self.named}: {message}\n{place(self.source, at)}")

    def rule_at(self, at: int) -> tuple[str, int]:
        """The name and the place of the rule whose definition in Lark holds a place."""
        name = self._owners[min(bisect_right(self._starts, at), len(self._owners)) - 1]
        return name, self.heads[name]

    def _read(self) -> Iterator[_Token]:
        for found in _TOKEN.finditer(self.source):
            token = _Token(str(found.lastgroup), found[0], found.start())
            if token.kind == "special":
                self.refuse(
                    token.at, f"{token.text} names a token of a model; a constraint is about text"
                )
            if token.text in ('"', "["):
                what = "a text" if token.text == '"' else "a class of characters"
                self.refuse(token.at, f"{what} that begins here does not end")
            if token.kind in ("head", "name") and not re.fullmatch("[a-zA-Z0-9_-]+", token.text):
                self.refuse(
                    token.at, f"{token.text!r:.60}: a rule's name has letters (a-z), digits and -"
                )
            if token.kind == "head":
                if token.text in self.heads:
                    self.refuse(token.at, f"{token.text!r} is defined twice")
                self.heads[token.text] = token.at
            if token.kind != "skip":
                yield token
        yield _Token("end", "", len(self.source))

    @property
    def _token(self) -> _Token:
        return self._tokens[self._index]

    def _take(self) -> _Token:
        self._index += 1
        return self._tokens[self._index - 1]

    def _skip_newlines(self) -> None:
        while self._token.kind == "newline":
            self._index += 1

    def _rule(self) -> None:
        self._skip_newlines()
        head = self._token
        if head.kind == "end":
            return
        if head.kind != "head" and not self._lines:
            self.refuse(head.at, "a rule is expected here, as in: root ::= [a-z]+")
        if head.kind != "head":
            what = "alternatives go" if head.text == "|" else "a rule goes"
            self._refuse_token(
                f"{what} on in a new line only in parentheses, or where the line before ends with |"
            )
        self._index += 1
        self._owner = head.text
        ways = self._ways()
        if self._token.kind not in ("newline", "end"):
            self._refuse_token("a rule begins on a line of its own")
        self._define(self._named[head.text], self._choice(ways))

    def _refuse_token(self, message: str) -> NoReturn:
        """Say what is wrong with a token that cannot stand where it does."""
        token = self._token
        if token.text in (")", "]", "}"):
            message = f"{token.text} closes nothing"
        elif token.text == "{":
            message = _REPEATS
        elif token.kind == "is" or (token.kind == "mark" and token.text not in "|(."):
            message = f"{token.text!r} has no meaning here"
        self.refuse(token.at, message)

    def _define(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}\n")
        self._owners.append(self._owner)

    def _ways(self) -> list[_Way]:
        """Alternatives, from the sign before the first one on."""
        ways = []
        while True:
            sign = self._take()
            self._skip_newlines()
            if self._token.kind in ("head", "end") and not self._opened:
                self.refuse(sign.at, 'nothing follows; write "" where the text may be empty')
            ways.append(self._way())
            if self._token.text != "|":
                return ways

    def _way(self) -> _Way:
        parts: list[str] = []
        last: _Way | None = None  # what a repeat that comes next is about
        while True:
            if self._opened:
                self._skip_newlines()
            token = self._token
            if token.kind == "repeat":
                if last is None:
                    self.refuse(
                        token.at,
                        f"{token.text:.60} stands behind what it repeats, once: for more put "
                        "parentheses around it",
                    )
                del parts[len(parts) - len(last) :]
                parts += self._repeated(last, token)
                self._index += 1
                last = None
                continue
            if (last := self._part(token)) is None:
                return tuple(parts)
            parts += last

    def _part(self, token: _Token) -> _Way | None:
        """What one token or group says; None where none begins here."""
        if token.text == "(" and token.kind == "mark":
            return self._group()
        if token.kind == "text":
            part = tuple(_literal(one) for one, _, _ in self._characters(token.text, token.at))
        elif token.kind == "set":
            part = (self._set(token.text, token.at),)
        elif token.kind == "name":
            if token.text not in self._named:
                self.refuse(token.at, f"nothing defines {token.text!r}")
            part = (self._named[token.text],)
        elif token.kind == "mark" and token.text == ".":
            part = ("/(?s:.)/",)
        else:
            return None
        self._index += 1
        return part

    def _group(self) -> _Way:
        self._opened.append(self._token.at)
        if len(self._opened) > _DEEPEST:
            self.refuse(
                self._opened[-1],
                f"groups are nested more than {_DEEPEST} deep: make rules of the inner ones",
            )
        ways = self._ways()
        if self._token.kind in ("end", "head"):
            self.refuse(self._opened[-1], "a group that begins here does not end")
        if self._token.text != ")":
            self._refuse_token("")
        self._index += 1
        self._opened.pop()
        return ways[0] if len(ways) == 1 else (f"({self._choice(ways)})",)

    def _repeated(self, part: _Way, token: _Token) -> _Way:
        if not part:
            return ()
        sign = token.text
        body = part[0] if len(part) == 1 else f"({' '.join(part)})"
        if sign in ("*", "+", "?") and body[-1] in "*+?":  # twice has too many ways to be read
            return (f"{body[:-1]}{sign if body[-1] == sign else '*'}",)
        if body[-1] in "*+?}":
            body = f"({body})"
        if token.text[0] == "{":
            found = _COUNT.fullmatch(token.text)
            if found is None:
                self.refuse(token.at, _REPEATS)
            least = self._count(found, 1, token.at, MOST_LEAST)
            most = self._count(found, 3, token.at, MOST_COUNT) if found[3] else None
            if most is None and not found[2]:
                most = least
            if most is not None and most < least:
                self.refuse(token.at, f"{token.text}: the first number is the smaller one")
            if most == 0:
                return ()
            sign = f"{{{least},{'' if most is None else most}}}"
        return (f"{body}{sign}",)

    def _count(self, found: re.Match[str], group: int, at: int, most: int) -> int:
        if (count := int(found[group][:20])) > most:
            self.refuse(
                at + found.start(group), f"{count:,} is too large here; at most {most:,} is taken"
            )
        return count

    def _choice(self, ways: list[_Way], depth: int = 0) -> str:
        """Alternatives in Lark. What several begin with stands once, and how they go on in a rule
        of its own: all alternatives that may come next cost time at each step."""
        begun: dict[str, list[_Way]] = {}
        for way in dict.fromkeys(ways):
            key = way[0] if way and depth < _LONGEST else f"{len(begun)}"
            begun.setdefault(key, []).append(way)
        joined = []
        for alike in begun.values():
            way = alike[0]
            if len(alike) > 1:
                common = 0
                for parts in zip(*alike, strict=False):
                    if len(set(parts)) > 1:
                        break
                    common += 1
                name = f"t{len(self.shared)}"
                self.shared.add(name)
                self._define(name, self._choice([way[common:] for way in alike], depth + 1))
                way = (*way[:common], name)
            joined.append(" ".join(way) or '""')
        return " | ".join(joined)

    def _characters(self, text: str, begin: int) -> Iterator[tuple[str, bool, int]]:
        """The characters between the first and the last: each, whether it was escaped, where."""
        at = 1
        while at < len(text) - 1:
            if text[at] != "\\":
                yield text[at], False, begin + at
                at += 1
                continue
            found = _ESCAPE.match(text, at + 1)
            if found is None:
                sign = text[at + 1]
                wrong = f"\\{sign} is no escape of GBNF; these are: {_ESCAPES}"
                if sign in _DIGITS:
                    wrong = f"\\{sign} has {_DIGITS[sign]} hexadecimal digits"
                self.refuse(begin + at, wrong)
            number = found[1] or found[2] or found[3]
            code = int(number, 16) if number else 0
            if code > _LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
                half = "half of a surrogate pair: write the whole character, as \\U0001F600"
                self.refuse(begin + at, half if code <= _LAST else "there is no such character")
            yield chr(code) if number else _PLAIN.get(found[0], found[0]), True, begin + at
            at = found.end()

    def _set(self, text: str, begin: int) -> str:
        """A class of characters, in which only what is said here has a meaning."""
        inside = list(self._characters(text, begin))
        negated = bool(inside) and inside[0][:2] == ("^", False)
        inside = inside[negated:]
        if not inside:
            self.refuse(begin, "a class of characters with none in it")
        ranges, index = [], 0
        while index < len(inside):
            low = high = inside[index][0]
            if index + 2 < len(inside) and inside[index + 1][:2] == ("-", False):
                high = inside[index + 2][0]
                if high < low:
                    self.refuse(
                        inside[index][2], f"{low!r} comes after {high!r}: nothing is between"
                    )
                index += 2
            ranges.append((ord(low), ord(high)))
            index += 1
        if negated and _are_all(ranges):
            self.refuse(begin, "a class of characters with none in it: all are excluded")
        said = "".join(rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in ranges)
        return f"/[{'^' if negated else ''}{said}]/"


def _literal(character: str) -> str:
    return json.dumps(character).replace("\x7f", r"\u007f")


def _are_all(ranges: list[tuple[int, int]]) -> bool:
    after = 0
    for low, high in sorted([*ranges, _SURROGATES]):
        if low > after:
            return False
        after = max(after, high + 1)
    return after > _LAST


def looks_like_gbnf(source: str) -> bool:
    return re.search(r"^\s*[\w-]+[ \t]*::=", source, re.MULTILINE) is not None

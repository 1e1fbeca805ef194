"""GBNF, the grammars of llama.cpp, in the words of Lark.

llguidance converts them, all but their escapes; what is done here is what it does not do: read
escapes and classes of characters as llama.cpp does, and say what is wrong in the user's own lines.
Used by `constraints_grammar.py`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import NoReturn

from stemma.lang.constraints_places import place
from stemma.lang.errors import InvalidArgument

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<text>"(?:\\.|[^"\\])*")
    |(?P<set>\[(?:\\.|[^\]\\])*\])
    |(?P<head>[\w-]+)(?=[ \t]*::=)
    |(?P<name>[\w-]+)
    |(?P<count>\{[^{}]*\})
    |(?P<special><[^<>\n]*>)
    |(?P<open>["\[])
    |(?P<any>\.)
    |(?P<rest>.)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[nrt\\\"\[\]]")
_ESCAPES = r"\n \r \t \\ \" \[ \] \xHH \uHHHH \UHHHHHHHH"
_PLAIN = {"n": "\n", "r": "\r", "t": "\t"}
_QUOTED = {"\n": r"\n", "\r": r"\r", "\t": r"\t", '"': r"\"", "\\": r"\\"}
_LAST = "\U0010ffff"


class Gbnf:
    """A grammar in GBNF as Lark, and where in the source each of its rules stands.

    source: as the user wrote it. lark: the same, a definition for each rule in the same order.
    Raises InvalidArgument with the line and a caret for what is malformed or undefined.
    """

    named = "grammar (GBNF)"

    def __init__(self, source: str) -> None:
        self.source = source
        self.heads: dict[str, int] = {}
        self._names: list[tuple[str, int]] = []
        self._places: list[tuple[int, int]] = []  # in what is converted, and in the source
        plain = self._plain()
        self._check_names()
        self.lark = self._converted(plain)
        self._starts = [found.start() for found in re.finditer(r"^\w+(?=:)", self.lark, re.M)]

    def refuse(self, at: int, message: str) -> NoReturn:
        raise InvalidArgument(f"{self.named}: {message}\n{place(self.source, at)}")

    def rule_at(self, at: int) -> tuple[str, int]:
        """The name and the place of the rule whose definition in Lark holds a place."""
        index = max(0, bisect_right(self._starts, at) - 1)
        return list(self.heads.items())[index]

    def _plain(self) -> str:
        """The source without comments and escapes, but those that llguidance reads."""
        out: list[str] = []
        size = at = 0
        while at < len(self.source):
            found = _TOKEN.match(self.source, at)
            assert found is not None
            self._places.append((size, at))
            out.append(self._token(str(found.lastgroup), found[0], at))
            size += len(out[-1])
            at = found.end()
        return "".join(out)

    def _token(self, kind: str, text: str, at: int) -> str:
        if kind == "comment":
            return ""
        if kind == "special":
            self.refuse(at, f"{text} names a token of a model; a constraint is about text")
        if kind == "open":
            what = "a text" if text == '"' else "a class of characters"
            self.refuse(at, f"{what} that begins here does not end")
        if kind in ("head", "name"):
            self._name(kind, text, at)
        if kind == "text":
            return _literal("".join(one for one, _, _ in self._characters(text, at)))
        if kind == "set":
            return self._set(text, at)
        return f"[\\x00-{_LAST}]" if kind == "any" else text

    def _name(self, kind: str, name: str, at: int) -> None:
        if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_-]*", name):
            self.refuse(
                at,
                f"{name!r:.60}: a rule's name has letters, digits and -, and a letter first",
            )
        if kind == "name":
            self._names.append((name, at))
        elif name in self.heads:
            self.refuse(at, f"{name!r} is defined twice")
        else:
            self.heads[name] = at

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
                self.refuse(
                    begin + at,
                    f"{text[at : at + 2]} is no escape of GBNF; these are: {_ESCAPES}",
                )
            number = found[1] or found[2] or found[3]
            code = int(number, 16) if number else 0
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                half = "half of a surrogate pair: write the whole character, as \\U0001F600"
                self.refuse(begin + at, half if code < 0xE000 else "there is no such character")
            yield chr(code) if number else _PLAIN.get(found[0], found[0]), True, begin + at
            at = found.end()

    def _set(self, text: str, begin: int) -> str:
        """A class of characters, in which only what is said here has a meaning."""
        inside = list(self._characters(text, begin))
        negated = bool(inside) and inside[0][:2] == ("^", False)
        inside = inside[negated:]
        if not inside:
            self.refuse(begin, "a class of characters with none in it")
        out, index = [], 0
        while index < len(inside):
            low = high = inside[index][0]
            if index + 2 < len(inside) and inside[index + 1][:2] == ("-", False):
                high = inside[index + 2][0]
                if high < low:
                    self.refuse(
                        inside[index][2], f"{low!r} comes after {high!r}: nothing is between"
                    )
                index += 2
            out.append(_in_set(low) if low == high else f"{_in_set(low)}-{_in_set(high)}")
            index += 1
        return f"[{'^' if negated else ''}{''.join(out)}]"

    def _check_names(self) -> None:
        for name, at in self._names:
            if name not in self.heads:
                self.refuse(at, f"nothing defines {name!r}")
        if "root" not in self.heads:
            raise InvalidArgument(f"{self.named}: there is no rule named 'root'")
        seen = {"start": "root"}  # which it becomes
        for name, at in self.heads.items():
            key = re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()
            if name != "root" and seen.setdefault(key, name) != name:
                self.refuse(at, f"{name!r} is too much like {seen[key]!r}: give it another name")

    def _converted(self, plain: str) -> str:
        from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

        try:
            return gbnf_to_lark(plain)
        except GbnfToLarkError as error:
            said = str(error).split(" at line ")[0]
            at, begin = self._places[bisect_right(self._places, (error.pos.pos, len(plain))) - 1]
            self.refuse(begin + error.pos.pos - at, said)
        except RecursionError as error:
            raise InvalidArgument(f"{self.named}: it is nested too deep") from error
        except Exception as error:  # the converter raises plain ones for what it does not know
            raise InvalidArgument(f"{self.named}: {error}") from error


def _literal(text: str) -> str:
    """A text; characters that none can have in Lark stand in classes beside its parts."""
    parts = re.split(r"([\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f])", text)
    if len(parts) == 1:
        return f'"{"".join(_QUOTED.get(one, one) for one in text)}"'
    inside = [f"[{_in_set(part)}]" if i % 2 else _literal(part) for i, part in enumerate(parts)]
    return f"({' '.join(part for part in inside if part != _EMPTY)})"


_EMPTY = '""'


def _in_set(character: str) -> str:
    if character.isascii() and not character.isalnum():
        return f"\\x{ord(character):02x}"
    return character


def looks_like_gbnf(source: str) -> bool:
    return re.search(r"^\s*[a-zA-Z][a-zA-Z0-9_\-]*\s*::=", source, re.MULTILINE) is not None

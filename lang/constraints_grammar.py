"""Context-free grammars: llguidance's dialect of Lark, and GBNF, checked where they are written.

Used by `constraints.py`. llguidance says what is malformed or undefined; what is done here is what
it does not do: rules that nothing uses or that can never end, what belongs to a model, schemas that
are written into a grammar, and a bound on the size.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from stemma.lang.constraints_escapes import fault_of_text
from stemma.lang.constraints_gbnf import Gbnf, looks_like_gbnf
from stemma.lang.constraints_lark import TOKEN, Definition, Token, endless_rule, last_open
from stemma.lang.constraints_limits import (
    MOST_ALTERNATIVES,
    MOST_COUNT,
    MOST_LEAST,
    MOST_LOOSE,
    MOST_MEETING,
    gathered,
    meaning,
)
from stemma.lang.constraints_matcher import emptiness, refusal
from stemma.lang.constraints_places import place
from stemma.lang.constraints_regex import loose_parts, too_long
from stemma.lang.constraints_schema import compiled_prepared, options, prepared_schema
from stemma.lang.errors import InvalidArgument

MOST_PAIRS = 1_000_000  # of an alternative that may end and one that goes on behind its rule
MOST_REFERENCES = 20_000  # of rules to rules; those that may be empty cost squared time
MOST_PARTS = 2_000  # rules, groups and repetitions; llguidance recurses into them

# What a regular expression has that matches nothing.
_may_be_empty = re.compile(r"\^|\$|&&|--").search

_SETTINGS = {
    "max_tokens": "gen(max_tokens=...)",
    "temperature": "gen(temperature=...)",
    "stop": "suffix=, or gen(stop=...)",
}


def compiled_grammar(source: str) -> tuple[str, list[str]]:
    """llguidance's form of a grammar in Lark or GBNF, and what to warn of.

    Raises InvalidArgument with the line, a caret and what is wrong or was expected there.
    """
    from llguidance import LLMatcher

    gbnf = Gbnf(source) if looks_like_gbnf(source) else None
    analysis = _Analysis(source if gbnf is None else gbnf.lark, gbnf)
    compiled = LLMatcher.grammar_from_lark(analysis.text)
    if message := refusal(compiled):
        analysis.refuse_as_llguidance_does(message)
    analysis.check_expressions()
    analysis.check_ends()
    analysis.check_terminals()
    if reason := emptiness(compiled):
        if "has_lowest_match" in reason:  # on which llguidance panics
            raise InvalidArgument(
                f"{analysis.named}: a rule with [lazy] may be empty here, and always would be: "
                "take `+` in place of `*`, or leave the rule out"
            )
        matches = "it matches nothing" if reason == "nothing" else f"it is too complex: {reason}"
        raise InvalidArgument(f"{analysis.named}: {matches}")
    return compiled, analysis.warnings


class _Analysis:
    """A grammar as its definitions. Unknown syntax is left to llguidance, which refuses it."""

    def __init__(self, lark: str, gbnf: Gbnf | None) -> None:
        self.lark = lark
        self.gbnf = gbnf  # of which this was made
        self.named = "grammar" if gbnf is None else gbnf.named
        self.warnings: list[str] = []
        self.definitions: dict[str, Definition] = {}
        self.shared = set() if gbnf is None else gbnf.shared  # which are parts of other rules
        self.loose: list[Token] = []  # of directives, as `%ignore WS`
        self.text = lark
        self._read()

    def refuse(self, at: int, message: str) -> NoReturn:
        if self.gbnf is not None:
            self.gbnf.refuse(self.gbnf.rule_at(at)[1], message)
        raise InvalidArgument(f"{self.named}: {message}\n{place(self.lark, at)}")

    def written(self, definition: Definition) -> tuple[str, int]:
        """The name of a definition and its line, as the user wrote them."""
        if self.gbnf is None:
            return definition.name, self.lark.count("\n", 0, definition.at) + 1
        name, at = self.gbnf.rule_at(definition.at)
        return name, self.gbnf.source.count("\n", 0, at) + 1

    def _tokens(self) -> list[Token]:
        tokens, replaced, at, last = [], [], 0, 0
        while at < len(self.lark):
            found = TOKEN.match(self.lark, at)
            if found is None:  # a character that only llguidance may know
                at += 1
                continue
            kind, begin = str(found.lastgroup), at
            at = found.end()
            if kind == "data":
                end = self._end_of_data(begin, at)
                if found.group().startswith("%json"):
                    replaced.append(self.lark[last:begin] + self._schema(begin, at, end))
                    last = end
                at = end
            if kind != "skip":
                tokens.append(Token(kind, found.group(), begin))
        self.text = "".join(replaced) + self.lark[last:]
        return tokens

    def _end_of_data(self, begin: int, at: int) -> int:
        try:
            return json.JSONDecoder().raw_decode(self.lark, at)[1]
        except RecursionError:
            self.refuse(begin, "the JSON here is nested too deep")
        except json.JSONDecodeError as error:
            self.refuse(error.pos, f"the JSON here is malformed: {error.msg}")

    def _schema(self, begin: int, at: int, end: int) -> str:
        """A schema in a grammar, prepared, on as many lines as it was written on."""
        schema = json.loads(self.lark[at:end])
        where = f"{self.named}: %json in line {self.lark.count(chr(10), 0, begin) + 1}"
        prepared, warnings = prepared_schema(schema, where)
        self.warnings += warnings
        compiled_prepared(prepared, "flexible", where)  # which says what it refuses, and where
        if isinstance(prepared, dict):
            prepared["x-guidance"] = options("flexible", prepared)
        lines = self.lark.count("\n", begin, end)
        return f"%json {json.dumps(prepared, ensure_ascii=False)}" + "\n" * lines

    def _read(self) -> None:
        tokens = self._tokens()
        parts = 0
        current: list[Token] = self.loose
        index, fresh = 0, True
        while index < len(tokens):
            token = tokens[index]
            self._check(token)
            if token.kind == "number":
                self._check_count(tokens[index - 1].text if index else "", token)
            parts += token.text in "([?*+{" and token.kind == "mark"
            if token.kind == "newline":
                fresh = True
            elif fresh and token.kind == "name" and (end := self._head(tokens, index)):
                definition = Definition(token.text.lstrip("!?"), token.at)
                self.definitions.setdefault(definition.name, definition)
                current, index, fresh = definition.body, end, False
                parts += definition.name not in self.shared
                continue
            else:
                if fresh and token.kind in ("directive", "data"):
                    current = self.loose
                fresh = False
                current.append(token)
            index += 1
        references = [
            token
            for definition in self.definitions.values()
            for token in definition.body
            if token.text in self.definitions
        ]
        if len(references) > MOST_REFERENCES:
            self.refuse(
                references[MOST_REFERENCES].at,
                f"the grammar refers to rules {len(references):,} times; at most "
                f"{MOST_REFERENCES:,} are taken: write repeats as rule{{n}}",
            )
        if parts > MOST_PARTS:
            raise InvalidArgument(
                f"{self.named}: has {parts:,} rules, groups and repetitions; at most "
                f"{MOST_PARTS:,} are taken"
            )
        self._check_alternatives()
        self._warn_of_unused()

    def _head(self, tokens: list[Token], index: int) -> int:
        """Where the body of the definition begins that stands at `index`; 0 if there is none."""
        depth = 0
        for at in range(index + 1, min(len(tokens), index + 60)):
            token = tokens[at]
            if token.text in ("[", "{"):
                depth += 1
            elif token.text in ("]", "}"):
                depth -= 1
            elif token.kind == "newline" or (token.text == "|" and not depth):
                return 0
            elif token.text == ":" and not depth:
                self._check_settings(tokens[index + 1 : at])
                return at + 1
        return 0

    def _check_settings(self, head: list[Token]) -> None:
        for token in head:
            if token.kind == "name" and token.text in _SETTINGS:
                self.refuse(
                    token.at,
                    f"{token.text!r} is not supported in a grammar: use {_SETTINGS[token.text]}",
                )

    def _check(self, token: Token) -> None:
        if token.kind == "special":
            self.refuse(
                token.at,
                f"{token.text} names a token of a model; a constraint is about text: write it in "
                "quotes if the text is meant",
            )
        if token.text.startswith("%llguidance"):
            self.refuse(
                token.at,
                "%llguidance sets options of llguidance, which are set already: leave it out",
            )
        if token.kind == "reference":
            self.refuse(token.at, f"{token.text} names another grammar; there is only this one")
        if token.kind != "text":
            return
        if token.text[0] == "/":
            large = too_long(token.text[1 : token.text.rindex("/")])
            fault = large and (large[0] + 1, large[1])
        else:
            fault = fault_of_text(token.text)
        if fault is not None:
            self.refuse(token.at + fault[0], fault[1])

    def _check_count(self, before: str, token: Token) -> None:
        """A repeat that llguidance cannot count, or that no text is long enough for."""
        most = MOST_LEAST if before in ("{", "~") else MOST_COUNT
        if (count := int(token.text[:20])) > most:
            self.refuse(token.at, f"{count:,} is too large here; at most {most:,} is taken")

    def _check_alternatives(self) -> None:
        """llguidance's parser has a row for all that may come next; terminals are not in it."""
        counts = {
            name: 1 + sum(token.text == "|" for token in definition.body)
            for name, definition in self.definitions.items()
            if name.islower() and name not in self.shared
        }
        begun = dict.fromkeys(counts, 0)  # how many alternatives begin with each rule
        for name in counts:
            before = "|"
            for token in self.definitions[name].body:
                if before == "|" and token.text in begun:
                    begun[token.text] += 1
                before = token.text
        pairs = {name: counts[name] * begun[name] for name in counts}
        if sum(pairs.values()) > MOST_PAIRS:
            name = max(pairs, key=pairs.__getitem__)
            called, _ = self.written(self.definitions[name])
            self.refuse(
                self.definitions[name].at,
                f"{called!r} has {counts[name]:,} alternatives and "
                f"begins {begun[name]:,}, which makes {pairs[name]:,} pairs; at most "
                f"{MOST_PAIRS:,} are taken: begin alternatives with a text",
            )
        total = sum(counts.values())
        if total > MOST_ALTERNATIVES:
            name = max(counts, key=counts.__getitem__)
            called, _ = self.written(self.definitions[name])
            self.refuse(
                self.definitions[name].at,
                f"the rules have {total:,} alternatives, {counts[name]:,} of them in {called!r}; "
                f"at most {MOST_ALTERNATIVES:,} can be told apart: {self._remedy()}",
            )

    def _remedy(self) -> str:
        if self.gbnf is not None:
            return (
                "put those that begin alike into one rule, and single characters into a class, "
                "as [abc]"
            )
        return 'write plain texts as a terminal, its name in capitals, as WORD: "a" | "b"'

    def check_expressions(self) -> None:
        """Refuse regular expressions that match nothing, which need a class with none in it or an
        anchor; unless all else is meant."""
        from llguidance import LLMatcher

        seen = {""}
        for definition in () if self.gbnf else self.definitions.values():
            before = ""
            for token in definition.body:
                text = token.text
                if text[0] == "/" and before != "~" and text not in seen and _may_be_empty(text):
                    seen.add(text)
                    if emptiness(LLMatcher.grammar_from_lark(f"start: {text}")) == "nothing":
                        self.refuse(token.at, f"{text:.60} matches nothing")
                before = text

    def check_terminals(self) -> None:
        """Refuse regular expressions that cost too much, with all terminals that they are made of:
        too many that must hold at once, or too many parts that may be left out."""
        known = self.definitions
        terminals = [name for name in known if name.isupper()]

        def parts(name: str) -> list[str]:
            return [token.text for token in known[name].body if token.text in known]

        def meeting(name: str) -> int:
            return sum(token.text == "&" for token in known[name].body)

        def loose(name: str) -> int:
            return sum(
                loose_parts(token.text) if token.text[0] == "/" else token.text in ("?", "*")
                for token in known[name].body
            )

        for own, most, said in (
            (
                meeting,
                MOST_MEETING - 1,
                f"{MOST_MEETING} regular expressions must hold at once (&)",
            ),
            (loose, MOST_LOOSE, f"{MOST_LOOSE:,} parts may be left out (by *, ? or {{0,...}})"),
        ):
            if (heavy := gathered(terminals, own, parts, most)) is not None:
                self.refuse(
                    known[heavy].at,
                    f"in {self.written(known[heavy])[0]!r} more than {said}: write one that says "
                    "the same with fewer, or use rules",
                )

    def _warn_of_unused(self) -> None:
        seen: set[str] = set()
        waiting = ["start", *(token.text for token in self.loose)]
        while waiting:
            name = waiting.pop().lstrip("!?")
            if name in self.definitions and name not in seen:
                seen.add(name)
                waiting += [t.text for t in self.definitions[name].body if t.kind == "name"]
        for name, definition in self.definitions.items():
            if name not in seen and name not in self.shared and "start" in self.definitions:
                called, line = self.written(definition)
                self.warnings.append(
                    f"{self.named}: nothing uses {called!r}, defined in line {line}"
                )

    def check_ends(self) -> None:
        """Refuse rules in use that no text can ever complete, as `list: "," list`."""
        if (culprit := endless_rule(self.definitions)) is not None:
            self.refuse(
                culprit.at,
                f"{self.written(culprit)[0]!r} never ends: each of its alternatives needs itself "
                "again",
            )

    def refuse_as_llguidance_does(self, message: str) -> NoReturn:
        """llguidance's error, shown in the text that the user wrote."""
        lines = message.strip().split("\n")
        found = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", lines[0])
        if found is None:
            said = "there is no rule named 'start'"
            if "no start rule found" not in lines[0]:
                said = meaning(lines[0])
            raise InvalidArgument(f"{self.named}: {said}")
        line, column, said = int(found[1]), int(found[2]), found[3]
        begin = sum(len(one) + 1 for one in self.lark.split("\n")[: line - 1])
        if said == "lexer error":
            self.refuse(
                begin + column - 1,
                "an unexpected character, or a string or regex that does not end in its line",
            )
        if re.match(r"Expected token '[)\]}]', found '\\n'", said):
            bodies = (definition.body for definition in self.definitions.values())
            tokens = [token for body in bodies for token in body if token.at < begin + column]
            if (opened := last_open(tokens)) is not None:
                self.refuse(opened.at, f"{opened.text} is not closed in its line")
        if unknown := re.match(r'unknown name: "([\w-]+)"', said):
            # llguidance points to where the alternatives begin that have it.
            name = re.compile(rf"(?<![\w-]){unknown[1]}(?![\w-])")
            if shown := name.search(self.lark, begin + column - 1):
                self.refuse(shown.start(), f"nothing defines {unknown[1]!r}")
        reasons = [one for one in lines if one.startswith("error: ")]
        if reasons:
            said = f"{said.split(' (in regex)')[0]:.200}: {reasons[0].removeprefix('error: ')}"
        self.refuse(begin + column - 1, meaning(said))

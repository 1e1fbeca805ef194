"""Grammars in Lark and GBNF: what they match, and what is wrong with them, line and caret."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from stemma.errors import ConstraintError, InvalidArgument
from stemma.lang.constraints import Constraint, ConstraintWarning

ARITHMETIC = r"""
start: sum
sum: product | sum ("+" | "-") product
product: atom | product "*" atom
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]+/
%ignore / {1,3}/
"""


def test_a_recursive_grammar_matches_what_it_says() -> None:
    constraint = Constraint.grammar(ARITHMETIC)
    for text in ["1", "1+2*(3 - 4)", "((7))"]:
        assert constraint.parse(text) == text
    for text in ["", "1+", "(1", "a"]:
        assert not constraint.matches(text)
    assert constraint.prefix_ok("(1+")
    assert not constraint.prefix_ok("(1)(")
    assert all(constraint.matches(text) for text in constraint.examples(10))


def test_a_text_has_the_escapes_of_json() -> None:
    constraint = Constraint.grammar(r'start: "\u00e9\ud83d\ude00\x41\\\"\/\n"')
    assert constraint.examples(1) == ['é😀A\\"/\n']


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (
            'start: "a" b\n',
            "grammar: nothing defines 'b'\n   1 | start: \"a\" b\n                  ^",
        ),
        (
            'start: A\nA: "x\n',
            "an unexpected character, or a string or regex that does not end in its line\n"
            '   2 | A: "x\n            ^',
        ),
        ('start: "a" | )\n', "llguidance says: expecting rule, token or statement"),
        (
            'start: "a"{3',
            'grammar: { is not closed in its line\n   1 | start: "a"{3\n' + " " * 17 + "^",
        ),
        (
            "start: /(?=a)b/\n",
            "look-around, including look-ahead and look-behind, is not supported",
        ),
        ('foo: "a"\n', "grammar: there is no rule named 'start'"),
        ("", "Empty grammar"),
        ('start: "a"\nstart: "b"\n', 'duplicate rule: "start"\n   2 | start: "b"'),
        ("start: A\nA: B\nB: A", "circular reference in token"),
        (
            'start: item\nitem: "," item | item "x"\n',
            "'item' never ends: each of its alternatives needs itself again\n"
            '   2 | item: "," item | item "x"\n       ^',
        ),
        ('start: a\na: "x" b\nb: "y" a\n', "'a' never ends"),
        ('start: x\nx: ("a" | x)* x\n', "'x' never ends"),
        (
            'start: B | "a"\nB: "b" /[^\\s\\S]/\n',
            'grammar: /[^\\s\\S]/ matches nothing\n   2 | B: "b" /[^\\s\\S]/\n' + " " * 14 + "^",
        ),
        ('start: "x" (/[a-c&&x]b/ | /a/)\n', "/[a-c&&x]b/ matches nothing\n   1 | start:"),
        ("start: A\nA: /a/ & /b/\n", "grammar: it matches nothing"),
        (
            '%llguidance {"no_forcing": true}\nstart: "a"\n',
            "%llguidance sets options of llguidance, which are set already: leave it out\n   1 | %",
        ),
        (
            'start: "a" ("b" | ["c"]\n\n',
            '( is not closed in its line\n   1 | start: "a" ("b" | ["c"]\n' + " " * 18 + "^",
        ),
        ('start: a\na: ["a"', "[ is not closed in its line\n   2 | a: ["),
        (
            "start: <|end|>\n",
            "<|end|> names a token of a model; a constraint is about text: write it in quotes if "
            "the text is meant\n   1 | start: <|end|>\n              ^",
        ),
        ("start: <[0-255]>\n", "names a token of a model"),
        ("start: @other\n", "@other names another grammar"),
        (
            "start: a\na[max_tokens=5]: /.*/\n",
            "'max_tokens' is not supported in a grammar: use gen(max_tokens=...)\n   2 | a[max_",
        ),
        ('start: a\na[stop="x"]: /.*/\n', "'stop' is not supported in a grammar"),
        ('start: %json {"type":}\n', "the JSON here is malformed: Expecting value"),
        (
            'start: a b\na[lazy]: /.*/\nb: "q"\n',
            "grammar: a rule with [lazy] may be empty here, and always would be: take `+`",
        ),
        (
            'start: %json {"items": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}}\n',
            "grammar: %json in line 1: at #/items/oneOf: 'oneOf' is supported only where",
        ),
        (
            'start: %json {"type": "string", "pattern": "^a$", "minLength": 3}\n',
            "grammar: %json in line 1: at #: the schema admits nothing: what it says of a string",
        ),
        (
            'start: a\na: %json {\n"type": "integer",\n"not": {}}\n',
            "grammar: %json in line 2: at #/not: 'not' is not supported",
        ),
        (
            'start: "a" "x\\U0001F600"\n',
            "grammar: a text has no escape \\U: write the character itself\n"
            '   1 | start: "a" "x\\U0001F600"\n                    ^',
        ),
        ('start: "\\0"\n', "a text has no escape \\0: write \\u and four hexadecimal digits, as"),
        (
            'start: A\nA: "\\d"\n',
            "text has no escape \\d: for a class of characters write a regular expression, /\\d/\n"
            '   2 | A: "\\d"\n           ^',
        ),
        ('start: "\\["\n', "a text has no escape \\[: leave the backslash out"),
        ('start: "\\u12"\n', "\\u has four hexadecimal digits, as \\u00e9"),
        ('start: "\\ud83d"\n', "\\ud83d is half of a surrogate pair: write the character itself"),
        ('start: "\x01"\n', "cannot have this character as it is: write \\u0001\n   1 | start:"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said_where_it_is(grammar: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Constraint.grammar(grammar)
    assert said in str(caught.value)


def test_a_rule_that_nothing_uses_is_warned_of() -> None:
    with pytest.warns(ConstraintWarning, match="nothing uses 'spare', defined in line 2") as told:
        constraint = Constraint.grammar('start: "a"\nspare: "b"\n')
    assert constraint.warnings == (str(told[0].message),)
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    "grammar",
    [
        ARITHMETIC,
        'start: x\nx: "a" x?\n',
        'start: x\nx: "a" x~0..3 | "b" x{0,2}\n',
        'start: x\nx: "(" x ")" |\n',
        'start: x\n\nx: "a"  // : "b" y\n  | "c" x\n',
        "%import common.INT\n%ignore WS\nWS: /[ \\t]+/\nstart: INT*\n",
        'start: "a::b" | ":" | /x:y/\n',
        "start: A\nA: /[a-z]+/ & ~/[^\\s\\S]/ & ~/(?s:.*)xx(?s:.*)/ & /(?s:.*)/\n",
    ],
)
def test_a_good_grammar_raises_and_warns_of_nothing(
    grammar: str, recwarn: pytest.WarningsRecorder
) -> None:
    assert Constraint.grammar(grammar).warnings == ()
    assert list(recwarn) == []


def test_a_schema_in_a_grammar_is_prepared_like_one_alone() -> None:
    source = (
        'start: "x=" value\nvalue: %json {\n  "type": "array",\n  "items": {"format": "date"}}\n'
    )
    constraint = Constraint.grammar(source)
    assert constraint.matches('x=["2024-02-29", "2023-01-01"]')
    assert not constraint.matches('x=["2023-02-29"]')
    assert not constraint.matches("x=[" + " " * 9 + "]")
    assert not constraint.matches("x=[ " + "\n" * 9 + "]")


@pytest.mark.parametrize(
    "grammar",
    [
        "start: a0\n" + "".join(f'a{i}: "x" a{i + 1}\n' for i in range(1_990)) + 'a1990: "z"\n',
        "start: a0\n" + "".join(f'a{i}: "x" a{i + 1}\n' for i in range(4_000)) + 'a4000: "z"\n',
        "start: A0\n" + "".join(f'A{i}: "x" A{i + 1}\n' for i in range(1_990)) + 'A1990: "z"\n',
        "start: A30\nA0: /ab/\n" + "".join(f"A{i}: A{i - 1} A{i - 1}\n" for i in range(1, 31)),
        "start: " + "(" * 50_000 + '"a"' + ")" * 50_000,
        'start: (("a"{0,1000}){0,1000}){0,1000}\n',
        "start: %json " + '{"items":' * 20_000 + "{}" + "}" * 20_000,
        "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000,
    ],
    ids=["chain", "long chain", "terminals", "doubling", "nested", "repeated", "json", "gbnf"],
)
def test_a_hostile_grammar_is_refused_or_costs_little(grammar: str) -> None:
    # In a process of its own: what recurses too deep would end this one without a word.
    code = (
        "import sys\n"
        "from stemma.lang.constraints import Constraint\n"
        "from stemma.errors import ConstraintError, InvalidArgument\n"
        "try:\n"
        "    Constraint.grammar(sys.stdin.read()).matches('a' * 3000)\n"
        "except (ConstraintError, InvalidArgument) as error:\n"
        "    assert len(str(error)) < 5000\n"
        "print('alive')\n"
    )
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], input=grammar, capture_output=True, text=True, cwd="/"
    )
    assert (done.stdout, done.returncode) == ("alive\n", 0), done.stderr[-2_000:]
    assert time.monotonic() - begun < 30


def test_an_ambiguous_grammar_takes_its_time_and_no_more() -> None:
    constraint = Constraint.grammar('start: s\ns: s s s | "a" |\n')
    assert constraint.matches("a" * 20)
    begun = time.monotonic()
    with pytest.raises(ConstraintError, match=r"too ambiguous|too complex"):
        constraint.matches("a" * 20_000)
    assert time.monotonic() - begun < 30

"""Grammars in GBNF: read as llama.cpp reads them, refused in the user's own lines."""

from __future__ import annotations

import pytest

from stemma.errors import InvalidArgument
from stemma.lang.constraints import Constraint, ConstraintWarning


def test_gbnf_is_taken_too() -> None:
    constraint = Constraint.grammar('root ::= "[" item ("," item)* "]"\nitem ::= [a-zé]+\n')
    assert constraint.matches("[é,b]")
    assert not constraint.matches("[a,]")
    assert constraint.forced_prefix() == "["


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (r'root ::= "\u00e9\U0001F600\x41"', ["é😀A"], ["e9"]),
        (r'root ::= "\[\]\"\\\n\r\t"', ['[]"\\\n\r\t'], []),
        ('root ::= "a\nb" # "c\n', ["a\nb"], []),
        (r'root ::= "\x00\u0001a\x7f" "\x85"', ["\x00\x01a\x7f\x85"], ["a"]),
        (r'root ::= "\x01a"{2} ("\x02")* "x"', ["\x01a\x01ax", "\x01a\x01a\x02x"], ["\x01ax"]),
        (r"root ::= [\u00e9\U0001F600-\U0001F64F]", ["é", "😃"], ["e", "9", "\\"]),
        (r"root ::= [^\u00e9\n]", ["e", "\\", "^"], ["é", "\n"]),
        (r"root ::= [a\x2dc^]+", ["a-c^"], ["b"]),
        ("root ::= [-a-c-]+", ["-abc-"], ["d"]),
        (r'root ::= [\[\]\\"&&~/]+', ['[]\\"&~/'], ["a"]),
        ('root ::= . "x"', ["\nx", "éx", "\x00x", "\U0010ffffx"], ["x"]),
        ('root ::= foo-Bar?\nfoo-Bar ::= ""', [""], ["x"]),
    ],
)
def test_escapes_and_classes_mean_what_they_mean_in_llama_cpp(
    grammar: str, good: list[str], bad: list[str]
) -> None:
    constraint = Constraint.grammar(grammar)
    assert [text for text in good if not constraint.matches(text)] == []
    assert [text for text in bad if constraint.matches(text)] == []


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (
            'root ::= "a" |\n  "\\q"\n',
            r"\q is no escape of GBNF; these are: \n \r \t \\ \" \[ \] \xHH \uHHHH \UHHHHHHHH"
            '\n   2 |   "\\q"\n          ^',
        ),
        (r'root ::= "\u00"', r"\u is no escape of GBNF"),
        (r'root ::= "\ud83d\ude00"', "half of a surrogate pair: write the whole character"),
        (r'root ::= "\U00110000"', "there is no such character"),
        (
            "root ::= [az-b]",
            "'z' comes after 'b': nothing is between\n   1 | root ::= [az-b]\n" + " " * 18 + "^",
        ),
        ("root ::= []", "a class of characters with none in it"),
        ('root ::= "a" [0-9\n', "a class of characters that begins here does not end"),
        ('root ::= "a\n', "a text that begins here does not end"),
        (
            'root ::= "é" foo\n',
            "nothing defines 'foo'\n   1 | root ::= \"é\" foo\n" + " " * 20 + "^",
        ),
        ('item ::= "a"\n', "there is no rule named 'root'"),
        ('root ::= "a"\nroot ::= "b"\n', "'root' is defined twice\n   2 | root ::="),
        ('root ::= a-b\na-b ::= "x"\na_b ::= "y"', "'a_b' is too much like 'a-b': give it"),
        ('root ::= start\nstart ::= "x"\n', "'start' is too much like 'root'"),
        (
            'root ::= 1a\n1a ::= "x"\n',
            "'1a': a rule's name has letters, digits and -, and a letter",
        ),
        ("root ::= <[1000]>\n", "<[1000]> names a token of a model"),
        ('root ::= "\\u00e9" )\n', 'Expected name\n   1 | root ::= "\\u00e9" )\n' + " " * 25 + "^"),
        (
            '# a list\nroot ::= "x" Lst\n\nLst ::= "," Lst\n',
            "'Lst' never ends: each of its alternatives needs itself again\n"
            '   4 | Lst ::= "," Lst\n       ^',
        ),
        (
            'root ::= "x" b{5000000}\nb ::= "y"\n',
            "5,000,000 is too large here; at most 262,144 is taken\n   1 | root ::=",
        ),
    ],
)
def test_what_is_wrong_is_said_in_the_lines_of_the_user(grammar: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Constraint.grammar(grammar)
    assert str(caught.value).startswith("grammar (GBNF): ")
    assert said in str(caught.value)


def test_a_rule_that_nothing_uses_is_warned_of_by_its_own_name() -> None:
    with pytest.warns(ConstraintWarning, match="nothing uses 'spare-Part', defined in line 3"):
        Constraint.grammar('# first\nroot ::= "a"\nspare-Part ::= "b"\n')

"""Grammars in GBNF: read as llama.cpp reads them, refused in the user's own lines."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        (
            r'root ::= "\u12"',
            '\\u has four hexadecimal digits\n   1 | root ::= "\\u12"\n' + " " * 17 + "^",
        ),
        (r"root ::= [\x1]", "\\x has two hexadecimal digits"),
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
        (
            'root ::= ä\nä ::= "x"\n',
            "'ä': a rule's name has letters (a-z), digits and -\n   1 | root ::= ä\n",
        ),
        ("root ::= <[1000]>\n", "<[1000]> names a token of a model"),
        (
            'root ::= "\\u00e9" )\n',
            ') closes nothing\n   1 | root ::= "\\u00e9" )\n' + " " * 25 + "^",
        ),
        ('root ::= "a"}\n', '} closes nothing\n   1 | root ::= "a"}\n' + " " * 19 + "^"),
        ('root ::= ("a" ]\n)', '] closes nothing\n   1 | root ::= ("a" ]\n'),
        (
            'root ::= "a" ("b"\n  "c"\nitem ::= "x"\n',
            'a group that begins here does not end\n   1 | root ::= "a" ("b"\n' + " " * 20 + "^",
        ),
        ('root ::= ("a" | ("b")', "a group that begins here does not end\n   1 | root"),
        (
            'root ::= "a"??\n',
            "? stands behind what it repeats, once: for more put parentheses around it\n"
            '   1 | root ::= "a"??\n' + " " * 20 + "^",
        ),
        ("root ::= * [a]\n", "* stands behind what it repeats"),
        (
            'root ::= "a"{2,1}\n',
            "{2,1}: the first number is the smaller one\n"
            '   1 | root ::= "a"{2,1}\n' + " " * 19 + "^",
        ),
        ('root ::= "a"{,2}\n', "a repeat is written {3}, {3,}, {3,5} or {0,5}\n   1 | root"),
        (
            'root ::= "a"{2\nb ::= "{}"',
            "a repeat is written {3}, {3,}, {3,5} or {0,5}\n   1 | root",
        ),
        (
            'root ::= "a"\n  | "b"\n',
            "alternatives go on in a new line only in parentheses, or where the line before ends "
            'with |\n   2 |   | "b"\n         ^',
        ),
        (
            'root ::= "a"\n  "b"\n',
            "a rule goes on in a new line only in parentheses, or where the line before ends "
            'with |\n   2 |   "b"\n         ^',
        ),
        ('"a"\nroot ::= "b"\n', 'a rule is expected here, as in: root ::= [a-z]+\n   1 | "a"'),
        ('root ::= "a" item ::= "b"\nx ::= "b"', "a rule begins on a line of its own\n   1 |"),
        ('root ::= "a" / "b"', "'/' has no meaning here\n   1 | root"),
        (
            'root ::= "a" |\nitem ::= "b"',
            'nothing follows; write "" where the text may be empty\n   1 | root ::= "a" |\n'
            + " " * 20
            + "^",
        ),
        (
            r"root ::= . [^\x00-\U0010ffff]",
            "a class of characters with none in it: all are excluded\n   1 | root ::= . [^",
        ),
        (
            "root ::= " + "(" * 101,
            "groups are nested more than 100 deep: make rules of the inner ones\n   1 | ",
        ),
        (
            '# a list\nroot ::= "x" Lst\n\nLst ::= "," Lst\n',
            "'Lst' never ends: each of its alternatives needs itself again\n"
            '   4 | Lst ::= "," Lst\n       ^',
        ),
        (
            'root ::= "x" b{5000000}\nb ::= "y"\n',
            "5,000,000 is too large here; at most 262,144 is taken\n"
            '   1 | root ::= "x" b{5000000}\n' + " " * 22 + "^",
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


ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [1-9] [0-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
LIST = r"""
root ::= item+
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
CHESS = r"""
root     ::= (turn "\n")+
turn     ::= [1-9] [0-9]? ". " move " " move
move     ::= (pawn | nonpawn | castle) [+#]?
pawn     ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
nonpawn  ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
castle   ::= "O-O" "-O"?
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (ARITHMETIC, ["a=1\n", "x1 +(2*y)\n/3 = 12 \n\n", "1=2\n3=4\n"], ["a=1", "a=\n", "1a=1\n"]),
        (
            JSON,
            ['{}', '{"a": [1, -2.5e+3, true,\n\t"\\u00e9\\n"], "b":{"c":null} }', '{"": 10 }'],
            ["[]", '{"a": }', '{"a": 01}', '{"a": "\n"}', '{"a": 1,}'],
        ),
        (LIST, ["- a\n- - b\n", "- é \t\n"], ["- a", "-a\n", "- \n", "- a\u2028\n"]),
        (CHESS, ["1. e4 e5\n2. Nf3 Nbd7+\n10. O-O O-O-O#\n", "1. exd8=Q Ra1xa8\n"], ["1. e9 e5\n"]),
        ('root ::= a "z"\na ::= [a-z]+', ["abz", "zz"], ["z", "ab"]),
        ('root ::= x "bc"\nx ::= "a" | "ab"', ["abc", "abbc"], ["ab"]),
        ('root ::= ("a"+)?', ["", "a", "aaa"], ["b"]),
        ('root ::= ("a"?){0,3}', ["", "a", "aaa"], ["aaaa"]),
        ("root ::= ([a-z]{2})+", ["ab", "abcd"], ["", "a", "abc"]),
        ('root ::= (rule+)*\nrule ::= "ab"', ["", "ab", "abab"], ["a", "aba"]),
        ('root ::= "a"{0} "b"{2,} "cd"{1}', ["bbcd", "bbbcd"], ["abbcd", "bcd"]),
        ('root ::= start\nstart ::= "x" Start\nStart ::= "y"', ["xy"], ["x", "y"]),
        ('root ::= a-b a_b\na-b ::= "-"\na_b ::= "_"', ["-_"], ["-", "--"]),
        ('root ::= "a" 1a\r\n1a ::= "x" | "" # or none\r\n', ["ax", "a"], [""]),
        ('root ::= "(" root ")" | root "+" root |\n  "1"', ["(1+1)+1"], ["(1", "1+"]),
        ('root ::= "ab" | "abc" | "abd"{2} | "ab"', ["ab", "abc", "abdabd"], ["a", "abd"]),
        ('root ::= a | a "x" | "y" | "" | a a{2}\na ::= "c"', ["c", "cx", "y", "", "ccc"], ["cc"]),
        ('root ::= (("a"*)* | "b"?)+ ""* "c"', ["c", "aabc", "bac"], ["ab"]),
        ("root ::= [^\x00-\U0010fffe]", ["\U0010ffff"], ["a"]),
    ],
)  # fmt: skip
def test_every_way_to_read_a_text_is_followed(
    grammar: str, good: list[str], bad: list[str]
) -> None:
    constraint = Constraint.grammar(grammar)
    assert [text for text in good if not constraint.matches(text)] == []
    assert [text for text in bad if constraint.matches(text)] == []
    assert all(constraint.matches(text) for text in constraint.examples(5))


@st.composite
def gbnf_and_regex(draw: st.DrawFn, depth: int = 3) -> tuple[str, str]:
    """The same shape twice."""
    kinds = ["text", "set", "all"] if depth == 0 else ["text", "set", "or", "both", "repeat"]
    kind = draw(st.sampled_from(kinds))
    if kind == "text":
        text = draw(st.text("ab-", max_size=3))
        return f'"{text}"', f"(?:{re.escape(text)})"
    if kind == "set":
        inside = draw(st.sampled_from(["a", "ab", "a-c", "^a", "^b-c", "-a"]))
        return f"[{inside}]", f"[{inside}]"
    if kind == "all":
        return ".", "(?s:.)"
    first, second = draw(gbnf_and_regex(depth - 1)), draw(gbnf_and_regex(depth - 1))
    if kind == "or":
        return f"({first[0]} |\n {second[0]})", f"(?:{first[1]}|{second[1]})"
    if kind == "both":
        return f"{first[0]} {second[0]}", first[1] + second[1]
    sign = draw(st.sampled_from(["*", "+", "?", "{0}", "{2}", "{1,}", "{0,2}", "{1,3}"]))
    return f"({first[0]}){sign}", f"(?:{first[1]}){sign}"


@settings(max_examples=150, deadline=None)
@given(gbnf_and_regex(), st.lists(st.text("abc-é", max_size=6), min_size=8, max_size=8))
def test_a_grammar_matches_what_the_same_regular_expression_does(
    shape: tuple[str, str], texts: list[str]
) -> None:
    constraint = Constraint.grammar(f"root ::= {shape[0]}\n")
    for text in texts:
        assert constraint.matches(text) == bool(re.fullmatch(shape[1], text)), text


@pytest.mark.parametrize(
    ("grammar", "forced"),
    [
        ('root ::= "[" [a-z]* "]"', "["),
        ('root ::= "ab" ("cd" | "ce")', "abc"),
        ('root ::= "é" x\nx ::= "y" | "yz"', "éy"),
        ('root ::= "a"{3} [b] "c"?', "aaab"),
        ("root ::= [a-z]", ""),
    ],
)
def test_what_every_text_begins_with_is_known(grammar: str, forced: str) -> None:
    assert Constraint.grammar(grammar).forced_prefix() == forced

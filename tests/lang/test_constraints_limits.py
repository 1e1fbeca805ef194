"""Constraints that cost too much: they work, or are refused in words that fit, at little cost."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from stemma.errors import ConstraintError, InvalidArgument
from stemma.lang import constraints_matcher
from stemma.lang.constraints import Constraint
from stemma.lang.constraints_limits import meaning

WORDS = [f"word{number * 7919 % 100_003}x" for number in range(5_000)]
QUOTED = [f'"{word}"' for word in WORDS]


@pytest.mark.parametrize(
    "constraint",
    [
        lambda: Constraint.choices(WORDS),
        lambda: Constraint.regex("|".join(WORDS)),
        lambda: Constraint.grammar("start: " + " | ".join(QUOTED)),
        lambda: Constraint.grammar("start: (word)+\nword: " + " | ".join(QUOTED[:4_900])),
        lambda: Constraint.grammar("start: WORD\nWORD: " + " | ".join([*QUOTED, '"z"'])),
        lambda: Constraint.grammar("root ::= " + " | ".join([*QUOTED, '"z"'])),
        lambda: Constraint.grammar("root ::= word+\nword ::= " + " | ".join([*QUOTED, '"z"'])),
        lambda: Constraint.json_schema({"enum": WORDS}),
    ],
    ids=["choices", "regex", "grammar", "rule", "terminal", "gbnf", "gbnf rule", "enum"],
)
def test_thousands_of_words_can_be_told_apart(constraint) -> None:  # type: ignore[no-untyped-def]
    built = constraint()
    quote = '"' if built.prefix_ok('"') else ""
    assert built.matches(f"{quote}{WORDS[4_000]}{quote}")
    assert not built.matches(f"{quote}word{quote}")
    assert built.examples(2)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (
            "xa{4294967295}",
            "{4294967295} stands for at least 4,294,967,295 characters; at most 262,144 are taken\n"
            "    xa{4294967295}\n      ^",
        ),
        ("a{4294967296}", "{4294967296} is too large; at most 4,294,967,295 is taken"),
        ("a{0,99999999999999999999999}", "is too large; at most 4,294,967,295 is taken"),
        ("x{5000000}?", "{5000000} stands for at least 5,000,000 characters"),
        (
            "(a{1000}|bc){1000}([]x]{1000}){1000}",
            "{1000} stands for at least 1,000,000 characters; at most 262,144 are taken",
        ),
        ("(?:a{1000}){1000}", "{1000} stands for at least 1,000,000 characters"),
        (r"(?P<n>\x{41}\p{L}[^\]a]){100000}", "{100000} stands for at least 300,000 characters"),
        ("(" * 300 + "a" + ")" * 300, "its groups are nested more than 250 deep"),
        (".*" * 3_000, "3,000 parts may be left out (by *, ? or {0,...}); at most 2,000 are taken"),
        (r"\pL" * 20_000, "20,000 classes of characters; at most 10,000 are taken"),
        ("a" * 300_000, "regex: has 300,000 characters; at most 262,144 are taken"),
    ],
)
def test_a_regular_expression_that_is_too_large_is_refused_with_its_size(
    pattern: str, said: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Constraint.regex(pattern)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "pattern",
    [
        "(a?){5000000}",
        "a{0,5000000}",
        "(a{1000}|){1000}",
        "(?i)(a{100000}|b{2}){2}",
        "[{5000000}]{3}",
        r"\{5000000\}",
        "a{262144}",
    ],
)
def test_what_a_text_can_reach_is_taken(pattern: str) -> None:
    assert not Constraint.regex(pattern).matches("c")


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (
            "start: word\nword: " + " | ".join([*QUOTED, '"z"']),
            "the rules have 5,002 alternatives, 5,001 of them in 'word'; at most 5,000 can be told "
            "apart: write plain texts as a terminal, its name in capitals, as WORD: ",
        ),
        (
            'root ::= "' + "ab" * 40_000 + '"',
            "its rules have more than 65,000 symbols, in GBNF one for each character of a text",
        ),
        (
            "root ::= " + " | ".join(f'"{chr(0x4E00 + number)}x"' for number in range(5_001)),
            "5,001 of them in 'root'; at most 5,000 can be told apart: put those that begin alike "
            "into one rule, and single characters into a class, as [abc]",
        ),
        (
            'start: "x" b{1000000}\nb: "y" | b "z"\n',
            '1,000,000 is too large here; at most 262,144 is taken\n   1 | start: "x" b{1000000}\n'
            + " " * 20
            + "^",
        ),
        (
            'start: b~3..4294967295\nb: "y" | b "z"\n',
            "4,294,967,295 is too large here; at most",
        ),
        (
            "start: A\nA: /a/ /b{5000000}/\n",
            "{5000000} stands for at least 5,000,000 characters; at most 262,144 are taken\n"
            "   2 | A: /a/ /b{5000000}/\n" + " " * 16 + "^",
        ),
        (
            "start: " + "(" * 200 + '"a"' + ")" * 200,
            "its groups are nested too deep: make",
        ),
        (
            "start: A\nA: B & /.*z.*/\nB: " + " & ".join(f"/.*a{i}.*/" for i in range(12)),
            "in 'A' more than 12 regular expressions must hold at once (&): write",
        ),
        (
            "start: A9\nA0: /a?b?c?d?/\n"
            + "".join(f"A{i}: A{i - 1} A{i - 1}\n" for i in range(1, 10)),
            "in 'A9' more than 2,000 parts may be left out",
        ),
        (
            "start: s+\ns: " + " | ".join(f"s {word}" for word in QUOTED[:1_500]),
            "'s' has 1,500 alternatives and begins 1,501, which makes 2,251,500 pairs; at most",
        ),
        (
            "start: " + "b " * 20_001 + '\nb: "x" |\n',
            "the grammar refers to rules 20,001 times; at most 20,000 are taken",
        ),
    ],
)
def test_a_grammar_that_is_too_large_is_refused_with_its_size(grammar: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Constraint.grammar(grammar)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_limit_that_only_a_text_meets_is_told_in_terms_of_the_constraint() -> None:
    with pytest.raises(ConstraintError, match="a regular expression has too many ways to go on at"):
        Constraint.regex(".*a.{2000}").matches("a" * 5_000)
    wide = "start: s+\ns: " + " | ".join(f's {word} | "y"' for word in QUOTED[:250])
    with pytest.raises(ConstraintError, match=r"rules are open at once|too ambiguous"):
        Constraint.grammar(wide).matches("y" * 3_000)


def test_a_long_text_is_no_fault_of_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints_matcher, "MOST_SECONDS", 0.01)
    monkeypatch.setattr(constraints_matcher, "_MANY_BYTES", 100)
    with pytest.raises(ConstraintError, match=r"text is too long: .* and it has 1,000,000"):
        Constraint.regex("[a-z ]*").matches("a" * 1_000_000)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("NoExtensionBias\n<non-verbose/>", "no text goes on from here"),
        (
            "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable",
            "its regular expressions take too long to prepare: give its repeats smaller bounds",
        ),
        ("what is new\nhere", "llguidance says: what is new"),
        ("", "llguidance says: nothing about it"),
    ],
)
def test_what_llguidance_says_is_told_in_terms_of_the_constraint(reason: str, said: str) -> None:
    assert meaning(reason).startswith(said)


def test_looking_for_an_example_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Constraint.grammar('root ::= . .* [^b-c]+ "baa"')
    monkeypatch.setattr(constraints_matcher, "MOST_SECONDS", 0.2)
    begun = time.monotonic()
    with pytest.raises(ConstraintError, match="no random walk came to an end"):
        slow.examples()
    assert time.monotonic() - begun < 5


def test_that_no_example_is_found_is_said_with_the_reason() -> None:
    with pytest.raises(ConstraintError, match="every text has more than 2,000 bytes"):
        Constraint.regex("x{5000}").examples()
    with pytest.raises(ConstraintError, match="a regular expression has too many ways to go on"):
        Constraint.regex("a?" * 2_000 + "a" * 2_000).examples()
    no_text = Constraint.grammar("start: A\nA: ~/(?s:.*)/\n")
    with pytest.raises(ConstraintError, match="bytes that are no text"):
        no_text.examples()


HOSTILE = {
    "regex": [
        "a{4294967295}",
        "x{0,5000000}",
        "(a{1000}){1000}",
        "((ab|c){1,1000}x?){1000}",
        "(((.{0,100}a){0,100}b){0,100}c){0,100}",
        "(a|b)*a(a|b){200}",
        ".*a.{2000}",
        ".*" * 2_000,
        ".*" * 131_000,
        "a?" * 2_000 + "a" * 2_000,
        "x{0,50}" * 37_000,
        r"\pL\PL" * 5_000,
        r"\pL\PL" * 43_000,
        "|".join(f"w{number * 7919 % 100_003}" for number in range(30_000)),
        "|".join(chr(0x4E00 + number) for number in range(20_000)),
        "[" + "".join(chr(0x4E00 + 2 * number) for number in range(10_000)) + "]{1,50}",
        "(" * 100_000 + "a" + ")" * 100_000,
        "(?i)" + "straße" * 40_000,
        "ab" * 500_000,
    ],
    "grammar": [
        "start: " + " | ".join(QUOTED),
        "start: s+\ns: " + " | ".join(f'{word} s | s {word} | "y"' for word in QUOTED[:1_500]),
        "start: " + "b " * 20_000 + '\nb: "x" |\n',
        "start: " + "b " * 120_000 + '\nb: "x" |\n',
        "start: " + '"a" ' * 65_000,
        'start: d{0,1000}\nd: c{0,1000}\nc: b{0,1000}\nb: "x" | "y" b\n',
        "start: a0\n" + "".join(f'a{i}: a{(i + 1) % 900} "x" | "y{i}"\n' for i in range(900)),
        "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1} |\n" for i in range(900)) + 'a900: "x" |',
        "start: A\nA: " + " & ".join(f"/(?s:.*)a{i}b(?s:.*)/" for i in range(12)),
        "start: A\nA: " + " & ".join(f"/(?s:.*)a{i}b(?s:.*)/" for i in range(60)),
        "start: A\nA: " + "|".join(f"/(?s:.*)a{i}b(?s:.*)/" for i in range(60)),
        "start: A\nA: ~/(?s:.*)a(a|b){30}/\n",
        "start: ("
        + "|".join(f"T{i}" for i in range(900))
        + ")+\n"
        + "".join(f"T{i}: /.*{i}.*x.*/\n" for i in range(900)),
        "start: A12\nA0: /a?b/\n" + "".join(f"A{i}: A{i - 1} A{i - 1}\n" for i in range(1, 13)),
        "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000,
        'start: "' + "ab" * 500_000 + '"',
        'root ::= "' + "ab" * 20_000 + '"',
        "root ::= " + " | ".join(f'"w{number * 7919 % 100_003}"' for number in range(20_000)),
        "root ::= " + " | ".join(f'"{"a" * number}"' for number in range(1, 300)),
        'root ::= (((("a"* "b"*)* [ab]*)* "\\"")* .*)* "c"',
        'root ::= [a-c"] root | "[" root? | "1" | ","',
    ],
    "json_schema": [
        {"enum": WORDS},
        {"enum": [{"a": number, "b": [number] * 5} for number in range(20_000)]},
        {"properties": {f"p{i}": {} for i in range(2_000)}},
        {"type": "string", "maxLength": 10**9},
        {"type": "array", "minItems": 10**6},
        {"patternProperties": {f"^k{i:04}[a-z]{{1,200}}$": {} for i in range(100)}},
        {"patternProperties": {f"^k{i:04}[a-z]{{1,200}}$": {} for i in range(300)}},
        {"type": "string", "pattern": "^(a|b|cd)*$", "minLength": 200_000, "maxLength": 250_000},
        {"allOf": [{"pattern": f"a{i}b"} for i in range(12)], "type": "string"},
        {"allOf": [{"pattern": f"a{i}b"} for i in range(60)], "type": "string"},
        {"anyOf": [{"required": [f"p{i}"], "type": "object"} for i in range(2_000)]},
        {"prefixItems": [{"type": "integer", "multipleOf": 4_999 - i} for i in range(300)]},
        {
            "$ref": "#/$defs/t",
            "$defs": {
                "t": {
                    "type": "object",
                    "properties": {f"p{i}": {"$ref": "#/$defs/t"} for i in range(300)},
                }
            },
        },
        json.dumps({"enum": ["x" * 100 + str(number) for number in range(2_000)]}),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_shapes_are_refused_or_work_in_bounded_time_and_memory(kind: str) -> None:
    # In a process of its own, whose memory is its own; the limit ends it where it grows by far.
    code = (
        "import json, resource, sys, time, warnings\n"
        "from stemma.lang.constraints import Constraint\n"
        "from stemma.errors import ConstraintError, InvalidArgument\n"
        "warnings.simplefilter('ignore')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
        "Constraint.regex('[a-z]+').examples(1)\n"
        "def grown():\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "before = grown()\n"
        "def use(constraint):\n"
        "    for asked in (\n"
        "        lambda: constraint.matches('aab\\\"[1,' * 2000),\n"
        "        lambda: constraint.examples(1),\n"
        "        lambda: constraint.forced_prefix(),\n"
        "        lambda: constraint.closing('', steps=60),\n"
        "        lambda: constraint.never_contains('zq'),\n"
        "    ):\n"
        "        try:\n"
        "            asked()\n"
        "        except ConstraintError as error:\n"
        "            assert len(str(error)) < 5000\n"
        "kind, shapes = json.load(sys.stdin)\n"
        "for number, shape in enumerate(shapes):\n"
        "    begun = time.process_time()\n"
        "    try:\n"
        "        use(getattr(Constraint, kind)(shape))\n"
        "    except InvalidArgument as error:\n"
        "        assert len(str(error)) < 5000\n"
        "    took = time.process_time() - begun\n"
        "    print(f'{number}: {took:.1f} s, {grown() - before} MiB', flush=True)\n"
        "    assert took < 20 and grown() - before < 1024, str(shape)[:200]\n"
        "print('alive')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([kind, HOSTILE[kind]]),
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.stdout.endswith("alive\n"), done.stdout + done.stderr[-2_000:]
    assert done.returncode == 0

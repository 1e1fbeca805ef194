"""What a constraint is, whatever it was made from: texts match, begin, are forced and are read."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import regex
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st

import stemma
from stemma.errors import ConstraintError, InvalidArgument
from stemma.lang.constraints import Constraint, ConstraintWarning
from stemma.lang.constraints_formats import FORMATS

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # one emoji of five code points


def test_the_whole_text_must_match() -> None:
    constraint = Constraint.regex("[a-z]+")
    assert constraint.matches("abc")
    assert not constraint.matches("abc1")
    assert not constraint.matches("")
    assert constraint.parse("abc") == "abc"


def test_a_prefix_is_the_beginning_of_some_text() -> None:
    constraint = Constraint.regex(r"\d{3}-\d{4}")
    assert constraint.prefix_ok("")
    assert constraint.prefix_ok("555-")
    assert constraint.prefix_ok("555-1234")
    assert not constraint.prefix_ok("555-12345")
    assert not constraint.prefix_ok("x")


@pytest.mark.parametrize(
    ("constraint", "forced"),
    [
        (Constraint.regex("colou?r"), "colo"),
        (Constraint.regex("日本語?"), "日本"),
        (Constraint.regex("(é|è)"), ""),  # the first byte is forced, a whole character is not
        (Constraint.choices(["only this"]), "only this"),
        (Constraint.grammar('start: "a" "bc" /[0-9]/'), "abc"),
        (Constraint.regex("(ab)?"), ""),
    ],
)
def test_what_is_forced_is_whole_characters(constraint: Constraint, forced: str) -> None:
    assert constraint.forced_prefix() == forced
    assert constraint.prefix_ok(forced)


def test_characters_of_all_lengths_match_whole() -> None:
    constraint = Constraint.regex(f"(日本|{FAMILY}|é+)")
    assert constraint.matches("日本")
    assert constraint.matches(FAMILY)
    assert constraint.matches("ééé")
    assert not constraint.matches(FAMILY[:3])
    assert constraint.prefix_ok(FAMILY[:3])
    assert not constraint.matches("\ud800")
    assert set(constraint.examples(50)) >= {"日本", FAMILY}


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.regex(r"[A-Z]\w{0,8}( [a-z]+)*\."),
        Constraint.regex(r"(?s:.*)"),
        Constraint.grammar('start: item ("," item)*\nitem: "(" start ")" | /[a-z]+/'),
        Constraint.json_schema({}),
        Constraint.json_schema({"type": "array", "items": {"$ref": "#"}}),
        Constraint.of_type(dict[str, list[int]]),
        Constraint.of_type(float),
    ],
    ids=lambda constraint: constraint.label,
)
def test_examples_match_and_are_the_same_for_the_same_seed(constraint: Constraint) -> None:
    found = constraint.examples(20, seed=4)
    assert len(found) == len(set(found)) == 20
    assert all(constraint.matches(text) for text in found)
    assert found == constraint.examples(20, seed=4)
    assert found != constraint.examples(20, seed=5)
    for text in found:
        constraint.parse(text)
        assert all(constraint.prefix_ok(text[:end]) for end in range(len(text)))


def test_there_are_no_more_examples_than_texts() -> None:
    assert sorted(Constraint.regex("[ab]c?").examples(10)) == ["a", "ac", "b", "bc"]
    assert Constraint.regex("a").examples(0) == []
    with pytest.raises(InvalidArgument, match=r"examples\(n=-1\)"):
        Constraint.regex("a").examples(-1)


def test_no_example_found_is_said() -> None:
    with pytest.raises(ConstraintError, match=r"no random walk came to an end within 2,000 bytes"):
        Constraint.regex("[ab]{5000}c").examples(1)


def test_a_text_that_does_not_match_is_not_read_and_the_place_is_told() -> None:
    with pytest.raises(ConstraintError) as caught:
        Constraint.of_type(int).parse("12x")
    assert str(caught.value) == "dtype=int: '12x' does not match: 'x' cannot follow '12'"
    with pytest.raises(ConstraintError, match=r"the text is not complete after '\[1'"):
        Constraint.of_type(list[int]).parse("[1")
    with pytest.raises(ConstraintError, match="does not match"):
        Constraint.regex(".*").parse("\ud800")


def _asking_for(**properties: object) -> Constraint:
    return Constraint.json_schema(
        {"type": "object", "properties": properties, "required": list(properties)}
    )


EMAIL = {"type": "string", "format": "email"}
NEEDS_ONE_SIGN = {"type": "string", "pattern": "^[!#-:<-~]+;[!-~]*$"}


@pytest.mark.parametrize(
    "constraint",
    [
        *(
            _asking_for(one={"type": "string", "format": name}, email=EMAIL, name={})
            for name in FORMATS
        ),
        _asking_for(all={"type": "array", "items": EMAIL, "minItems": 2}, name={"type": "string"}),
        _asking_for(one=NEEDS_ONE_SIGN, id={"type": "string", "format": "uuid"}),
        _asking_for(id={"type": "string", "format": "uuid"}, one=NEEDS_ONE_SIGN),
    ],
    ids=str,
)
def test_what_closes_a_text_is_found_from_wherever_it_is_cut(constraint: Constraint) -> None:
    whole = constraint.closing("")
    assert whole is not None
    assert constraint.matches(whole)
    for end in range(0, len(whole), 5):
        rest = constraint.closing(whole[:end])
        assert rest is not None
        assert constraint.matches(whole[:end] + rest)


def test_a_busy_machine_finds_no_less(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count(step=3600)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(hours)))
    assert _asking_for(email=EMAIL, name={"type": "string"}).closing("") is not None


def test_choices_are_exact_texts() -> None:
    constraint = Constraint.choices(["yes", "no (really)", "a|b", "x\ny", "tab\t/\\ #", "né"])
    for text in ["yes", "no (really)", "a|b", "x\ny", "tab\t/\\ #", "né"]:
        assert constraint.parse(text) == text
    assert not constraint.matches("a")
    assert not constraint.matches("yesno (really)")
    assert len(constraint.examples(99)) == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "choices=\\[\\]: there must be at least one"),
        ("yes", "must be a list of strings, not one string"),
        (3, r"choices=3: must be a list of strings$"),
        (["a", "b", "a"], "'a' is there twice"),
        (["a", 1], "every choice is a string, not 1"),
    ],
)
def test_choices_that_cannot_be_meant_are_refused(options: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Constraint.choices(options)


def test_a_stop_string_that_can_never_come_is_known() -> None:
    digits = Constraint.of_type(int)
    assert digits.never_contains("\n")
    assert digits.never_contains("1-")
    assert not digits.never_contains("-12")
    slash = Constraint.regex("a/b(\nc)?")
    assert not slash.never_contains("/b")
    assert not slash.never_contains("\nc")
    assert slash.never_contains("c/")
    assert Constraint.choices(["no.", "yes"]).never_contains("s.")
    assert not Constraint.json_schema({"const": 1}).never_contains("x")  # not decided


@pytest.mark.parametrize("make", [Constraint.regex, Constraint.grammar, Constraint.json_schema])
def test_what_is_no_text_is_refused_by_name(make: object) -> None:
    assert callable(make)
    with pytest.raises(InvalidArgument, match=make.__name__):
        make(3)
    with pytest.raises(InvalidArgument, match="half of a surrogate pair"):
        make("\ud800")
    with pytest.raises(InvalidArgument, match="has 300,000 characters; at most 262,144"):
        make("a" * 300_000)


def test_what_is_asked_about_must_be_a_text() -> None:
    for ask in (Constraint.regex("a").matches, Constraint.regex("a").prefix_ok):
        with pytest.raises(InvalidArgument, match=r"^a text is a string, not 3$"):
            ask(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["label", "lable"])
def test_a_constraint_does_not_change(name: str) -> None:
    with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
        setattr(Constraint.regex("a"), name, "b")


def test_equal_words_make_equal_constraints() -> None:
    assert Constraint.regex("a+") == Constraint.regex("a+")
    assert hash(Constraint.of_type(int)) == hash(Constraint.of_type("int"))
    assert Constraint.regex("a+") != Constraint.regex("a*")
    assert stemma.Constraint is Constraint
    assert stemma.ConstraintWarning is ConstraintWarning


def test_importing_loads_neither_llguidance_nor_pydantic() -> None:
    code = (
        "import sys, stemma.lang.constraints; "
        "print(sorted({'llguidance', 'pydantic', 'regex', 'typing_extensions'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# Regular expressions


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(abc", "unclosed group\n    (abc\n    ^"),
        ("a(?=b)", "look-around, including look-ahead and look-behind, is not supported"),
        (r"(a)\1", "backreferences are not supported"),
        (r"one\b two", "\\b is not supported here"),
        ("a^b", "^ is not supported here"),
        (
            "a+++b",
            "possessive quantifiers are not supported: leave the '+' out\n    a+++b\n      ^",
        ),
        (r"[^\s\S]", "it matches nothing"),
        ("[a-c&&x]", "it matches nothing"),
        (r"(?-u)\xff", "pattern can match invalid UTF-8"),
        ("é(", "unclosed group\n    é(\n     ^"),
    ],
)
def test_a_regex_that_cannot_be_used_is_refused_with_its_place(pattern: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Constraint.regex(pattern)
    assert str(caught.value).startswith(f"regex={pattern!r}: ")
    assert said in str(caught.value)


def test_the_caret_stands_below_the_place() -> None:
    with pytest.raises(InvalidArgument) as caught:
        Constraint.regex(r"one\b two")
    assert str(caught.value).endswith("\n    one\\b two\n       ^")


def test_anchors_at_the_ends_change_nothing() -> None:
    assert Constraint.regex("^ab$").matches("ab")
    assert Constraint.regex(r"\Aab\z").matches("ab")
    assert Constraint.regex("[+*?]+").matches("+*")  # in a class they are no quantifiers


_LETTERS = st.sampled_from(["a", "b", "é", "ß", "日", "語", "😀", FAMILY, " ", "-", "0", "7"])
_ATOMS = st.one_of(
    _LETTERS.map(regex.escape).map(lambda text: f"(?:{text})"),
    st.sampled_from([".", "[a-z]", "[^a]", r"\d", "[é日]", "[^0-9a-f]", r"\."]),
)
_PATTERNS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "+?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_PATTERNS, st.lists(_LETTERS, max_size=6).map("".join), st.integers(0, 9))
@example("[^a]", "\n", 0)
@example("(?:é|日).", "日\r", 0)
def test_a_regex_means_what_it_means_to_pythons_regex(pattern: str, text: str, seed: int) -> None:
    constraint = Constraint.regex(pattern)

    def known(text: str, *, partial: bool = False) -> bool:
        try:
            return regex.fullmatch(pattern, text, partial=partial, timeout=0.5) is not None
        except TimeoutError:  # that one goes back and forth, for ages with stars within stars
            reject()

    assert constraint.matches(text) == known(text)
    # The other way round `regex` errs: it says that "ßa" may begin "ß日😀".
    assert not constraint.prefix_ok(text) or known(text, partial=True)
    try:
        examples = constraint.examples(2, seed=seed)
    except ConstraintError:  # where the end is hard to find
        examples = []
    for found in examples:
        assert known(found)
        assert all(constraint.prefix_ok(found[:end]) for end in range(len(found)))
        cut = found[: random.Random(seed).randrange(len(found) + 1)]
        assert constraint.matches(cut) == known(cut)


# Bounds


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 50_000 + "a" + ")" * 50_000,
        "|".join(f"{i}x" for i in range(30_000)),
        "(?:a?){1000}a{1000}",
        "((a{0,1000}){0,1000}){0,1000}b",
        r"(\w{1,50}\W{1,50}){1,500}",
        "(?s).*a.{2000}",
        "(a|aa)*b{0,100000}",
        "a{1000}{1000}",
        "a" * 200_000,
    ],
    ids=lambda pattern: pattern[:30],
)
def test_a_hostile_regex_is_refused_or_costs_little(pattern: str) -> None:
    begun = time.monotonic()
    with suppress(InvalidArgument, ConstraintError):
        constraint = Constraint.regex(pattern)
        constraint.forced_prefix()
        constraint.matches("a" * 2_000)
        constraint.never_contains("ab")
    assert time.monotonic() - begun < 20


def test_what_belongs_to_another_parameter_is_refused_by_that_ones_name() -> None:
    words = Constraint.regex("[a-z]+")
    for arguments, said in (
        ({"grammar": words}, "grammar=<Constraint regex='[a-z]+'> is a Constraint: give it as con"),
        ({"regex": words}, "is a Constraint: give it as constraint="),
        ({"json_schema": words}, "is a Constraint: give it as constraint="),
        ({"dtype": words}, "is a Constraint: give it as constraint="),
        ({"constraint": stemma.seq("a", words)}, "is a piece: give it as grammar="),
        ({"regex": stemma.seq("a", words)}, "is a piece: give it as grammar="),
        ({"constraint": {"type": "integer"}}, "constraint={'type': 'integer'} is an object: give"),
        ({"dtype": {"type": "integer"}}, "is an object: give it as json_schema="),
        ({"constraint": int}, "constraint=<class 'int'> is a type: give it as dtype="),
        ({"grammar": int}, "grammar=<class 'int'> is a type: give it as dtype="),
        ({"constraint": "[a-z]"}, "constraint='[a-z]': must be a Constraint, as st.Constraint"),
        (
            {"regex": re.compile("a.b", re.IGNORECASE | re.DOTALL)},
            "regex=re.compile('a.b', re.IGNORECASE|re.DOTALL): must be a string: give '(?is)a.b'",
        ),
        ({"regex": re.compile("ab")}, "must be a string: give 'ab'"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            stemma.gen("x", **arguments)
        assert said in str(caught.value)
    assert stemma.gen("x", json_schema=int).params.constraint is not None

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from stemma.backend.local.detokenize import OutputEnd, OutputText
from stemma.backend.local.stops import StopWatch
from stemma.backend.local.tokenizer import Piece, Tokenizer
from stemma.lang.errors import ConstraintError, EngineInvariantError
from stemma.lang.sampling import SamplingParams
from tests.tokenizers_for_tests import byte_level_tokenizer

EOS = 2


# Tokens that the tests need, in place of others of the small vocabulary.
WHOLE = ["the", " and", "ab", "\n", "a b", "🙂a", "b中", "é", "🙂"]
TORN = [b"a\xf0", b"\x9f\x99", b"\x82b", b"a\xc3", b"\xa9STOP", b"\xf0\x9f", b"\x99\x82"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    for n, spelled in enumerate([*(text.encode() for text in WHOLE), *TORN]):
        tokenizer.token_bytes[300 + n] = spelled
    return tokenizer


Spell = Callable[..., list[int]]


@pytest.fixture(scope="module")
def ids_of(tokenizer: Tokenizer) -> Spell:
    """Ids that spell the pieces: of each the token where there is one, else those of its bytes."""
    by_bytes = {spelled: i for i, spelled in enumerate(tokenizer.token_bytes)}

    def spell(*pieces: str | bytes) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            spelled = piece.encode() if isinstance(piece, str) else piece
            single = by_bytes.get(spelled)
            ids += [single] if single is not None else [by_bytes[bytes([b])] for b in spelled]
        return ids

    return spell


def run(
    tokenizer: Tokenizer, ids: Iterable[int], *, skip: bytes = b"", **settings: Any
) -> tuple[OutputEnd, list[str]]:
    """Push until the output ends; also what was streamed, token by token and at the end."""
    output = OutputText(tokenizer, SamplingParams(**settings), skip=skip)
    streamed: list[str] = []
    for token_id in ids:
        ended = output.push(token_id)
        streamed.append(output.take_increment())
        if ended:
            break
    end = output.finish()
    streamed.append(output.take_increment())
    assert output.finish() == end
    return end, streamed


# A plain, slow account of the same rules, on bytes and whole texts.


# Well-formed UTF-8 and its beginnings, after table 3-7 of the Unicode Standard.
CHARACTER = re.compile(
    rb"[\x00-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|\xed[\x80-\x9f][\x80-\xbf]|"
    rb"[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|"
    rb"\xf4[\x80-\x8f][\x80-\xbf]{2}"
)
BEGINNING = re.compile(
    rb"[\xc2-\xdf]|\xe0[\xa0-\xbf]?|\xed[\x80-\x9f]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|"
    rb"\xf0([\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3][\x80-\xbf]{0,2}|\xf4([\x80-\x8f][\x80-\xbf]?)?"
)


def characters(data: bytes) -> list[tuple[str, int, int]]:
    """(character, its end in `data`, bytes read until it was certain)."""
    found: list[tuple[str, int, int]] = []
    at = 0
    while at < len(data):
        if whole := CHARACTER.match(data, at):
            found.append((whole[0].decode(), whole.end(), whole.end()))
        elif begun := BEGINNING.match(data, at):
            if begun.end() == len(data):
                break
            found.append(("\ufffd", begun.end(), begun.end() + 1))
        else:
            found.append(("\ufffd", at + 1, at + 1))
        at = found[-1][1]
    return found


def first_stop(
    text: str, stops: Sequence[str], expression: str | None
) -> tuple[int, int, str] | None:
    for end in range(1, len(text) + 1):
        found = [(end - len(stop), end, stop) for stop in stops if text[:end].endswith(stop)]
        match = regex.search(expression, text[:end]) if expression else None
        if match:
            found.append((match.start(), match.end(), match.group()))
        if found:
            return min(found, key=lambda place: (place[1], place[0]))
    return None


def reference(
    spelled: Sequence[bytes], stops: Sequence[str], expression: str | None, include: bool
) -> OutputEnd:
    ends = [0]
    for token in spelled:
        ends.append(ends[-1] + len(token))
    known = characters(b"".join(spelled))
    text = "".join(character for character, _, _ in known)
    stop = first_stop(text, stops, expression)
    length = len(text) if stop is None else stop[1] if include else stop[0]
    boundaries = {0, *(end for _, end, _ in known[:length])}
    pushed = len(spelled)
    if stop is not None:
        certain = known[stop[1] - 1][2]
        pushed = next(n for n, end in enumerate(ends) if end >= certain)
    kept = max(n for n in range(pushed + 1) if ends[n] in boundaries)
    covered = sum(1 for _, end, _ in known[:length] if end <= ends[kept])
    return OutputEnd(text[:length], kept, text[covered:length], stop[2] if stop else None)


PARTS = ["a", "b", " ", "中", b"\xf0", b"\x82", b"\xff", *WHOLE, *TORN]
STOPS = ["ab", "b", "aba", "\n", "é", "🙂中", " and", "a b", "\ufffd", "STOP", "🙂"]
EXPRESSIONS = ["a+b", "ab|ba+", "(?<=a)b", "b(?=a)", "b(?!a)", "[é中]", "a.b", "aab|b", r"\ba"]
EXPRESSIONS += ["🙂$", "(ab|b)a", "(?i)STop", "the|S"]
tokens = st.lists(st.sampled_from(PARTS), max_size=25)
stop_lists = st.lists(st.sampled_from(STOPS), max_size=3)
expressions = st.none() | st.sampled_from(EXPRESSIONS)


@given(parts=tokens, stops=stop_lists, expression=expressions, include=st.booleans())
def test_outputs_end_where_the_plain_account_says(
    tokenizer: Tokenizer,
    ids_of: Spell,
    parts: list[str | bytes],
    stops: list[str],
    expression: str | None,
    include: bool,
) -> None:
    ids = ids_of(*parts)
    end, streamed = run(tokenizer, ids, stop=stops, stop_regex=expression, include_stop=include)
    assert end == reference([tokenizer.token_bytes[i] for i in ids], stops, expression, include)
    assert "".join(streamed) == end.text
    kept = b"".join(tokenizer.token_bytes[i] for i in ids[: end.kept]).decode(errors="replace")
    assert kept + end.rest == end.text


@given(data=st.data(), parts=tokens, stops=stop_lists, expression=expressions)
def test_the_text_does_not_depend_on_how_it_is_cut_into_tokens(
    tokenizer: Tokenizer,
    ids_of: Spell,
    data: st.DataObject,
    parts: list[str | bytes],
    stops: list[str],
    expression: str | None,
) -> None:
    ids = ids_of(*parts)
    single = ids_of(*(bytes([b]) for i in ids for b in tokenizer.token_bytes[i]))
    settings: dict[str, Any] = {"stop": stops, "stop_regex": expression}
    one, other = (run(tokenizer, some, **settings)[0] for some in (ids, single))
    assert (one.text, one.matched_stop) == (other.text, other.matched_stop)


@given(ids=st.lists(st.integers(3, 400), max_size=40))
def test_streaming_shows_each_character_once_and_only_whole(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    end, streamed = run(tokenizer, ids)
    data = b"".join(tokenizer.token_bytes[i] for i in ids)
    assert "".join(streamed) == end.text == "".join(c for c, _, _ in characters(data))
    assert all(
        data.decode(errors="replace").startswith("".join(streamed[:n])) for n in range(len(ids))
    )


@given(
    parts=st.lists(st.sampled_from(["a", "b", "ab", " ", "\n", "the", " and"]), max_size=20),
    stops=st.lists(st.sampled_from(["ab", "b", "\n", "ba", "b the"]), min_size=1, max_size=2),
    min_tokens=st.integers(0, 6),
)
def test_no_stop_begins_within_min_tokens(
    tokenizer: Tokenizer, ids_of: Spell, parts: list[str], stops: list[str], min_tokens: int
) -> None:
    ids = ids_of(*parts)
    end, _ = run(tokenizer, ids, stop=stops, min_tokens=min_tokens)
    head = tokenizer.decode(ids[:min_tokens])
    later = first_stop(tokenizer.decode(ids[min_tokens:]), stops, None)
    assert end.matched_stop == (later[2] if later else None)
    tail = tokenizer.decode(ids[min_tokens:])
    assert end.text == head + (tail[: later[0]] if later else tail)
    assert end.kept >= min(min_tokens, len(ids))


def test_whole_tokens_before_a_stop_are_kept_and_the_rest_is_told(
    tokenizer: Tokenizer, ids_of: Spell
) -> None:
    end, _ = run(tokenizer, ids_of("the", " and", "b"), stop="nd")
    assert end == OutputEnd(text="the a", kept=1, rest=" a", matched_stop="nd")
    end, _ = run(tokenizer, ids_of("the", " and", "b"), stop="nd", include_stop=True)
    assert end == OutputEnd(text="the and", kept=2, rest="", matched_stop="nd")


def test_text_that_may_begin_a_stop_is_held_back(tokenizer: Tokenizer, ids_of: Spell) -> None:
    _, streamed = run(tokenizer, ids_of("a", "\n", "\n", "b", "\n", "\n", "\n", "a"), stop="\n\n\n")
    assert streamed == ["a", "", "", "\n\nb", "", "", "", ""]


def test_a_character_is_held_until_it_is_whole(tokenizer: Tokenizer, ids_of: Spell) -> None:
    smile = "🙂".encode()
    _, streamed = run(tokenizer, ids_of("a", smile[:1], smile[1:3], smile[3:], "b"))
    assert streamed == ["a", "", "", "🙂", "b", ""]
    _, streamed = run(tokenizer, ids_of(smile[:1], smile[1:2], "b"))
    assert streamed == ["", "", "\ufffdb", ""]


def test_half_a_character_at_the_end_is_dropped_with_its_tokens(
    tokenizer: Tokenizer, ids_of: Spell
) -> None:
    smile = "🙂".encode()
    end, _ = run(tokenizer, ids_of("a", "b", smile[:1], smile[1:2]))
    assert end == OutputEnd(text="ab", kept=2, rest="", matched_stop=None)
    end, _ = run(tokenizer, [*ids_of("a", "b", smile[:1]), EOS])
    assert end == OutputEnd(text="ab", kept=2, rest="", matched_stop=EOS)


def test_a_character_shared_with_a_cut_token_goes_to_the_rest(
    tokenizer: Tokenizer, ids_of: Spell
) -> None:
    """The first token ends within é; the second has the rest of it, and the stop."""
    end, streamed = run(tokenizer, ids_of(b"a\xc3", b"\xa9STOP"), stop="STOP")
    assert end == OutputEnd(text="aé", kept=0, rest="aé", matched_stop="STOP")
    assert streamed == ["a", "é", ""]


def test_ends_of_text_are_not_kept(tokenizer: Tokenizer, ids_of: Spell) -> None:
    the, a = ids_of("the", "a")
    assert run(tokenizer, [the, EOS])[0] == OutputEnd("the", 1, "", EOS)
    assert run(tokenizer, [the, EOS], include_stop=True)[0] == OutputEnd("the", 1, "", EOS)
    assert run(tokenizer, [the, a, the], stop_token_ids=(a,))[0] == OutputEnd("the", 1, "", a)
    kept = run(tokenizer, [the, a, the], stop_token_ids=(a,), include_stop=True)[0]
    assert kept == OutputEnd("thea", 2, "", a)
    ignored = run(tokenizer, [the, EOS, a], ignore_eos=True)[0]
    assert ignored == OutputEnd("the<|im_end|>a", 3, "", None)


def test_no_token_ends_an_output_before_min_tokens(tokenizer: Tokenizer, ids_of: Spell) -> None:
    the = ids_of("the")[0]
    end, _ = run(tokenizer, [EOS, the, EOS], min_tokens=2)
    assert (end.kept, end.matched_stop) == (2, EOS)


def test_a_stop_may_not_begin_with_a_character_torn_by_min_tokens(
    tokenizer: Tokenizer, ids_of: Spell
) -> None:
    smile = "🙂".encode()
    ids = ids_of(smile[:2], smile[2:], "a", "🙂")
    end, _ = run(tokenizer, ids, stop="🙂", min_tokens=1)
    assert end == OutputEnd("🙂a", 3, "", "🙂")


def test_a_healed_token_counts_but_its_old_bytes_are_not_output(
    tokenizer: Tokenizer, ids_of: Spell
) -> None:
    ids = ids_of("the", " and")
    assert run(tokenizer, ids, skip=b"th")[0] == OutputEnd("e and", 2, "", None)
    assert run(tokenizer, ids, skip=b"the")[0] == OutputEnd(" and", 2, "", None)
    assert run(tokenizer, ids, skip=b"the", stop=" a")[0] == OutputEnd("", 1, "", " a")
    assert run(tokenizer, ids, skip=b"t", stop="e")[0] == OutputEnd("h", 0, "h", "e")
    assert run(tokenizer, ids, skip=b"t", stop="th")[0].matched_stop is None
    with pytest.raises(EngineInvariantError, match="healing"):
        run(tokenizer, ids, skip=b"x")


def test_which_literal_token_is_replaced_may_be_told_later(
    tokenizer: Tokenizer, ids_of: Spell
) -> None:
    output = OutputText(tokenizer, SamplingParams())
    output.stand_for(ids_of("a")[0])
    output.push(ids_of("ab")[0])
    assert output.finish() == OutputEnd("b", 1, "", None)


def test_the_ids_that_end_a_text_may_be_given(tokenizer: Tokenizer, ids_of: Spell) -> None:
    the, a = ids_of("the", "a")
    output = OutputText(tokenizer, SamplingParams(), end_ids=frozenset({a}))
    assert [output.push(i) for i in (the, EOS, a)] == [False, False, True]
    assert output.finish() == OutputEnd("the<|im_end|>", 2, "", a)


def test_healing_from_half_a_character(tokenizer: Tokenizer, ids_of: Spell) -> None:
    end, _ = run(tokenizer, ids_of(b"\x82", "a"), skip=b"\x82")
    assert end == OutputEnd("a", 2, "", None)


def test_of_stops_that_end_together_the_one_that_begins_first_is_taken(
    tokenizer: Tokenizer, ids_of: Spell
) -> None:
    end, _ = run(tokenizer, ids_of("a", "\n", "b"), stop=("b", "\nb"))
    assert (end.text, end.matched_stop) == ("a", "\nb")
    end, _ = run(tokenizer, ids_of("a", "b"), stop="ab", stop_regex="ab")
    assert (end.text, end.matched_stop) == ("", "ab")


def test_nothing_can_be_pushed_after_the_end(tokenizer: Tokenizer, ids_of: Spell) -> None:
    output = OutputText(tokenizer, SamplingParams(stop=("a",)))
    assert output.push(ids_of("a")[0])
    with pytest.raises(EngineInvariantError):
        output.push(ids_of("a")[0])


def test_ids_without_bytes_are_kept_and_show_nothing(tokenizer: Tokenizer, ids_of: Spell) -> None:
    ids = [ids_of("the")[0], tokenizer.vocab_size + 3]
    assert run(tokenizer, ids)[0] == OutputEnd("the", 2, "", None)


def test_a_long_output_with_stops_costs_linear_time(tokenizer: Tokenizer, ids_of: Spell) -> None:
    """What is searched for stops stays as short as the longest of them."""
    output = OutputText(tokenizer, SamplingParams(stop=("\n\n\n", "never this")))
    newline, the = ids_of("\n", "the")
    longest = 0
    for n in range(5000):
        output.push(newline if n % 3 else the)
        assert output._watch is not None
        longest = max(longest, len(output._watch._text))
        output.take_increment()
    assert longest < len("never this") + len("the")
    assert output.finish().kept == 5000


def test_streamed_pieces_of_a_real_text_join_to_it(tokenizer: Tokenizer) -> None:
    text = "Größe: 你好\n\n🙂👍🏽 and the lazy dog. " * 20
    end, streamed = run(tokenizer, tokenizer.encode([Piece(text)], first=True), stop="never")
    assert "".join(streamed) == end.text == text
    assert end.rest == ""
    assert sum(a != "" for a, _ in pairwise(streamed)) > 100


def test_an_expression_that_was_held_up_once_is_tried_again() -> None:
    class HeldUp:
        pattern = "b"
        left = 1

        def search(self, *arguments: Any, **settings: Any) -> regex.Match[str] | None:
            if self.left:
                self.left -= 1
                raise TimeoutError
            found: regex.Match[str] | None = regex.compile("b").search(*arguments, **settings)
            return found

    expression: Any = HeldUp()
    found = StopWatch((), expression).feed("ab")
    assert found is not None
    assert found.text == "b"
    expression.left = 2
    with pytest.raises(ConstraintError, match="stop_regex='b' took over"):
        StopWatch((), expression).feed("ab")

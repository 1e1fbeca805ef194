from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.backend.local.literal import Literal
from stemma.backend.local.text_cuts import last_cut
from stemma.backend.local.tokenizer import Piece, Tokenizer
from tests.backend.text.test_tokenizer import KINDS
from tests.tokenizers_for_tests import CORPUS, byte_level_tokenizer, metaspace_tokenizer

FRAGMENTS = [
    *CORPUS,
    " ",
    "  ",
    "\n",
    "\n\n",
    " \n",
    "\t",
    "\r\n",
    "1",
    "1234567",
    "'s",
    "'ll",
    "'",
]
FRAGMENTS += [
    "a",
    " b",
    "Word",
    " many words in a row",
    "中文",
    "\u3002",
    "\uff0c",
    "🙂",
    "👍🏽",
    "e\u0301",
]
FRAGMENTS += [
    "\u0301",
    "-",
    "...",
    "<|im_end|>",
    "<s>",
    "<",
    "▁",
    "\u00a0",
    "\u2028",
    "ß",
    "한국",
    "か",
    "\u3099",
]
steps = st.tuples(
    st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=12).map("".join)
    | st.text(max_size=30),
    st.sampled_from([False, False, False, True]),
)


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return Tokenizer.from_folder(KINDS[request.param](tmp_path_factory.mktemp("tokenizer")))


def build(tokenizer: Tokenizer, parts: Iterable[tuple[str, bool]], first: bool = True) -> Literal:
    literal = Literal(tokenizer, first=first)
    for text, control in parts:
        literal = literal.append(text, control=control)
    return literal


def encoded(
    tokenizer: Tokenizer, parts: Iterable[tuple[str, bool]], first: bool = True
) -> list[int]:
    return tokenizer.encode([Piece(*part) for part in parts], first=first)


@given(parts=st.lists(steps, max_size=30), last=st.lists(steps, max_size=3), first=st.booleans())
def test_appending_gives_the_ids_of_the_whole(
    tokenizer: Tokenizer,
    parts: list[tuple[str, bool]],
    last: list[tuple[str, bool]],
    first: bool,
) -> None:
    shared = build(tokenizer, parts, first)
    for n in range(3):  # forks that go on differently
        literal, own = shared, [*last[n:], (f"child {n}", False)]
        for text, control in own:
            literal = literal.append(text, control=control)
        assert literal.ids() == encoded(tokenizer, [*parts, *own], first)
    assert shared.ids() == encoded(tokenizer, parts, first)


@given(
    left=st.lists(st.sampled_from(FRAGMENTS)).map("".join),
    right=st.text(max_size=20),
    data=st.data(),
)
def test_cutting_at_a_safe_place_changes_no_id(
    tokenizer: Tokenizer, left: str, right: str, data: st.DataObject
) -> None:
    text = (
        left + data.draw(st.sampled_from(["a b", "x\ny", "文\u3002中", "é\uff0cß", "z z"])) + right
    )
    at = last_cut(text, tokenizer.cuts)
    if at is not None:
        parts = encoded(tokenizer, [(text[:at], False)]) + encoded(
            tokenizer, [(text[at:], False)], False
        )
        assert parts == encoded(tokenizer, [(text, False)])


def test_the_usual_tokenizers_have_safe_cuts(tokenizer: Tokenizer) -> None:
    assert " " in tokenizer.cuts


def test_a_tokenizer_that_joins_words_has_no_safe_cut_at_spaces(tmp_path: Path) -> None:
    joined = Tokenizer.from_folder(
        byte_level_tokenizer(tmp_path, words=r"\p{L}+(?: \p{L}+)*|\P{L}+")
    )
    assert " " not in joined.cuts
    text = "many words in a row " * 50
    assert build(joined, [(text, False), ("and more", False)]).ids() == encoded(
        joined, [(text + "and more", False)]
    )


def test_a_vocabulary_with_a_space_inside_an_entry_has_no_safe_cut(tmp_path: Path) -> None:
    folder = metaspace_tokenizer(tmp_path, legacy=True)
    path = folder / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace('"merges": [', '"merges": [["e", "▁"], ').replace(
            '"vocab": {', '"vocab": {"e▁": 999, '
        ),
        encoding="utf-8",
    )
    assert not Tokenizer.from_folder(folder).cuts


def test_a_child_encodes_only_its_own_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_tokenizer(tmp_path))
    shared = build(tokenizer, [("The quick brown fox. " * 2000, False)])
    shared.append("a").ids()
    lengths: list[int] = []
    encode = tokenizer.encode

    def counted(pieces: Iterable[Piece], *, first: bool) -> list[int]:
        pieces = list(pieces)
        lengths.append(sum(len(piece.text) for piece in pieces))
        return encode(pieces, first=first)

    monkeypatch.setattr(tokenizer, "encode", counted)
    for n in range(10):
        shared.append(f" child {n}").ids()
    assert max(lengths) < 60


def test_many_small_appends_cost_linear_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_tokenizer(tmp_path))
    encode = tokenizer.encode
    total = 0

    def counted(pieces: Iterable[Piece], *, first: bool) -> list[int]:
        nonlocal total
        pieces = list(pieces)
        total += sum(len(piece.text) for piece in pieces)
        return encode(pieces, first=first)

    monkeypatch.setattr(tokenizer, "encode", counted)
    build(tokenizer, [("some words and ", False)] * 3000).ids()
    assert total <= 3000 * 15


def test_a_literal_is_a_value(tokenizer: Tokenizer) -> None:
    parent = build(tokenizer, [("some words " * 40, False)])
    before = parent.ids()
    parent.append("more").ids()
    parent.ids().clear()
    assert parent.ids() == before


def test_bos_goes_before_plain_text_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(metaspace_tokenizer(tmp_path))
    assert build(tokenizer, []).wants_bos
    assert build(tokenizer, [("text", False)]).wants_bos
    assert build(tokenizer, [("text ", False), ("<s>", True)]).wants_bos
    assert not build(tokenizer, [("<s>", True), ("text", False)]).wants_bos
    assert not build(tokenizer, [("text", False)], first=False).wants_bos
    long = build(tokenizer, [("<s>", True), ("word " * 200, False), ("end", False)])
    assert not long.wants_bos


def test_a_model_that_expects_no_bos_gets_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(metaspace_tokenizer(tmp_path, adds_bos=False))
    assert not build(tokenizer, [("text", False)]).wants_bos


def test_only_a_last_token_of_plain_text_can_be_healed(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_tokenizer(tmp_path))
    assert build(tokenizer, [("The quick", False)]).can_heal
    assert build(tokenizer, [("<|im_start|>user\n", True), ("The quick", False)]).can_heal
    assert build(tokenizer, [("words and " * 100, False), ("words", False)]).can_heal
    assert not build(tokenizer, []).can_heal
    assert not build(tokenizer, [("The quick\n", True)]).can_heal
    assert not build(tokenizer, [("text", False), ("<|im_end|>", True)]).can_heal
    # One token, half of it control text.
    assert len(encoded(tokenizer, [(" an", True), ("d", False)])) == 1
    assert not build(tokenizer, [(" an", True), ("d", False)]).can_heal


def test_an_empty_literal_is_false(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_tokenizer(tmp_path))
    assert not build(tokenizer, [("", False), ("", True)])
    assert build(tokenizer, [("x", False)])
    assert build(tokenizer, []).ids() == []


@given(
    parts=st.lists(steps, max_size=6), end=st.sampled_from(["", " ", "  ", "\n\n", "\n   ", "\t"])
)
def test_open_end_spells_the_same_text(
    tokenizer: Tokenizer, parts: list[tuple[str, bool]], end: str
) -> None:
    literal = build(tokenizer, [*parts, (end, False)])
    assert tokenizer.decode(literal.open_ids()) == tokenizer.decode(literal.ids())


def test_white_space_at_an_open_end_is_divided_as_before_a_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_tokenizer(tmp_path))
    for text, before_a_word in (("sea\n\n", "sea\n\n?"), ("sea", "sea"), ("sea ", "sea ")):
        literal = build(tokenizer, [(text, False)])
        followed = build(tokenizer, [(before_a_word, False)]).ids()
        assert literal.open_ids() == followed[: len(literal.open_ids())]
    control = build(tokenizer, [("<|im_start|>user\n\n", True)])
    assert control.open_ids() == control.ids()

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from stemma.backend.local.tokenizer import Piece, Tokenizer
from stemma.backend.local.tokenizer_files import DummyPrefix
from stemma.lang.errors import ModelLoadError
from tests.tokenizers_for_tests import (
    CORPUS,
    LLAMA3_WORDS,
    byte_level_tokenizer,
    metaspace_tokenizer,
)

Make = Callable[[Path], Path]
KINDS: dict[str, Make] = {
    "gpt2": byte_level_tokenizer,
    "llama3": lambda f: byte_level_tokenizer(f, words=LLAMA3_WORDS, adds_bos=True),
    "digits": lambda f: byte_level_tokenizer(f, digits=True, normalizer={"type": "NFC"}),
    "metaspace-first": metaspace_tokenizer,
    "metaspace-always": lambda f: metaspace_tokenizer(f, prefix="always", adds_bos=False),
    "metaspace-never": lambda f: metaspace_tokenizer(f, prefix="never"),
    "llama2": lambda f: metaspace_tokenizer(f, legacy=True),
}
texts = st.lists(st.sampled_from([*CORPUS, " ", "  ", "\n", "x", "1", "é", "🙂", "中"])).map(
    "".join
)
texts |= st.text(max_size=40)


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def full(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def make(tmp_path: Path, **options: Any) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_tokenizer(tmp_path, **options))


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def is_plain(text: str, full: tokenizers.Tokenizer) -> bool:
    """Whether it spells no added token: the full tokenizer knows no text in which that is text."""
    added = full.get_added_tokens_decoder().values()
    return not any(token.content in text for token in added)


@given(text=texts)
def test_plain_text_is_tokenised_as_by_the_full_tokenizer(
    ours: Tokenizer, full: tokenizers.Tokenizer, text: str
) -> None:
    assume(is_plain(text, full))
    assert ours.encode([Piece(text)], first=True) == full.encode(text, add_special_tokens=False).ids


@given(parts=st.lists(st.tuples(texts, st.sampled_from("se")), max_size=4), last=texts)
def test_control_text_and_contents_are_tokenised_as_one_rendered_text(
    ours: Tokenizer, full: tokenizers.Tokenizer, parts: list[tuple[str, str]], last: str
) -> None:
    assume(all(is_plain(text, full) for text in (last, *(text for text, _ in parts))))
    names = {"s": ours.bos_token or "", "e": ours.eos_token or ""}
    pieces = [p for text, name in parts for p in (Piece(text), Piece(names[name] + "user\n", True))]
    pieces.append(Piece(last))
    rendered = "".join(piece.text for piece in pieces)
    wanted = full.encode(rendered, add_special_tokens=False).ids
    assert ours.encode(pieces, first=True) == wanted


@given(text=texts)
def test_the_bytes_of_a_continuation_are_its_text(ours: Tokenizer, text: str) -> None:
    ids = ours.encode([Piece(text)], first=False)
    composed = text if text.isascii() else None  # NFC may compose, and <unk> stands for nothing
    assert composed is None or b"".join(map(ours.bytes_of, ids)) == text.encode()
    assert composed is None or ours.decode(ids) == text


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "metaspace-first"])
def test_non_ascii_text_survives(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(KINDS[kind](tmp_path))
    text = "é 中文 🙂👍🏽 привет \u0000\u00a0"
    assert tokenizer.decode(tokenizer.encode([Piece(text)], first=False)) == text


def test_every_spelling_of_added_tokens_in_plain_text_stays_text(
    ours: Tokenizer, folder: Path
) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for token in spec["added_tokens"]:
        for text in (token["content"], f"a {token['content']}b", token["content"] * 2):
            ids = ours.encode([Piece(text)], first=False)
            assert not any(ours.is_control(i) for i in ids)
            assert ours.decode(ids) == text
            as_control = ours.encode([Piece(token["content"], True)], first=False)
            assert as_control == [token["id"]]
            assert ours.is_control(token["id"])
            assert ours.token_bytes[token["id"]] == token["content"].encode()


def test_a_vocabulary_that_could_spell_a_control_token_does_not(tmp_path: Path) -> None:
    """With `ignore_merges` a whole word of the vocabulary is taken as it is; merges may lead there
    too."""
    byte_level_tokenizer(tmp_path, words=r"\S+|\s+")

    def spell(spec: Any) -> None:
        model = spec["model"]
        model["ignore_merges"] = True
        model["vocab"]["<|"] = len(model["vocab"]) + 2
        model["vocab"]["<||"] = len(model["vocab"]) + 2
        model["merges"] += [["<", "|"], ["<|", "|"]]
        spec["added_tokens"].append(
            {**spec["added_tokens"][0], "id": model["vocab"]["<||"], "content": "<||"}
        )

    change_json(tmp_path / "tokenizer.json", spell)
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in ("<||", "<|im_end|>", "a <|| b"):
        ids = tokenizer.encode([Piece(text)], first=True)
        assert not any(tokenizer.is_control(i) for i in ids)
        assert tokenizer.decode(ids) == text


def test_a_control_token_may_be_spelled_over_adjoining_control_pieces(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    assert tokenizer.encode([Piece("<|im", True), Piece("_end|>", True)], first=False) == [2]
    apart = tokenizer.encode([Piece("<|im", True), Piece("_end|>")], first=False)
    assert apart == tokenizer.encode([Piece("<|im_end|>")], first=False)


def test_control_tokens_strip_as_the_full_tokenizer_strips(tmp_path: Path) -> None:
    more: tuple[dict[str, Any], ...] = (
        {"content": "<|end|>", "rstrip": True},
        {"content": "<mask>", "lstrip": True},
        {"content": "<|end|>x"},  # the longest one is taken
    )
    folder = byte_level_tokenizer(tmp_path, more_tokens=more)
    ours = Tokenizer.from_folder(folder)
    full = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "a<|end|> \n b <mask> c<|end|>xy"
    assert ours.encode([Piece(text, True)], first=True) == full.encode(text).ids
    # Contents are verbatim: nothing of them is stripped.
    ids = ours.encode([Piece("<|end|>", True), Piece("  b")], first=True)
    assert ours.decode(ids) == "<|end|>  b"


def test_white_space_tokens_are_ordinary_text(tmp_path: Path) -> None:
    """GPT-NeoX and Gemma have runs of spaces or newlines among their added tokens."""
    more = ({"content": "    ", "special": False}, {"content": "\n\n", "special": False})
    folder = byte_level_tokenizer(tmp_path, more_tokens=more)
    ours = Tokenizer.from_folder(folder)
    full = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "a\n\nb    c     d"
    assert ours.encode([Piece(text)], first=True) == full.encode(text).ids
    assert not any(ours.is_control(i) for i in full.encode(text).ids)
    assert full.token_to_id("    ") in ours.ids_starting_with(b"    ")


def test_only_the_start_of_a_text_gets_a_dummy_prefix(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(metaspace_tokenizer(tmp_path))
    word = Piece("and")
    start = tokenizer.encode([word], first=True)
    assert tokenizer.decode(start) == " and"
    assert tokenizer.decode(tokenizer.encode([word], first=False)) == "and"
    after_control = tokenizer.encode([Piece("<s>", True), word], first=True)
    assert tokenizer.decode(after_control) == "<s>and"


def test_a_legacy_tokenizer_repeats_its_dummy_prefix_after_control_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(metaspace_tokenizer(tmp_path, legacy=True))
    assert tokenizer.dummy_prefix is DummyPrefix.ALWAYS
    ids = tokenizer.encode([Piece("and"), Piece("</s>", True), Piece("and")], first=False)
    assert tokenizer.decode(ids) == "and</s> and"


@given(data=st.data())
def test_ids_starting_with_finds_what_a_scan_finds(ours: Tokenizer, data: st.DataObject) -> None:
    some = data.draw(st.sampled_from(ours.token_bytes))
    prefix = data.draw(st.sampled_from([some, some[:1], some + b"!", b"\xff", b"\xf4\xff", b""]))
    scan = [
        i
        for i, spelled in enumerate(ours.token_bytes)
        if spelled and spelled.startswith(prefix) and not ours.is_control(i)
    ]
    assert ours.ids_starting_with(prefix).tolist() == scan


def test_byte_fallback_tokens_are_their_byte(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(metaspace_tokenizer(tmp_path))
    assert tokenizer.token_bytes[3 + 0xE2] == b"\xe2"
    assert tokenizer.decode([3 + b for b in "🙂".encode()]) == "🙂"
    assert tokenizer.decode([3 + 0xF0]) == "\ufffd"


def test_ids_beyond_the_vocabulary_have_no_bytes(ours: Tokenizer) -> None:
    assert ours.vocab_size == len(ours.token_bytes)
    assert ours.bytes_of(ours.vocab_size + 5) == b""
    assert ours.decode([ours.vocab_size]) == ""


@pytest.mark.parametrize("kind", list(KINDS))
def test_adds_bos_says_what_the_full_tokenizer_does(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path)
    tokenizer = Tokenizer.from_folder(folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    starts_with_bos = theirs("x")["input_ids"][0] == theirs.bos_token_id
    assert tokenizer.adds_bos == starts_with_bos
    assert tokenizer.bos_id == theirs.bos_token_id


def test_end_of_text_ids_come_from_all_files(tmp_path: Path) -> None:
    byte_level_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_folder(tmp_path).eos_ids == {0, 2, 5, 7}


def test_a_folder_without_tokenizer_config_takes_names_from_config(tmp_path: Path) -> None:
    byte_level_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.chat_template is None


def test_a_template_file_goes_before_the_one_in_the_configuration(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, chat_template="inside")
    assert tokenizer.chat_template == "inside"
    (tmp_path / "chat_template.jinja").write_text("beside", encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).chat_template == "beside"


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    byte_level_tokenizer(tmp_path)
    several = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    change_json(tmp_path / "tokenizer_config.json", lambda c: c.update(chat_template=several))
    assert Tokenizer.from_folder(tmp_path).chat_template == "b"


def test_a_named_token_that_is_only_in_the_vocabulary_is_a_control_token(tmp_path: Path) -> None:
    byte_level_tokenizer(tmp_path)
    change_json(tmp_path / "tokenizer.json", lambda s: s["added_tokens"].clear())
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode([Piece("<|im_start|>a", True)], first=True)[0] == tokenizer.bos_id == 1
    assert tokenizer.eos_ids == {2}


def test_a_folder_without_tokenizer_files_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ModelLoadError, match="no such folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")


def test_a_folder_with_other_tokenizer_files_is_converted(tmp_path: Path) -> None:
    folder = byte_level_tokenizer(tmp_path)
    wanted = Tokenizer.from_folder(folder).encode([Piece("The lazy dog doesn't.")], first=True)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines), encoding="utf-8")
    change_json(
        folder / "tokenizer_config.json", lambda c: c.update(tokenizer_class="GPT2Tokenizer")
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode([Piece("The lazy dog doesn't.")], first=True) == wanted
    assert tokenizer.bos_id == 1


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    byte_level_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_an_unknown_alphabet_is_refused(tmp_path: Path) -> None:
    byte_level_tokenizer(tmp_path)

    def word_piece(spec: Any) -> None:
        spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
        spec["pre_tokenizer"] = {"type": "BertPreTokenizer"}

    change_json(tmp_path / "tokenizer.json", word_piece)
    with pytest.raises(ModelLoadError, match="spell bytes"):
        Tokenizer.from_folder(tmp_path)

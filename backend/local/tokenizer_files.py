"""Reading a model folder's tokenizer files, and what follows from tokenizer.json alone.

Owns the knowledge of that file's layout: which added tokens are control tokens, which bytes an id
stands for, how to take dummy prefixes and control tokens out. Called by `tokenizer.py` only.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import tokenizers

from stemma.lang.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a folder says about its tokenizer.

    spec: tokenizer.json.
    control: added tokens that plain text never gives, special or not.
    white_space: added tokens of white space only (GPT-NeoX, Gemma), which are ordinary vocabulary.
    add_bos_token: of tokenizer_config.json.
    """

    spec: Spec
    control: tuple[Spec, ...]
    white_space: tuple[Spec, ...]
    bos_token: str | None
    eos_token: str | None
    eos_ids: frozenset[int]
    add_bos_token: bool
    chat_template: str | None


class DummyPrefix(Enum):
    """Where a tokenizer puts a space before plain text that has none."""

    NEVER = "never"
    FIRST = "first"  # at the very start of a text
    ALWAYS = "always"  # there and after every control token

    @classmethod
    def of(cls, spec: Spec) -> DummyPrefix:
        steps = {
            key: spec.get(key) for key in ("normalizer", "pre_tokenizer")
        }  # a decoder only mirrors them
        kinds = [_dummy_prefix(part) for part in _components(steps)]
        return max(kinds, key=list(cls).index, default=cls.NEVER)


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the folder. Raises ModelLoadError."""
    path = folder / "tokenizer.json"
    spec = _read_json(path) if path.is_file() else _converted(folder)
    config = _read_json(folder / "tokenizer_config.json")
    model_configs = [
        _read_json(folder / name) for name in ("generation_config.json", "config.json")
    ]
    names = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}
    added = _added_tokens(spec, config, [name for name in names.values() if name is not None])
    if not config:  # then the ids in the model's configuration are all there is
        texts = {token["id"]: token["content"] for token in added}
        for name in names:
            given = (c[f"{name}_id"] for c in model_configs if isinstance(c.get(f"{name}_id"), int))
            names[name] = texts.get(next(given, -1))
    ordinary = [token for token in added if _is_white_space(token["content"])]
    control = [
        token
        for token in added
        if not _is_white_space(token["content"]) and not _BYTE_TOKEN.fullmatch(token["content"])
    ]
    return TokenizerFiles(
        spec=spec,
        control=tuple(control),
        white_space=tuple(ordinary),
        bos_token=names["bos_token"],
        eos_token=names["eos_token"],
        eos_ids=frozenset(i for c in model_configs for i in _eos_ids(c)),
        add_bos_token=bool(config.get("add_bos_token")),
        chat_template=_chat_template(folder, config),
    )


def plain_model(files: TokenizerFiles) -> Any:
    """The model of tokenizer.json, changed so that plain text cannot give the id of a control
    token.

    Their vocabulary entries get a name that nobody can write, and merges that would make them go.
    White space tokens enter the vocabulary, so that they keep their ids.
    """
    model = dict(files.spec["model"])
    unwritable = "\ue000" + uuid.uuid4().hex
    names = {token["content"]: unwritable + token["content"] for token in files.control}
    extra = {token["content"]: token["id"] for token in files.white_space}
    if isinstance(model["vocab"], dict):
        model["vocab"] = extra | {names.get(t, t): i for t, i in model["vocab"].items()}
    else:  # Unigram: (piece, score) in the order of ids
        pieces = [[names.get(t, t), score] for t, score in model["vocab"]]
        known = {t for t, _ in pieces}
        for text, token_id in extra.items():
            if text not in known:
                pieces += [[f"{unwritable}{i}", 0.0] for i in range(len(pieces), token_id + 1)]
                pieces[token_id] = [text, 0.0]
        model["vocab"] = pieces
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:

        def stays(merge: str | list[str]) -> bool:  # written "a b" or ["a", "b"]
            a, b = merge.split(" ", 1) if isinstance(merge, str) else merge
            return not (a in names or b in names or a + b in names)

        model["merges"] = list(filter(stays, model["merges"]))
    return tokenizers.Tokenizer.from_str(json.dumps(whole_spec(model))).model


def whole_spec(model: Spec, **components: Spec | None) -> Spec:
    """A tokenizer.json of a model and some components, without added tokens."""
    steps = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {
        "version": "1.0",
        "added_tokens": [],
        **dict.fromkeys(steps),
        **components,
        "model": model,
    }


def without_dummy_prefix(spec: Spec) -> Spec:
    """The same pipeline with nothing that puts a space in front."""

    def bare(part: Spec | None) -> Spec | None:
        if part is None or part["type"] == "Prepend":
            return None
        if part["type"] == "Metaspace":
            return part | {"prepend_scheme": "never", "add_prefix_space": False}
        if part["type"] == "ByteLevel":
            return part | {"add_prefix_space": False}
        for key in ("normalizers", "pretokenizers"):
            if key in part:
                return part | {key: [b for p in part[key] if (b := bare(p)) is not None]}
        return part

    return spec | {key: bare(spec.get(key)) for key in ("normalizer", "pre_tokenizer")}


def token_bytes(files: TokenizerFiles) -> list[bytes]:
    """The bytes of every id. Raises ModelLoadError for an alphabet that is not known."""
    vocab = files.spec["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((t, i) for i, (t, _) in enumerate(vocab))
    to_bytes = _alphabet(files.spec)
    known = {token_id: to_bytes(text) for text, token_id in pairs}
    for token in files.control:
        known[token["id"]] = token["content"].encode()
    for token in files.white_space:
        known.setdefault(token["id"], token["content"].encode())
    return [known.get(i, b"") for i in range(max(known) + 1)]


def _alphabet(spec: Spec) -> Callable[[str], bytes]:
    """How a vocabulary entry spells bytes."""
    kinds = {part["type"] for part in _components(spec)}
    if "ByteLevel" in kinds:
        return _byte_level
    marks = {part.get("replacement") for part in _components(spec) if part["type"] == "Metaspace"}
    replaced = {part.get("content") for part in _components(spec) if part["type"] == "Replace"}
    if not (marks or _SPACE_MARK in replaced):
        raise ModelLoadError(
            f"tokenizer.json: how its entries spell bytes is not known (it has {sorted(kinds)}); "
            "byte-level and SentencePiece-like tokenizers can be used"
        )
    mark = marks.pop() if marks else _SPACE_MARK
    fallback = "ByteFallback" in kinds or spec["model"].get("byte_fallback")

    def metaspace(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if fallback else None
        return (
            bytes([int(byte[1], 16)]) if byte else token.replace(mark or _SPACE_MARK, " ").encode()
        )

    return metaspace


def _byte_values() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 character is its byte, the others follow from U+0100
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(0x100) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_VALUES = _byte_values()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_VALUES[c] for c in token])
    except KeyError:  # an entry that no text gives, such as a control token inside the vocabulary
        return token.encode()


def _components(spec: Spec) -> Iterator[Spec]:
    """Every normalizer, pre-tokenizer and decoder, those inside sequences too."""
    todo = [spec.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
    while todo:
        part = todo.pop()
        if part is not None:
            yield part
            for key in ("normalizers", "pretokenizers", "decoders"):
                todo += part.get(key, [])


def _dummy_prefix(part: Spec) -> DummyPrefix:
    if part["type"] == "Prepend":
        return DummyPrefix.ALWAYS
    if part["type"] == "Metaspace":
        old = "always" if part.get("add_prefix_space", True) else "never"
        return DummyPrefix(part.get("prepend_scheme", old))
    if part["type"] == "ByteLevel" and part.get("add_prefix_space"):
        return DummyPrefix.ALWAYS
    return DummyPrefix.NEVER


def _added_tokens(spec: Spec, config: Spec, named: list[str]) -> list[Spec]:
    """Added tokens of tokenizer.json, then those only tokenizer_config.json has, then named ones of
    the vocabulary."""
    added = {token["content"]: token for token in spec.get("added_tokens") or ()}
    for token_id, token in config.get("added_tokens_decoder", {}).items():
        added.setdefault(token["content"], {**token, "id": int(token_id)})
    vocab = spec["model"]["vocab"]
    for text in named:
        if text not in added:
            ids = vocab if isinstance(vocab, dict) else {t: i for i, (t, _) in enumerate(vocab)}
            if text in ids:
                added[text] = {
                    "content": text,
                    "id": ids[text],
                    "normalized": False,
                    "special": True,
                }
    return list(added.values())


def _is_white_space(content: str) -> bool:
    return content.replace(_SPACE_MARK, " ").isspace()


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json is a string or an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _eos_ids(config: Spec) -> list[int]:
    value = config.get("eos_token_id")
    if value is None:
        value = (config.get("text_config") or {}).get("eos_token_id")
    return value if isinstance(value, list) else [] if value is None else [value]


def _chat_template(folder: Path, config: Spec) -> str | None:
    """chat_template.jinja, else the default one of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}.get("default")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> Spec:
    """The object in the file; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{path}: cannot be read as JSON ({error}); fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: an object was expected; fetch the file again")
    return value


def _converted(folder: Path) -> Spec:
    """tokenizer.json made by transformers from the tokenizer files of another kind."""
    if not folder.is_dir():
        raise ModelLoadError(f"{folder}: there is no such folder; give a model's folder")
    try:
        from transformers import AutoTokenizer

        spec = json.loads(AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer.to_str())
        if not spec["model"]["vocab"]:
            raise ValueError("no vocabulary was found")
    except Exception as error:  # whatever the conversion trips over, the remedy is the same
        raise ModelLoadError(
            f"{folder / 'tokenizer.json'}: there is no such file, and transformers cannot make it "
            f"from the others ({type(error).__name__}: {error}). Install what that names (often "
            "sentencepiece or tiktoken), or put a tokenizer.json there: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        ) from error
    assert isinstance(spec, dict)
    return spec

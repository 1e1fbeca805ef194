"""Small tokenizers of the two families, trained on a text here and written as a hub repository has
them."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's asleep.",
    "A branch is a line of text; a fork makes two of it, and they share what came before.",
    "In 1998 there were 12345 reasons.\n\nNow there are 7.\n  - one\n  - two\n\tthree\r\n",
    "def f(x):\n    return x + 1  # we'll see   if that's   right\n\n\n",
    "Größe, naïve café, señor; привет, как дела? こんにちは世界 🙂🎉👍🏽",
    "你好\uff0c世界\u3002今天天气很好\u3002世界你好",
    "Words and words and more words: reading, writing, thinking, answering, asking, planning.",
]

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a small test model.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_tokenizer(
    folder: Path,
    *,
    words: str = GPT2_WORDS,
    digits: bool = False,
    normalizer: dict[str, Any] | None = None,
    adds_bos: bool = False,
    chat_template: str | None = CHATML,
    more_tokens: tuple[dict[str, Any], ...] = (),
) -> Path:
    """Byte-level BPE like GPT-2's or, with other `words`, Llama 3's. Returns the folder.

    Ids 0..2 are <|endoftext|>, <|im_start|> (BOS) and <|im_end|> (EOS), inside the vocabulary as
    SmolLM2 has them; <think> and </think> are added tokens that are not special; `more_tokens`
    follow. digits: every digit is a word, as SmolLM2 has it. adds_bos: the post-processor puts BOS
    before plain text.
    """
    vocab, merges = _trained_byte_level(words, digits)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {name: n for n, name in enumerate(names)} | {
        t: i + len(names) for t, i in vocab.items()
    }
    added = [_added(name, n) for n, name in enumerate(names)]
    for name in ("<think>", "</think>"):
        added.append(_added(name, len(vocab) + len(added) - 3, special=False))
    for token in more_tokens:
        added.append(_added(**{"token_id": len(vocab) + len(added) - 3, **token}))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False},
        byte_level | {"use_regex": False},
    ]
    if digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    return _write(
        folder,
        {
            "added_tokens": added,
            "normalizer": normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": _bos_in_front("<|im_start|>", 1) if adds_bos else None,
            "decoder": byte_level | {"use_regex": True},
            "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        },
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        chat_template,
    )


def metaspace_tokenizer(
    folder: Path,
    *,
    prefix: str = "first",
    legacy: bool = False,
    adds_bos: bool = True,
    chat_template: str | None = None,
) -> Path:
    """BPE on words marked with ▁, with byte fallback, like Llama 2's. Returns the folder.

    Ids 0..2 are <unk>, <s> (BOS) and </s> (EOS), then come the 256 byte tokens. prefix: where the
    dummy prefix goes ("first", "always", "never"). legacy: a normalizer marks spaces, always with a
    dummy prefix, and nothing splits words.
    """
    trained, merges = _trained_metaspace()
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    vocab = {name: n for n, name in enumerate(names)}
    for token in trained:
        vocab.setdefault(token, len(vocab))
    mark: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, mark]
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prefix, "split": True}
    return _write(
        folder,
        {
            "added_tokens": [_added(name, n) for n, name in enumerate(names[:3])],
            "normalizer": {"type": "Sequence", "normalizers": steps} if legacy else None,
            "pre_tokenizer": None if legacy else metaspace,
            "post_processor": _bos_in_front("<s>", 1) if adds_bos else None,
            "decoder": {"type": "Sequence", "decoders": back},
            "model": {
                "type": "BPE",
                "vocab": vocab,
                "merges": merges,
                "unk_token": "<unk>",
                "fuse_unk": True,
                "byte_fallback": True,
            },
        },
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        chat_template,
    )


@lru_cache
def _trained_byte_level(words: str, digits: bool) -> tuple[dict[str, int], list[Any]]:
    tokenizer = Tokenizer(models.BPE())
    steps = [
        pre_tokenizers.Split(Regex(words), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    if digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    return _train(tokenizer, trainer)


@lru_cache
def _trained_metaspace() -> tuple[dict[str, int], list[Any]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    text = set("".join(CORPUS[:4]) + "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(c for c in text if not c.isspace()),
        show_progress=False,
        limit_alphabet=len(text),
    )
    return _train(tokenizer, trainer)


def _train(tokenizer: Tokenizer, trainer: Any) -> tuple[dict[str, int], list[Any]]:
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return dict(sorted(model["vocab"].items(), key=lambda item: item[1])), model["merges"]


def _added(content: str, token_id: int, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **plain, "special": True, **flags}


def _bos_in_front(bos: str, bos_id: int) -> dict[str, Any]:
    special = {"SpecialToken": {"id": bos, "type_id": 0}}
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, other],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _write(
    folder: Path, spec: dict[str, Any], config: dict[str, Any], chat_template: str | None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    spec = {"version": "1.0", "truncation": None, "padding": None, **spec}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if chat_template is not None:
        config["chat_template"] = chat_template
    for name, value in (("tokenizer.json", spec), ("tokenizer_config.json", config)):
        (folder / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return folder

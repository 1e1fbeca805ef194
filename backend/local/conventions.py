"""How a model wants to be used, by its own files: how its chats are written and its texts end, the
sampling that its authors recommend, and the marks around its reasoning.

Owns the reading of `generation_config.json`. Called by `LocalBackend`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from stemma.backend.chat import ChatFormat
from stemma.backend.local.tokenizer import Piece, Tokenizer
from stemma.lang.errors import ModelLoadError, UnsupportedByBackend
from stemma.lang.reasoning import KNOWN_MARKS, THINK, Marks
from stemma.lang.sampling import SamplingParams

# The settings of `generation_config.json` that have a name in `SamplingParams`.
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
# Those that have none and change what is drawn, with the values under which they do not.
_WITHOUT_NAME: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "guidance_scale": (1.0,),
    "bad_words_ids": ([],),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "exponential_decay_length_penalty": (),
}


def recommended_sampling(folder: Path, model: str) -> SamplingParams:
    """`generation_config.json` as sampling.

    `do_sample: false` is temperature 0. What the file does not say keeps our default, and the end
    of text needs nothing: the engine knows it. Raises UnsupportedByBackend where there is no file
    or it asks for what has no name here, ModelLoadError if it cannot be read.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        raise UnsupportedByBackend(
            f"{model} has no generation_config.json: its authors recommend no sampling"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        given = {key: value for key, value in config.items() if value is not None}
    except (ValueError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a JSON object: {error}") from error
    beyond = [
        f"{key}={given[key]!r}"
        for key, neutral in _WITHOUT_NAME.items()
        if key in given and given[key] not in neutral
    ]
    if beyond:
        raise UnsupportedByBackend(
            f"the generation_config.json of {model} asks for {', '.join(beyond)}, which "
            "SamplingParams has no name for: write the sampling that you want yourself"
        )
    settings = {ours: given[theirs] for theirs, ours in _NAMES.items() if theirs in given}
    if given.get("do_sample") is False:
        settings |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return SamplingParams(**settings)


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """The template's pieces. A model whose template is missing or cannot be taken apart still does
    plain text.
    """
    if tokenizer.chat_template is None:
        return ChatFormat.absent()
    try:
        return ChatFormat.from_template(
            tokenizer.chat_template,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
        )
    except ModelLoadError as error:
        return ChatFormat.absent(str(error))


def end_ids(tokenizer: Tokenizer, chat: ChatFormat) -> frozenset[int]:
    """What ends a text: the model's end-of-text ids, and the control token that ends an assistant's
    turn.
    """
    ends = set(tokenizer.eos_ids)
    with suppress(UnsupportedByBackend):
        turn_end = tokenizer.encode([Piece(chat.end("assistant"), control=True)], first=True)
        ends.update(filter(tokenizer.is_control, turn_end[:1]))
    return frozenset(ends)


def reasoning_marks(tokenizer: Tokenizer) -> Marks:
    """The known marks that are added tokens of the model, else those that its chat template spells,
    else the usual ones.
    """
    template = tokenizer.chat_template or ""
    as_tokens = (m for m in KNOWN_MARKS if all(_is_token(tokenizer, mark) for mark in m))
    as_text = (m for m in KNOWN_MARKS if all(mark in template for mark in m))
    return next(as_tokens, None) or next(as_text, THINK)


def _is_token(tokenizer: Tokenizer, mark: str) -> bool:
    ids = tokenizer.encode([Piece(mark, control=True)], first=False)
    return len(ids) == 1 and tokenizer.is_control(ids[0])

"""What a model's own files say: its recommended sampling, and the marks around its reasoning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stemma.backend.local.conventions import reasoning_marks, recommended_sampling
from stemma.backend.local.tokenizer import Tokenizer
from stemma.lang.errors import ModelLoadError, UnsupportedByBackend
from stemma.lang.sampling import SamplingParams
from tests.tokenizers_for_tests import CHATML, byte_level_tokenizer


def recommended(folder: Path, **config: Any) -> SamplingParams:
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    return recommended_sampling(folder, "a-model")


def test_settings_get_their_names_here(tmp_path: Path) -> None:
    params = recommended(
        tmp_path,
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.1,
        repetition_penalty=1.05,
        max_new_tokens=64,
        min_new_tokens=2,
        stop_strings=["User:"],
        eos_token_id=[2, 3],
        pad_token_id=None,
        transformers_version="5.0.0",
    )
    assert params == SamplingParams(
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.1,
        repetition_penalty=1.05,
        max_tokens=64,
        min_tokens=2,
        stop=("User:",),
    )


def test_what_the_file_leaves_out_keeps_our_default(tmp_path: Path) -> None:
    assert recommended(tmp_path, bos_token_id=1) == SamplingParams()


def test_a_model_that_does_not_sample_takes_the_most_probable_token(tmp_path: Path) -> None:
    params = recommended(tmp_path, do_sample=False, temperature=0.7, top_k=50)
    assert params == SamplingParams(temperature=0)


def test_what_has_no_name_here_is_refused_unless_it_changes_nothing(tmp_path: Path) -> None:
    assert recommended(tmp_path, num_beams=1, typical_p=1.0, suppress_tokens=[]) == SamplingParams()
    with pytest.raises(
        UnsupportedByBackend, match=r"a-model .*num_beams=4, no_repeat_ngram_size=3"
    ):
        recommended(tmp_path, num_beams=4, no_repeat_ngram_size=3)


def test_a_file_that_is_missing_or_unreadable_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedByBackend, match=r"a-model has no generation_config\.json"):
        recommended_sampling(tmp_path, "a-model")
    for content in ("{", "[]"):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(ModelLoadError, match="is not a JSON object"):
            recommended_sampling(tmp_path, "a-model")


def test_marks_that_are_added_tokens_are_the_models(tmp_path: Path) -> None:
    byte_level_tokenizer(tmp_path, chat_template=CHATML + "{# [THINK] and [/THINK] #}")
    assert reasoning_marks(Tokenizer.from_folder(tmp_path)) == ("<think>", "</think>")


def without_think(folder: Path) -> None:
    """Take <think> and </think> out of a tokenizer."""
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text(encoding="utf-8"))
    spec["added_tokens"] = [t for t in spec["added_tokens"] if "think" not in t["content"]]
    path.write_text(json.dumps(spec), encoding="utf-8")


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        (CHATML, ("<think>", "</think>")),
        (CHATML + "{# [THINK] and [/THINK] #}", ("[THINK]", "[/THINK]")),
        (CHATML + "{# <reasoning> only #}", ("<think>", "</think>")),
        (None, ("<think>", "</think>")),
    ],
)
def test_without_such_tokens_the_template_tells(
    tmp_path: Path, template: str | None, marks: tuple[str, str]
) -> None:
    byte_level_tokenizer(tmp_path, chat_template=template)
    without_think(tmp_path)
    assert reasoning_marks(Tokenizer.from_folder(tmp_path)) == marks

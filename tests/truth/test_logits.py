"""Logits through decoder, batch, attention and KV pool, against transformers' for each line alone.

On tiny random models within 1e-4 of float32 transformers; on the default model no further from
float64 than twice what transformers itself is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.truth.exact_for_tests import load_reference, logits_of
from tests.truth.paged_for_tests import Paged

Line = list[int]
Steps = list[list[Line]]
"""What is handed to the engine's parts, step by step: in each step some lines, from their start."""

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-query": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "many-heads": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
    },
    "deep": {"num_hidden_layers": 6, "initializer_range": 0.2},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def in_one_pass(line: Line) -> Steps:
    return [[line]]


def in_chunks(line: Line) -> Steps:
    rng, ends = random.Random(1), [0]
    while ends[-1] < len(line):
        ends.append(min(len(line), ends[-1] + rng.choice([1, 2, 7, 30, 64])))
    return [[line[:end]] for end in ends[1:]]


def token_by_token(line: Line) -> Steps:
    half = len(line) // 2
    return [[line[:half]], *([line[:end]] for end in range(half + 1, len(line) + 1))]


def as_a_tree(line: Line) -> Steps:
    """Branches that leave the line, and each other, at many places; some of it computed before.

    The second step has cached trunks, new rows that many lines share, lines that end within others
    and private tails, short and long. Then all branches decode together.
    """
    rng = random.Random(2)
    stems, vocabulary = [line], sorted(set(line))
    for _ in range(len(line) // 10):
        stem = rng.choice(stems)
        tail = [rng.choice(vocabulary) for _ in range(rng.choice([1, 2, 5, 20]))]
        stems.append(stem[: rng.randrange(1, len(stem) + 1)] + tail)
    started = [stem[: rng.randrange(1, len(stem))] for stem in stems[: len(stems) // 2]]
    steps = [started, stems]
    for _ in range(3):
        stems = [[*stem, rng.choice(vocabulary)] for stem in stems]
        steps.append(stems)
    return steps


MODES: list[Callable[[Line], Steps]] = [in_one_pass, in_chunks, token_by_token, as_a_tree]


def computed(paged: Paged, steps: Steps) -> list[tuple[Line, Tensor]]:
    """Per line of each step the logits of its last positions, those that the step computed."""
    return [pair for lines in steps for pair in zip(lines, paged.step(lines), strict=True)]


class Alone:
    """A transformers model that is given each line alone, or a longer one that it begins."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.passes: list[tuple[Line, Tensor]] = []

    def expected(self, found: list[tuple[Line, Tensor]]) -> Tensor:
        """The model's logits for the positions that were found, joined."""
        for line in sorted((line for line, _ in found), key=len, reverse=True):
            self._logits(line)
        return torch.cat([self._logits(line)[len(line) - len(rows) :] for line, rows in found])

    def _logits(self, line: Line) -> Tensor:
        for longer, logits in self.passes:
            if longer[: len(line)] == line:
                return logits[: len(line)]
        self.passes.append((line, logits_of(self.model, line)))
        return self.passes[-1][1]


@pytest.mark.parametrize("scattered", [False, True], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("config", CONFIGS)
def test_logits_of_tiny_models_are_within_1e_4_of_transformers(
    config: str, mode: Callable[[Line], Steps], scattered: bool, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model(seed=4, **CONFIGS[config])
    rng = random.Random(3)
    line = [rng.randrange(3, 500) for _ in range(200)]
    found = computed(Paged(folder, capacity=2000, scattered=scattered), mode(line))
    logits = torch.cat([part for _, part in found])
    truth = Alone(load_reference(folder)).expected(found)
    assert truth.std() > 1  # the weights are such that a mistake shows
    torch.testing.assert_close(logits, truth, atol=1e-4, rtol=0)


def errors(found: Tensor, exact: Tensor) -> Tensor:
    """The largest and the root-mean-square difference."""
    apart = found.double() - exact
    return torch.stack([apart.abs().max(), apart.pow(2).mean().sqrt()])


@pytest.mark.slow
def test_logits_of_the_default_model_are_as_exact_as_those_of_transformers(
    default_model_folder: Path, reference: LlamaForCausalLM, exact: LlamaForCausalLM, passage: Line
) -> None:
    lengths = {in_one_pass: 200, in_chunks: 200, token_by_token: 80, as_a_tree: 50}
    theirs, truth = Alone(reference), Alone(exact)
    for mode in MODES:
        steps = mode(passage[: lengths[mode]])
        found = computed(Paged(default_model_folder, capacity=1000, scattered=False), steps)
        right = truth.expected(found)
        ours = errors(torch.cat([part for _, part in found]), right)
        allowed = 2 * errors(theirs.expected(found), right)
        print(f"{mode.__name__}: largest and rms error {ours.tolist()}, allowed {allowed.tolist()}")
        assert (ours <= allowed).all()

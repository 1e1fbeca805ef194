"""Scored choices on the default model: the tokens and log-probabilities are transformers'."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from stemma.backend.base import Branch, ChoiceScore
from stemma.backend.local.backend import LocalBackend
from stemma.lang.sampling import SamplingParams
from tests.truth.exact_for_tests import agreement, logits_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Open = Callable[..., LocalBackend]

QUESTION = "Question: What is the capital of France?\nAnswer:"
CASES = {
    "spaces": (QUESTION, [" Paris", " Berlin", " Rome", " the"]),
    "shared-beginnings": (
        QUESTION,
        [
            " Paris",
            " Paris is",
            " Paris is the",
            " Paris, of course",
            " Par",
            " Pariser",
            " Berlin",
        ],
    ),
    "one-token-and-ten": (
        QUESTION,
        [
            " Paris",
            " It is the one that lies on the Seine",
            " It is the one that lies by the Seine",
        ],
    ),
    "token-over-the-seam": ("The answer is ", ["yes", "no", "nothing of the kind", "yesterday"]),
    "half-a-word": ("She went to the super", ["market", "natural history museum", "vis", "b"]),
    "one-token-before": ("The", [" end", " beginning"]),
    "characters-of-many-tokens": ("Choose: ", ["日本語", "日本", "🙂", "🙃!", "Zoë"]),
}


def transformers_logprobs(model: LlamaForCausalLM, ids: list[int]) -> Tensor:
    """Log-probabilities of ids[1:], each after what stands before it."""
    logprobs = logits_of(model, ids)[:-1].double().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def check(
    branch: Branch, choices: list[str], scores: tuple[ChoiceScore, ...], model: LlamaForCausalLM
) -> float:
    """The largest difference per token."""
    largest = 0.0
    ids = branch.token_ids()
    for text, score in zip(choices, scores, strict=True):
        assert score.text == text
        length = len(score.token_ids)
        assert length == len(score.logprobs)
        line = [*ids[: score.start], *score.token_ids]
        expected = transformers_logprobs(model, line)[-length:]
        apart = (torch.tensor(score.logprobs) - expected).abs()
        largest = max(largest, apart.max().item())
        if score.unconditional is not None:
            alone = transformers_logprobs(model, list(score.token_ids))
            assert score.unconditional[0] == 0
            assert len(score.unconditional) == length
            apart = (torch.tensor(score.unconditional[1:]) - alone).abs()
            largest = max(largest, *apart.tolist(), 0.0)
    return largest


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_those_of_transformers(
    case: str, page_size: int, open_backend: Open, reference: LlamaForCausalLM
) -> None:
    prompt, choices = CASES[case]
    backend = open_backend(page_size=page_size)
    backend.flush_cache()
    branch = backend.open()
    branch.append(prompt)
    for unconditional in (True, False):  # then everything is in the cache
        scored = branch.score(choices, unconditional=unconditional).result()
        assert all((c.unconditional is not None) == unconditional for c in scored.choices)
        apart = check(branch, choices, scored.choices, reference)
        print(f"{case}: log-probabilities differ by at most {apart:.1e}")
        assert apart < 1e-3
        assert (
            scored.usage.cached_tokens + scored.usage.computed_tokens == scored.usage.prompt_tokens
        )


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_whole_text(case: str, open_backend: Open) -> None:
    prompt, choices = CASES[case]
    backend = open_backend(page_size=1)
    branch = backend.open()
    branch.append(prompt)
    ids = backend.tokenizer(prompt)["input_ids"]
    assert branch.token_ids() == ids
    whole = [backend.tokenizer(prompt + choice)["input_ids"] for choice in choices]
    start = min(agreement(ids, line) for line in whole)
    scores = branch.score(choices).result().choices
    assert {score.start for score in scores} == {start}
    assert [list(score.token_ids) for score in scores] == [line[start:] for line in whole]


def test_tokens_are_those_of_the_choice_where_it_would_change_the_first_of_all(
    open_backend: Open, reference: LlamaForCausalLM
) -> None:
    backend = open_backend(page_size=1)
    branch = backend.open()
    branch.append("The")
    assert len(backend.encode("The")) == len(backend.encode("Then")) == 1
    choices = ["n", " end", "n the"]
    scores = branch.score(choices, unconditional=True).result().choices
    assert {score.start for score in scores} == {1}
    assert [list(score.token_ids) for score in scores] == [backend.encode(c) for c in choices]
    assert check(branch, choices, scores, reference) < 1e-3


def test_the_cases_are_what_their_names_say(open_backend: Open) -> None:
    backend = open_backend(page_size=1)
    lengths = {}
    starts = {}
    for case, (prompt, choices) in CASES.items():
        branch = backend.open()
        branch.append(prompt)
        scores = branch.score(choices).result().choices
        lengths[case] = [len(score.token_ids) for score in scores]
        starts[case] = len(branch.token_ids()) - scores[0].start
    assert lengths["spaces"] == [1, 1, 1, 1]
    assert lengths["one-token-and-ten"] == [1, 10, 10]
    assert starts["spaces"] == 0
    assert starts["token-over-the-seam"] > 0
    assert starts["half-a-word"] > 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_choices_after_generated_text_and_after_a_committed_choice(
    page_size: int, open_backend: Open, reference: LlamaForCausalLM
) -> None:
    backend = open_backend(page_size=page_size)
    backend.flush_cache()
    branch = backend.open()
    branch.append("Here is a short story about a fox.")
    branch.generate(SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)).result()
    for choices in ([" The end.", " The fox", " the fox"], [" was glad.", " was", " is a fox"]):
        scored = branch.score(choices, unconditional=True).result()
        assert check(branch, choices, scored.choices, reference) < 1e-3
        winner = scored.choices[1]
        expected = [*branch.token_ids()[: winner.start], *winner.token_ids]
        branch.commit(winner)
        assert branch.token_ids() == expected

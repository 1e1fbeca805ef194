"""Greedy output on the default model is transformers' `generate`, token for token.

Whatever the cache, the page size and the company. Where the most probable two tokens are a tie
within 1e-4 the outputs may part: then the tie is shown, and every later token has to be the most
probable one, or tied with it, for what stands before it. Requests together, which cost little, are
followed for longer than those alone; these too end more than a page behind their prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaForCausalLM

from stemma.backend.base import Completion
from stemma.backend.local.backend import LocalBackend
from stemma.lang.sampling import SamplingParams
from tests.truth.exact_for_tests import agreement, logits_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TIE = 1e-4
NEW = 40
NEW_ALONE = 20
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
ALONE = GREEDY.but(max_tokens=NEW_ALONE)
# Of the prompts that start at the same place, each begins the next: they share what is computed.
STARTS_AND_LENGTHS = [
    *((0, length) for length in (1, 2, 16, 17, 33, 100, 255, 600)),
    *((700, length) for length in (3, 15, 32, 64, 300, 1500)),
    *((1500, 5), (1507, 8), (1600, 48), (1650, 128), (1800, 200), (2000, 31)),
]

Open = Callable[..., LocalBackend]


@dataclass(frozen=True, slots=True)
class Expected:
    """A prompt and what transformers makes of it."""

    prompt: list[int]
    output: list[int]

    def begun(self) -> Expected:
        """As far as a request alone goes."""
        return Expected(self.prompt, self.output[:NEW_ALONE])


Compare = Callable[[Expected, Completion], None]


@pytest.fixture(scope="module")
def expected(reference: LlamaForCausalLM, passage: list[int]) -> list[Expected]:
    prompts = [passage[start : start + length] for start, length in STARTS_AND_LENGTHS]
    assert [len(prompt) for prompt in prompts] == [length for _, length in STARTS_AND_LENGTHS]
    found: list[Expected] = []
    group: list[list[int]] = []
    for prompt in sorted(prompts, key=len):
        if group and len(prompt) > 2 * len(group[0]) + 30:
            found += generate(reference, group)
            group = []
        group.append(prompt)
    return found + generate(reference, group)


def generate(model: LlamaForCausalLM, prompts: list[list[int]]) -> list[Expected]:
    """transformers' greedy output for prompts of similar length, filled up on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    whole = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    outputs: list[list[int]] = whole[:, width:].tolist()
    assert all(len(output) == NEW for output in outputs)
    return [Expected(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


@pytest.fixture
def compare(request: pytest.FixtureRequest, open_backend: Open) -> Compare:
    """Fails unless a completion is the expected one, or parts from it at a tie, which is shown."""

    def check(expected: Expected, found: Completion) -> None:
        ours, theirs = list(found.token_ids), expected.output
        assert found.usage.output_tokens == len(expected.output)
        assert found.usage.prompt_tokens == len(expected.prompt)
        parting = agreement(ours, theirs)
        if parting == len(ours):
            assert is_half_a_character(open_backend(page_size=1), theirs[len(ours) :])
            return
        exact = request.getfixturevalue("exact")  # loaded only if there is something to show
        logits = logits_of(exact, expected.prompt + ours, keep=len(ours) + 1)[:-1]
        best = logits.max(-1).values
        gaps = best - logits.gather(1, torch.tensor(ours)[:, None])[:, 0]
        their_gap = best[parting] - logits[parting, theirs[parting]]
        print(
            f"after a prompt of {len(expected.prompt)}, output {parting} is token {ours[parting]}, "
            f"{gaps[parting]:.1e} below the best in float64; transformers has {theirs[parting]}, "
            f"{their_gap:.1e} below. Largest gap of the tokens from there on: "
            f"{gaps[parting:].max():.1e}"
        )
        assert their_gap <= TIE
        assert (gaps[parting:] <= TIE).all()

    return check


def is_half_a_character(backend: LocalBackend, dropped: list[int]) -> bool:
    """Whether tokens that were not kept are none, or the beginning of a character and no more."""
    data = b"".join(map(backend.text.bytes_of, dropped))
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return not dropped


@pytest.mark.parametrize("page_size", [1, 16])
def test_alone_cold_and_warm(
    page_size: int, open_backend: Open, expected: list[Expected], compare: Compare
) -> None:
    backend = open_backend(page_size=page_size)
    for item in map(Expected.begun, expected):
        backend.flush_cache()
        cold, warm = (backend.generate([item.prompt], ALONE)[0] for _ in range(2))
        assert cold.usage.cached_tokens == 0
        assert warm.usage.cached_tokens == floor(len(item.prompt) - 1, page_size)
        compare(item, cold)
        compare(item, warm)


@pytest.mark.parametrize("page_size", [1, 16])
def test_together_cold_and_warm(
    page_size: int, open_backend: Open, expected: list[Expected], compare: Compare
) -> None:
    backend = open_backend(page_size=page_size)
    backend.flush_cache()
    prompts = [item.prompt for item in expected]
    cold = backend.generate(prompts, GREEDY)
    warm = backend.generate(prompts, GREEDY)
    if page_size == 1:  # each token of the passage is computed once, however many prompts have it
        distinct = {tuple(p[: i + 1]) for p in prompts for i in range(len(p))}
        assert sum(c.usage.computed_tokens for c in cold) == len(distinct)
    for item, first, second in zip(expected, cold, warm, strict=True):
        assert second.usage.cached_tokens == floor(len(item.prompt) - 1, page_size)
        compare(item, first)
        compare(item, second)


@pytest.mark.parametrize("page_size", [1, 16])
def test_together_without_prefix_cache(
    page_size: int, open_backend: Open, expected: list[Expected], compare: Compare
) -> None:
    backend = open_backend(page_size=page_size, prefix_cache=False)
    found = backend.generate([item.prompt for item in expected], GREEDY)
    for item, completion in zip(expected, found, strict=True):
        assert completion.usage.cached_tokens == 0
        compare(item, completion)


def test_alone_without_prefix_cache(
    open_backend: Open, expected: list[Expected], compare: Compare
) -> None:
    backend = open_backend(page_size=1, prefix_cache=False)
    for item in map(Expected.begun, expected):
        (completion,) = backend.generate([item.prompt], ALONE)
        assert completion.usage.cached_tokens == 0
        compare(item, completion)


def floor(tokens: int, page_size: int) -> int:
    return tokens - tokens % page_size

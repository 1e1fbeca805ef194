"""How much of a growing branch is found in the cache, to the token, on the default model.

All of the branch before the new text: except a last token that was drawn and never run through the
model, and, where the new text is a single token, except what its healing draws again. Floored to a
page.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stemma.backend.local.backend import LocalBackend
from stemma.lang.sampling import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Open = Callable[..., LocalBackend]

QUESTIONS = [
    "What is a stemma?",
    "Can you give an example of one?",
    "Who makes them, and what for?",
    "Thanks. Name a book about it.",
    "And one that is shorter.",
    "Good bye!",
]
LITERALS = [
    "This is a list of animals and what they eat.\n1. The fox eats",
    "\n2. The",
    " a",
    ", and",
    ".",
    " It is said that",
    "\n\n",
    " x",
    " 日本語 🙂",
    " of the",
]


class Follower:
    """Generates on a branch and knows, from the branch's ids alone, what the cache has of it."""

    def __init__(self, backend: LocalBackend, page_size: int) -> None:
        self.backend = backend
        self.branch = backend.open()
        self.page_size = page_size
        self.computed: list[int] = []  # the branch's ids that were run through the model
        self.redone = 0

    def generate(self, params: SamplingParams, *, heal: bool = True, healing: bool = False) -> str:
        """One generation, its cached tokens asserted; gives the reason why it ended.

        healing: whether it may draw the last token of the prompt again.
        """
        before = self.branch.token_ids()
        completion = self.branch.generate(params, heal=heal).result()
        after, usage = self.branch.token_ids(), completion.usage
        if not heal:  # white space at the end of the prompt may be other tokens then
            text, before = self.backend.decode(before), after[: usage.prompt_tokens]
            assert self.backend.decode(before) == text

        assert usage.prompt_tokens == len(before)
        assert before[: len(self.computed)] == self.computed  # nothing was written again
        found = min(len(self.computed), len(before) - 1 - healing)
        self.redone += len(self.computed) - found
        assert usage.cached_tokens == found - found % self.page_size
        assert usage.computed_tokens == len(before) - usage.cached_tokens

        healed = after[: len(before)] != before
        self.computed = before[: len(before) - healed] + list(completion.token_ids)
        assert after[: len(self.computed)] == self.computed
        kept_all = usage.output_tokens == len(completion.token_ids)
        if completion.finish_reason == "length" and kept_all:
            self.computed.pop()  # drawn last
        return completion.finish_reason


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_chat_of_six_turns_computes_only_what_is_new(page_size: int, open_backend: Open) -> None:
    backend = open_backend(page_size=page_size)
    backend.flush_cache()
    follower = Follower(backend, page_size)
    roles: list[str] = []
    reasons = set()
    for number, question in enumerate(QUESTIONS):
        branch = follower.branch
        for role, content in (("user", question), ("assistant", None)):
            branch.append(backend.chat.begin(role, roles), control=True)
            roles.append(role)
            if content is not None:
                branch.append(content)
                branch.append(backend.chat.end(role), control=True)
        limit = 40 if number % 2 else 12
        reasons.add(follower.generate(SamplingParams(max_tokens=limit, temperature=0)))
        branch.append(backend.chat.end("assistant"), control=True)
    assert reasons == {"stop", "length"}  # both ends of a turn were there


@pytest.mark.parametrize("heal", [True, False], ids=["healed", "as-it-is"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_line_of_literals_and_generations_computes_only_what_is_new(
    page_size: int, heal: bool, open_backend: Open
) -> None:
    backend = open_backend(page_size=page_size)
    backend.flush_cache()
    follower = Follower(backend, page_size)
    reasons = []
    for number in range(20):
        literal = LITERALS[number % len(LITERALS)]
        follower.branch.append(literal)
        params = SamplingParams(max_tokens=3 + number % 6, seed=number, ignore_eos=True)
        if number % 3 == 0:  # a stop that may cut a token in two
            params = params.but(stop="e")
        elif number % 3 == 1:  # a token that ends the output, drawn for sure after two others
            params = params.but(stop_token_ids=(13,), logit_bias=((13, 99.0),), min_tokens=2)
        tail = backend.text.bytes_of(follower.branch.token_ids()[-1])
        others = len(backend.text.ids_starting_with(tail)) > 1
        inside = literal.encode().endswith(tail)
        reasons.append(follower.generate(params, heal=heal, healing=heal and others and inside))
    assert set(reasons) == {"stop", "length"}
    assert (follower.redone > 0) == heal  # after a stop, a literal of one token

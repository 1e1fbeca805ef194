"""How a variable came about: what `state.meta("x")` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stemma.backend.base import ChoiceScore, Completion, FinishReason, TokenLogprob, Usage
from stemma.lang.choices import ChoicesMethod, Decision


@dataclass(frozen=True, slots=True)
class Meta:
    """Of a `gen`. matched_stop: the stop string, token id or regex match that ended it."""

    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None

    @classmethod
    def of(cls, completion: Completion) -> Meta:
        return cls(
            finish_reason=completion.finish_reason,
            matched_stop=completion.matched_stop,
            usage=completion.usage,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
        )


@dataclass(frozen=True, slots=True)
class ChoiceMeta:
    """One choice of a `select`: its tokens, their log-probabilities with and without the prompt,
    and the outcome.

    score: under the method. probability: among the choices, from the sum of `logprobs`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] | None
    score: float
    probability: float


@dataclass(frozen=True, slots=True)
class SelectMeta:
    """Of a `select`. `choices` are in the order written; `index` is the winner's."""

    method: ChoicesMethod
    index: int
    choices: tuple[ChoiceMeta, ...]
    usage: Usage

    @classmethod
    def of(
        cls, method: ChoicesMethod, decision: Decision, scored: Sequence[ChoiceScore], usage: Usage
    ) -> SelectMeta:
        choices = tuple(
            ChoiceMeta(c.text, c.token_ids, c.logprobs, c.unconditional, score, probability)
            for c, score, probability in zip(
                scored, decision.scores, decision.probabilities, strict=True
            )
        )
        return cls(method, decision.index, choices, usage)

    @property
    def probabilities(self) -> dict[str, float]:
        """Probability of each choice, by its text; they sum to 1."""
        return {choice.text: choice.probability for choice in self.choices}


@dataclass(frozen=True, slots=True)
class ScoreMeta:
    """Of a `score`."""

    usage: Usage

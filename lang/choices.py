"""How a choice is decided from token log-probabilities: three methods, each a pure function of
numbers.

`select` names a method; `interpreter/landing.py` asks `decide` once the backend has scored the
choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from stemma.lang.errors import InvalidArgument


class ChoicesMethod(StrEnum):
    """The methods. l_1..l_k are a choice's token log-probabilities, u_1..u_k those without the
    prompt.

    TOKEN_LENGTH_NORMALIZED: the largest mean(l_i). GREEDY_TOKEN_SELECTION: column by column keep
    the choices whose l_j is the largest; a choice that has ended continues with its own mean. What
    greedy decoding among the choices would write. UNCONDITIONAL_LIKELIHOOD_NORMALIZED: the largest
    mean(l_i - u_i): how much the prompt raises a choice, so that a choice is not preferred for
    being common.
    """

    TOKEN_LENGTH_NORMALIZED = "token_length_normalized"
    GREEDY_TOKEN_SELECTION = "greedy_token_selection"
    UNCONDITIONAL_LIKELIHOOD_NORMALIZED = "unconditional_likelihood_normalized"

    @property
    def needs_unconditional(self) -> bool:
        return self is ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED

    @classmethod
    def _missing_(cls, value: object) -> ChoicesMethod:
        raise InvalidArgument(f"choices_method={value!r}: must be one of {', '.join(cls)}")


token_length_normalized = ChoicesMethod.TOKEN_LENGTH_NORMALIZED
greedy_token_selection = ChoicesMethod.GREEDY_TOKEN_SELECTION
unconditional_likelihood_normalized = ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED


@dataclass(frozen=True, slots=True)
class Decision:
    """Which choice won, and by what.

    index: of the winner; of equals the first. scores: per choice, under the method, the winner's is
    the largest (for greedy_token_selection: how many columns the choice survived). probabilities:
    softmax of sum(l_i).
    """

    index: int
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]


def decide(
    method: ChoicesMethod,
    logprobs: Sequence[Sequence[float]],
    unconditional: Sequence[Sequence[float]] | None = None,
) -> Decision:
    """Decide between choices; `logprobs[c]` are l_1..l_k of choice c, natural logarithms.

    >>> decide(token_length_normalized, [[-1.0], [-0.2, -0.4]]).index
    1
    """
    if not logprobs or not all(logprobs):
        raise InvalidArgument("decide: every choice needs at least one token")
    if method is ChoicesMethod.TOKEN_LENGTH_NORMALIZED:
        scores = [_mean(row) for row in logprobs]
    elif method is ChoicesMethod.GREEDY_TOKEN_SELECTION:
        scores = _columns_survived(logprobs)
    else:
        if unconditional is None:
            raise InvalidArgument(f"decide: {method} needs the unconditional log-probabilities")
        scores = [
            _mean([given - alone for given, alone in zip(row, base, strict=True)])
            for row, base in zip(logprobs, unconditional, strict=True)
        ]
    return Decision(
        index=max(range(len(scores)), key=scores.__getitem__),
        scores=tuple(scores),
        probabilities=tuple(_softmax([math.fsum(row) for row in logprobs])),
    )


def _mean(row: Sequence[float]) -> float:
    return math.fsum(row) / len(row)


def _columns_survived(logprobs: Sequence[Sequence[float]]) -> list[float]:
    survived = [0.0] * len(logprobs)
    running = list(range(len(logprobs)))
    for column in range(max(map(len, logprobs))):
        values = {
            c: logprobs[c][column] if column < len(logprobs[c]) else _mean(logprobs[c])
            for c in running
        }
        best = max(values.values())
        running = [c for c in running if values[c] == best]
        for c in running:
            survived[c] += 1
    return survived


def _softmax(sums: Sequence[float]) -> list[float]:
    top = max(sums)
    if top == -math.inf:  # all impossible: none is likelier than another
        return [1 / len(sums)] * len(sums)
    weights = [math.exp(total - top) for total in sums]
    return [weight / math.fsum(weights) for weight in weights]

"""What one draw asks for, and the part of it that changes logits: penalties, bias, bans, masks.

`Draw` is built by the engine for every row it wants a token of. The sampler applies the rules,
before temperature and cuts, to a copy of the rows that have any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemma.lang.errors import EngineInvariantError
from stemma.lang.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Draw:
    """What one row needs to be sampled.

    seed, counter: the request's 64-bit seed and the index of this draw within the request; they
    alone decide the random number.
    prompt_ids: only looked at when repetition_penalty is not 1.
    output_ids: only looked at when a penalty is on.
    banned: ids that must not come now (the ends, while min_tokens holds).
    allowed: the token ids that alone may come; mask: the same as bits, [ceil(vocab / 8)] uint8, the
        lowest first. None allows all.
    """

    params: SamplingParams
    seed: int
    counter: int
    prompt_ids: NDArray[Any] | None = None
    output_ids: Sequence[int] | None = None
    banned: tuple[int, ...] = ()
    allowed: NDArray[np.integer[Any]] | None = None
    mask: NDArray[np.uint8] | None = None


def has_rules(draw: Draw) -> bool:
    """Whether the draw's logits are not simply the model's."""
    p = draw.params
    return bool(
        draw.banned
        or draw.allowed is not None
        or draw.mask is not None
        or p.logit_bias
        or p.repetition_penalty != 1
        or p.frequency_penalty
        or p.presence_penalty
    )


def ruled(x: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The logits x [n, vocab] (fp32 or fp64) with row i as draw i says; x stays as it is.

    Order: repetition penalty (on prompt and output), frequency and presence penalties (on the
    output), bias, bans, allowed; masks come first, for what they exclude stays so. What may not
    come is lowered by infinity, not overwritten: no bias lifts it again, and a NaN below it stays a
    NaN. Banned and allowed ids outside the vocabulary mean nothing; an id of prompt, output or bias
    outside it raises EngineInvariantError.
    """
    x = _masked(x, draws)
    _repeat(x, draws)
    _add(x, draws)
    _restrict(x, draws)
    return x


def bias_outside(draw: Draw, vocab: int) -> str | None:
    """What is wrong with the ids of `logit_bias`, in words, if anything."""
    ids = [token for token, _ in draw.params.logit_bias]  # sorted, so the ends tell
    if not ids or 0 <= ids[0] <= ids[-1] < vocab:
        return None
    wrong = ids[0] if ids[0] < 0 else ids[-1]
    return f"logit_bias names token {wrong}, but the model's tokens are 0 to {vocab - 1}"


def why_not(row: Tensor, draw: Draw) -> str:
    """Why no token can be drawn from these logits [vocab], in words."""
    if bool(row.isnan().any()):
        return "the model's logits hold NaN"
    if float(row.max()) == float("inf"):
        return "the model's logits hold +inf"
    if float(row.max()) == -float("inf"):
        return "all of the model's logits are -inf"
    x = row[None].to(torch.float64 if row.dtype == torch.float64 else torch.float32)
    if bool((ruled(x, [draw]) == -torch.inf).all()):
        return "no token is left: allowed and banned tokens and logit_bias exclude every one"
    return "logit_bias or a penalty makes a logit too large to be represented"


def to_device(array: NDArray[Any], like: Tensor) -> Tensor:
    """The array as a tensor on the device of `like`, without waiting; fp64 becomes fp32 on MPS."""
    if like.device.type == "mps" and array.dtype == np.float64:
        array = array.astype(np.float32)
    return torch.from_numpy(array).to(like.device, non_blocking=True)


def _repeat(x: Tensor, draws: Sequence[Draw]) -> None:
    vocab = x.shape[1]
    cells: list[NDArray[np.int64]] = []
    strengths: list[NDArray[np.float64]] = []
    for i, draw in enumerate(draws):
        if draw.params.repetition_penalty != 1:
            for ids in (draw.prompt_ids, draw.output_ids):
                known = _checked(ids, vocab)
                cells.append(i * vocab + known)
                strengths.append(np.full(len(known), draw.params.repetition_penalty))
    if not cells:
        return
    at = to_device(np.concatenate(cells), x)
    strength = to_device(np.concatenate(strengths), x).to(x.dtype)
    flat = x.view(-1)
    before = flat[at]
    # An id that occurs twice is written twice, with the same value: it counts once.
    flat[at] = torch.where(before > 0, before / strength, before * strength)


def _add(x: Tensor, draws: Sequence[Draw]) -> None:
    vocab = x.shape[1]
    cells: list[NDArray[np.int64]] = []
    amounts: list[NDArray[np.floating[Any]]] = []

    def put(row: int, ids: NDArray[np.int64], amount: NDArray[np.floating[Any]]) -> None:
        cells.append(row * vocab + ids)
        amounts.append(amount)

    for i, draw in enumerate(draws):
        p = draw.params
        if p.frequency_penalty or p.presence_penalty:
            ids, counts = np.unique(_checked(draw.output_ids, vocab), return_counts=True)
            put(i, ids, -p.frequency_penalty * counts - p.presence_penalty)
        if p.logit_bias:
            ids = _checked([token for token, _ in p.logit_bias], vocab)
            put(i, ids, np.array([bias for _, bias in p.logit_bias]))
        if draw.banned:
            ids = np.array([token for token in draw.banned if 0 <= token < vocab], dtype=np.int64)
            put(i, ids, np.full(len(ids), -np.inf))
    if not cells:
        return
    # Summed here, so that a cell is written once: on a GPU the order of several additions is open.
    distinct, which = np.unique(np.concatenate(cells), return_inverse=True)
    total = np.bincount(which, weights=np.concatenate(amounts), minlength=len(distinct))
    flat = x.view(-1)
    flat[to_device(distinct, x)] += to_device(total, x).to(x.dtype)


def _masked(x: Tensor, draws: Sequence[Draw]) -> Tensor:
    """A copy of the logits with the masks of the draws."""
    masked = {i: draw.mask for i, draw in enumerate(draws) if draw.mask is not None}
    if not masked:
        return x.clone()
    bits = np.stack(list(masked.values()))
    if 8 * bits.shape[1] < x.shape[1]:
        raise EngineInvariantError(
            f"a mask of {8 * bits.shape[1]} bits for a vocabulary of {x.shape[1]}"
        )
    amounts = _amounts(bits, x).view(len(masked), -1)[:, : x.shape[1]]
    if len(masked) == len(x):
        return x + amounts
    rows = to_device(np.array(list(masked), dtype=np.int64), x)
    return x.index_add(0, rows, amounts.to(x.dtype))


def _restrict(x: Tensor, draws: Sequence[Draw]) -> None:
    for i, draw in enumerate(draws):
        if draw.allowed is not None:
            ids = np.asarray(draw.allowed, dtype=np.int64)
            amounts = np.full(x.shape[1], -np.inf, dtype=np.float32)
            amounts[ids[(ids >= 0) & (ids < len(amounts))]] = 0
            x[i] += to_device(amounts, x)


# What each of the 256 bytes of a mask adds to its eight logits.
_EIGHT = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)


def _amounts(bits: NDArray[np.uint8], like: Tensor) -> Tensor:
    """What masks add to logits, on their device: 0 or minus infinity."""
    if like.device.type == "cpu":
        return torch.from_numpy(np.take(_EIGHT, bits, axis=0))
    return to_device(_EIGHT, like)[to_device(bits, like).long()]


def _checked(ids: Sequence[int] | NDArray[Any] | None, vocab: int) -> NDArray[np.int64]:
    known = np.array([] if ids is None else ids, dtype=np.int64)
    if len(known) and not 0 <= known.min() <= known.max() < vocab:
        span = f"{known.min()} to {known.max()}"
        raise EngineInvariantError(f"token ids from {span} in a vocabulary of {vocab}")
    return known

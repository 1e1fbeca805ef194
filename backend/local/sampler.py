"""Draws the next tokens of a step: all rows together, on the logits' device, with one wait for it.

Owns nothing: a result is a pure function of a row of logits and a `Draw`, whatever else is in the
batch. Called by the engine after the forward pass. What changes logits before a draw is in
`logit_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stemma.backend.base import TokenLogprob
from stemma.backend.local.logit_rules import (
    Draw,
    bias_outside,
    has_rules,
    ruled,
    to_device,
    why_not,
)
from stemma.backend.local.random import exponentials
from stemma.lang.errors import EngineInvariantError, StemmaError

__all__ = ["Draw", "Sampled", "SamplerError", "sample", "token_logprobs"]

_BLOCK = 256  # rows are summed in blocks; only the block that wins is looked at token by token
_LARGEST = 128  # up to this top_k, `topk` is faster than sorting the row
_SLACK = 4  # units of rounding: a set that misses top_p by no more has reached it
_NOTHING = -1  # stands for a token id where a row cannot be drawn from


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of one draw.

    logprob: natural-log probability under the model: of the raw logits, before penalties,
    temperature and cuts; None unless `params.logprobs`.
    top: the `params.top_logprobs` most probable (id, logprob), best first.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SamplerError(StemmaError):
    """Some rows cannot be sampled or scored. `reasons`: index of the draw or target -> why.

    The others are fine: the same call without these gives their results.
    """

    def __init__(self, reasons: dict[int, str]) -> None:
        index, reason = next(iter(reasons.items()))
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        super().__init__(f"row {index}: {reason}{more}")
        self.reasons = reasons


class _Kind(Enum):
    """How a token is chosen. Rows of one kind are computed together; none pays for another kind."""

    GREEDY = auto()  # the largest logit
    PLAIN = auto()  # softmax without a cut
    FLOOR = auto()  # min_p alone
    LARGEST = auto()  # top_k up to _LARGEST, with top_p and min_p or without
    SORTED = auto()  # any other cut


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """One distribution: a row of logits under the settings of `draw`; shared by all of `draws`."""

    row: int
    draw: Draw
    draws: list[int]


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[Sampled]:
    """One token for each of `draws`, in their order.

    logits: [m, vocab], floating, any device; not changed. rows[i]: the row that draw i is from; a
    row may serve many draws and is then worked on once.

    Order: penalties, bias, bans and allowed; then temperature, top_k, top_p (of the k that top_k
    kept), min_p. A cut does not separate equal probabilities: what ties with the last token kept
    stays. Temperature 0 and top_k 1 take the largest logit, of equal ones the lowest id. Any other
    draw is a race (`_race`) with the times `random.exponentials(seed, counter)`: where logits
    change by a rounding, the token changes only if two were about to tie.

    Raises SamplerError where logits are NaN or +inf, where the rules leave no token, or where a
    bias names no token. Waits for the device once (on the error path again).
    """
    vocab = logits.shape[1]
    if len(rows) != len(draws):
        raise EngineInvariantError(f"{len(draws)} draws, but rows of logits for {len(rows)}")
    wrong = {i: why for i, draw in enumerate(draws) if (why := bias_outside(draw, vocab))}
    if wrong:
        raise SamplerError(wrong)
    if not draws:
        return []
    order: list[int] = []
    parts: list[Tensor] = []
    for (kind, changed), sources in _groups(rows, draws, vocab).items():
        for some in _chunks(sources, logits):
            order += [i for source in some for i in source.draws]
            parts.append(_tokens(logits, kind, changed, some, draws))
    tokens = torch.cat(parts)  # in `order`
    asked = [at for at, i in enumerate(order) if draws[i].params.logprobs]
    top = min(vocab, max((draws[order[at]].params.top_logprobs for at in asked), default=0))
    targets = tokens[to_device(np.array(asked, dtype=np.int64), logits)].clamp_min(0)
    report = _logprobs(logits, [rows[order[at]] for at in asked], targets, top)
    numbers = _to_host(torch.cat((tokens.to(report.dtype), report.flatten())))

    found = dict(zip(order, numbers[: len(order)].astype(int).tolist(), strict=True))
    failed = sorted(i for i, token in found.items() if token == _NOTHING)
    if failed:
        raise SamplerError({i: why_not(logits[rows[i]], draws[i]) for i in failed})
    table = numbers[len(order) :].reshape(len(asked), 1 + 2 * top)
    scored = {order[at]: columns for at, columns in zip(asked, table, strict=True)}
    return [_sampled(found[i], draw, scored.get(i)) for i, draw in enumerate(draws)]


@torch.inference_mode()
def token_logprobs(logits: Tensor, targets: Sequence[int], top: int = 0) -> list[TokenLogprob]:
    """Natural-log probability of targets[i] under row i of the logits, and the `top` best tokens.

    logits: [n, vocab], floating, any device. Goes through the rows in chunks, so that beside the
    logits little memory is needed on any n; waits for the device once. Raises SamplerError where a
    row holds NaN or +inf, or only -inf.
    """
    vocab = logits.shape[1]
    if len(targets) != len(logits):
        raise EngineInvariantError(f"{len(targets)} targets for {len(logits)} rows of logits")
    if targets and not 0 <= min(targets) <= max(targets) < vocab:
        raise EngineInvariantError(f"a target is no token of a vocabulary of {vocab}")
    wanted = to_device(np.array(targets, dtype=np.int64), logits)
    table = _to_host(_logprobs(logits, range(len(targets)), wanted, min(top, vocab)))
    broken = np.flatnonzero(np.isnan(table[:, 0])).tolist()
    if broken:
        reason = "the model's logits hold NaN or +inf, or only -inf"
        raise SamplerError(dict.fromkeys(broken, reason))
    return [
        TokenLogprob(token, float(columns[0]), _alternatives(columns, top))
        for token, columns in zip(targets, table, strict=True)
    ]


def _groups(
    rows: Sequence[int], draws: Sequence[Draw], vocab: int
) -> dict[tuple[_Kind, bool], list[_Source]]:
    """The distributions of a step, by kind and by whether their logits have to be changed first."""
    groups: dict[tuple[_Kind, bool], list[_Source]] = {}
    known: dict[object, _Source] = {}
    for i, (row, draw) in enumerate(zip(rows, draws, strict=True)):
        p = draw.params
        kind = _kind_of(draw, vocab)
        changed = has_rules(draw)
        key: object = (row, kind, p.temperature, p.top_k, p.top_p, p.min_p)
        if kind is _Kind.GREEDY:
            key = (row, kind)
        if changed:
            key = i  # the rules depend on the request's own history: nothing to share
        if key not in known:
            known[key] = _Source(row, draw, [])
            groups.setdefault((kind, changed), []).append(known[key])
        known[key].draws.append(i)
    return groups


def _kind_of(draw: Draw, vocab: int) -> _Kind:
    p = draw.params
    if p.temperature == 0 or p.top_k == 1:
        return _Kind.GREEDY
    if 0 < p.top_k <= min(_LARGEST, vocab):
        return _Kind.LARGEST
    if 0 < p.top_k < vocab or p.top_p < 1:
        return _Kind.SORTED
    return _Kind.FLOOR if p.min_p > 0 else _Kind.PLAIN


def _rows_at_once(logits: Tensor) -> int:
    """Bounds the working memory; on a CPU, fresh pages for large arrays cost more than the work."""
    return max(1, (1 << 21 if logits.device.type == "cpu" else 1 << 26) // logits.shape[1])


def _chunks(sources: list[_Source], logits: Tensor) -> Iterator[list[_Source]]:
    step = _rows_at_once(logits)
    for start in range(0, len(sources), step):
        yield sources[start : start + step]


def _tokens(
    logits: Tensor, kind: _Kind, changed: bool, sources: list[_Source], draws: Sequence[Draw]
) -> Tensor:
    """Token ids (int64) of the draws of these sources, one source after the other; or _NOTHING."""
    x = _take(logits, [source.row for source in sources])
    own = [source.draw for source in sources]
    if changed:
        x = ruled(x, own)
    owner = np.repeat(np.arange(len(sources)), [len(source.draws) for source in sources])
    if kind is _Kind.GREEDY:
        return _largest_logit(x)[to_device(owner, x)]
    weights = _probabilities(x, [draw.params.temperature for draw in own])
    if kind is not _Kind.PLAIN:
        _cut(weights, kind, own)
    drawing = [draws[i] for source in sources for i in source.draws]
    entrants = _BLOCK + -(-x.shape[1] // _BLOCK)
    times = exponentials([d.seed for d in drawing], [d.counter for d in drawing], entrants)
    token, total = _race(weights, to_device(owner, x), to_device(times, x))
    return torch.where((total > 0) & total.isfinite(), token, _NOTHING)


def _take(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of the logits, in fp32 (fp64 if they are); a view, unless a copy is needed."""
    first, count = rows[0], len(rows)
    if list(rows) == list(range(first, first + count)):
        x = logits[first : first + count]
    else:
        x = logits.index_select(0, to_device(np.array(rows, dtype=np.int64), logits))
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _largest_logit(x: Tensor) -> Tensor:
    """Index of each row's largest logit, the first of equal ones; _NOTHING if it is not finite.

    By blocks: a maximum without its index is several times faster than one with it. NaN counts as
    the largest in both, so it comes out.
    """
    block = _blockwise(x, torch.amax).argmax(-1, keepdim=True)
    # Past the end the last token is repeated: it comes before its copies, so they never win.
    ids = (block * _BLOCK + torch.arange(_BLOCK, device=x.device)).clamp_max(x.shape[1] - 1)
    inside = x.gather(1, ids)
    at = inside.argmax(-1, keepdim=True)
    return torch.where(inside.gather(1, at).isfinite(), ids.gather(1, at), _NOTHING)[:, 0]


def _probabilities(x: Tensor, temperatures: Sequence[float]) -> Tensor:
    if all(temperature == 1 for temperature in temperatures):
        return x.softmax(-1)
    limits = torch.finfo(x.dtype)
    bounded = np.clip(np.array(temperatures)[:, None], limits.tiny, limits.max)
    # From the largest logit down, so that nothing but minus infinity can come of a tiny divisor.
    falling = x - x.amax(-1, keepdim=True)
    return falling.div_(to_device(bounded, x).to(x.dtype)).softmax(-1)


def _cut(weights: Tensor, kind: _Kind, draws: Sequence[Draw]) -> None:
    """Set the probabilities to zero that top_k, top_p and min_p exclude. In place.

    Every cut is a least probability, read off the sorted values. Values are sorted without their
    ids, which is what makes it cheap, and so the result does not depend on how a sort treats ties.
    """
    params = [draw.params for draw in draws]
    ratio = to_device(np.array([p.min_p for p in params])[:, None], weights)
    if kind is _Kind.FLOOR:
        _keep_from(weights, weights.amax(-1, keepdim=True) * ratio)
        return
    vocab = weights.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    rising = _largest(weights, max(top_k))
    first = to_device(rising.shape[1] - np.array(top_k)[:, None], weights)  # the least that stays
    kth = rising.gather(1, first)
    least = torch.maximum(kth, rising[:, -1:] * ratio)
    if any(p.top_p < 1 for p in params):
        if min(top_k) < vocab:
            place = torch.arange(rising.shape[1], device=rising.device)
            rising.mul_(place >= first)
        # The nucleus starts where the sum from below exceeds what it may leave out.
        slack = _SLACK * torch.finfo(rising.dtype).eps
        left_out = to_device(np.array([1 - p.top_p * (1 - slack) for p in params]), weights)
        no_cut = to_device(np.array([p.top_p == 1 for p in params])[:, None], weights)
        nucleus = rising.gather(1, _first_beyond(rising, left_out))
        least = torch.maximum(least, nucleus.masked_fill(no_cut, 0))
    _keep_from(weights, least)


def _keep_from(weights: Tensor, least: Tensor) -> None:
    """Set to zero what is below `least` [n, 1]. Many times faster than `masked_fill_` on a CPU."""
    weights.mul_(torch.ge(weights, least.to(weights.dtype), out=torch.empty_like(weights)))


def _largest(weights: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, or more, rising, in a tensor of their own.

    On a CPU numpy's vectorised sort of a whole row is faster than `topk` of some hundreds.
    """
    if count <= _LARGEST:
        # One width for all: a sum over it must not depend on the largest top_k in the batch.
        return F.pad(weights.topk(count).values.flip(-1), (_BLOCK - count, 0))
    if weights.device.type == "cpu":
        return torch.from_numpy(np.sort(weights.numpy(), axis=-1))
    return weights.sort(-1).values


def _race(weights: Tensor, owner: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """The token that wins the race of row owner[i] with times[i], and the row's total weight.

    The first of exponential waiting times E/w is w's with probability w / total (the Gumbel-max
    trick on another scale). Two levels: the blocks race with their sums, then the tokens of the
    block that won. Unlike the inverse of a running sum, where every border moves when any weight
    before it does, a race is decided anew only among entrants that were about to tie.

    times: [n, _BLOCK + blocks] of rate 1: those of the tokens in a block, then those of the blocks.
    """
    vocab = weights.shape[1]
    sums = _blockwise(weights, torch.sum).to(times.dtype)
    block = (times[:, _BLOCK:] / sums[owner]).argmin(-1)
    ids = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights[owner[:, None], ids.clamp_max(vocab - 1)] * (ids < vocab)
    winner = (times[:, :_BLOCK] / inside).argmin(-1)
    return (block * _BLOCK + winner).clamp_max(vocab - 1), sums.sum(-1)[owner]


def _first_beyond(rising: Tensor, share: Tensor) -> Tensor:
    """[n, 1] first index where the running sum of a row exceeds this share of its total.

    Summed in the type of `share`. Never an index of weight zero, unless all are.
    """
    wide = rising.to(share.dtype)
    upto = wide.cumsum(-1)
    # Asked for explicitly, because the sums of a parallel scan may rise a little over a zero.
    beyond = (upto > (share * upto[:, -1])[:, None]) & (wide > 0)
    beyond[:, -1] = True  # a share that rounds to 1
    return beyond.to(torch.uint8).argmax(-1, keepdim=True)


def _blockwise(x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """[n, vocab] -> [n, blocks], reduced by `torch.sum` or `torch.amax`; the last may be short."""
    rows, vocab = x.shape
    count = vocab // _BLOCK
    whole = reduce(x[:, : count * _BLOCK].reshape(rows, count, _BLOCK), dim=-1)
    if vocab % _BLOCK == 0:
        return whole
    return torch.cat((whole, reduce(x[:, count * _BLOCK :], dim=-1, keepdim=True)), -1)


def _logprobs(logits: Tensor, rows: Sequence[int], targets: Tensor, top: int) -> Tensor:
    """[n, 1 + 2 * top]: logprob of the target, best logprobs, their ids. NaN where a row is bad."""
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    parts = [logits.new_empty((0, 1 + 2 * top), dtype=wide)]
    step = _rows_at_once(logits)
    for start in range(0, len(rows), step):
        every = _take(logits, rows[start : start + step]).log_softmax(-1)
        columns = [every.gather(1, targets[start : start + step, None])]
        if top:
            columns += every.topk(top)
        parts.append(torch.cat([column.to(wide) for column in columns], -1))
    return torch.cat(parts)


def _to_host(numbers: Tensor) -> NDArray[np.float64]:
    """The one place that waits for the device."""
    return np.asarray(numbers.cpu().numpy(), dtype=np.float64)


def _sampled(token: int, draw: Draw, columns: NDArray[np.float64] | None) -> Sampled:
    if columns is None:
        return Sampled(token)
    return Sampled(token, float(columns[0]), _alternatives(columns, draw.params.top_logprobs))


def _alternatives(columns: NDArray[np.float64], top: int) -> tuple[tuple[int, float], ...]:
    """The first `top` of a row of `_logprobs`, as (id, logprob); equal ones by id."""
    count = len(columns) // 2
    ids, values = columns[1 + count :].astype(int).tolist(), columns[1 : 1 + count].tolist()
    return tuple(sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))[:top])

"""What the engine takes from the hidden states of a step: log-probabilities of known tokens, and
draws of new ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stemma.backend.base import TokenLogprob
from stemma.backend.local.batch import Batch
from stemma.backend.local.constrain import Guide
from stemma.backend.local.logit_rules import Draw
from stemma.backend.local.model.decoder import Decoder
from stemma.backend.local.native.masks import Lower
from stemma.backend.local.request import Request
from stemma.backend.local.sampler import Sampled, SamplerError, sample, token_logprobs
from stemma.backend.local.scheduler import Step
from stemma.lang.errors import ConstraintError, StemmaError

LOGPROB_ROWS = 128
"""Rows whose full logits are held at once where only log-probabilities of given tokens are
wanted.
"""


class BadRows(Exception):
    """Rows that no token can be drawn from or scored by, as errors of the requests they are of."""

    def __init__(self, errors: Mapping[Request, StemmaError]) -> None:
        super().__init__(*errors.values())
        self.errors = dict(errors)


def score_known_tokens(
    decoder: Decoder, step: Step, batch: Batch, hidden: Tensor
) -> list[list[TokenLogprob]]:
    """Log-probabilities of the known tokens that this step predicts and somebody wants, per
    request.
    """
    rows: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    for i, (request, entry) in enumerate(zip(step.requests, step.entries, strict=True)):
        first = request.next_logprob
        if first is None:
            continue
        known = request.tokens.view(request.logprobs_end)[first : request.scheduled_end + 1]
        offset = first - 1 - entry.computed
        rows += batch.rows_of(i)[offset : offset + len(known)].tolist()
        targets += known.tolist()
        owners += [i] * len(known)
    top = max((step.requests[i].prompt_top_logprobs for i in owners), default=0)
    scored: list[list[TokenLogprob]] = [[] for _ in step.requests]
    for start in range(0, len(rows), LOGPROB_ROWS):
        block = slice(start, start + LOGPROB_ROWS)
        wanted = torch.tensor(rows[block], dtype=torch.int64).to(hidden.device)
        try:
            found = token_logprobs(decoder.logits(hidden[wanted]), targets[block], top)
        except SamplerError as error:
            at_fault = {owners[start + k]: why for k, why in error.reasons.items()}
            errors = {step.requests[i]: StemmaError(why) for i, why in at_fault.items()}
            raise BadRows(errors) from error
        for i, logprob in zip(owners[block], found, strict=True):
            scored[i].append(logprob)
    return scored


def draw_tokens(
    decoder: Decoder,
    step: Step,
    batch: Batch,
    hidden: Tensor,
    end_ids: frozenset[int],
    lower: Lower | None = None,
) -> list[tuple[Request, list[Sampled]]]:
    """Draw for every request whose known tokens end in this step.

    lower: puts a mask onto a row in place, where there is a quick way.
    """
    drawing = [
        (i, r)
        for i, r in enumerate(step.requests)
        if r.samples and r.scheduled_end == len(r.tokens)
    ]
    if not drawing:
        return []
    rows: list[int] = []
    owners: list[Request] = []
    draws: list[Draw] = []
    too_complex: dict[Request, StemmaError] = {}
    for i, request in drawing:
        own = batch.rows_of(i)
        try:
            wanted = _draws_of(request, end_ids)
        except ConstraintError as error:
            too_complex[request] = error
            continue
        rows += own[len(own) - len(wanted) :].tolist()
        owners += [request] * len(wanted)
        draws += wanted
    if too_complex:
        raise BadRows(too_complex)
    distinct, index = np.unique(np.array(rows, dtype=np.int64), return_inverse=True)
    logits = decoder.logits(hidden[torch.from_numpy(distinct).to(hidden.device)])
    if lower is not None:
        _lower_own_rows(logits, index, draws, lower)
    try:
        sampled = iter(sample(logits, index.tolist(), draws))
    except SamplerError as error:
        raise _bad_draws(owners, error) from error
    drawn: dict[Request, list[Sampled]] = {request: [] for _, request in drawing}
    for request in owners:
        drawn[request].append(next(sampled))
    return list(drawn.items())


def _lower_own_rows(
    logits: Tensor, index: npt.NDArray[np.int64], draws: list[Draw], lower: Lower
) -> None:
    """Put masks straight onto rows that one draw alone is from: nobody else reads them."""
    users = np.bincount(index)
    rows, masks = [], []
    for row, draw in zip(index, draws, strict=True):
        if draw.mask is not None and users[row] == 1 and not draw.params.logprobs:
            rows.append(row)
            masks.append(draw.mask)
            draw.mask = None
    if rows:
        lower(logits, np.array(rows), np.stack(masks))


def _bad_draws(owners: list[Request], error: SamplerError) -> BadRows:
    """The requests at fault. Not those of which only rows behind a draft's token are bad: they
    may never come to that; they go on without drafts, and fail where they do.
    """
    at_fault: dict[Request, StemmaError] = {}
    for k, why in error.reasons.items():
        owner = owners[k]
        if owner.drafting is not None and k > owners.index(owner):
            owner.drafting.off = True
        else:
            at_fault[owner] = StemmaError(why)
    return BadRows(at_fault)


def _draws_of(request: Request, end_ids: frozenset[int]) -> list[Draw]:
    """The draws of a request's last rows: of the last known token; before it of the one before
    where that is healed; behind it of each token of a draft, as if it had been drawn.
    """
    counter, known = request.draw_counter, len(request.output_ids)
    guide = request.guide
    if request.heal is not None:
        redone = _draw_of(request, end_ids, request.output_ids, 0, allowed=request.heal)
        if guide is not None:
            guide = guide.ahead()
            guide.take(int(request.tokens.view()[request.known_end - 1]))
        return [redone, _draw_of(request, end_ids, request.output_ids, counter, guide=guide)]
    if not request.drafted:
        return [_draw_of(request, end_ids, request.output_ids, counter, guide=guide)]
    draft = request.tokens.view()[request.known_end :].tolist()
    said = request.output_ids + draft
    ahead = None if guide is None else guide.ahead()
    draws = []
    for i, token in enumerate((*draft, None)):
        draws.append(_draw_of(request, end_ids, said[: known + i], counter + i, guide=ahead))
        if ahead is not None and token is not None:
            ahead.take(token)
    return draws


def _draw_of(
    request: Request,
    end_ids: frozenset[int],
    output_ids: list[int],
    counter: int,
    *,
    allowed: np.ndarray | None = None,
    guide: Guide | None = None,
) -> Draw:
    """allowed: what alone may come. guide: says what may; nothing is forbidden where the output may
    end, for there what it does not allow ends it.
    """
    params = request.params
    banned: tuple[int, ...] = ()
    too_short = allowed is None and len(output_ids) < params.min_tokens
    if too_short:
        banned = (*end_ids, *params.stop_token_ids)
    mask = None
    if guide is not None and (too_short or not guide.may_end):
        mask = guide.mask()
    return Draw(
        params=params,
        seed=request.seed,
        counter=counter,
        prompt_ids=request.tokens.view(request.prompt_length),
        output_ids=output_ids,
        banned=banned,
        allowed=allowed,
        mask=mask,
    )

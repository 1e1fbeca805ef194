"""How an output grows: by the token that was drawn, and by those that its constraint then forces.

Pure bookkeeping on a request, called by the engine after each draw and once before the first.
Nothing here looks at logits.
"""

from __future__ import annotations

from stemma.backend.base import FinishReason, TokenLogprob
from stemma.backend.local.constrain import Beginning
from stemma.backend.local.request import Request
from stemma.backend.local.sampler import Sampled
from stemma.lang.errors import ConstraintError, EngineInvariantError


def begin(request: Request, beginning: Beginning) -> None:
    """Give a request the guide of its constraint, and write what that forces at the start. Before
    the request is submitted.

    Healing goes on as far as the constraint allows it: where it forces the beginning, that is
    tokenised together with the prompt's last token.
    """
    params = request.params
    assert params.constraint is not None
    last = request.prompt_length - 1
    literal = int(request.tokens.view()[last])
    guide, heal = beginning.guide(params.constraint), beginning.heal
    if guide.closing is not None and len(guide.closing.way) > request.max_tokens:
        limit, remedy = f"max_tokens={request.max_tokens}", "raise max_tokens, or leave it out"
        if params.max_tokens is None:
            limit, remedy = f"room for {request.max_tokens} tokens", "shorten the prompt"
        raise ConstraintError(
            f"{limit} with {params.constraint.label}: the shortest text that was found has "
            f"{len(guide.closing.way)} tokens: {remedy}"
        )
    if not request.samples:  # max_tokens=0, and no text is allowed
        return
    request.guide, request.heal = guide, heal
    if heal is not None:
        forced = guide.forced()[:1]
        if not forced:
            return
        request.heal = None
        if forced[0] == literal or not may_redo(request, literal, forced[0]):
            guide.take(literal)
        else:
            request.tokens.truncate(last)
            request.prompt_length = request.logprobs_end = last
            request.own_start = min(request.own_start, last)
            request.healed = True
            request.text_out.stand_for(literal)
    end = _force(request)
    request.publish_end = request.known_end  # samples of one prompt share these tokens, too
    if end is not None:
        stop_sampling(request, end)


def may_redo(request: Request, literal: int, token: int) -> bool:
    """Whether a token may stand in place of the prompt's last one (healing): not where the output
    could then no longer end within its tokens, if that is asked.
    """
    guide, output = request.guide, request.text_out
    if guide is None or guide.closing is None:
        return True
    added = output.new_bytes(token)[len(output.new_bytes(literal)) :]
    return guide.closing.fits(added, request.remaining_output - 1)


def write(request: Request, sampled: Sampled) -> FinishReason | None:
    """Append a drawn token. Returns why the output ends there; None if it goes on.

    Where a constraint could end, all that it does not allow next says that it does; and after
    `max_tokens` one more token is drawn to see whether it does, which is not written.
    """
    guide, token = request.guide, sampled.token_id
    if guide is None:
        if _append(request, token, sampled):
            return "stop"
        return "length" if request.remaining_output <= 0 else None
    output = request.text_out
    if output.num_tokens < request.params.min_tokens or not output.is_stop(token):
        may_end = guide.may_end
        if not guide.take(token):
            if not may_end:
                raise EngineInvariantError(f"token {token} was drawn, which is not allowed")
            return "stop"
        if request.remaining_output <= 0:
            return "length"
        if not _can_be_closed(request, token):
            guide.untake()
            return _close(request)
    if _append(request, token, sampled):
        return "stop"
    return _force(request)


def stop_sampling(request: Request, reason: FinishReason) -> None:
    """Nothing more is drawn; the request ends when its tokens are computed."""
    request.finish_reason = reason
    request.samples = False


def _force(request: Request) -> FinishReason | None:
    """Append what has to come."""
    guide = request.guide
    assert guide is not None
    while forced := guide.forced():
        for token in forced:
            if request.remaining_output <= 0:
                return "length"
            if not _can_be_closed(request, token):
                return _close(request)
            if not guide.take(token):
                raise EngineInvariantError(f"token {token} was forced, which is not allowed")
            if _append_forced(request, token):
                return "stop"
    if guide.ended:
        return "stop"
    if request.remaining_output <= 0 and (guide.closing is not None or not guide.may_end):
        return "length"
    return None


def _close(request: Request) -> FinishReason:
    """Complete the output in the way that is known to fit."""
    guide = request.guide
    assert guide is not None
    assert guide.closing is not None
    for token in guide.closing.way:
        if not guide.take(token):
            raise EngineInvariantError(f"token {token} of the way to the end is not allowed")
        if _append_forced(request, token):
            return "stop"
    return "length"


def _can_be_closed(request: Request, token: int) -> bool:
    """Whether the output can still end within its tokens after this one, where that is asked."""
    closing = request.guide.closing if request.guide is not None else None
    if closing is None:
        return True
    return closing.take(request.text_out.new_bytes(token), request.remaining_output - 1)


def _append_forced(request: Request, token: int) -> bool:
    """Append a token that was not drawn. Its log-probability is known when it is computed."""
    place = len(request.tokens)
    ended = _append(request, token)
    if request.params.logprobs:
        if request.is_scored:
            request.next_logprob = place
        request.logprobs_end = len(request.tokens)
    return ended


def _append(request: Request, token: int, sampled: Sampled | None = None) -> bool:
    """Append a token to the output; True if that ends its text."""
    output = request.text_out
    ended = output.push(token)
    if output.num_tokens > len(request.output_ids):  # else it only said that the text ends
        request.tokens.extend([token])
        request.output_ids.append(token)
        request.forced += sampled is None
        if sampled is not None and sampled.logprob is not None:
            request.logprobs.append(TokenLogprob(token, sampled.logprob, sampled.top))
    return ended

"""Many prompts at once and nothing else to do: `LocalBackend.generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stemma.backend.base import Completion, Pending
from stemma.backend.local.request import CacheUse, Request
from stemma.backend.local.waiting_order import depth_first
from stemma.lang.sampling import SamplingParams, derive_seed

if TYPE_CHECKING:
    from stemma.backend.local.backend import LocalBackend


def complete(
    backend: LocalBackend,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    use: CacheUse,
    *,
    prompt_logprobs: bool,
) -> list[Completion]:
    """`params.n` completions of each prompt, side by side. If one fails, or while they are waited
    for Ctrl-C is pressed, the others are stopped and the error is raised.
    """
    seed = backend.seed_of(params)
    handles: list[Pending[Completion]] = []
    requests: list[Request] = []
    for ids in prompts:
        for k in range(params.n):
            handle: Pending[Completion] = Pending()
            handles.append(handle)
            requests.append(
                backend.make_request(
                    ids,
                    params,
                    use.namespace,
                    cache=use.mode,
                    priority=use.priority,
                    seed=derive_seed(seed, k) if k else seed,
                    next_logprob=1 if prompt_logprobs else None,
                    on_finish=_resolving(handle),
                    on_error=handle.fail,
                )
            )
    backend.submit(depth_first(requests))
    try:
        return [handle.result() for handle in handles]
    except BaseException:
        backend.engine.cancel(requests)
        raise


def _resolving(handle: Pending[Completion]) -> Callable[[Request], None]:
    """What to do with a finished request: resolve the handle with its completion."""
    return lambda request: handle.finish(request.completion())

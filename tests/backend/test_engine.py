"""The engine as a whole on a tiny random model: requests in, right results out, nothing left
behind.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stemma.backend.base import Completion, Namespace, Pending
from stemma.backend.local.backend import LocalBackend
from stemma.lang.errors import (
    BackendClosed,
    Cancelled,
    ConstraintError,
    ContextOverflow,
    EngineInvariantError,
    InvalidArgument,
    OutOfCacheMemory,
    StemmaError,
)
from stemma.lang.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
Make = Callable[..., LocalBackend]


def prompts(seed: int, count: int, *, longest: int = 60) -> list[list[int]]:
    """Random prompts, many of which share a beginning."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, 500) for _ in range(rng.randrange(1, longest))] for _ in range(3)]
    found = []
    for _ in range(count):
        stem = rng.choice(stems)
        tail = [rng.randrange(3, 500) for _ in range(rng.randrange(1, longest // 2))]
        found.append(stem[: rng.randrange(len(stem) + 1)] + tail)
    return found


def alone(backend: LocalBackend, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    backend.flush_cache()
    return backend.generate([prompt], params)[0].token_ids


@pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64])
@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(max_tokens=12, seed=5, ignore_eos=True)],
    ids=["greedy", "sampled"],
)
def test_text_does_not_depend_on_cache_batch_or_chunks(
    make: Make, page_size: int, params: SamplingParams
) -> None:
    work = prompts(1, 12)
    plain = make(prefix_cache=False)
    expected = [alone(plain, prompt, params) for prompt in work]
    for options in (
        {},
        {"max_step_tokens": max(40, 8 + page_size), "max_running": 8},
        {"policy": "fcfs", "max_running": 3},
    ):
        backend = make(page_size=page_size, **options)
        cold = [c.token_ids for c in backend.generate(work, params)]
        warm = [c.token_ids for c in backend.generate(work, params)]
        assert cold == expected
        assert warm == expected


def test_samples_of_one_prompt_share_every_row_of_it(make: Make) -> None:
    backend = make()
    prompt = prompts(2, 1)[0] * 3
    before = backend.stats().computed_tokens
    found = backend.generate([prompt], SamplingParams(max_tokens=1, n=16, seed=1, ignore_eos=True))
    assert backend.stats().computed_tokens - before == len(prompt)
    assert [c.usage.computed_tokens for c in found] == [len(prompt)] + [0] * 15
    assert all(c.usage.cached_tokens + c.usage.computed_tokens == len(prompt) for c in found)
    assert len({c.token_ids for c in found}) > 1


def test_requests_that_arrive_together_compute_a_shared_prefix_once(make: Make) -> None:
    backend = make()
    stem = [3 + 7 * i % 490 for i in range(800)]
    work = [[*stem, 200 + i, 300 + i] for i in range(64)]
    found = backend.generate(work, SamplingParams(max_tokens=1, temperature=0))
    assert backend.stats().computed_tokens == 800 + 2 * 64
    assert backend.stats().steps == 1
    assert sorted(c.usage.computed_tokens for c in found) == [2] * 63 + [802]


def test_rows_that_a_later_chunk_shares_count_as_cached(make: Make) -> None:
    backend = make(max_step_tokens=300)
    prompts = [[*range(5, 205), 300], [*range(5, 155), 301]]
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    for prompt in prompts:
        backend.generate([prompt], params, prompt_logprobs=True)
    before = backend.stats()
    first = [3, *range(210, 459)]  # leaves the next one 50 rows of the step
    backend.generate([first, *prompts], params, prompt_logprobs=True)
    after = backend.stats()
    asked = after.prompt_tokens - before.prompt_tokens
    cached = after.cached_tokens - before.cached_tokens
    assert asked - cached == after.computed_tokens - before.computed_tokens


def test_outputs_are_reused_by_a_prompt_that_contains_them(make: Make) -> None:
    backend = make()
    prompt = prompts(3, 1)[0]
    first = backend.generate([prompt], GREEDY)[0]
    follow = [*prompt, *first.token_ids, 7]
    usage = backend.generate([follow], GREEDY)[0].usage
    assert usage.cached_tokens == len(follow) - 2  # the last output token had no KV yet


def test_namespaces_share_nothing(make: Make) -> None:
    backend = make()
    prompt = prompts(4, 1)[0]
    spaces = [Namespace(), Namespace(salt="a"), Namespace(extra_key="a")]
    for space in spaces:
        assert backend.generate([prompt], GREEDY, namespace=space)[0].usage.cached_tokens == 0
    assert backend.flush_cache(spaces[1]) > 0
    assert backend.generate([prompt], GREEDY, namespace=spaces[1])[0].usage.cached_tokens == 0
    assert backend.generate([prompt], GREEDY, namespace=spaces[2])[0].usage.cached_tokens > 0


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_small_pool_retracts_and_still_gives_the_same_text(make: Make, page_size: int) -> None:
    work = prompts(5, 24, longest=80)
    params = GREEDY.but(max_tokens=60)
    roomy = make(prefix_cache=False, kv_tokens=8192)
    expected = [c.token_ids for c in roomy.generate(work, params)]
    tight = make(kv_tokens=320, page_size=page_size, max_running=16, max_step_tokens=256)
    assert [c.token_ids for c in tight.generate(work, params)] == expected
    stats = tight.stats()
    assert stats.retractions > 0
    assert stats.protected_tokens == stats.private_tokens == 0


def submit(
    backend: LocalBackend, prompt: list[int], params: SamplingParams
) -> tuple[Pending[Completion], object]:
    handle: Pending[Completion] = Pending()
    request = backend.make_request(
        prompt,
        params,
        Namespace(),
        on_finish=lambda r: handle.finish(r.completion()),
        on_error=handle.fail,
        seed=params.seed or 0,
    )
    handle.on_cancel = lambda: backend.engine.cancel([request])
    backend.submit([request])
    return handle, request


def test_cancelling_at_random_leaves_no_lock_and_harms_nobody(make: Make) -> None:
    backend = make(kv_tokens=1000, max_running=16, max_step_tokens=128)
    rng = random.Random(6)
    work = prompts(6, 60)
    params = [GREEDY.but(max_tokens=rng.randrange(1, 60)) for _ in work]
    handles = [submit(backend, p, q)[0] for p, q in zip(work, params, strict=True)]
    for handle in rng.sample(handles, 30):
        handle.cancel()
        time.sleep(0.002)
    ended: list[Completion | Cancelled] = []
    for handle in handles:
        try:
            ended.append(handle.result(timeout=60))
        except Cancelled as error:
            ended.append(error)
    finished = [i for i, e in enumerate(ended) if isinstance(e, Completion)]
    assert 0 < len(finished) < len(work)
    plain = make(prefix_cache=False)
    for i in finished[:10]:
        assert ended[i].token_ids == alone(plain, work[i], params[i])  # type: ignore[union-attr]
    stats = backend.stats()
    assert stats.protected_tokens == stats.private_tokens == stats.running == stats.waiting == 0


def test_cancelled_request_carries_its_partial_text(make: Make) -> None:
    backend = make()
    pieces: list[str] = []
    seen = threading.Event()

    def listen(piece: str) -> None:
        pieces.append(piece)
        seen.set()

    branch = backend.open()
    branch.append("The quick brown fox")
    generation = branch.generate(SamplingParams(max_tokens=900, seed=1, ignore_eos=True))
    generation.subscribe(listen)
    assert seen.wait(30)
    generation.cancel()
    with pytest.raises(Cancelled) as error:
        generation.result(timeout=30)
    assert error.value.partial.startswith("".join(pieces))
    assert branch.token_ids() == backend.encode("The quick brown fox")


def test_failed_step_fails_its_requests_only_and_leaks_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    expected = backend.generate(prompts(7, 3), GREEDY)
    forward = backend.engine._forward
    calls = 0

    def fail_third(batch: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of device memory")
        return forward(batch)  # type: ignore[arg-type]

    backend.flush_cache()
    monkeypatch.setattr(backend.engine, "_forward", fail_third)
    with pytest.raises(RuntimeError, match="out of device memory"):
        backend.generate(prompts(7, 3), GREEDY)
    stats = backend.stats()
    assert stats.protected_tokens == stats.private_tokens == stats.running == 0
    assert [c.token_ids for c in backend.generate(prompts(7, 3), GREEDY)] == [
        c.token_ids for c in expected
    ]


def test_row_that_cannot_be_drawn_fails_alone(make: Make) -> None:
    backend = make()
    good, bad = prompts(8, 2)
    expected = alone(backend, good, GREEDY)
    everything = tuple((i, -float("inf")) for i in range(backend.config.vocab_size))
    first, _ = submit(backend, good, GREEDY)
    second, _ = submit(backend, bad, GREEDY.but(logit_bias=everything))
    with pytest.raises(StemmaError, match="no token") as error:
        second.result(timeout=30)
    assert not isinstance(error.value, EngineInvariantError)
    assert first.result(timeout=30).token_ids == expected


def test_request_that_can_never_fit_is_refused_at_once(make: Make) -> None:
    backend = make(kv_tokens=100, max_running=8, max_step_tokens=64)
    with pytest.raises(OutOfCacheMemory, match="100") as error:
        backend.generate([[5] * 120], GREEDY)
    assert (error.value.needed, error.value.limit) == (132, 100)
    with pytest.raises(ContextOverflow) as overflow:
        make(kv_tokens=4096).generate([[5] * 1020], GREEDY)
    assert (overflow.value.needed, overflow.value.limit) == (1032, 1024)


def test_default_max_tokens_is_clipped_to_the_room_left(make: Make) -> None:
    backend = make()
    found = backend.generate([[5] * 1020], SamplingParams(ignore_eos=True, seed=1))[0]
    assert (found.usage.output_tokens, found.finish_reason) == (4, "length")


def test_pool_of_exactly_the_request_is_enough(make: Make) -> None:
    for page_size in (1, 16):
        backend = make(kv_tokens=64, page_size=page_size, max_running=4, max_step_tokens=32)
        found = backend.generate([[5] * 40, [6] * 40], GREEDY.but(max_tokens=24))
        assert [c.usage.output_tokens for c in found] == [24, 24]


def test_empty_prompt_and_foreign_ids_are_refused(make: Make) -> None:
    backend = make()
    with pytest.raises(InvalidArgument, match="no tokens"):
        backend.generate([""])
    vocabulary = backend.config.vocab_size
    with pytest.raises(InvalidArgument, match=str(vocabulary)):
        backend.generate([[vocabulary]])


def test_prompt_logprobs_equal_a_full_forward_pass(make: Make) -> None:
    backend = make()
    prompt = prompts(9, 1)[0]
    params = SamplingParams(
        max_tokens=2, temperature=0, logprobs=True, top_logprobs=3, ignore_eos=True
    )
    backend.generate([prompt[:10]], GREEDY)  # warm a part of it
    found = backend.generate([prompt], params, prompt_logprobs=True)[0]
    expected = naive_logprobs(backend, [*prompt, *found.token_ids])
    assert found.prompt_logprobs is not None
    assert found.logprobs is not None
    both = [*found.prompt_logprobs, *found.logprobs]
    assert [t.token_id for t in both] == [*prompt[1:], *found.token_ids]
    np.testing.assert_allclose(
        [t.logprob for t in both], expected, rtol=0, atol=5e-5
    )  # its norms are fp32
    assert all(len(t.top) == 3 and t.top[0][1] >= t.logprob for t in both)


def naive_logprobs(backend: LocalBackend, ids: list[int]) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(backend.model_folder, dtype=torch.float64)
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logprobs[i, t]) for i, t in enumerate(ids[1:])]


def test_zero_max_tokens_scores_the_prompt_and_ends(make: Make) -> None:
    backend = make()
    found = backend.generate([[5, 6, 7]], SamplingParams(max_tokens=0), prompt_logprobs=True)[0]
    assert (found.text, found.token_ids, found.finish_reason) == ("", (), "length")
    assert found.prompt_logprobs is not None
    assert len(found.prompt_logprobs) == 2
    assert found.usage.prompt_tokens == 3


def test_slow_listener_is_not_waited_for_by_others(make: Make) -> None:
    backend = make()
    branch = backend.open()
    branch.append("The quick brown fox")
    generation = branch.generate(SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
    chunks: list[str] = []
    generation.subscribe(chunks.append)
    assert generation.result(timeout=30).text == "".join(chunks)


def test_closed_backend_fails_running_and_refuses_new_work(make: Make) -> None:
    backend = make()
    handle, _ = submit(backend, [5, 6], GREEDY.but(max_tokens=900))
    backend.close()
    with pytest.raises(BackendClosed):
        handle.result(timeout=30)
    with pytest.raises(BackendClosed):
        backend.generate([[5]])
    backend.close()


def test_many_threads_share_one_backend(make: Make) -> None:
    backend = make()
    work = prompts(10, 8)
    expected = [alone(backend, prompt, GREEDY) for prompt in work]
    found: dict[int, tuple[int, ...]] = {}

    def run(i: int) -> None:
        found[i] = backend.generate([work[i]], GREEDY)[0].token_ids

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(len(work))] == expected


def test_lpm_lets_nobody_be_overtaken_without_bound(make: Make) -> None:
    from stemma.backend.local import scheduler

    backend = make(max_running=1, max_step_tokens=64)
    hot = list(range(3, 43))
    backend.generate([hot], GREEDY.but(max_tokens=1))
    order: list[str] = []
    handles: list[Pending[Completion]] = []

    def send(name: str, ids: list[int]) -> None:
        handle: Pending[Completion] = Pending()

        def finish(request: object) -> None:
            order.append(name)
            handle.finish(request.completion())  # type: ignore[attr-defined]

        handles.append(handle)
        backend.submit(
            [
                backend.make_request(
                    ids,
                    GREEDY.but(max_tokens=1),
                    Namespace(),
                    on_finish=finish,
                    on_error=handle.fail,
                )
            ]
        )

    count = scheduler.MAX_OVERTAKEN + 40

    def arrive_together() -> None:
        send("cold", [400, 401, 402])
        for i in range(count):
            send("hot", [*hot, 100 + i])

    backend.engine.call(arrive_together)
    for handle in handles:
        handle.result(timeout=60)
    assert 1 <= order.index("cold") <= scheduler.MAX_OVERTAKEN


def test_choices_behind_nothing_are_refused(make: Make) -> None:
    with pytest.raises(InvalidArgument, match="nothing stands before"):
        make().open().score(["yes", "no"])


def test_choices_that_join_with_the_first_token_are_scored_behind_it(make: Make) -> None:
    backend = make()
    word = next(b.decode() for b in backend.text.token_bytes if len(b) == 2 and b.isalpha())
    assert len(backend.encode(word)) == 1
    branch = backend.open()
    branch.append(word[0])
    for choice in branch.score([word[1], "?"]).result().choices:
        assert choice.start == 1
        assert all(logprob < 0 for logprob in choice.logprobs)


def test_broken_engine_raises_a_new_error_for_each_program(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    monkeypatch.setattr(backend.engine.scheduler, "schedule", lambda: 1 / 0)
    errors = []
    for _ in range(2):
        with pytest.raises(EngineInvariantError, match="division by zero") as raised:
            backend.generate([[5, 6]], GREEDY)
        errors.append(raised.value)
    assert errors[0] is not errors[1]
    assert isinstance(errors[1].__cause__, ZeroDivisionError)


def test_requests_of_a_failed_step_get_an_error_each(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()

    def fail(batch: object) -> torch.Tensor:
        raise RuntimeError("out of device memory")

    monkeypatch.setattr(backend.engine, "_forward", fail)
    handles: list[Pending[Completion]] = []

    def arrive_together() -> None:
        handles.extend(submit(backend, prompt, GREEDY)[0] for prompt in prompts(11, 2))

    backend.engine.call(arrive_together)
    errors = [handle.future.exception(timeout=30) for handle in handles]
    assert [str(error) for error in errors] == ["out of device memory"] * 2
    assert errors[0] is not errors[1]


def test_nobody_waits_for_an_engine_that_broke_twice(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    backend.generate([[5]], GREEDY)
    handle: Pending[Completion] | None = None

    def break_everything() -> None:
        nonlocal handle
        monkeypatch.setattr(backend.engine.scheduler, "schedule", lambda: 1 / 0)
        backend.engine._inbox.put(lambda: 1 / 0)
        handle, _ = submit(backend, [5, 6], GREEDY)

    backend.engine.call(break_everything)
    assert handle is not None
    with pytest.raises(EngineInvariantError):
        handle.result(timeout=30)


def test_stop_expression_that_backtracks_without_end_fails_its_request_alone(make: Make) -> None:
    backend = make()
    letter = backend.encode("a")[0]
    only_a = GREEDY.but(max_tokens=60, logit_bias=((letter, 1000.0),))
    slow, _ = submit(backend, [letter], only_a.but(stop_regex="(a|aa)+$b"))
    other, _ = submit(backend, [letter], only_a)
    with pytest.raises(ConstraintError, match="stop_regex"):
        slow.result(timeout=60)
    assert other.result(timeout=60).text == "a" * 60


def test_waiting_on_the_engines_own_thread_is_refused(make: Make) -> None:
    backend = make()
    with pytest.raises(StemmaError, match="own thread"):
        backend.engine.call(lambda: backend.generate([[5]], GREEDY))


def test_busy_branch_takes_no_second_operation(make: Make) -> None:
    branch = make().open()
    branch.append("The quick")
    generation = branch.generate(GREEDY.but(max_tokens=500))
    with pytest.raises(StemmaError, match="at work"):
        branch.generate(GREEDY)
    generation.cancel()


def test_min_tokens_raise_the_default_of_max_tokens(make: Make) -> None:
    found = make().generate([[5, 6]], SamplingParams(min_tokens=150, seed=1))[0]
    assert found.usage.output_tokens >= 150


@pytest.mark.parametrize(
    "options",
    [{"page_size": 1.5}, {"kv_tokens": 1e4}, {"max_running": 0}, {"device": "gpu"}],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(
    make: Make, options: dict[str, object]
) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        make(**options)


def test_prompts_that_are_neither_texts_nor_lists_are_refused(make: Make) -> None:
    with pytest.raises(InvalidArgument, match="lists of token ids"):
        make().generate([1, 2])  # type: ignore[list-item]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork here")
def test_forked_process_is_told_to_spawn(make: Make) -> None:
    backend = make()
    backend.generate([[5]], GREEDY)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # the child: no pytest may run in it
        said = []
        for attempt in (lambda: make(), lambda: backend.generate([[5]], GREEDY)):
            try:
                attempt()
            except BackendClosed as error:
                said.append(str(error))
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        lines = told.read().splitlines()
    os.waitpid(child, 0)
    assert len(lines) == 2
    assert all("spawn" in line for line in lines)


@pytest.mark.parametrize("wrong", ["off", 1, None, -3])
def test_speculation_is_on_or_off(make: Make, wrong: object) -> None:
    with pytest.raises(InvalidArgument, match=r"speculation=.*: must be True or False"):
        make(speculation=wrong)


def test_a_name_is_no_namespace(make: Make) -> None:
    backend = make()
    for act in (
        lambda: backend.flush_cache("tenant"),  # type: ignore[arg-type]
        lambda: backend.generate([[3]], namespace="tenant"),  # type: ignore[arg-type]
        lambda: backend.open("tenant"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument, match="namespace='tenant': must be a Namespace"):
            act()


@pytest.mark.parametrize("ttl", ["1", None, True, 0, -1, float("nan")])
def test_time_to_live_is_a_number_of_seconds(make: Make, ttl: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"ttl=.*: must be a number of seconds above 0"):
        make().pin([3, 4, 5], ttl=ttl)

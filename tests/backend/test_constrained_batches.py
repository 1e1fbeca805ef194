"""Requests with shapes of their own, among others without: each gives what it gives alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stemma.backend.local.backend import LocalBackend
from stemma.lang.constraints import Constraint
from stemma.lang.errors import Cancelled
from stemma.lang.sampling import SamplingParams
from tests.backend.conftest import Make
from tests.backend.shapes_for_tests import Asked, Told, answers, check_counts, check_logprobs, shape

PERSON = Constraint.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "year": {"type": "integer", "minimum": 0, "maximum": 3000},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        },
        "required": ["name", "year", "tags"],
        "additionalProperties": False,
    },
    whitespace="spaced",
)


def mixed(count: int = 24) -> list[Asked]:
    """Requests of all kinds, of which some share a prompt, a shape or both."""
    draw = random.Random(4)
    asked = []
    for number in range(count):
        constraint = None if number % 4 == 0 else PERSON if number % 4 == 1 else shape(number)[0]
        params = SamplingParams(
            constraint=constraint,
            max_tokens=draw.choice([40, 60]) if number % 5 == 1 else draw.choice([10, 30, 60]),
            temperature=draw.choice([0, 0.7, 1.3]),
            seed=draw.randrange(3),
            logprobs=number % 3 == 0,
            on_limit="close" if number % 5 == 1 and constraint is PERSON else "cut",
        )
        if draw.random() < 0.3:
            params = params.but(repetition_penalty=1.1, top_p=0.9)
        if draw.random() < 0.2:
            params = params.but(stop=("e",))
        prompt = draw.choice(["A person: ", "A person:", 'The quick brown fox "', "Now "])
        asked.append(Asked(prompt, params, heal=draw.random() < 0.7))
    return asked


@pytest.fixture(scope="module")
def alone(tiny_model: Callable[..., Path]) -> Iterator[list[Told]]:
    with LocalBackend(
        tiny_model(), dtype="float64", prefix_cache=False, speculation=False, jump_forward=False
    ) as backend:
        yield [answers(backend, asked)[0] for asked in mixed()]


def check_same(backend: LocalBackend, found: list[Told], alone: list[Told]) -> None:
    for ours, theirs in zip(found, alone, strict=True):
        assert ours.plain == theirs.plain
        assert ours.ids == theirs.ids
        check_counts(ours)
        logprobs = [[p.logprob for p in told.completion.logprobs or ()] for told in (ours, theirs)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-9)
    backend.check()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculation": False},
        {"jump_forward": False},
        {"prefix_cache": False},
        {"page_size": 16},
        {"max_step_tokens": 24, "max_running": 8},
        {"max_step_tokens": 48, "max_running": 16, "page_size": 16},
        {"max_running": 3},
    ],
    ids=str,
)
def test_every_request_gives_what_it_gives_alone(
    make: Make, alone: list[Told], options: dict[str, Any]
) -> None:
    backend = make(**options)
    check_same(backend, answers(backend, *mixed()), alone)
    check_same(backend, answers(backend, *mixed()), alone)  # on what the first time has left


@pytest.mark.parametrize("page_size", [1, 16])
def test_and_so_it_does_where_memory_is_short(
    make: Make, alone: list[Told], page_size: int
) -> None:
    backend = make(kv_tokens=160, page_size=page_size, max_running=12)
    check_same(backend, answers(backend, *mixed()), alone)
    long = SamplingParams(
        constraint=Constraint.regex("(?:[a-z ]{2}[0-9]{2}, the end\\. )+!"), max_tokens=110
    )
    asked = [Asked("Now: ", long.but(seed=seed, logprobs=seed % 2 == 0)) for seed in range(6)]
    plain = make(speculation=False, jump_forward=False, prefix_cache=False)
    check_same(backend, answers(backend, *asked), answers(plain, *asked))
    assert backend.stats().retractions > 0


def test_and_so_it_does_while_others_are_cancelled(make: Make, alone: list[Told]) -> None:
    backend = make()
    asked = mixed()
    endless = SamplingParams(
        constraint=Constraint.regex("(?:[a-z ]{1,9}[0-9])+!"), max_tokens=900, temperature=1
    )
    started = threading.Semaphore(0)
    others = []
    for number in range(8):
        branch = backend.open()
        branch.append(asked[number].prompt)
        handle = branch.generate(endless.but(seed=number))
        handle.subscribe(lambda _: started.release())
        others.append(handle)
    for _ in range(12):
        assert started.acquire(timeout=60)
    stop = threading.Timer(0.02, lambda: [other.cancel() for other in others])
    stop.start()
    found = answers(backend, *asked)
    stop.join()
    for other in others:
        other.cancel()
        with pytest.raises(Cancelled) as caught:
            other.result(60)
        assert endless.constraint is not None
        assert endless.constraint.prefix_ok(caught.value.partial)
    check_same(backend, found, alone)


# -- drafts


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_what_was_written_before_is_drafted(
    make: Make, temperature: float, logprobs: bool, page_size: int
) -> None:
    backend = make(page_size=page_size)
    plain = make(speculation=False, jump_forward=False, prefix_cache=False)
    params = SamplingParams(
        constraint=PERSON, temperature=temperature, seed=3, max_tokens=70, logprobs=logprobs
    )
    asked = [Asked("A person: ", params.but(seed=seed)) for seed in range(4)]
    expected = answers(plain, *asked)
    accepted = [0]
    steps = [0]
    for _ in range(3):
        found = answers(backend, *asked)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.plain == theirs.plain
            check_counts(ours)
            check_logprobs(backend, ours)
        stats = backend.stats()
        accepted.append(stats.accepted_tokens)
        steps.append(stats.steps)
    first, again = accepted[1] - accepted[0], accepted[3] - accepted[2]
    assert again > first
    assert stats.drafted_tokens >= stats.accepted_tokens
    assert stats.output_tokens == 3 * sum(t.completion.usage.output_tokens for t in expected)
    backend.check()


def test_drafts_of_another_shape_are_cut_where_a_mask_forbids_them(make: Make) -> None:
    """The same prompts with other shapes: what the tree has behind them is partly not allowed."""
    backend, plain = make(), make(speculation=False, prefix_cache=False)
    shapes = [
        None,
        Constraint.regex('\\{"name": "[a-m]{1,5}", "year": [0-9]{1,4}\\}'),
        PERSON,
        Constraint.regex('\\{"name": "[a-z ]*", "age": 7\\}'),
        Constraint.json_schema({"type": "object", "additionalProperties": {"type": "string"}}),
    ]
    for seed in range(4):
        for constraint in shapes * 2:
            params = SamplingParams(
                constraint=constraint, max_tokens=40, seed=seed, temperature=0.9, logprobs=True
            )
            ours, theirs = (answers(b, Asked("A person:", params))[0] for b in (backend, plain))
            assert ours.plain == theirs.plain
            check_logprobs(backend, ours)
    assert backend.stats().accepted_tokens > 0

"""Forced tokens change how many steps an output takes, and nothing else.

`STEMMA_EXAMPLES` says how many random shapes are tried, `STEMMA_FIRST` the number of the first.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from stemma.backend.local.backend import LocalBackend
from stemma.lang.constraints import Constraint
from stemma.lang.errors import ConstraintError, StemmaError
from stemma.lang.sampling import SamplingParams
from tests.backend.shapes_for_tests import (
    Asked,
    answers,
    ask,
    check_counts,
    check_logprobs,
    shape,
)
from tests.conftest import TinyModel
from tests.tokenizers_for_tests import LLAMA3_WORDS, byte_level_tokenizer, metaspace_tokenizer

EXAMPLES = int(os.environ.get("STEMMA_EXAMPLES", "45"))
FIRST = int(os.environ.get("STEMMA_FIRST", "0"))
TOGETHER = 45

pytestmark = pytest.mark.timeout(120 + EXAMPLES)

Backends = tuple[LocalBackend, LocalBackend]


@pytest.fixture(scope="module", params=["gpt2", "llama3", "metaspace"])
def both(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Iterator[Backends]:
    """One with forced tokens and one without, on the tokenizers of three families."""
    seed = 31 + ["gpt2", "llama3", "metaspace"].index(request.param)
    folder = tiny_model(seed=seed, vocab_size=640, max_position_embeddings=2048)
    if request.param == "llama3":
        byte_level_tokenizer(folder, words=LLAMA3_WORDS, digits=True)
    elif request.param == "metaspace":
        metaspace_tokenizer(folder)
    backends = [
        LocalBackend(folder, dtype="float64", kv_tokens=8_192, jump_forward=jump, speculation=jump)
        for jump in (True, False)
    ]
    backends[0].engine.check_every_step = True
    yield backends[0], backends[1]
    for backend in backends:
        backend.close()


def asked_by(number: int) -> Asked:
    """A request for a random shape, whose prompt often ends where the output may go on from."""
    draw = random.Random(-1 - number)
    constraint, _ = shape(number)
    begun = constraint.forced_prefix()
    prompt = "A prompt, and what follows"
    match draw.randrange(6):
        case 0:
            prompt += ": "
        case 1:
            prompt += ' is "'
        case 2:
            prompt += ":" + begun[: draw.randint(0, len(begun))]
        case 3:
            prompt += draw.choice(["\n", "\n\n", "  ", " {", "[", "1", "é", "日", " the"])
        case 4:
            prompt += ": " + begun
    least = draw.choice([0, 0, 0, 3])
    params = SamplingParams(
        max_tokens=draw.choice([1, 2, 5, 9, 17, 40]) + least,
        min_tokens=least,
        temperature=draw.choice([0, 0, 0.8]),
        seed=number,
        logprobs=draw.random() < 0.5,
        ignore_eos=draw.random() < 0.3,
        constraint=constraint,
    )
    match draw.randrange(6):
        case 0:
            params = params.but(stop=(draw.choice(['"', "e", ": ", "a", "1", " "]),))
        case 1:
            params = params.but(stop_regex=draw.choice(["[a-e]{2}", r"\d", '": ?']))
        case 2:
            params = params.but(top_logprobs=2, repetition_penalty=1.2, top_p=0.9)
    params = params.but(include_stop=draw.random() < 0.3)
    return Asked(prompt, params, heal=draw.random() < 0.75)


def test_any_shape_gives_the_same_with_and_without(both: Backends) -> None:
    jump, step = both
    before, forced = [backend.stats() for backend in both], 0
    written = [0, 0]
    for first in range(FIRST, FIRST + EXAMPLES, TOGETHER):
        numbers = range(first, min(first + TOGETHER, FIRST + EXAMPLES))
        asked = [asked_by(number) for number in numbers]
        for number, request, ours, theirs in zip(
            numbers, asked, ask(jump, *asked), ask(step, *asked), strict=True
        ):
            try:
                if isinstance(ours, StemmaError) or isinstance(theirs, StemmaError):
                    assert str(ours) == str(theirs)
                    assert isinstance(ours, ConstraintError)
                    continue
                assert ours.plain == theirs.plain
                assert ours.ids == theirs.ids
                for told, backend in ((ours, jump), (theirs, step)):
                    check_counts(told)
                    check_logprobs(backend, told)
                assert ours.completion.usage.output_tokens == theirs.completion.usage.output_tokens
                assert theirs.completion.usage.forced_tokens == 0
            except BaseException as error:
                error.add_note(f"STEMMA_FIRST={number} {request}\n{ours}\n{theirs}")
                raise
            forced += ours.completion.usage.forced_tokens
            written[0] += ours.completion.usage.output_tokens
            written[1] += theirs.completion.usage.output_tokens
    after = [backend.stats() for backend in both]
    assert [
        b.output_tokens - a.output_tokens for a, b in zip(before, after, strict=True)
    ] == written
    assert after[0].forced_tokens - before[0].forced_tokens == forced > EXAMPLES
    assert after[1].forced_tokens == 0
    for backend in both:
        backend.check()


FORCED = "The capital of France is Paris."
SENTENCE = Constraint.choices([FORCED])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("heal", [False, True])
@pytest.mark.parametrize("prompt", ["Now:", "Now: ", "Now: The cap", "Now:\n"])
def test_stops_inside_of_what_is_forced(
    both: Backends, prompt: str, heal: bool, include: bool
) -> None:
    for params, end in (
        (SamplingParams(stop=" of"), " of"),
        (SamplingParams(stop=("xyz", "ran")), "ran"),
        (SamplingParams(stop_regex="[A-Z][a-z]{3}n"), None),
        (SamplingParams(stop_regex="F[a-z]+e "), "France "),
        (SamplingParams(stop="The", min_tokens=2), None),
        (SamplingParams(stop="is", min_tokens=1), "is"),
    ):
        expected = FORCED
        if end is not None:
            expected = FORCED[: FORCED.index(end) + len(end) * include]
        asked = Asked(prompt, params.but(constraint=SENTENCE, include_stop=include), heal)
        for backend in both:
            (told,) = answers(backend, asked)
            assert told.completion.text == expected
            assert told.completion.matched_stop == end
            assert told.completion.finish_reason == "stop"
            check_counts(told)


def test_limits_anywhere_in_what_is_forced(both: Backends) -> None:
    for prompt in ("Now:", "Now: ", "Now: T"):
        whole = [answers(b, Asked(prompt, SamplingParams(constraint=SENTENCE)))[0] for b in both]
        assert whole[0].plain == whole[1].plain
        length = len(whole[0].completion.token_ids)
        limits = range(1, length + 2)
        params = SamplingParams(constraint=SENTENCE, logprobs=True)
        asked = [Asked(prompt, params.but(max_tokens=limit)) for limit in limits]
        found = [answers(backend, *asked) for backend in both]
        for limit, ours, theirs in zip(limits, *found, strict=True):
            assert ours.plain == theirs.plain
            assert ours.completion.usage.output_tokens == min(limit, length)
            assert (ours.completion.finish_reason == "length") == (limit < length)
            assert FORCED.startswith(ours.completion.text)
            for told, backend in zip((ours, theirs), both, strict=True):
                check_counts(told)
                check_logprobs(backend, told)


def test_what_is_all_forced_is_never_drawn(both: Backends) -> None:
    jump, _ = both
    before = jump.stats()
    (told,) = answers(jump, Asked("Now:", SamplingParams(constraint=SENTENCE)))
    after = jump.stats()
    assert told.completion.text == FORCED
    assert told.completion.usage.forced_tokens == told.completion.usage.output_tokens > 5
    assert after.steps - before.steps == 1


@pytest.mark.parametrize("prompt", ["Now: ", 'Now: {"na', "Nun: é"])
def test_closing_at_every_limit(both: Backends, prompt: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "größe": {"enum": ["klein", "groß", "日本"]},
            "tags": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["name", "größe", "tags"],
    }
    for constraint, most in (
        (Constraint.json_schema(schema, whitespace="spaced"), 48),
        (Constraint.json_schema({"type": "array", "items": {"type": "string"}}), 20),
        (Constraint.regex("(?:[日-本]|🙂|é){2,9}!"), 24),
    ):
        limits = range(1, most)
        asked = [
            Asked(
                prompt,
                SamplingParams(
                    max_tokens=limit,
                    on_limit="close",
                    constraint=constraint,
                    seed=limit,
                    temperature=1.5 * (limit % 2),
                    logprobs=limit % 4 < 2,
                ),
            )
            for limit in limits
        ]
        least = None
        for limit, ours, theirs in zip(limits, *(ask(b, *asked) for b in both), strict=True):
            if isinstance(ours, StemmaError) or isinstance(theirs, StemmaError):
                assert least is None, f"{limit} are too few, {least} were enough: {ours} {theirs}"
                assert str(ours) == str(theirs)
                assert "the shortest text" in str(ours)
                continue
            least = least or limit
            assert ours.plain == theirs.plain
            assert ours.completion.usage.output_tokens <= limit
            constraint.parse(ours.completion.text)
            assert not ours.completion.rest
            for told, backend in zip((ours, theirs), both, strict=True):
                check_counts(told)
                if limit % 8 in (0, 1):
                    check_logprobs(backend, told)
        assert least is not None


def test_samples_of_one_prompt_share_what_is_forced(both: Backends) -> None:
    jump, step = both
    constraint = Constraint.json_schema(
        {
            "type": "object",
            "properties": {"first name": {"type": "string", "maxLength": 4}},
            "required": ["first name"],
            "additionalProperties": False,
        },
        whitespace="compact",
    )
    params = SamplingParams(constraint=constraint, n=6, seed=5, max_tokens=40, logprobs=True)
    found = [backend.generate("A name: ", params) for backend in both]
    for ours, theirs in zip(*found, strict=True):
        assert (ours.text, ours.token_ids) == (theirs.text, theirs.token_ids)
        assert ours.finish_reason == theirs.finish_reason
        assert [p.logprob for p in ours.logprobs or ()] == pytest.approx(
            [p.logprob for p in theirs.logprobs or ()], abs=1e-9
        )
        assert ours.text.startswith('{"first name":"')
    assert len({completion.text for completion in found[0]}) > 1
    assert jump.stats().steps < step.stats().steps


def test_prompt_logprobs_go_on_into_what_is_forced(both: Backends) -> None:
    params = SamplingParams(constraint=SENTENCE, logprobs=True, top_logprobs=2)
    ids = both[0].encode("Now it is this:")
    ours, theirs = (b.generate([ids], params, prompt_logprobs=True)[0] for b in both)
    for completion in (ours, theirs):
        assert completion.prompt_logprobs is not None
        assert completion.logprobs is not None
        assert [p.token_id for p in completion.prompt_logprobs] == ids[1:]
        assert [p.token_id for p in completion.logprobs] == list(completion.token_ids)
    for a, b in zip(
        (*ours.prompt_logprobs, *ours.logprobs),
        (*theirs.prompt_logprobs, *theirs.logprobs),
        strict=True,
    ):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-9)
        assert [i for i, _ in a.top] == [i for i, _ in b.top]


def test_a_tokenizer_with_a_normal_form_writes_what_the_shape_says(tiny_model: TinyModel) -> None:
    """Its own tokens for a letter and an accent would be those of one letter."""
    folder = tiny_model(seed=34, vocab_size=640, max_position_embeddings=512)
    byte_level_tokenizer(folder, normalizer={"type": "NFC"})
    shapes = [Constraint.regex("cafe\u0301 = [0-9]"), Constraint.regex("(?:e\u0301|o\u0308){3}!")]
    found = []
    for jump in (True, False):
        with LocalBackend(folder, dtype="float64", kv_tokens=2048, jump_forward=jump) as backend:
            asked = [
                Asked(prompt, SamplingParams(constraint=each, seed=1, max_tokens=30, on_limit=on))
                for each in shapes
                for prompt in ("It:", "It: ", "It: caf")
                for on in ("cut", "close")
            ]
            found.append([told.plain for told in answers(backend, *asked)])
            for each, told in zip(asked, found[-1], strict=True):
                assert each.params.constraint is not None
                assert each.params.constraint.matches(str(told[0]))
    assert found[0] == found[1]

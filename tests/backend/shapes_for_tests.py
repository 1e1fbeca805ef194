"""Random shapes of outputs: JSON Schemas and regular expressions, the same for the same number.

And what a backend does when it is asked for them: requests handed in together, with their streams.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, NamedTuple

import jsonschema

from stemma.backend.base import Completion
from stemma.backend.local.backend import LocalBackend
from stemma.lang.constraints import Constraint
from stemma.lang.errors import StemmaError
from stemma.lang.sampling import SamplingParams

Schema = dict[str, Any]
NAMES = ("name", "age", "a", "tags", "größe", "first name", "日本", 'q"uote', "x/y")
WORDS = ("red", "green", "blue", "naïve café", "日本語", "🙂🎉", 'say "no"', "two\nlines", "")
PATTERNS = (
    "[a-z]{1,6}",
    "^[A-Z][a-z]{0,4}$",
    "^(yes|no)$",
    "^[0-9]{2,4}-[0-9]{2}$",
    "^[é日🙂]{2}$",
)
LITERALS = (
    "a",
    "b",
    "the ",
    "12",
    "é",
    "日本",
    "🙂",
    "👩‍👩‍👧",
    "e\u0301",
    '"',
    r"\n",
    r"\\",
    " ",
    "  ",
)
CLASSES = (
    *("[a-z]", "[0-9]", r"\d{2}", "[^a]", r"[^\n]", r"\w", "[\u03b1-\u03c9]", "[🙂-🙏]"),
    *(r"\s", "."),
)
FORMATS = ("date", "uuid", "ipv4", "email")


class Shapes:
    """Draws shapes by a number."""

    def __init__(self, number: int) -> None:
        self.draw = random.Random(number)

    def schema(self, levels: int = 3) -> Schema:
        """A schema of bounded depth; one in eight refers to itself."""
        if levels == 3 and self.draw.random() < 0.12:
            return self._recursive()
        kinds: list[Callable[[int], Schema]] = [self._scalar]
        if levels:
            kinds += [self._object, self._object, self._array, self._tuple, self._any_of]
        return self.draw.choice(kinds)(levels - 1)

    def _scalar(self, _: int) -> Schema:
        draw = self.draw
        kinds: list[Callable[[], Schema]] = [
            self._integer,
            self._number,
            self._string,
            lambda: {"type": "boolean"},
            lambda: {"type": "null"},
            lambda: {"const": draw.choice([*WORDS, 7, -1.5, True, None, [1, "a"], {"k": []}])},
            lambda: {"enum": draw.sample([*WORDS, 0, 12, False, None], draw.randint(1, 4))},
            lambda: {"type": draw.sample(["integer", "null", "boolean", "string"], 2)},
        ]
        return draw.choice(kinds)()

    def _integer(self) -> Schema:
        low = self.draw.randint(-200, 100)
        schema: Schema = {"type": "integer"}
        if self.draw.random() < 0.6:
            schema |= {"minimum": low, "maximum": low + self.draw.choice([0, 3, 40, 2_000])}
        return schema

    def _number(self) -> Schema:
        low = self.draw.choice([-3.5, 0, 0.25, 10])
        schema: Schema = {"type": "number"}
        if self.draw.random() < 0.5:
            schema |= {"minimum": low, "exclusiveMaximum": low + self.draw.choice([0.5, 7])}
        return schema

    def _string(self) -> Schema:
        schema: Schema = {"type": "string"}
        match self.draw.randrange(4):
            case 0:
                least = self.draw.randint(0, 3)
                schema |= {"minLength": least, "maxLength": least + self.draw.randint(0, 6)}
            case 1:
                schema["pattern"] = self.draw.choice(PATTERNS)
            case 2:
                schema["format"] = self.draw.choice(FORMATS)
        return schema

    def _object(self, levels: int) -> Schema:
        names = self.draw.sample(NAMES, self.draw.randint(0, 4))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.schema(levels) for name in names},
            "required": [name for name in names if self.draw.random() < 0.7],
            "additionalProperties": False,
        }
        if self.draw.random() < 0.15:
            schema["additionalProperties"] = {"type": "integer"}
        return schema

    def _array(self, levels: int) -> Schema:
        schema: Schema = {"type": "array", "items": self.schema(levels)}
        if self.draw.random() < 0.7:
            schema["maxItems"] = self.draw.randint(0, 4)
            schema["minItems"] = self.draw.randint(0, schema["maxItems"])
        return schema

    def _tuple(self, levels: int) -> Schema:
        first = [self.schema(levels) for _ in range(self.draw.randint(1, 3))]
        return {"type": "array", "prefixItems": first, "minItems": len(first), "items": False}

    def _any_of(self, levels: int) -> Schema:
        return {"anyOf": [self.schema(levels) for _ in range(self.draw.randint(1, 3))]}

    def _recursive(self) -> Schema:
        node = self._object(0)
        node["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
        node["required"].append("next")
        tree = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
        top = self.draw.choice(["node", "tree"])
        return {"$ref": f"#/$defs/{top}", "$defs": {"node": node, "tree": tree}}

    def regex(self, levels: int = 3) -> str:
        draw = self.draw
        if not levels or draw.random() < 0.25:
            return draw.choice((*LITERALS, *CLASSES))
        match draw.randrange(5):
            case 0:
                return f"(?:{self.regex(levels - 1)}|{self.regex(levels - 1)})"
            case 1:
                times = draw.choice(["?", "*", "+", "{2}", "{0,3}", "{1,2}"])
                return f"(?:{self.regex(levels - 1)}){times}"
            case _:
                return self.regex(levels - 1) + self.regex(levels - 1)


def shape(number: int) -> tuple[Constraint, Schema | None]:
    """A constraint; of one in JSON also its schema. Every third is a regular expression."""
    shapes = Shapes(number)
    if number % 3 == 0:
        return Constraint.regex(shapes.regex()), None
    schema = shapes.schema()
    white = ("compact", "spaced", "flexible")[number // 3 % 3]
    return Constraint.json_schema(schema, whitespace=white), schema


def check_valid(schema: Schema, value: object) -> None:
    """Raise unless a validator that is not ours takes the value."""
    kind = jsonschema.Draft202012Validator
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(value)


@dataclass(frozen=True)
class Asked:
    prompt: str
    params: SamplingParams
    heal: bool = True


class Told(NamedTuple):
    """What came of a request. prompt, ids: those of the branch before and after it."""

    prompt: list[int]
    ids: list[int]
    completion: Completion
    pieces: list[str]

    @property
    def plain(self) -> tuple[object, ...]:
        """What must be the same however it was computed."""
        c = self.completion
        return (c.text, c.token_ids, c.finish_reason, c.matched_stop, c.rest)


def ask(backend: LocalBackend, *asked: Asked) -> list[Told | StemmaError]:
    """Hand in requests, all at once, and wait for all of them; an error stands for its answer."""
    waiting: list[Any] = []
    for each in asked:
        branch, pieces = backend.open(), list[str]()
        branch.append(each.prompt)
        prompt = branch.token_ids()
        try:
            handle = branch.generate(each.params, heal=each.heal)
        except StemmaError as error:
            waiting.append(error)
            continue
        handle.subscribe(pieces.append)
        waiting.append((branch, handle, prompt, pieces))
    told: list[Told | StemmaError] = []
    for each in waiting:
        if isinstance(each, StemmaError):
            told.append(each)
            continue
        branch, handle, prompt, pieces = each
        try:
            completion = handle.result(120)
            told.append(Told(prompt, branch.token_ids(), completion, pieces))
        except (StemmaError, CancelledError) as error:
            told.append(error if isinstance(error, StemmaError) else StemmaError(repr(error)))
        branch.close()
    return told


def answers(backend: LocalBackend, *asked: Asked) -> list[Told]:
    """The same where nothing may fail."""
    found = []
    for each, told in zip(asked, ask(backend, *asked), strict=True):
        if isinstance(told, StemmaError):
            told.add_note(repr(each))
            raise told
        found.append(told)
    return found


def check_counts(told: Told) -> None:
    """Raise unless the numbers and the pieces of an answer agree with each other."""
    completion = told.completion
    usage = completion.usage
    assert "".join(told.pieces) == completion.text
    assert 0 <= usage.forced_tokens <= usage.output_tokens
    assert len(completion.token_ids) <= usage.output_tokens
    assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    if completion.token_ids and not completion.rest:
        assert told.ids[-len(completion.token_ids) :] == list(completion.token_ids)
    if completion.logprobs is not None:
        assert [p.token_id for p in completion.logprobs] == list(completion.token_ids)


def check_logprobs(backend: LocalBackend, told: Told) -> None:
    """Raise unless the log-probabilities are those of the same ids as a prompt."""
    ids, logprobs = told.ids, told.completion.logprobs
    if not logprobs or told.completion.rest:
        return
    found = backend.generate([ids], SamplingParams(max_tokens=0), prompt_logprobs=True)[0]
    assert found.prompt_logprobs is not None
    wanted = found.prompt_logprobs[-len(logprobs) :]
    for ours, theirs in zip(logprobs, wanted, strict=True):
        assert ours.token_id == theirs.token_id
        assert abs(ours.logprob - theirs.logprob) < 1e-9, (ours, theirs)

"""Shapes that would take a machine's time and memory: refused or bounded, and nobody else waits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stemma.backend.local.backend import LocalBackend
from stemma.lang.constraints import Constraint
from stemma.lang.errors import ConstraintError, InvalidArgument, StemmaError
from stemma.lang.sampling import SamplingParams
from tests.backend.shapes_for_tests import Asked, Told, answers, ask
from tests.conftest import TinyModel

BUILT_IN = 10.0  # seconds, on a busy machine; each takes far less on an idle one
RUN_IN = 20.0

Make = Callable[[], Constraint]


def deep_arrays(levels: int) -> dict[str, Any]:
    """Arrays in arrays, by references."""
    defs: dict[str, Any] = {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(levels)
    }
    return {"$defs": {**defs, f"a{levels}": {"type": "null"}}, "$ref": "#/$defs/a0"}


def nested_arrays(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def wide(count: int, *, required: bool) -> dict[str, Any]:
    names = [f"property{i}" for i in range(count)]
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names if required else [],
        "additionalProperties": False,
    }


LIST = "start: item\nitem: "
HOSTILE: dict[str, Make] = {
    "a repetition of repetitions": lambda: Constraint.regex("(?:(?:(?:a{0,60}){0,60}){0,60})b"),
    "a long repetition": lambda: Constraint.regex("a{0,20000}b"),
    "a choice of what is the same": lambda: Constraint.regex("(?:a|a|aa|aaa)*(?:a|b|ab)*c"),
    "what explodes as an automaton": lambda: Constraint.regex("(?:a|b)*a(?:a|b){18}"),
    "any character but at a distance": lambda: Constraint.regex("(?s:.*)x(?s:.{40})y"),
    "many groups": lambda: Constraint.regex("(?:a" * 60 + ")?" * 60),
    "too many groups": lambda: Constraint.regex("(?:" * 50_000 + "a" + ")" * 50_000),
    "a megabyte of letters": lambda: Constraint.regex("a" * 1_000_000),
    "a long text": lambda: Constraint.regex("abcdefghij" * 20_000),
    "many choices": lambda: Constraint.choices([f"choice number {i}" for i in range(5_000)]),
    "all of Unicode": lambda: Constraint.regex(r"[\p{L}\p{N}&&[^\p{Greek}]]{1,500}"),
    "a grammar that is ambiguous": lambda: Constraint.grammar(
        LIST + 'item item | item item item | "a"'
    ),
    "an ambiguous and empty grammar": lambda: Constraint.grammar(
        'start: x x x x x\nx: | "a" | x x\n'
    ),
    "left recursion": lambda: Constraint.grammar(
        'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/\n'
    ),
    "groups in groups": lambda: Constraint.grammar("start: " + "(" * 900 + '"a"' + ")" * 900),
    "a chain of rules": lambda: Constraint.grammar(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(1_500)) + '\nr1500: "a"\n'
    ),
    "a megabyte of rules": lambda: Constraint.grammar(
        "start: r0\n" + "".join(f'r{i}: "word{i}" | r{i + 1}\n' for i in range(40_000))
    ),
    "terminals that explode": lambda: Constraint.grammar(
        "start: (A | B | C)+\nA: /(a|b)*a(a|b){12}/\nB: /(a|b)*b(a|b){12}/\nC: /[ab]{40,80}/\n"
    ),
    "references in a row": lambda: Constraint.json_schema(deep_arrays(325)),
    "too many references": lambda: Constraint.json_schema(deep_arrays(20_000)),
    "arrays in arrays": lambda: Constraint.json_schema(nested_arrays(99)),
    "too many arrays": lambda: Constraint.json_schema(nested_arrays(600)),
    "many properties": lambda: Constraint.json_schema(wide(1_000, required=True)),
    "many that may be left out": lambda: Constraint.json_schema(wide(400, required=False)),
    "a megabyte of properties": lambda: Constraint.json_schema(wide(20_000, required=True)),
    "a schema of itself": lambda: Constraint.json_schema(
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "string"}, {"$ref": "#"}]}
    ),
    "many alternatives": lambda: Constraint.json_schema(
        {"anyOf": [{"type": "array", "items": {"const": i}, "minItems": i % 7} for i in range(800)]}
    ),
    "many items": lambda: Constraint.json_schema(
        {"type": "array", "items": {"type": "integer"}, "minItems": 5_000}
    ),
    "a long string": lambda: Constraint.json_schema({"type": "string", "minLength": 100_000}),
    "what all must hold": lambda: Constraint.json_schema(
        {"allOf": [{"type": "string", "pattern": f"(a|b)*{c}(a|b){{9}}"} for c in "abab"]}
    ),
    "a large number": lambda: Constraint.json_schema(
        {"type": "integer", "minimum": -(10**30), "multipleOf": 9_999_991}
    ),
}

ORDINARY = [
    Asked(
        prompt,
        SamplingParams(
            temperature=0.8,
            seed=seed,
            max_tokens=24,
            constraint=Constraint.regex("[a-z ]{3,60}\\.") if seed % 2 else None,
        ),
    )
    for seed, prompt in enumerate(["The quick", "brown fox", "jumps over ", "A list: "] * 2)
]


@pytest.fixture(scope="module")
def backend(tiny_model: TinyModel) -> Iterator[LocalBackend]:
    with LocalBackend(tiny_model(), dtype="float64", kv_tokens=16_384) as backend:
        yield backend


@pytest.fixture(scope="module")
def alone(backend: LocalBackend) -> list[Told]:
    return answers(backend, *ORDINARY)


def built(name: str) -> Constraint | InvalidArgument:
    try:
        return HOSTILE[name]()
    except InvalidArgument as error:
        return error


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_shape_is_bounded_and_the_others_go_on(
    backend: LocalBackend, alone: list[Told], name: str
) -> None:
    begun = time.monotonic()
    made = built(name)
    assert time.monotonic() - begun < BUILT_IN
    if isinstance(made, InvalidArgument):
        assert len(str(made)) < 3_000
        return
    for on_limit in ("cut", "close"):
        begun = time.monotonic()
        settings = SamplingParams(constraint=made, max_tokens=60, seed=1, on_limit=on_limit)
        hostile, *others = ask(backend, Asked("A text: ", settings), *ORDINARY)
        assert time.monotonic() - begun < RUN_IN
        for ours, theirs in zip(others, alone, strict=True):
            assert not isinstance(ours, StemmaError), ours
            assert ours.plain == theirs.plain
        if isinstance(hostile, StemmaError):
            assert isinstance(hostile, ConstraintError)
        elif on_limit == "close" or hostile.completion.finish_reason == "stop":
            assert made.matches(hostile.completion.text)
        else:
            assert made.prefix_ok(hostile.completion.text)


# -- stacks

ON_A_SMALL_STACK = """
import sys, threading
sys.path.append(sys.argv[1])
threading.stack_size(256 * 1024)
from tests.backend.test_hostile_constraints import HOSTILE
from stemma.lang.constraints_matcher import matcher
def work():
    for name in sys.argv[2:]:
        constraint = HOSTILE[name]()
        constraint.matches("[[[null]]]")
        walk = matcher(constraint.compiled)
        walk.compute_bitmask()
        walk.deep_copy().compute_ff_tokens()
        print("done")
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
DEEPEST = "a chain of rules", "references in a row", "arrays in arrays", "many groups"


def test_the_deepest_shapes_need_no_large_stack() -> None:
    """On some systems a thread has half a megabyte."""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", ON_A_SMALL_STACK, root, *DEEPEST],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    assert (done.returncode, done.stdout) == (0, "done\n" * len(DEEPEST)), done.stderr[-2_000:]


def test_guides_may_be_made_on_any_thread(backend: LocalBackend) -> None:
    """More shapes than are kept, asked for at once from everywhere."""
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for i in range(40):
                constraint = Constraint.regex(f"[a-z]{{1,{1 + (first + i) % 9}}}")
                backend._constrainer.beginning(constraint).result().guide(constraint).forced()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []

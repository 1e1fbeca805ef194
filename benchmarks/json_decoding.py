"""JSON decoding: ten fields read out of a text, with and without forced tokens; what a mask costs.

    python benchmarks/json_decoding.py
    python benchmarks/json_decoding.py --outlines-python VENV/bin/python

Two parts. `decoding`: every contender reads the same records by the same JSON Schema, greedily, one
after the other; Stemma also all at once. `overhead`: what a mask adds to a decode step, in pairs of
runs with and without a constraint that never ends, of as many tokens.

Peers run under interpreters of their own:

    --outlines-python VENV/bin/python    pip install torch==2.13.0, then outlines transformers
    --llama-cpp-python VENV/bin/python   pip install llama-cpp-python; needs --gguf
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FIELDS: dict[str, dict[str, Any]] = {
    "first_name": {"type": "string", "maxLength": 20},
    "last_name": {"type": "string", "maxLength": 20},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "city": {"type": "string", "maxLength": 20},
    "country": {"enum": ["France", "Germany", "Italy", "Spain", "Portugal"]},
    "occupation": {"type": "string", "maxLength": 20},
    "years_of_experience": {"type": "integer", "minimum": 0, "maximum": 60},
    "favourite_colour": {"enum": ["red", "green", "blue", "yellow"]},
    "number_of_children": {"type": "integer", "minimum": 0, "maximum": 12},
    "is_married": {"type": "boolean"},
}
SCHEMA = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}
PEOPLE: list[dict[str, Any]] = [
    dict(zip(FIELDS, values, strict=True))
    for values in (
        ("Anna", "Weber", 34, "Berlin", "Germany", "nurse", 10, "blue", 2, True),
        ("Luca", "Rossi", 51, "Milan", "Italy", "baker", 30, "red", 0, False),
        ("Marie", "Dubois", 28, "Lyon", "France", "teacher", 4, "green", 1, True),
        ("Pedro", "Garcia", 45, "Madrid", "Spain", "lawyer", 20, "yellow", 3, True),
        ("Ines", "Silva", 39, "Porto", "Portugal", "doctor", 12, "blue", 0, False),
        ("Karl", "Schmidt", 62, "Munich", "Germany", "farmer", 41, "green", 4, True),
        ("Sofia", "Bianchi", 23, "Rome", "Italy", "painter", 2, "red", 0, False),
        ("Paul", "Martin", 57, "Paris", "France", "driver", 35, "blue", 2, False),
    )
]
OUTPUT_TOKENS = 200  # no record is as long


def described(person: dict[str, Any]) -> str:
    family = "is married" if person["is_married"] else "is not married"
    return (
        f"{person['first_name']} {person['last_name']} is {person['age']} years old and lives in "
        f"{person['city']}, {person['country']}. As a {person['occupation']} with "
        f"{person['years_of_experience']} years of experience, {person['first_name']} likes "
        f"{person['favourite_colour']}, has {person['number_of_children']} children and {family}."
    )


def prompts() -> list[str]:
    """One solved example, then the text to read."""
    example = f"Text: {described(PEOPLE[0])}\nJSON: {json.dumps(PEOPLE[0])}\n\n"
    return [f"{example}Text: {described(person)}\nJSON: " for person in PEOPLE[1:]]


def fields_right(texts: list[str]) -> str:
    """How many of the fields are as they should be; raises for a text that is not of the schema."""
    right = 0
    for text, person in zip(texts, PEOPLE[1:], strict=True):
        found = json.loads(text)
        assert list(found) == list(FIELDS), text
        right += sum(found[field] == person[field] for field in FIELDS)
    return f"{right} of {len(texts) * len(FIELDS)}"


# -- contenders: a function that reads all prompts and returns the texts

Read = Callable[[list[str]], list[str]]


def outlines_peer(setup: dict[str, Any]) -> Read:
    import outlines
    import torch
    import transformers

    torch.set_num_threads(setup["threads"])
    model = outlines.from_transformers(
        transformers.AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.float32),
        transformers.AutoTokenizer.from_pretrained(setup["model"]),
    )
    generator = outlines.Generator(model, outlines.json_schema(json.dumps(SCHEMA)))

    def read(texts: list[str]) -> list[str]:
        return [
            str(generator(text, max_new_tokens=OUTPUT_TOKENS, do_sample=False)) for text in texts
        ]

    return read


def llama_cpp_peer(setup: dict[str, Any]) -> Read:
    import llama_cpp

    model = llama_cpp.Llama(
        setup["gguf"], n_ctx=2048, n_threads=setup["threads"], verbose=False, seed=0
    )

    def read(texts: list[str]) -> list[str]:
        written = []
        for text in texts:
            grammar = llama_cpp.LlamaGrammar.from_json_schema(json.dumps(SCHEMA), verbose=False)
            reply: Any = model(
                text, grammar=grammar, max_tokens=OUTPUT_TOKENS, temperature=0, repeat_penalty=1.0
            )
            written.append(reply["choices"][0]["text"])
        return written

    return read


PEERS = {"outlines": outlines_peer, "llama-cpp": llama_cpp_peer}


def serve(name: str) -> None:
    """A peer's process: a setup on the first line, then per line of prompts a line of texts."""
    read = PEERS[name](json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(read(json.loads(line))), flush=True)


@contextmanager
def peer(name: str, python: str, setup: dict[str, Any]) -> Iterator[Read]:
    with subprocess.Popen(
        [python, __file__, "--serve", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(setup["threads"])},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(message: object) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps(message), file=process.stdin, flush=True)
            while line := process.stdout.readline():
                try:
                    return json.loads(line)
                except ValueError:  # what a library prints
                    continue
            raise RuntimeError(f"{name}: its process ended")

        ask(setup)
        yield ask
        process.stdin.close()


# -- part decoding


def decoding(arguments: argparse.Namespace) -> None:
    import stemma as st

    shape = st.Constraint.json_schema(SCHEMA, whitespace="spaced")
    params = st.SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, constraint=shape)

    def one_by_one(backend: st.LocalBackend) -> Read:
        def read(texts: list[str]) -> list[str]:
            backend.flush_cache()
            return [backend.generate(text, params)[0].text for text in texts]

        return read

    def at_once(backend: st.LocalBackend) -> Read:
        def read(texts: list[str]) -> list[str]:
            backend.flush_cache()
            return [completion.text for completion in backend.generate(texts, params)]

        return read

    jumping, drawing = st.LocalBackend(), st.LocalBackend(jump_forward=False)
    exact = st.LocalBackend(quantization=None)
    setup = {
        "model": str(jumping.model_folder),
        "gguf": arguments.gguf,
        "threads": arguments.threads,
    }
    contenders: dict[str, Read] = {
        "Stemma int8": one_by_one(jumping),
        "int8, no forced tokens": one_by_one(drawing),
        "Stemma fp32": one_by_one(exact),
        "Stemma int8, all at once": at_once(jumping),
        "int8, all at once, no forced tokens": at_once(drawing),
    }
    with peers(arguments, setup) as others:
        contenders |= others
        asked = prompts()
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        texts: dict[str, list[str]] = {}
        for read in contenders.values():
            read(asked[:1])  # the first touch of everything, and the grammar
        for _ in range(arguments.pairs):
            for name, read in contenders.items():
                begun = time.perf_counter()
                texts[name] = read(asked)
                seconds[name].append(time.perf_counter() - begun)
    same = texts["Stemma int8"] == texts["int8, no forced tokens"]
    print(f"{len(asked)} records of {len(FIELDS)} fields, medians of {arguments.pairs}\n")
    print("| contender | seconds | times as long | fields right |\n| --- | --- | --- | --- |")
    base = statistics.median(seconds["Stemma int8"])
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"| {name} | {median:.2f} | {median / base:.2f} | {fields_right(texts[name])} |")
    print(f"\nthe same texts with and without forced tokens: {same}")
    for name, backend in (("with", jumping), ("without", drawing)):
        before = backend.stats()
        one_by_one(backend)(asked)
        after = backend.stats()
        output = after.output_tokens - before.output_tokens
        forced = after.forced_tokens - before.forced_tokens
        print(f"{name} forced tokens: {output} written, {forced} of them forced, "
              f"{after.steps - before.steps} forward passes")  # fmt: skip
    for backend in (jumping, drawing, exact):
        backend.close()


@contextmanager
def peers(arguments: argparse.Namespace, setup: dict[str, Any]) -> Iterator[dict[str, Read]]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        found: dict[str, Read] = {}
        for name, title, python in (
            ("outlines", "transformers + outlines, fp32", arguments.outlines_python),
            ("llama-cpp", "llama.cpp, its own grammar", arguments.llama_cpp_python),
        ):
            if python is None:
                print(f"{title}: left out, for no interpreter with it was given")
            else:
                found[title] = stack.enter_context(peer(name, python, setup))
        yield found


# -- part overhead


def overhead(arguments: argparse.Namespace) -> None:
    """A mask at every token that leaves nearly all tokens, and one that leaves few."""
    import stemma as st

    tokens = 128
    shapes = {
        "free text, most tokens allowed": st.Constraint.regex(r"(?s:[^\x00]){20000}"),
        "digits, few tokens allowed": st.Constraint.regex(r"[0-9 ]{20000}"),
    }
    with st.LocalBackend(speculation=False, jump_forward=False) as backend:
        print(f"\nA decode step with a mask for every row, {tokens} tokens, temperature 1:\n")
        print(
            "| rows | constraint | ms without | ms with | more |\n| --- | --- | --- | --- | --- |"
        )
        for rows in (1, 16):
            for name, shape in shapes.items():
                plain, masked = [], []
                for turn in range(arguments.pairs + 1):
                    for constraint, into in ((None, plain), (shape, masked)):
                        params = st.SamplingParams(
                            max_tokens=tokens, min_tokens=tokens, n=rows, seed=turn,
                            ignore_eos=True, constraint=constraint,
                        )  # fmt: skip
                        backend.flush_cache()
                        before = backend.stats()
                        backend.generate("Once upon a time", params)
                        after = backend.stats()
                        steps = after.steps - before.steps
                        into.append((after.step_seconds - before.step_seconds) / steps * 1e3)
                ratios = [b / a for a, b in zip(plain[1:], masked[1:], strict=True)]
                print(
                    f"| {rows} | {name} | {statistics.median(plain[1:]):.2f} | "
                    f"{statistics.median(masked[1:]):.2f} | {statistics.median(ratios) - 1:+.1%} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("decoding", "overhead"), help="one of the parts")
    parser.add_argument("--pairs", type=int, default=5, help="turns of each contender (5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--outlines-python")
    parser.add_argument("--llama-cpp-python")
    parser.add_argument("--gguf", help="the model's file, for llama.cpp")
    parser.add_argument("--serve", choices=tuple(PEERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    if arguments.part in (None, "overhead"):
        overhead(arguments)
    if arguments.part in (None, "decoding"):
        decoding(arguments)


if __name__ == "__main__":
    main()

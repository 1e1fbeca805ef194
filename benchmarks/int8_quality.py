"""What int8 costs in quality: perplexity and agreement with fp32, on text of three kinds.

    python benchmarks/int8_quality.py [--model MODEL] [--tokens 8192] [--json FILE]

Prose is the documentation that comes with Python, code its library; the chats are this model's own
answers in fp32 to questions about that documentation. Both sides read the same windows of 1,024
tokens. "same token" is how often the most probable next token is the same, which is what greedy
output goes by.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import typing
from pathlib import Path
from pydoc_data.topics import topics

from rich.console import Console
from rich.table import Table

import stemma as st
from stemma.backend.base import Completion
from stemma.backend.local.tokenizer import Piece

WINDOW = 1024
READ = st.SamplingParams(temperature=0, max_tokens=1, top_logprobs=1, logprobs=True)


@st.function
def answer(s: st.ProgramState, topic: str) -> None:
    s += st.user(f"Explain {topic.lower()} in Python to a beginner.")
    s += st.assistant(st.gen("answer", max_tokens=300, temperature=0.8))


def texts(backend: st.LocalBackend, tokens: int) -> dict[str, list[int]]:
    """At least so many token ids of each kind."""
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    code = "\n\n".join(Path(str(m.__file__)).read_text() for m in (typing, argparse, subprocess))
    ids = {
        kind: backend.text.encode([Piece(text)], first=True)
        for kind, text in {"prose": prose, "code": code}.items()
    }
    chats: list[int] = []
    names = iter(sorted(topics))
    while len(chats) < tokens:
        items = [{"topic": name} for _, name in zip(range(16), names, strict=False)]
        for state in answer.run_batch(items, backend=backend, seed=len(chats)):
            chats += state.tokens()
    return {**ids, "chat": chats}


def read(model: str | None, quantization: str | None, windows: list[list[int]]) -> list[Completion]:
    with st.LocalBackend(model, quantization=quantization, kv_tokens=16384) as backend:
        return backend.generate(windows, READ, prompt_logprobs=True, cache="off")


def compare(exact: list[Completion], int8: list[Completion]) -> tuple[int, float, float, float]:
    """Tokens, perplexity of both, and the share of places with the same most probable token."""
    pairs = [
        (a, b)
        for one, other in zip(exact, int8, strict=True)
        for a, b in zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True)
    ]
    count = len(pairs)
    perplexities = (math.exp(-sum(pair[side].logprob for pair in pairs) / count) for side in (0, 1))
    same = sum(a.top[0][0] == b.top[0][0] for a, b in pairs) / count
    return count, *perplexities, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=8192, help="of each kind")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    with st.LocalBackend(args.model, quantization=None, kv_tokens=16384) as backend:
        ids = texts(backend, args.tokens)
    windows = {
        kind: [text[at : at + WINDOW] for at in range(0, args.tokens, WINDOW)]
        for kind, text in ids.items()
    }
    every = [window for some in windows.values() for window in some]
    exact, int8 = (read(args.model, quantization, every) for quantization in (None, "int8"))
    table = Table("text", "tokens", "fp32 perplexity", "int8", "difference", "same token")
    rows = {}
    at = 0
    for kind, some in [*windows.items(), ("all", every)]:
        start = 0 if kind == "all" else at
        part = slice(start, start + len(some))
        at += len(some)
        count, before, after, same = compare(exact[part], int8[part])
        rows[kind] = {"tokens": count, "fp32": before, "int8": after, "same": same}
        change = f"{after / before - 1:+.2%}"
        table.add_row(kind, f"{count:,}", f"{before:.3f}", f"{after:.3f}", change, f"{same:.1%}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

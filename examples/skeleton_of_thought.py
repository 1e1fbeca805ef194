"""Skeleton of thought: write the outline first, then all its points at the same time.

    python examples/skeleton_of_thought.py                # the default model
    python examples/skeleton_of_thought.py path/or/hub-id

A long answer is slow because it is written one token after the other. With the outline known, the
points can be written side by side (Ning et al. 2023): a step of the model then writes a token of
each. `join` brings what the branches have written back to the branch they came from.
"""

from __future__ import annotations

import sys

import stemma as st

QUESTION = "How do I stay healthy?"

EXAMPLES = """\
Short answers to practical questions.

Question: How do I make good tea?
1. Use fresh water
2. Warm the pot
3. Let it draw
On "Use fresh water": Water that has boiled before tastes flat, so fill the kettle again each time.
On "Warm the pot": A cold pot takes the heat out of the water, so rinse it with hot water first.
On "Let it draw": Good tea needs four minutes, but after five it becomes bitter.

Question: How do I paint a wall?
1. Clean the wall
2. Cover the floor
3. Paint from the top
On "Clean the wall": Paint does not stick to dust, so wash the wall and let it dry for a day.
On "Cover the floor": Drops fall even from a careful brush, so lay out old newspapers first.
On "Paint from the top": Paint runs down, so begin under the ceiling and smooth the drops.

"""


@st.function
def answer(s: st.ProgramState, question: str, points: int = 3) -> str:
    s += EXAMPLES + f"Question: {question}\n"

    # The skeleton: each point knows the ones before it.
    for i in range(points):
        s += f"{i + 1}. " + st.gen(f"point {i + 1}", max_tokens=10, stop="\n") + "\n"
    outline = [s[f"point {i + 1}"] for i in range(points)]

    # The flesh: each point grows on a branch of its own.
    branches = s.fork(points)
    for point, branch in zip(outline, branches, strict=True):
        branch += f'On "{point}": ' + st.gen("text", max_tokens=48, stop="\n")

    texts = branches.join()["text"]
    return "\n".join(f"- {point}: {text}" for point, text in zip(outline, texts, strict=True))


def main(model: str | None = None) -> None:
    with st.LocalBackend(model) as backend:
        state = answer.run(QUESTION, backend=backend, seed=2, temperature=0.6)
        steps = backend.stats().steps

    print(QUESTION)
    print(state.value)
    usage = state.usage
    print(f"\n{usage.output_tokens} tokens were written in {steps} steps of the model")
    print(f"prompts: {usage.computed_tokens:,} tokens computed, {usage.cached_tokens:,} saved")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except st.StemmaError as error:
        sys.exit(f"error: {error}")

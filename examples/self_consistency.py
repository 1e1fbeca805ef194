"""Self-consistency: let the model reason many times, and believe the answer it reaches most often.

    python examples/self_consistency.py                # the default model
    python examples/self_consistency.py path/or/hub-id

One line of reasoning may go wrong anywhere; sixteen seldom go wrong in the same place (Wang et al.
2022). The samples are branches of one prompt, and the prompt is computed once.
"""

from __future__ import annotations

import re
import sys
from collections import Counter

import stemma as st

SAMPLES = 16
LANDMARK = "the Acropolis"

EXAMPLES = """\
Q: What language do people speak in the city of the Eiffel Tower?
A: The Eiffel Tower is in Paris. Paris is in France. People in France speak French. \
The answer is French.

Q: What language do people speak in the city of the Brandenburg Gate?
A: The Brandenburg Gate is in Berlin. Berlin is in Germany. People in Germany speak German. \
The answer is German.

Q: What language do people speak in the city of the Kremlin?
A: The Kremlin is in Moscow. Moscow is in Russia. People in Russia speak Russian. \
The answer is Russian.

"""


@st.function
def ask(s: st.ProgramState, landmark: str) -> None:
    s += EXAMPLES
    s += f"Q: What language do people speak in the city of {landmark}?\nA: "
    s += st.gen("reasoning", n=SAMPLES, max_tokens=48, stop="\n")


def answer_of(reasoning: str) -> str | None:
    """What a line of reasoning comes to; None if it never says."""
    found = re.search(r"The answer is (\w+)", reasoning)
    return found[1] if found else None


def vote(reasonings: list[str]) -> list[tuple[str, int]]:
    """The answers and how many voted for each, the winner first."""
    answers = [answer_of(reasoning) for reasoning in reasonings]
    return Counter(answer for answer in answers if answer is not None).most_common()


def main(model: str | None = None) -> None:
    with st.LocalBackend(model) as backend:
        state = ask.run(LANDMARK, backend=backend, seed=1)

    for reasoning in state["reasoning"]:
        print("-", reasoning)
    votes = vote(state["reasoning"])
    print("\nvotes:", ", ".join(f"{answer} {count}" for answer, count in votes))
    print("answer:", votes[0][0] if votes else "none")

    usage = state.usage
    shared = usage.computed_tokens + usage.output_tokens
    alone = usage.prompt_tokens + usage.output_tokens
    print(f"\nprompt: {usage.computed_tokens:,} tokens computed, {usage.cached_tokens:,} saved")
    print(f"with {usage.output_tokens:,} tokens of output: {shared:,} computed;")
    print(f"without sharing it had been {alone:,}, {alone / shared:.1f} times as many")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except st.StemmaError as error:
        sys.exit(f"error: {error}")

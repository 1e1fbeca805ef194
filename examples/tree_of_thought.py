"""Tree of thought: branch into many ideas, judge each, go on from the best.

    python examples/tree_of_thought.py                # the default model
    python examples/tree_of_thought.py path/or/hub-id

A haiku has lines of 5, 7 and 5 syllables, which a small model hardly ever hits in one go. So it
writes many first lines, the best are kept, each is continued many times, and so on (Yao et al.
2023). Two judges decide: Python counts the syllables, and among lines of the right length the model
says what they are about, on a branch of its own that has not seen the task.
"""

from __future__ import annotations

import re
import sys

import stemma as st

POEMS = """\
Haiku about winter:
Snow on the rooftops
and a thin line of grey smoke
above the still street

Haiku about the cat:
Asleep in the sun
she moves one ear, then the tail
and dreams of sparrows

Haiku about the city:
Rain on the windows
a tram rings its silver bell
and nobody looks

"""

JUDGED = """\
Snow on the rooftops
and a thin line of grey smoke
Topic: winter

Asleep in the sun
she moves one ear, then the tail
Topic: cat

Rain on the windows
a tram rings its silver bell
Topic: city

White sails and salt wind
Topic: sea

An old oak, and moss
Topic: forest

"""

TOPICS = ["winter", "cat", "city", "sea", "forest"]


@st.function
def haiku(s: st.ProgramState, topic: str, width: int = 16, keep: int = 2) -> str:
    judge = s.copy()
    judge += JUDGED
    s += POEMS + f"Haiku about the {topic}:\n"
    s["poem"] = ""

    best = [s]
    for syllables in (5, 7, 5):
        # Branch: each of the best so far goes on in `width` ways.
        thoughts = [thought for state in best for thought in state.fork(width)]
        for thought in thoughts:
            thought += st.gen("line", max_tokens=16, stop="\n") + "\n"

        # Judge: all at once. A branch has the variables of the one that it came from.
        verdicts = judge.fork(len(thoughts))
        for thought, verdict in zip(thoughts, verdicts, strict=True):
            thought["poem"] += thought["line"] + "\n"
            verdict += thought["poem"] + "Topic: " + st.select("topic", TOPICS)
        for thought, verdict in zip(thoughts, verdicts, strict=True):
            thought["off"] = abs(count_syllables(thought["line"]) - syllables)
            thought["fit"] = verdict.meta("topic").probabilities[topic]

        # Prune: what the others share with the best stays cached.
        thoughts.sort(key=lambda thought: (thought["off"], -thought["fit"]))
        best = thoughts[:keep]
        print(f"The best of {len(thoughts)} lines that should have {syllables} syllables:")
        for thought in thoughts[:5]:
            off, fit, line = thought["off"], thought["fit"], thought["line"]
            print(f"  {off} off, topic {fit:3.0%}  {line}")

    return str(best[0]["poem"])


def count_syllables(line: str) -> int:
    """About how many: groups of vowels, without a silent e at the end of a word."""
    count = 0
    for word in re.findall(r"[a-z]+", line.lower()):
        groups = len(re.findall(r"[aeiouy]+", word))
        silent = word.endswith("e") and not word.endswith("le") and groups > 1
        count += max(1, groups - silent)
    return count


def main(model: str | None = None) -> None:
    with st.LocalBackend(model) as backend:
        state = haiku.run("forest", backend=backend, seed=1, min_p=0.05)
    print(f"\n{state.value}")
    usage = state.usage
    print(f"tokens: {usage.computed_tokens:,} computed, {usage.cached_tokens:,} saved by sharing")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except st.StemmaError as error:
        sys.exit(f"error: {error}")

"""First answers: ask many times at once, and stop when enough of the answers are good.

    python examples/first_answer.py                # the default model
    python examples/first_answer.py path/or/hub-id

Eight branches write a list of fruits. `first` waits for the three that are done first and are
good, which Python decides, and cancels the rest: the engine stops computing them within one step.
Each has a time limit of its own, so that no branch can hold up the others. `race` takes whoever is
done first, good or not, and `join(on_error="drop")` hands over what is there.
"""

from __future__ import annotations

import sys

import stemma as st

BRANCHES, WANTED, SECONDS = 8, 3, 20.0

EXAMPLE = """\
Five vegetables: carrot, leek, pea, cabbage, onion.
Five animals: horse, owl, salmon, bee, goat.
Five fruits:"""


def is_good(words: str) -> bool:
    """Five of them, all different."""
    fruits = [word.strip() for word in words.split(",")]
    return len(fruits) == 5 == len(set(fruits)) and all(fruits)


@st.function
def ask(s: st.ProgramState, seconds: float = SECONDS) -> tuple[list[str], list[str], list[str]]:
    s += EXAMPLE
    branches = s.fork(BRANCHES)
    branches += st.gen("fruits", max_tokens=48, stop=[".", "\n"], timeout=seconds)
    try:
        good = branches.first(WANTED, when=lambda branch: is_good(branch["fruits"]))
    except st.errors.TooFewBranches as error:  # the model is small: take those that there are
        good = error.found

    again = s.fork(BRANCHES)
    again += st.gen("fruits", max_tokens=48, stop=[".", "\n"], timeout=seconds)
    try:
        quick = [again.race()["fruits"]]
    except st.errors.TooFewBranches:  # none was in time
        quick = []
    in_time = again.join(on_error="drop").get("fruits", [])
    return good["fruits"], quick, in_time


def main(model: str | None = None) -> None:
    with st.LocalBackend(model) as backend:
        state = ask.run(backend=backend, seed=1)
        stats = backend.stats()

    good, quick, in_time = state.value
    print(f"the first {len(good)} of {BRANCHES} that are good:")
    for fruits in good:
        print(" -", fruits.strip())
    print("\nthe first that was done:", *(fruits.strip() for fruits in quick))
    print(f"done when it was, and kept: {len(in_time)} of {BRANCHES}")
    print(f"\nat work when all was told: {stats.running}, tokens locked: {stats.protected_tokens}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except st.StemmaError as error:
        sys.exit(f"error: {error}")

"""Fork, select, sample: three ways in which a text goes on in more than one direction.

    python examples/fork_and_select.py                # the default model
    python examples/fork_and_select.py path/or/hub-id

A fork asks about several countries after the same examples, a select scores given answers, a
sample draws several continuations. The text that they share is computed once: the tree at the end
shows what the engine keeps.
"""

from __future__ import annotations

import sys

import stemma as st

COUNTRIES = ["Japan", "Kenya", "Italy", "Peru"]


@st.function
def atlas(s: st.ProgramState) -> list[tuple[str, str]]:
    s += "Capitals and continents.\n"
    s += "France: the capital is Paris, the continent is Europe.\n"
    s += "Egypt: the capital is Cairo, the continent is Africa.\n"
    s += "Brazil: the capital is Brasilia, the continent is South America.\n"

    # Fork: each branch goes on from the examples, and none sees another. Nothing waits here.
    branches = s.fork(COUNTRIES)
    for country, branch in zip(COUNTRIES, branches, strict=True):
        branch += f"{country}: the capital is"
        branch += st.gen("capital", max_tokens=8, temperature=0, stop=[",", ".", "\n"])
        # Select: nothing is generated, the most probable of the choices becomes part of the text.
        branch += ", the continent is"
        branch += st.select("continent", [" Africa", " Asia", " Europe", " South America"])

    # Sample: one text, three draws. `postcard` is a list, and the branch goes on with its first.
    s += 'Postcards.\nParis: "We climbed the tower and ate far too much cheese."\n'
    s += 'Cairo: "The pyramids are larger than in any picture, and so is the heat."\n'
    s += 'Rome: "' + st.gen("postcard", n=3, max_tokens=32, temperature=0.8, stop=['"', "\n"])

    # Reading waits for what is read.
    return [(branch["capital"].strip(), branch["continent"].strip()) for branch in branches]


def main(model: str | None = None) -> None:
    backend = st.LocalBackend(model)
    try:
        state = atlas.run(backend=backend, seed=1)
        for country, (capital, continent) in zip(COUNTRIES, state.value, strict=True):
            print(f"{country}: {capital}, {continent}")
        for postcard in state["postcard"]:
            print("Rome:", postcard)

        usage = state.usage
        print(f"\n{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} from the cache:")
        print(backend.tree())
    finally:
        backend.close()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except st.StemmaError as error:
        sys.exit(f"error: {error}")

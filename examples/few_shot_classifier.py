"""Few-shot classification: a handful of solved examples, then `select` for every new item.

    python examples/few_shot_classifier.py                # the default model
    python examples/few_shot_classifier.py path/or/hub-id

`select` writes nothing: it asks the model how probable each answer is and takes the best, so the
answer is always one of the given ones. Every headline is a branch behind the same examples, and the
examples are computed once for all of them.
"""

from __future__ import annotations

import sys

import stemma as st

SECTIONS = ["business", "music", "science", "sports"]

EXAMPLES = {
    "Rock group fills the stadium with its songs": "music",
    "Striker scores three goals against Leeds": "sports",
    "The Wolves win the cup after extra time": "sports",
    "Central bank lowers interest rates": "business",
    "Telescope finds water on a distant planet": "science",
    "Singer announces farewell tour": "music",
    "Airline orders forty new planes": "business",
    "Sprinter breaks the national record": "sports",
    "Old violin found in an attic is a Stradivarius": "music",
    "New vaccine protects against malaria": "science",
    "Pianist gives a concert in the old town": "music",
    "Swimmer wins gold in the relay": "sports",
    "Scientists measure the age of a star": "science",
    "Bank cuts two thousand jobs": "business",
}

TESTS = {
    "Goalkeeper saves two penalties in the final": "sports",
    "Car maker reports record profit": "business",
    "Band plays its first concert in ten years": "music",
    "Fossil of a feathered dinosaur discovered": "science",
    "Orchestra opens the season with Mahler": "music",
    "Tennis champion retires at thirty": "sports",
    "Oil price falls for the third week": "business",
    "Robot lands on the dark side of the moon": "science",
    "Choir of children sings for the queen": "music",
    "Supermarket chain to close fifty stores": "business",
    "Coach leaves the team after five defeats": "sports",
    "Bees can count to four, researchers say": "science",
}


@st.function
def classify(s: st.ProgramState, headlines: list[str]) -> list[tuple[str, float]]:
    """The section of each headline, and how probable the model finds it."""
    for headline, section in EXAMPLES.items():
        s += f"Headline: {headline}\nSection: {section}\n\n"

    branches = s.fork(len(headlines))
    for headline, branch in zip(headlines, branches, strict=True):
        branch += f"Headline: {headline}\nSection: " + st.select("section", SECTIONS)

    # Reading waits; by now all headlines are under way.
    return [(b["section"], b.meta("section").probabilities[b["section"]]) for b in branches]


def main(model: str | None = None) -> None:
    with st.LocalBackend(model) as backend:
        state = classify.run(list(TESTS), backend=backend)

    right = 0
    for (headline, expected), (section, probability) in zip(
        TESTS.items(), state.value, strict=True
    ):
        right += section == expected
        correction = "" if section == expected else f" (it is {expected})"
        print(f"{section:9}{probability:4.0%}  {headline}{correction}")

    usage = state.usage
    print(f"\naccuracy: {right} of {len(TESTS)}")
    print(f"tokens: {usage.computed_tokens:,} computed, {usage.cached_tokens:,} saved by sharing")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except st.StemmaError as error:
        sys.exit(f"error: {error}")

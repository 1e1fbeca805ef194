"""The model as a judge: several dimensions at once, each on its own branch, then one verdict.

    python examples/judge.py                # the default model
    python examples/judge.py path/or/hub-id

Branch, solve, merge (Saha et al. 2023): the report is read once, every dimension is graded on a
branch that does not see the others, and the verdict is given where all grades are known. Grades
come from `select`, so there is nothing to parse, and each comes with a probability: a small judge
leans to friendly grades, but its probabilities put the reports in the right order.
"""

from __future__ import annotations

import sys

import stemma as st

# For each dimension, the good grade and the bad one.
GRADES = {
    "food": ["excellent", "terrible"],
    "service": ["friendly", "rude"],
    "price": ["cheap", "expensive"],
}
STARS = ["one star", "two stars", "three stars", "four stars", "five stars"]

REPORTS = {
    "The Old Mill": "The roast was tender and the dumplings were the best I have ever had. The "
    "owner smiled and brought us a second helping. The bill was small.",
    "Chez Paul": "The potatoes were cold and the meat was grey. The waitress insulted my mother. "
    "It cost a fortune.",
    "Cafe Nord": "The cake was fresh and the coffee was strong. The waiter threw the plates on the "
    "table. We paid very little.",
    "Bella Vista": "The pizza tasted of paper. Nobody said hello, and the waiter swore at us. It "
    "was far too expensive.",
}


@st.function
def judge(s: st.ProgramState, report: str) -> dict[str, tuple[str, float]]:
    """The grade of each dimension, and the probability of the good one."""
    s += st.user("Read this report about a restaurant.\n\n" + report)
    s += st.assistant("I have read it.")

    # Branch and solve: the grades are given side by side.
    branches = s.fork(list(GRADES))
    for (dimension, grades), branch in zip(GRADES.items(), branches, strict=True):
        branch += st.user(f"How was the {dimension}?")
        branch += st.assistant(f"The {dimension} was " + st.select("grade", grades) + ".")

    found = {}
    for dimension, branch in zip(GRADES, branches, strict=True):
        good, _ = GRADES[dimension]
        found[dimension] = branch["grade"], branch.meta("grade").probabilities[good]

    # Merge: what the branches found becomes text, and the verdict is given on it.
    food, service, price = (f"the {name} was {grade}" for name, (grade, _) in found.items())
    s += st.user("How many stars does the restaurant get, from one to five?")
    s += st.assistant(
        f"{food.capitalize()}, {service} and {price}, so it gets " + st.select("stars", STARS) + "."
    )
    return found


def main(model: str | None = None) -> None:
    with st.LocalBackend(model) as backend:
        for name, report in REPORTS.items():
            state = judge.run(report, backend=backend)
            print(f"{name}: {state['stars']}")
            for dimension, (grade, probability) in state.value.items():
                good, _ = GRADES[dimension]
                print(f"  {dimension:8} {grade:10} ({good}: {probability:.0%})")
        stats = backend.stats()
    computed = stats.prompt_tokens - stats.cached_tokens
    print(f"\ntokens: {computed:,} computed, {stats.cached_tokens:,} saved by sharing")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except st.StemmaError as error:
        sys.exit(f"error: {error}")

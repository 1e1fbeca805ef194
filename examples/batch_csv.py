"""A batch: one program over all rows of a file, the results in a new file.

    python examples/batch_csv.py                            # the default model
    python examples/batch_csv.py path/or/hub-id             # results in reviews_read.csv
    python examples/batch_csv.py path/or/hub-id results.csv

`run_batch` runs many rows at a time and returns their states in the order of the rows. All rows
begin with the same examples: the first one computes them, the others find them in the cache. What
is finished is kept in a checkpoint until the results are written: break it off with Ctrl-C, call it
again, and it goes on with the rows that are left.

The same without a line of Python around the program:

    stemma batch examples/batch_csv.py examples/data/reviews.csv --keep id --out reviews_read.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import stemma as st

REVIEWS = Path(__file__).parent / "data" / "reviews.csv"

EXAMPLES = """\
Review: The kettle leaks and the handle gets hot. I sent it back.
Product: kettle
Opinion: negative

Review: I use this lamp every evening, it gives a warm and steady light.
Product: lamp
Opinion: positive

Review: Best headphones I have owned, clear sound and soft on the ears.
Product: headphones
Opinion: positive

Review: After two days the zip of the jacket broke.
Product: jacket
Opinion: negative

"""


@st.function
def read_review(s: st.ProgramState, review: str) -> None:
    s += EXAMPLES
    s += f"Review: {review}\nProduct: " + st.gen("product", max_tokens=8, stop="\n")
    s += "\nOpinion: " + st.select("opinion", ["positive", "negative"])


def read_all(
    rows: list[dict[str, str]], backend: st.Backend, checkpoint: Path
) -> list[st.ProgramState]:
    return read_review.run_batch(
        [{"review": row["review"]} for row in rows],
        backend=backend,
        temperature=0,
        progress=True,
        retries=2,
        checkpoint=checkpoint,
    )


def main(model: str | None = None, results: str = "reviews_read.csv") -> None:
    with REVIEWS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    checkpoint = Path(f"{results}.checkpoint")
    with st.LocalBackend(model) as backend:
        states = read_all(rows, backend, checkpoint)
        stats = backend.stats()

    with Path(results).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "product", "opinion", "review"])
        for row, state in zip(rows, states, strict=True):
            writer.writerow([row["id"], state["product"], state["opinion"], row["review"]])
            print(f"{row['id']:>3} {state['opinion']:9} {state['product']:10} {row['review']}")
    checkpoint.unlink()

    computed = stats.prompt_tokens - stats.cached_tokens
    print(f"\n{len(rows)} rows written to {results}")
    print(f"tokens: {computed:,} computed, {stats.cached_tokens:,} saved by sharing")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3])
    except st.StemmaError as error:
        sys.exit(f"error: {error}")

"""Nine moments in the life of a radix tree: two chats, some few-shot questions, and too little
memory for all of them.

    python examples/nine_moments.py                      # print every moment
    python examples/nine_moments.py --html moments.html  # and write a page to step through them

One program tells the story by which the SGLang paper explains RadixAttention (Zheng et al. 2024,
arXiv 2312.07104). Its branches lie idle between their turns and hold no memory. Nobody tells the
engine what they share: it finds what it still has of a branch, and computes the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

import stemma as st
from stemma.lang.ops import Expr
from stemma.treeview import Moment, Recorder, save_page

SYSTEM = "You are a helpful assistant."
HELLO = (
    "Hello! Here is a problem that I cannot solve. A baker makes 24 rolls in the morning and twice "
    "as many at noon. He sells all but 6 of them, each for 2 coins, and gives the rest to a "
    "school. In the evening he buys flour for 30 coins and milk for 12, and puts what is left into "
    "a jar. I would like to know how many coins there are in the jar that night."
)
EXAMPLES = (
    "Question 1: Where do fish live?\nAnswer 1: In water.\n"
    "Question 2: Who writes books?\nAnswer 2: Authors do.\n"
    "Question 3:"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """In tokens, how much the cache holds and how long each output is.

    These make room run out at the fifth, the eighth and the ninth moment of the default model.
    """

    pool: int = 275
    greeting: int = 10
    solution: int = 16
    abilities: int = 14
    story: int = 126
    variant: int = 12
    answer: int = 5
    reason: int = 16


@st.function
def two_chats_and_some_questions(
    s: st.ProgramState, sizes: Sizes, moment: Callable[[str, str], object]
) -> None:
    first, second, few_shot = s.fork(["first chat", "second chat", "few-shot"])
    moment("The tree is empty", "Nothing has been computed yet, so nothing can be reused.")

    first += st.system(SYSTEM) + st.user(HELLO)
    first += st.assistant(written("greeting", sizes.greeting))
    first["greeting"]  # reading waits until it is there
    moment(
        "The first turn of a chat",
        "System prompt, message and answer are one edge: nothing branches off yet.",
    )

    first += st.user("Solve this problem, please.")
    first += st.assistant(written("solution", sizes.solution))
    first["solution"]
    moment(
        "The chat goes on",
        "The first turn is found in the tree, answer included. Only what follows is computed.",
    )

    second += st.system(SYSTEM) + st.user("What can you do?")
    second += st.assistant(written("abilities", sizes.abilities))
    second["abilities"]
    moment(
        "A second chat with the same system prompt",
        "The edge splits where the two chats part. The system prompt is there once, for both.",
    )

    second += st.user("Write a story about a fox and a river.")
    second += st.assistant(written("story", sizes.story))
    second["story"]
    moment(
        "The second chat goes on, and room runs out",
        "What has not been used for longest goes: the branch of the first chat. The system prompt "
        "is in use and stays.",
    )

    what, when, how = few_shot.fork(["what", "when", "how"])
    what += EXAMPLES + " What do bees make?\nAnswer 3:" + written("answer", sizes.answer)
    what["answer"]
    moment(
        "A question after some examples",
        "It does not begin like the chats, so it becomes a branch of its own.",
    )

    when += EXAMPLES + " When do owls sleep?\nAnswer 3:" + written("answer", sizes.answer)
    how += EXAMPLES + " How do snakes move?\nAnswer 3:" + written("answer", sizes.answer)
    when["answer"], how["answer"]
    moment(
        "Other questions after the same examples",
        "The edge splits where the examples end. Only the questions are computed.",
    )

    first += st.user("How about 36 rolls in the morning?")
    first += st.assistant(written("variant", sizes.variant))
    first["variant"]
    moment(
        "The first chat comes back",
        "Only its system prompt is left; the rest is computed again. The second chat has not been "
        "used for longest, and makes room.",
    )

    what += "Explanation:" + written("reason", sizes.reason, n=4, temperature=0.8)
    what["reason"]
    moment(
        "Many samples for one question",
        "They share everything before them, the answer that the model wrote included. The other "
        "questions and the first chat make room.",
    )


def written(name: str, tokens: int, *, n: int = 1, temperature: float = 0) -> Expr:
    """Exactly `tokens` tokens, so that what they take of the cache is known beforehand."""
    return st.gen(name, tokens, min_tokens=tokens, n=n, temperature=temperature, heal=False)


def record(
    backend: st.LocalBackend,
    sizes: Sizes = Sizes(),
    *,
    seed: int = 19,
    show: Callable[[Moment], object] = lambda _: None,
) -> list[Moment]:
    """Run the program and return its moments; `show` gets each as it comes."""
    recorder = Recorder(backend)

    def moment(title: str, caption: str) -> None:
        show(recorder.note(title, caption))

    two_chats_and_some_questions.run(sizes, moment, backend=backend, seed=seed)
    return recorder.moments


def main(model: str | None = None, html: str | None = None) -> None:
    sizes = Sizes()
    backend = st.LocalBackend(model, kv_tokens=sizes.pool, eviction="lru")
    try:
        moments = record(backend, sizes, show=Console(highlight=False).print)
    finally:
        backend.close()
    if html is not None:
        save_page(moments, html, title="Nine moments of a radix tree")
        print(f"\nwritten: {html}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Nine moments in the life of a radix tree.")
    parser.add_argument("model", nargs="?", help="a folder, a GGUF file or a hub id")
    parser.add_argument("--html", metavar="FILE", help="write a page to step through the moments")
    try:
        main(**vars(parser.parse_args()))
    except st.StemmaError as error:
        sys.exit(f"error: {error}")

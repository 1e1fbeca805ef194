"""A conversation: every turn goes on from what the turns before have computed.

    python examples/chat.py                # the default model
    python examples/chat.py path/or/hub-id

`st.system`, `st.user` and `st.assistant` write messages in the model's own chat format. Nothing is
sent again and nothing is computed again: watch the numbers behind each answer. On a terminal you
may go on with questions of your own; an empty line ends the conversation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import stemma as st

INSTRUCTIONS = """\
You work at the desk of a museum and answer visitors in one short sentence.

The Harbour Museum is open from Tuesday to Sunday, from 10 in the morning to 6 in the evening. A \
ticket costs 8 euros. The oldest ship in the museum is the Seagull, a fishing boat built in 1871. \
The cafe on the second floor sells coffee, cake and fish soup. The bus number 14 stops in front of \
the door."""

QUESTIONS = [
    "When is the museum open?",
    "How much is a ticket?",
    "What is the oldest ship?",
    "When was it built?",
]


@st.function
def chat(s: st.ProgramState, questions: Iterable[str]) -> None:
    s += st.system(INSTRUCTIONS)
    for question in questions:
        print("you:  ", question)
        s += st.user(question)
        s += st.assistant(st.gen("answer", max_tokens=48, stop=[".", "\n"], include_stop=True))
        print("model:", s["answer"])
        usage = s.meta("answer").usage
        print(f"       [{usage.cached_tokens} tokens cached, {usage.computed_tokens} computed]")


def ask() -> Iterator[str]:
    """The questions above, then those that are typed."""
    yield from QUESTIONS
    while sys.stdin.isatty() and (question := input("> ").strip()):
        yield question


def main(model: str | None = None) -> None:
    with st.LocalBackend(model) as backend:
        chat.run(ask(), backend=backend, temperature=0)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except (EOFError, KeyboardInterrupt):
        print()
    except st.StemmaError as error:
        sys.exit(f"error: {error}")

"""The example program behind `stemma demo`: a story is read once, then asked, titled and judged.

Called by the command line; a first program to read and change.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text

import stemma as st
from stemma.board import show_events, told
from stemma.commands.loading import opened_backend

STORY = (
    "The lighthouse at Grey Point had been dark for eleven years when Mara, a retired ship's "
    "carpenter, moved into it with her dog Biscuit. She spent the winter scraping rust from the "
    "iron stairs and polishing the great lens with vinegar and newspaper. The people of the "
    "village laughed, for the harbour had closed long ago and no ship had passed since. On the "
    "first night of spring she lit the lamp all the same. Toward midnight a small fishing boat, "
    "lost in the fog for two days, turned its bow toward the light and came home safely. Since "
    "then the village has paid for the oil."
)
QUESTIONS = {
    "who": ("Who moved into the lighthouse?", "Into the lighthouse moved"),
    "dog": ("What is the name of the dog?", "Mara's dog is named"),
    "oil": ("What did the people pay for?", "They paid for"),
}
TITLES = ("title-1", "title-2", "title-3", "title-4")


@st.function
def lighthouse(s: st.ProgramState) -> None:
    s += st.system("You answer questions about a story in one short sentence.")
    s += st.user("Read this story.\n\n" + STORY) + st.assistant("I have read it.")

    # Every branch goes on from the same text: the engine computes that text once.
    for reader, question in zip(s.fork(list(QUESTIONS)), QUESTIONS.values(), strict=True):
        asked, beginning = question
        reader += st.user(asked)
        # A small model answers better where the answer has begun already.
        reader += st.assistant(beginning + st.gen("answer", max_tokens=40, temperature=0, stop="."))

    # Samples are branches, too; these have the same text and differ in their draws.
    for writer in s.fork(TITLES):
        writer += st.user("Give the story a title.")
        writer += st.assistant(st.gen("title", max_tokens=16, temperature=0.8, stop="\n"))

    # A choice writes nothing: all choices are scored in one pass.
    s += st.user("How does the story end: happily or sadly?")
    s += st.assistant(st.select("ending", ["The story ends happily.", "The story ends sadly."]))


def run_demo(model: str | None = None, *, seed: int = 0, console: Console | None = None) -> None:
    """Run the program on `model`, show its texts as they grow, then the prefix tree and the counts.

    Raises ModelLoadError and whatever the program raises.
    """
    console = console or Console()
    with opened_backend(model, Console(stderr=True)) as backend:
        console.print(Text(STORY, style="dim"))
        console.print()
        started = time.perf_counter()
        stream = lighthouse.stream(backend=backend, seed=seed)
        show_events(stream, console)
        seconds = time.perf_counter() - started
        console.print()
        console.print(backend.tree(), highlight=False)
        console.print()
        console.print(told(stream.state.usage, seconds), soft_wrap=True)

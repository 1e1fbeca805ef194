"""The example program behind `stemma demo`: a story is read once, then asked, titled and judged.

Owns the program and how its run is shown. Called by the command line; a first program to read and
change.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

import stemma as st
from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.metrics import Stats
from stemma.backend.local.model.default_model import resolve_model
from stemma.interpreter.events import Event, Forked, Selected, TextAdded, VariableFinished

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
    "who": "Who moved into the lighthouse?",
    "dog": "What is the name of the dog?",
    "night": "What happened on the first night of spring?",
}
TITLES = ("title-1", "title-2", "title-3", "title-4")


@st.function
def lighthouse(s: st.ProgramState) -> None:
    s += st.system("You answer questions about a story in one short sentence.")
    s += st.user("Read this story.\n\n" + STORY) + st.assistant("I have read it.")

    # Every branch goes on from the same text: the engine computes that text once.
    for reader, question in zip(s.fork(list(QUESTIONS)), QUESTIONS.values(), strict=True):
        reader += st.user(question)
        reader += st.assistant(st.gen("answer", max_tokens=40, temperature=0, stop="\n"))

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
    source = resolve_model(model)
    with console.status("Loading the model"):
        backend = LocalBackend(source)
    try:
        console.print(Text(STORY, style="dim"))
        console.print()
        started = time.perf_counter()
        show_events(lighthouse.stream(backend=backend, seed=seed), console)
        seconds = time.perf_counter() - started
        for part in ("", backend.tree(), "", told(backend.stats(), seconds)):
            console.print(part, highlight=False)
    finally:
        backend.close()


def show_events(events: Iterable[Event], console: Console) -> None:
    """Show a run: on a terminal all texts grow side by side, elsewhere each comes when finished."""
    board = Board()
    if console.is_terminal:
        with Live(board, console=console, refresh_per_second=12):
            for event in events:
                board.take(event)
        return
    for event in events:
        board.take(event)
        if isinstance(event, VariableFinished):
            console.print(board.line(event.branch), highlight=False, soft_wrap=True)


class Board:
    """The texts of a run, one row for each branch that wrote something."""

    def __init__(self) -> None:
        self.rows: dict[str, Text] = {}

    def take(self, event: Event) -> None:
        """Let an event change its branch's row."""
        match event:
            case Forked(children=children):
                for child in children:
                    self.rows[child] = Text()
            case TextAdded(branch=branch, text=text, variable=str()):
                self.rows.setdefault(branch, Text()).append(text)
            case Selected(branch=branch, choice=choice, probabilities=probabilities):
                share = f"  {probabilities[choice]:.0%} of {len(probabilities)} choices"
                self.rows[branch] = Text(choice).append(share, style="dim")

    def line(self, branch: str) -> Text:
        """A branch's row as one line."""
        return Text(f"{branch}  ", style="cyan").append_text(self.rows[branch])

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for branch, text in self.rows.items():
            table.add_row(branch, text)
        return table


def told(stats: Stats, seconds: float) -> Text:
    """What the run took, in words."""
    computed = stats.prompt_tokens - stats.cached_tokens
    return Text(
        f"{stats.prompt_tokens:,} prompt tokens: {stats.cached_tokens:,} came from the cache "
        f"({stats.hit_rate:.0%}), {computed:,} were computed. {stats.output_tokens:,} tokens were "
        f"written. {stats.steps:,} steps in {seconds:.1f} s."
    )

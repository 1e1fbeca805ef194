"""Showing a state: every segment of its kind, what it took, branches if asked, and nothing that
a text could do to a terminal or a page.
"""

from __future__ import annotations

import gc
import re
from html.parser import HTMLParser
from io import StringIO
from typing import Any

import pytest
import rich
from rich.console import Console

import stemma as st
from stemma.backend.mock import Broken, MockBackend
from stemma.interpreter.picture import Picture, Segment, Split, shortened
from tests.conftest import TinyModel


@st.function
def story(s: st.ProgramState) -> None:
    s += st.user("Once " + "upon") + st.control("<x>")
    s += st.gen("one", stop=".") + " and " + st.select("two", ["yes", "no"])
    branches = s.fork(["a", "b"])
    branches += "in branch " + st.gen("three")
    s += st.gen("four", reasoning="why", max_tokens=3) + st.score(" end", "five")


def run(**how: Any) -> st.ProgramState:
    replies = {"branch ": "deep", "yes": "<think>hm</think>so it goes on"}

    def reply(prompt: str, params: st.SamplingParams) -> str:
        return next((text for end, text in replies.items() if prompt.endswith(end)), "a time. No")

    return story.run(backend=MockBackend(reply, **how))


def test_a_picture_has_every_segment_with_its_kind() -> None:
    picture = run().picture()
    assert [(s.kind, s.text, s.variable) for s in picture.segments] == [
        ("template", "<|im_start|>user\n", None),
        ("literal", "Once upon", None),
        ("template", "<|im_end|>\n", None),
        ("control", "<x>", None),
        ("generated", "a time", "one"),
        ("literal", " and ", None),
        ("selected", "yes", "two"),
        ("mark", "<think>", None),
        ("reasoning", "hm", "why"),
        ("mark", "</think>", None),
        ("generated", "so it goes", "four"),
        ("score", "", "five"),
    ]


def test_the_segments_joined_are_the_text() -> None:
    state = run()
    assert "".join(segment.text for segment in state.picture().segments) == state.text()


def test_what_the_model_did_is_told_per_operation() -> None:
    state = run()
    told = {s.variable: s for s in state.picture().segments if s.usage is not None}
    assert list(told) == ["one", "two", "four", "five"]
    for name, segment in told.items():
        assert segment.usage == state.meta(name).usage
    assert told["one"].note == "stopped at '.'"
    assert told["two"].note == "50% of 2 choices"
    assert told["four"].note == "cut by max_tokens"
    assert told["five"].note == "-1.00 for ' end'"


def test_what_has_ended_a_text_in_a_shape_is_told(tiny_model: TinyModel) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Now: " + st.gen("closed", max_tokens=4, on_limit="close", regex="[a-z]{3,}!")
        s += " then " + st.gen("cut", max_tokens=4, on_limit="cut", regex="[a-z]{90}!")
        s += " and " + st.gen("full", regex="[a-z]{900}!")

    folder = tiny_model(max_position_embeddings=128)
    with st.LocalBackend(folder, dtype="float64", device="cpu", kv_tokens=256) as backend:
        picture = program.run(backend=backend).picture()
    notes = {s.variable: s.note for s in picture.segments if s.usage is not None}
    assert notes == {
        "closed": "closed by max_tokens",
        "cut": "cut by max_tokens",
        "full": "cut by the end of the model's context",
    }


def test_samples_are_added_up_and_named() -> None:
    state = st.function(lambda s: s.append("p q" + st.gen("x", n=3))).run(
        backend=MockBackend(["a b", "c", "d"])
    )
    (segment,) = state.picture().segments[1:]
    assert segment.usage is not None
    assert (segment.usage.prompt_tokens, segment.usage.output_tokens) == (6, 4)
    assert segment.note == "ended; the first of 3 samples"


def test_the_usage_is_the_branchs_and_on_the_main_branch_also_the_runs() -> None:
    state = run()
    picture = state.picture(children=True)
    (split,) = (part for part in picture.parts if isinstance(part, Split))
    children = [branch.usage for branch in split.branches]
    assert picture.of_run == state.usage
    assert picture.usage + children[0] + children[1] == pytest.approx(state.usage, abs=0)
    assert all(branch.of_run is None for branch in split.branches)


def test_branches_stand_where_they_went_on() -> None:
    picture = run().picture(children=True)
    at = next(i for i, part in enumerate(picture.parts) if isinstance(part, Split))
    before, split = picture.parts[at - 1], picture.parts[at]
    assert isinstance(before, Segment)
    assert isinstance(split, Split)
    assert before.variable == "two"
    assert [branch.label for branch in split.branches] == ["story/a", "story/b"]
    assert [s.text for s in split.branches[0].segments] == ["in branch ", "deep"]
    assert run().picture().parts == run().picture().segments


def test_a_branch_shown_by_itself_has_all_its_text() -> None:
    kept: list[st.ProgramState] = []

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "before "
        (child,) = s.fork(1)
        s += "after"
        child += "child" + st.gen("x")
        child.copy().append("grandchild")
        kept.append(child)

    program.run(backend=MockBackend(["!"]))
    picture = kept[0].picture(children=True)
    assert [segment.text for segment in picture.segments] == ["before child", "!"]
    assert isinstance(picture.parts[-1], Split)
    assert picture.parts[-1].branches[0].segments[0].text == "grandchild"


def test_branches_that_nothing_holds_any_more_are_shown() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        for word in ("one", "two"):
            s.copy().append(word)

    backend = MockBackend()
    state = program.run(backend=backend)
    while backend.open_branches > 1:
        gc.collect()
    shown = str(state.picture(children=True))
    assert "program/0" in shown
    assert "program/2:0" in shown


def test_a_failure_is_shown_not_raised() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "p" + st.gen("x") + "never"

    with pytest.raises(ZeroDivisionError) as caught:
        program.run(backend=MockBackend([Broken("half", ZeroDivisionError("gone"))]))
    picture = caught.value.state.picture()  # type: ignore[attr-defined]
    assert picture.failure == "ZeroDivisionError: gone"
    assert picture.segments[-1] == Segment("generated", "half", "x", None, "failed here", True)
    assert str(picture).splitlines()[-1].endswith("ZeroDivisionError: gone")


def test_show_prints_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    state = run()
    state.show()
    shown = capsys.readouterr().out
    assert "“a time”" in shown
    assert re.search(r"\d prompt tokens: 0\s+from the\s+cache, \d\s+computed; 2\s+written", shown)
    assert "deep" not in shown
    state.show(children=True)
    assert capsys.readouterr().out.count("deep") == 2
    rich.print(state)
    assert "“a time”" in capsys.readouterr().out


def test_a_picture_prints_one_row_for_each_segment() -> None:
    program = st.function(lambda s: s.append(st.user("hi \n there") + st.gen("x", stop="!")))
    printed = str(program.run(backend=MockBackend(["so!"])).picture())
    assert printed == (
        "<lambda>  4 prompt tokens: 0 from the cache, 4 computed; 1 written\n"
        "├── template  “<|im_start|>user⏎”\n"
        "├── text      “hi ⏎\n"
        "│              there”\n"
        "├── template  “<|im_end|>⏎”\n"
        "└── gen       x “so”\n"
        "              4 prompt tokens: 0 from the cache, 4 computed; 1 written; stopped at '!'"
    )


def test_it_waits_for_what_is_queued() -> None:
    @st.function
    def program(s: st.ProgramState) -> Picture:
        s += st.gen("x")
        return s.picture()

    state = program.run(backend=MockBackend(["late"], delay=0.1))
    assert [segment.text for segment in state.value.segments] == ["late"]


def test_a_notebook_or_debugger_does_not_wait() -> None:
    backend = MockBackend(["never"], delay=60)
    state = st.function(lambda s: s.append("now" + st.gen("x"))).run(backend=backend, stream=True)
    while "now" not in state._repr_html_():
        pass
    assert "never" not in state._repr_html_()
    backend.close()


def test_long_texts_lose_their_middle_unless_all_is_wanted() -> None:
    text = "a" * 3000 + "b" * 3000
    state = st.function(lambda s: s.append(text)).run(backend=MockBackend())
    (segment,) = state.picture().segments
    assert "[…4,000 characters…]" in segment.text
    assert state.picture(limit=None).segments[0].text == text
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 3) == "ab […4 characters…] g"


EVIL = "<script>alert(1)</script><b onclick='x'>&amp;\x1b[31m\x07\u202e\"</details></div>"


@st.function
def evil(s: st.ProgramState) -> None:
    s += st.control(EVIL) + EVIL + st.gen(EVIL, reasoning="why" + EVIL)
    s.fork([EVIL.replace("/", "|")]).__iadd__(EVIL + st.select(EVIL, [EVIL]))
    s += st.score(EVIL, "score" + EVIL)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_self_contained_balanced_and_escaped() -> None:
    tags = Tags()
    tags.feed(evil.run(backend=MockBackend([f"<think>{EVIL}</think>{EVIL}"]))._repr_html_())
    tags.close()
    assert tags.open == []
    assert tags.seen <= {"div", "span", "b", "details", "summary", "br"}
    assert tags.attributes <= {"style", "title", "open"}
    assert tags.text.count(EVIL) >= 8
    assert "prompt tokens" in tags.text


def test_a_text_moves_no_cursor_in_a_terminal() -> None:
    state = evil.run(backend=MockBackend([EVIL]))
    console = Console(file=StringIO(), width=200, color_system=None)
    with console.capture() as capture:
        console.print(state.picture(children=True))
    shown = capture.get()
    assert "\\x1b[31m\\x07\\u202e" in shown
    assert not set("\x1b\x07\u202e") & set(shown)


def test_deep_and_many_forks_are_counted_not_drawn() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s.fork(70).__iadd__("y")
        for _ in range(3000):
            s = s.copy()
            s += "x"

    state = program.run(backend=MockBackend())
    picture = state.picture(children=True)
    assert "and what is below" in str(picture)
    assert "and what is below" in picture._repr_html_()
    assert "… 20 more" in str(picture)
    assert "… 20 more" in picture._repr_html_()
    assert len(str(picture).splitlines()) < 150


def test_of_very_many_branches_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        for _ in range(50):
            s.copy().append("x")

    monkeypatch.setattr("stemma.interpreter.run.RECORDED_BRANCHES", 10)
    state = program.run(backend=MockBackend())
    assert len(state._run.record) <= 10
    shown = str(state.picture(children=True))
    assert "program/50:0" in shown
    assert "program/2:0" not in shown

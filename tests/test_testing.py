"""`stemma.testing` and the pytest plugin: snapshots of what is sent, scripts as fixtures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import stemma as st
from stemma.backend.base import Namespace
from stemma.lang.errors import InvalidArgument
from stemma.testing import UPDATE, MockBackend, assert_prompt, prompt_text

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def _no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UPDATE, raising=False)


@st.function
def talk(s: st.ProgramState, topic: str) -> None:
    s += st.user(f"About {topic}. ")
    for branch in (branches := s.fork(2)):
        branch += st.assistant(st.gen("line", max_tokens=8, stop="\n") + ",\n" + st.gen("more"))
        branch += st.select("mood", ["happy", "angry"])
    branches.join()


def talked(topic: str = "tea") -> MockBackend:
    backend = MockBackend(lambda prompt, params: f"[{len(prompt)}]")
    talk.run(topic, backend=backend)
    return backend


TALK = """\
1: gen max_tokens=8 stop=('\\n',), 2 times
| <|im_start|>user
| About tea. <|im_end|>
| <|im_start|>assistant
|

2: gen, 2 times, after the text of 1
| [61],
|

3: select of 'happy', 'angry', 2 times, after the text of 2
| [67]<|im_end|>
|
"""


def test_a_prompt_is_written_once_and_what_goes_on_from_it_behind_it() -> None:
    assert prompt_text(talked()) == TALK


def test_white_space_at_the_end_of_a_line_is_visible() -> None:
    assert prompt_text("a \t\n b\r\n") == "| a␣\\t\n|  b␍\n|\n"
    assert prompt_text("a") == "| a\n"
    assert prompt_text("a\n") == "| a\n|\n"
    assert prompt_text("a ") != prompt_text("a")


def test_texts_come_in_the_order_of_what_they_go_on_from() -> None:
    shown = prompt_text(["b", "a1x", "a", "a1", "b", ""])
    assert shown == (
        "1: text\n|\n\n2: text\n| a\n\n3: text, after the text of 2\n| 1\n\n"
        "4: text, after the text of 3\n| x\n\n5: text, 2 times\n| b\n"
    )
    assert prompt_text(reversed(["b", "a1x", "a", "a1", "b", ""])) == shown


def test_settings_that_are_not_the_usual_ones_are_told_but_for_the_seed() -> None:
    backend = MockBackend(lambda prompt, params: "x")
    branch = backend.open(Namespace(adapter="a", salt="s"), cache="off", priority=2)
    branch.append("A")
    branch.generate(st.SamplingParams(temperature=0, seed=4), heal=False)
    assert prompt_text(backend).startswith(
        "1: gen temperature=0 heal=False cache='off' priority=2 adapter='a' salt='s'\n"
    )


def test_a_state_is_the_text_of_its_branch() -> None:
    state = talk.run("tea", backend=MockBackend(lambda prompt, params: "x"))
    assert prompt_text(state) == prompt_text(state.text())


@pytest.mark.parametrize("sent", [3, None, [1, 2], MockBackend])
def test_what_was_never_sent_is_refused(sent: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="nothing that was sent"):
        assert_prompt(sent, tmp_path / "x.txt")  # type: ignore[arg-type]


def test_a_snapshot_is_written_when_asked_for_and_compared_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "talk.txt"
    with pytest.raises(AssertionError, match=r"there is no snapshot .*talk\.txt yet: pytest --upd"):
        assert_prompt(talked(), path)
    assert not path.exists()
    assert_prompt(talked(), path, update=True)
    assert path.read_bytes().decode() == TALK
    assert_prompt(talked(), path)
    with pytest.raises(AssertionError) as caught:
        assert_prompt(talked("milk"), path)
    assert "-| About tea. <|im_end|>\n+| About milk. <|im_end|>\n" in str(caught.value)
    monkeypatch.setenv(UPDATE, "1")
    assert_prompt(talked("milk"), path)
    monkeypatch.setenv(UPDATE, "0")
    assert_prompt(talked("milk"), path)
    with pytest.raises(AssertionError):
        assert_prompt(talked(), path)


def test_a_relative_snapshot_is_beside_the_file_that_calls() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_prompt("x", "nowhere.txt")
    assert str(Path(__file__).resolve().parent / "nowhere.txt") in str(caught.value)


def test_line_ends_of_a_checkout_make_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "talk.txt"
    path.write_bytes(TALK.replace("\n", "\r\n").encode())
    assert_prompt(talked(), path)


# Scripts


@st.function
def choose(s: st.ProgramState) -> list[str]:
    found = []
    for _ in range(2):
        s += "A" + st.select("x", ["one", "two words", "three"])
        found.append(s["x"])
    return found


@pytest.mark.parametrize(
    "method",
    [
        st.token_length_normalized,
        st.greedy_token_selection,
        st.unconditional_likelihood_normalized,
    ],
)
def test_scripted_choices_are_chosen_in_order_by_any_method(method: st.ChoicesMethod) -> None:
    @st.function
    def program(s: st.ProgramState) -> list[str]:
        found = []
        for _ in range(2):
            s += "A" + st.select("x", ["one", "two words", "three"], choices_method=method)
            found.append(s["x"])
        return found

    backend = MockBackend(choices=["two words", "three"])
    assert backend.choices_left == 2
    assert program.run(backend=backend).value == ["two words", "three"]
    assert backend.choices_left == 0


def test_a_choice_that_is_none_and_one_too_few_are_told() -> None:
    with pytest.raises(st.StemmaError, match="chooses 'boat', which is none of the choices"):
        choose.run(backend=MockBackend(choices=["boat"]))
    with pytest.raises(st.StemmaError, match="the script has no choice number 2"):
        choose.run(backend=MockBackend(choices=["one"]))
    with pytest.raises(ConnectionError):
        choose.run(backend=MockBackend(choices=["one", ConnectionError("lost")]))


def test_a_script_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="two ways"):
        MockBackend(choices=["a"], scores=lambda prompt, choice: [0.0])
    with pytest.raises(InvalidArgument, match="not one text"):
        MockBackend("reply")
    with pytest.raises(InvalidArgument, match="not one text"):
        MockBackend(choices="reply")


# In pytest


def test_the_plugin_and_the_module_load_no_model_library() -> None:
    heavy = ["torch", "transformers", "tokenizers", "safetensors"]
    for module in ("stemma.pytest_plugin", "stemma.testing"):
        code = f"import sys, {module}; print(sorted({set(heavy)!r} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
        assert (done.stdout, done.stderr) == ("[]\n", "")


def test_pytest_loads_the_plugin_and_nothing_else_of_the_package(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_there():
            assert "stemma.pytest_plugin" in sys.modules
            assert [name for name in sys.modules if name.startswith("stemma.")] == [
                "stemma.pytest_plugin"
            ]
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


SUITE = """
import pytest
import stemma as st

@st.function
def greet(s, name):
    s += f"Hello {name}," + st.gen("x") + st.select("y", ["a", "b"])

def test_greeting(scripted, prompt_snapshot):
    backend = scripted([" dear"], choices=["b"])
    assert greet.run("Ada")["x"] == " dear"
    prompt_snapshot(backend)
    prompt_snapshot("more", "second")

@pytest.mark.parametrize("name", ["Bo/b", "É"])
def test_names(scripted, prompt_snapshot, name):
    scripted(lambda prompt, params: "x")
    prompt_snapshot(greet.run(name))
"""


def test_snapshots_are_named_after_their_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=SUITE)
    missing = pytester.runpytest_subprocess()
    missing.assert_outcomes(failed=3)
    missing.stdout.fnmatch_lines(["*there is no snapshot */snapshots/test_it/test_greeting.txt*"])
    assert not (pytester.path / "snapshots").exists()
    pytester.runpytest_subprocess("--update-prompts").assert_outcomes(passed=3)
    names = sorted(path.name for path in (pytester.path / "snapshots" / "test_it").iterdir())
    assert names == sorted(
        [
            "test_greeting.txt",
            "test_greeting-second.txt",
            "test_names-Bo-b-c7f129.txt",
            "test_names-xc9-462ae4.txt",
        ]
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=3)
    pytester.makepyfile(test_it=SUITE.replace("Hello", "Good day"))
    changed = pytester.runpytest_subprocess()
    changed.assert_outcomes(failed=3)
    changed.stdout.fnmatch_lines(["*-| Hello Ada,", "*+| Good day Ada,"])


CLASSES = """
import pytest

class TestA:
    def test_m(self, prompt_snapshot):
        prompt_snapshot("A")

class TestB:
    class TestC:
        def test_m(self, prompt_snapshot):
            prompt_snapshot("B")

@pytest.mark.parametrize("name", ["a/b", "a-b", "a b", "A"])
def test_m(prompt_snapshot, name):
    prompt_snapshot(name)

@pytest.mark.parametrize("name", ["x", "x-y"])
def test_n(prompt_snapshot, name):
    prompt_snapshot(name, "y" if name == "x" else "")
"""


def test_no_two_tests_have_one_snapshot(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=CLASSES)
    made = pytester.runpytest_subprocess("--update-prompts")
    made.assert_outcomes(passed=7, failed=1)
    made.stdout.fnmatch_lines(["*test_n-x-y.txt was compared already by *test_n?x?: give name=*"])
    folder = pytester.path / "snapshots" / "test_it"
    assert (folder / "TestA" / "test_m.txt").read_text() == "| A\n"
    assert (folder / "TestB" / "TestC" / "test_m.txt").read_text() == "| B\n"
    assert len(list(folder.glob("test_m-*.txt"))) == 4
    pytester.runpytest_subprocess().assert_outcomes(passed=7, failed=1)


def test_a_script_ends_with_its_test_and_must_be_played(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        import stemma as st
        from stemma.interpreter import default

        @st.function
        def greet(s):
            s += "Hello," + st.gen("x")

        def test_one(scripted):
            scripted([" dear", " left"])
            greet.run()

        def test_two():
            assert default._backend is None

        def test_three(scripted):
            scripted([" dear", " left"])
            greet.run()
            assert False

        def test_four(scripted, prompt_snapshot):
            scripted()
            with pytest.raises(ValueError, match="compared already"):
                for _ in range(2):
                    prompt_snapshot("x")
        """
    )
    result = pytester.runpytest_subprocess("--update-prompts")
    result.assert_outcomes(passed=3, errors=1, failed=1)
    result.stdout.fnmatch_lines(["*script was not played to its end: 1 of its replies are left*"])

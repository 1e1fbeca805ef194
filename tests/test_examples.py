"""The examples: their logic on scripted replies, and what they print on the default model."""

from __future__ import annotations

import ast
import csv
import importlib.util
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, strategies
from typer.testing import CliRunner

import stemma as st
from stemma.commands.app import app
from stemma.lang.sampling import SamplingParams

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prefer(*wanted: str) -> Callable[[str, str], list[float]]:
    """Scores by which the `wanted` choices win."""
    return lambda prompt, choice: [-0.1 if choice in wanted else -3.0] * len(choice.split())


# All of them


def test_the_readme_has_a_line_for_every_example() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert {path.name for path in EXAMPLES.glob("*.py")} <= set(listed)
    assert len(listed) == len(set(listed))


SCRIPTS = [
    "fork_and_select",
    "few_shot_classifier",
    "self_consistency",
    "first_answer",
    "chat",
    "batch_csv",
    "skeleton_of_thought",
    "order_form",
    "judge",
    "react_agent",
    "tree_of_thought",
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_a_script_that_tells_an_error_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = EXAMPLES / f"{name}.py"
    assert f"python examples/{name}.py" in (ast.get_docstring(ast.parse(path.read_text())) or "")
    monkeypatch.setattr(sys, "argv", [str(path), "/not/there"])
    with pytest.raises(SystemExit, match=r"error: there is no model at /not/there") as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert "\n" not in str(ended.value)


# Their logic


def test_the_classifier_asks_for_every_headline_behind_the_same_examples() -> None:
    backend = st.MockBackend(scores=prefer("music"))
    classifier = load("few_shot_classifier")
    state = classifier.classify.run(["Choir sings", "Band plays"], backend=backend)
    assert [section for section, _ in state.value] == ["music", "music"]
    assert all(0.25 < probability < 1 for _, probability in state.value)
    examples = state.text()
    assert backend.prompts == [
        f"{examples}Headline: {headline}\nSection: " for headline in ("Choir sings", "Band plays")
    ]


def test_the_vote_counts_answers_and_leaves_out_who_gives_none() -> None:
    vote = load("self_consistency").vote
    reasonings = [
        "So. The answer is Greek.",
        "I do not know.",
        "The answer is Latin.",
        "It is Greek.",
    ]
    assert vote([*reasonings, "The answer is Greek!"]) == [("Greek", 2), ("Latin", 1)]
    assert vote(["I do not know."]) == []


def test_the_samples_of_the_vote_are_those_of_one_prompt() -> None:
    example = load("self_consistency")
    replies = [f"The answer is {'Greek' if i % 4 else 'Latin'}." for i in range(example.SAMPLES)]
    backend = st.MockBackend(replies)
    state = example.ask.run("the Acropolis", backend=backend)
    assert state["reasoning"] == replies
    assert example.vote(state["reasoning"]) == [("Greek", 12), ("Latin", 4)]
    assert len(set(backend.prompts)) == 1


def test_the_first_answers_are_good_ones_and_the_rest_is_stopped() -> None:
    example = load("first_answer")
    good, bad = " fig, kiwi, lime, pear, plum", " fig, fig"
    script = iter([bad, good, ConnectionError(), good, good, good, bad, bad, *[good] * 8])
    backend = st.MockBackend(script)
    assert example.ask.run(backend=backend).value[:2] == ([good] * 3, [good])
    assert example.is_good(good)
    for words in (bad, " fig, kiwi, lime, pear", " fig, , kiwi, lime, pear", ""):
        assert not example.is_good(words)


def test_where_too_few_answers_are_good_or_in_time_those_there_are_are_taken() -> None:
    example = load("first_answer")
    good = " fig, kiwi, lime, pear, plum"
    backend = st.MockBackend(iter([good, *["bad"] * 7, *["slow"] * 8]))
    assert example.ask.run(backend=backend).value[0] == [good]
    backend = st.MockBackend(lambda text, params: good, delay=60)
    assert example.ask.run(0.05, backend=backend).value == ([], [], [])
    assert backend.running == 0


numbers = strategies.integers(0, 10_000).map(str) | strategies.sampled_from(
    ["0.5", "1.25", "12.75"]
)
expressions = strategies.recursive(
    numbers,
    lambda inner: (
        strategies.tuples(inner, strategies.sampled_from(["+", "-", "*", "/"]), inner).map(" ".join)
        | inner.map("({})".format)
        | inner.map("-{}".format)
    ),
    max_leaves=8,
)


@given(expressions)
def test_the_calculator_computes_what_python_computes(expression: str) -> None:
    calculate = load("react_agent").calculate
    try:
        expected = f"{eval(expression):.12g}"
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            calculate(expression)
    else:
        assert calculate(expression) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').getcwd()",
        "2 ** 9999999999",
        "x + 1",
        "True + 1",
        "'a' * 3",
        "[1][0]",
        "1 if 2 else 3",
        "23 * 34 euros",
        "",
        "1 / 0",
        "(" * 90 + "1",
        "9" * 5000,
        "1" + "+1" * 100_000,
        "-" * 100_000 + "1",
    ],
)
def test_the_agent_is_told_an_error_for_whatever_is_no_arithmetic(expression: str) -> None:
    call = f"calculate({json.dumps({'expression': expression})})"
    backend = st.MockBackend(["Hm.", call])
    state = load("react_agent").agent.run("?", most_steps=1, backend=backend)
    assert state["call"].error is not None
    assert state.text().endswith(f"Observation: {state['call'].error}\n")


def test_the_agent_reads_what_its_tools_observed_until_it_answers() -> None:
    example = load("react_agent")
    replies = {
        "Question: Two lamps?\nThought: ": "I need a price.",
        "Thought: I need a price.\nAction: ": 'price({"thing": "lamp"})',
        "Observation: 34\nThought: ": "2 lamps.",
        "Thought: 2 lamps.\nAction: ": 'calculate({"expression": "2 * 34"})',
        "Observation: 68\nThought: ": "Done.",
        "Thought: Done.\nAction: ": 'answer({"text": "68"})',
    }

    def reply(prompt: str, params: SamplingParams) -> str:
        (found,) = [text for end, text in replies.items() if prompt.endswith(end)]
        return found

    state = example.agent.run("Two lamps?", backend=st.MockBackend(reply))
    assert state.value == "68"
    assert state.text().removeprefix(example.EXAMPLES) == (
        "Question: Two lamps?\n"
        'Thought: I need a price.\nAction: price({"thing": "lamp"})\nObservation: 34\n'
        'Thought: 2 lamps.\nAction: calculate({"expression": "2 * 34"})\nObservation: 68\n'
        'Thought: Done.\nAction: answer({"text": "68"})\n'
    )


def test_the_agent_gives_up_after_its_last_step() -> None:
    backend = st.MockBackend(["Hm.", 'price({"thing": "desk"})'] * 3)
    state = load("react_agent").agent.run("A boat?", most_steps=3, backend=backend)
    assert state.value is None
    assert state.text().endswith("Observation: 175\n")
    assert state.text().removeprefix(load("react_agent").EXAMPLES).count("price(") == 3


@pytest.mark.parametrize(
    ("line", "syllables"),
    [
        ("", 0),
        ("the", 1),
        ("Snow on the rooftops", 5),
        ("and a thin line of grey smoke", 7),
        ("above the still street", 5),
        ("a little table", 5),
    ],
)
def test_syllables_are_counted(line: str, syllables: int) -> None:
    assert load("tree_of_thought").count_syllables(line) == syllables


def test_the_tree_of_thought_keeps_the_lines_of_the_right_length_that_fit_best() -> None:
    example = load("tree_of_thought")

    def write(prompt: str, params: SamplingParams) -> str:
        words = [
            "oak",
            "ash",
            "oak oak oak oak oak",
            "ash ash ash ash ash",
            "oak oak oak oak oak oak oak",
        ]
        return words[len(backend.calls) % len(words)]

    def score(prompt: str, choice: str) -> list[float]:
        last_line = prompt.rsplit("\n", 2)[1]
        fits = choice == ("forest" if "oak" in last_line else "sea")
        return [-0.1 if fits else -5.0]

    backend = st.MockBackend(write, scores=score)
    poem = example.haiku.run("forest", width=5, backend=backend).value
    assert poem.split("\n") == ["oak " * 4 + "oak", "oak " * 6 + "oak", "oak " * 4 + "oak", ""]
    written = [call for call in backend.calls if call.params is not None]
    assert len(written) == 5 + 10 + 10
    judged = [call.prompt for call in backend.calls if call.choices]
    assert not any("Haiku about" in prompt for prompt in judged)  # the judge is not told the task


def test_the_skeletons_points_do_not_see_each_others_texts() -> None:
    def write(prompt: str, params: SamplingParams) -> str:
        asked = prompt.rsplit("\n", 1)[1]
        return f"text of {asked[4]}" if asked.startswith("On ") else f"{'abc'[int(asked[0]) - 1]}."

    backend = st.MockBackend(write)
    state = load("skeleton_of_thought").answer.run("Why?", backend=backend)
    assert state.value == "- a.: text of a\n- b.: text of b\n- c.: text of c"
    assert state["text"] == ["text of a", "text of b", "text of c"]
    assert [prompt.endswith('1. a.\n2. b.\n3. c.\nOn "b.": ') for prompt in backend.prompts] == [
        False, False, False, False, True, False,
    ]  # fmt: skip


def test_a_chat_goes_on_for_as_long_as_there_are_questions(capsys: pytest.CaptureFixture) -> None:
    example = load("chat")
    backend = st.MockBackend(["At ten. And", "Eight euros."])
    state = example.chat.run(["When?", "How much?"], backend=backend)
    assert [message["content"] for message in state.messages()] == [
        example.INSTRUCTIONS, "When?", "At ten.", "How much?", "Eight euros.",
    ]  # fmt: skip
    assert capsys.readouterr().out.count("model:") == 2


def test_a_chat_that_has_no_terminal_ends_with_its_own_questions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    example = load("chat")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert list(example.ask()) == example.QUESTIONS
    typed = iter(["Any cake?", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert list(example.ask()) == [*example.QUESTIONS, "Any cake?"]


def test_the_judges_verdict_is_given_on_the_grades_of_all_dimensions() -> None:
    backend = st.MockBackend(scores=prefer("terrible", "friendly", "expensive", "two stars"))
    state = load("judge").judge.run("It was nice.", backend=backend)
    assert {name: grade for name, (grade, _) in state.value.items()} == {
        "food": "terrible", "service": "friendly", "price": "expensive",
    }  # fmt: skip
    assert state.value["food"][1] < 0.5 < state.value["service"][1]
    assert state.messages()[-1]["content"] == (
        "The food was terrible, the service was friendly and the price was expensive, "
        "so it gets two stars."
    )


def test_a_review_is_read_behind_the_examples() -> None:
    backend = st.MockBackend(["lamp\nOpinion"], scores=prefer("negative"))
    state = load("batch_csv").read_review.run("The lamp is dark.", backend=backend)
    assert state.text().endswith("Review: The lamp is dark.\nProduct: lamp\nOpinion: negative")


def test_the_batch_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    example = load("batch_csv")
    with example.REVIEWS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    def backend() -> st.MockBackend:
        return st.MockBackend(lambda prompt, params: "lamp\n", scores=prefer("negative"))

    kept = tmp_path / "kept"
    example.read_all(rows, backend(), kept)
    kept.write_text("\n".join(kept.read_text().split("\n")[:10]) + "\nhalf a li")
    second = backend()
    states = example.read_all(rows, second, kept)
    assert len(second.calls) == 2 * (len(rows) - 9)
    assert [state["opinion"] for state in states] == ["negative"] * len(rows)


def test_the_command_of_the_batch_takes_its_program_and_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("batch_csv")
    (command,) = re.findall(r"^    stemma (batch .*)$", example.__doc__ or "", re.MULTILINE)

    @contextmanager
    def opened(*_: object) -> Iterator[st.Backend]:
        yield st.MockBackend(lambda prompt, params: "lamp\n", scores=prefer("positive"))

    monkeypatch.setattr("stemma.commands.batch.opened_backend", opened)
    words = [str(EXAMPLES.parent / w) if w.startswith("examples/") else w for w in command.split()]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    with open("reviews_read.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [str(i) for i in range(1, len(rows) + 1)]
    assert {(row["product"], row["opinion"], row["error"]) for row in rows} == {
        ("lamp", "positive", "")
    }


# On the default model


def tokens_told(output: str, pattern: str) -> list[int]:
    """The numbers that an example's last lines tell."""
    found = re.search(pattern, output)
    assert found is not None, output
    return [int(number.replace(",", "")) for number in found.groups()]


COMPUTED_AND_SAVED = r"([\d,]+) (?:tokens )?computed, ([\d,]+) saved"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sharing"),
    [
        ("few_shot_classifier", 10),
        ("self_consistency", 10),
        ("skeleton_of_thought", 3),
        ("tree_of_thought", 20),
        ("judge", 5),
        ("react_agent", 5),
    ],
)
def test_an_example_computes_a_fraction_of_its_prompts(
    name: str, sharing: int, default_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`sharing`: how many tokens are saved at least for each one that is computed."""
    example = load(name)
    example.main(str(default_model_folder))
    output = capsys.readouterr().out
    computed, saved = tokens_told(output, COMPUTED_AND_SAVED)
    assert 0 < computed * sharing < saved
    CHECKS[name](example, output)


def check_few_shot_classifier(example: ModuleType, output: str) -> None:
    (right,) = tokens_told(output, rf"accuracy: (\d+) of {len(example.TESTS)}")
    assert right >= 10  # by chance: 3
    assert all(headline in output for headline in example.TESTS)


def check_self_consistency(example: ModuleType, output: str) -> None:
    samples = re.findall(r"^- (.*)$", output, re.MULTILINE)
    assert len(samples) == example.SAMPLES
    assert len(set(samples)) > 1
    assert f"\nanswer: {example.vote(samples)[0][0]}\n" in output
    assert "\nanswer: Greek\n" in output
    shared, alone = tokens_told(output, r"output: ([\d,]+) computed;\n.* had been ([\d,]+)")
    assert shared * 4 < alone


def check_skeleton_of_thought(example: ModuleType, output: str) -> None:
    assert len(re.findall(r"^- .+: .+$", output, re.MULTILINE)) == 3
    written, steps = tokens_told(output, r"(\d+) tokens were written in (\d+) steps")
    assert steps < written


def check_tree_of_thought(example: ModuleType, output: str) -> None:
    poem = output.split("\n\n")[1].splitlines()
    assert [example.count_syllables(line) for line in poem] == [5, 7, 5]


def check_judge(example: ModuleType, output: str) -> None:
    sure = [int(number) for number in re.findall(r"friendly: (\d+)%", output)]
    mill, paul, _, vista = sure
    assert mill > max(paul, vista)
    assert len(re.findall(r": (one|two|three|four|five) stars?$", output, re.MULTILINE)) == 4


def check_react_agent(example: ModuleType, output: str) -> None:
    for question, answer in zip(example.QUESTIONS, (782, 632, 2100, 324), strict=True):
        conversation = output.split(f"Question: {question}")[1].split("Question:")[0]
        assert f'Action: answer({{"text": "{answer}"}})\n' in conversation
        assert f"Observation: {answer}\n" in conversation


CHECKS = {
    "few_shot_classifier": check_few_shot_classifier,
    "self_consistency": check_self_consistency,
    "skeleton_of_thought": check_skeleton_of_thought,
    "tree_of_thought": check_tree_of_thought,
    "judge": check_judge,
    "react_agent": check_react_agent,
}


@pytest.mark.slow
def test_each_turn_of_the_chat_computes_little_more_than_its_question(
    default_model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    example = load("chat")
    example.main(str(default_model_folder))
    output = capsys.readouterr().out
    turns = re.findall(r"\[(\d+) tokens cached, (\d+) computed\]", output)
    cached, computed = zip(*[(int(a), int(b)) for a, b in turns], strict=True)
    assert len(turns) == len(example.QUESTIONS)
    assert cached[0] == 0
    assert list(cached) == sorted(cached)
    assert max(computed[1:]) < 30 < computed[0]
    assert "1871" in output


def test_the_fields_of_a_form_are_variables() -> None:
    example = load("order_form")
    forms = ["Name: Ada\nItems: 2 cups, 1 tray\nPayment: cash\n", "Name: Bob\nItems: 10 pens\n"]
    backend = st.MockBackend(forms)
    first, second = (example.read_order.run("Hi.", backend=backend) for _ in forms)
    assert first.value == [(2, "cups"), (1, "tray")]
    assert (first["name"], first["payment"]) == ("Ada", "cash")
    assert second.value == [(10, "pens")]
    assert (second["name"], second["payment"]) == ("Bob", None)
    for form in re.findall(r"Name: .*\n(?:.+\n)*", example.EXAMPLES):
        assert st.Constraint.grammar(example.FORM).matches(form)


@pytest.mark.slow
def test_the_model_fills_in_the_forms(
    default_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("order_form")
    example.main(str(default_model_folder))
    output = capsys.readouterr().out
    told = re.findall(r"^  ([A-Z][a-z]+): (.*); pays by (card|cash|\?)$", output, re.MULTILINE)
    assert [name for name, _, _ in told] == ["Maria", "Ben", "Alice"]
    assert [len(ordered.split(", ")) for _, ordered, _ in told] == [1, 3, 1]
    written, forced = tokens_told(output, r"(\d+) written, (\d+) of them not drawn")
    assert written / 5 < forced < written


@pytest.mark.slow
def test_the_batch_writes_a_row_for_every_row(
    default_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("batch_csv")
    results = tmp_path / "results.csv"
    example.main(str(default_model_folder), str(results))
    assert list(tmp_path.iterdir()) == [results]
    with results.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with example.REVIEWS.open(newline="", encoding="utf-8") as file:
        assert [row["review"] for row in rows] == [row["review"] for row in csv.DictReader(file)]
    assert sum(row["product"] in row["review"] for row in rows) >= 10
    assert {row["opinion"] for row in rows} == {"positive", "negative"}
    computed, saved = tokens_told(capsys.readouterr().out, COMPUTED_AND_SAVED)
    assert 0 < computed * 5 < saved


@pytest.mark.slow
def test_the_first_answers_of_the_model_leave_the_engine_idle(
    default_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("first_answer")
    example.main(str(default_model_folder))
    output = capsys.readouterr().out
    good = re.findall(r"^ - (.*)$", output, re.MULTILINE)
    assert len(good) <= example.WANTED
    assert all(map(example.is_good, good))
    assert tokens_told(output, r"at work when all was told: (\d+), tokens locked: (\d+)") == [0, 0]

"""Programs of every shape that SGLang's frontend knows, as its users write them: only the import
is changed.

On a script, that is; `test_from_sglang_model.py` runs some on the model. What differs on purpose is
tested in `test_from_sglang_differences.py`, the names in `test_from_sglang_names.py`.
"""

from __future__ import annotations

import asyncio
import json
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import stemma as sgl
from stemma.lang.ops import Gen


@pytest.fixture(autouse=True)
def _no_default_backend() -> Iterator[None]:
    yield
    sgl.set_default_backend(None)


def play(*replies: Any, **how: Any) -> sgl.MockBackend:
    """Make a script the default backend, as an SGLang user makes an endpoint."""
    backend = sgl.MockBackend(list(replies), **how)
    sgl.set_default_backend(backend)
    return backend


def play_by(reply: Callable[[str], str], **how: Any) -> sgl.MockBackend:
    """Make a function of the prompt the default backend: for branches, which come in any order."""
    backend = sgl.MockBackend(lambda prompt, params: reply(prompt), **how)
    sgl.set_default_backend(backend)
    return backend


@sgl.function
def few_shot(s: Any, question: str) -> None:
    s += "Q: How many legs has a spider?\nA: Eight.\n"
    s += "Q: How many legs has an ant?\nA: Six.\n"
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", max_tokens=16, stop="\n")


def test_few_shot_question_answering() -> None:
    backend = play(" Four.\nQ: How")
    state = few_shot.run(question="How many legs has a cow?", temperature=0, max_new_tokens=64)
    assert state["answer"] == " Four."
    assert state.text().endswith("How many legs has a cow?\nA: Four.")
    params = backend.calls[0].params
    assert params is not None
    assert (params.temperature, params.max_tokens, params.stop) == (0, 16, ("\n",))


def test_a_program_is_called_like_a_function() -> None:
    play(" Four.")
    assert few_shot("How many legs has a cow?")["answer"] == " Four."


@sgl.function
def chat_of_wrappers(s: Any, first: str, second: str) -> None:
    s += sgl.system("You know the sea.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=32))
    s += sgl.user(second)
    s += sgl.assistant("Well: " + sgl.gen("answer_2", max_tokens=32))


@sgl.function
def chat_of_edges(s: Any, first: str, second: str) -> None:
    s += sgl.system_begin() + "You know the sea." + sgl.system_end()
    for number, question in ((1, first), (2, second)):
        s += sgl.user_begin()
        s += question
        s += sgl.user_end()
        s += sgl.assistant_begin()
        if number == 2:
            s += "Well: "
        s += sgl.gen(f"answer_{number}", max_tokens=32)
        s += sgl.assistant_end()


@sgl.function
def chat_of_blocks(s: Any, first: str, second: str) -> None:
    s.system("You know the sea.")
    with s.user():
        s += first
    with s.assistant():
        s += sgl.gen("answer_1", max_tokens=32)
    s.user(second)
    s.assistant("Well: " + sgl.gen("answer_2", max_tokens=32))


@pytest.mark.parametrize("program", [chat_of_wrappers, chat_of_edges, chat_of_blocks])
def test_a_chat_of_two_turns_in_all_styles(program: sgl.Program) -> None:
    backend = play("Salt.", "Deep.")
    state = program.run(first="What is in it?", second="And how is it?")
    assert (state["answer_1"], state["answer_2"]) == ("Salt.", "Deep.")
    assert state.messages() == [
        {"role": "system", "content": "You know the sea."},
        {"role": "user", "content": "What is in it?"},
        {"role": "assistant", "content": "Salt."},
        {"role": "user", "content": "And how is it?"},
        {"role": "assistant", "content": "Well: Deep."},
    ]
    assert backend.prompts[1] == state.text()[: -len("Deep.<|im_end|>\n")]


def test_a_role_without_content_is_an_empty_message() -> None:
    play()
    state = sgl.function(lambda s: s.append(sgl.user())).run()
    assert state.messages() == [{"role": "user", "content": ""}]


METHODS = [
    sgl.token_length_normalized,
    sgl.greedy_token_selection,
    sgl.unconditional_likelihood_normalized,
]


@pytest.mark.parametrize("method", METHODS)
def test_choices_and_select_with_every_method(method: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Is fire hot? " + sgl.gen("a", choices=["no", "yes"], choices_method=method)
        s += " Is ice hot? " + sgl.select("b", ["no", "yes"], choices_method=method)

    def scores(prompt: str, choice: str) -> list[float]:
        if not prompt:
            return [-1.0]
        return [-0.1 if (choice == "yes") == prompt.endswith("fire hot? ") else -2.0]

    play(scores=scores)
    state = program.run()
    assert state.text() == "Is fire hot? yes Is ice hot? no"
    assert (state["a"], state["b"]) == ("yes", "no")
    assert state.meta("a").method == method


def test_select_by_keywords_with_a_temperature_of_zero() -> None:
    play()
    program = sgl.function(
        lambda s: s.append(sgl.select(name="a", choices=["x", "y"], temperature=0.0))
    )
    assert program.run()["a"] == "x"


def test_json_by_hand_in_a_scope() -> None:
    @sgl.function
    def character(s: Any, name: str) -> None:
        s += name + " as JSON:\n"
        with s.var_scope("json_output"):
            s += '{"name": "' + name + '", "house": "'
            s += sgl.gen("house", choices=["Lion", "Snake"])
            s += '", "age": ' + sgl.gen("age", max_tokens=4, stop=[",", "}"]) + "}"

    play("11}")
    state = character.run("Hermine")
    assert json.loads(state["json_output"]) == {"name": "Hermine", "house": "Lion", "age": 11}


def test_a_variable_is_used_in_later_text() -> None:
    @sgl.function
    def story(s: Any) -> None:
        s += "Her name was" + sgl.gen("name", stop=".") + ". "
        s += "Everybody knew" + s["name"] + ", and" + s["name"] + " knew" + sgl.gen("end")
        s["loud"] = s["name"].upper()
        assert "name" in s
        assert "age" not in s

    backend = play(" Ada. She", " them.")
    state = story.run()
    assert state.text() == "Her name was Ada. Everybody knew Ada, and Ada knew them."
    assert backend.prompts[1].endswith("and Ada knew")
    assert state["loud"] == " ADA"


OPERATORS = {"+": operator.add, "*": operator.mul}


def calculate(text: str) -> int:
    match = re.search(r"(\d+) *([+*]) *(\d+)", text)
    assert match is not None
    return int(OPERATORS[match[2]](int(match[1]), int(match[3])))


def test_tool_use_with_python_between_generations() -> None:
    @sgl.function
    def tool_use(s: Any, question: str) -> None:
        s += "To answer this question: " + question + " "
        s += "I need a " + sgl.gen("tool", choices=["search engine", "calculator"]) + ". "
        if s["tool"] == "calculator":
            s += "The expression is" + sgl.gen("expression", stop=".") + ". "
            s += f"It gives {calculate(s['expression'])}."
        else:
            s += "The words to look for are" + sgl.gen("words")

    def scores(prompt: str, choice: str) -> list[float]:
        return [-1.0 if ("times" in prompt) == (choice == "calculator") else -3.0] * 2

    play(" 6 * 7. So", scores=scores)
    assert tool_use.run("What is 6 times 7?").text().endswith("is 6 * 7. It gives 42.")
    play(" tallest tree", scores=scores)
    assert tool_use.run("Which tree is the tallest?")["words"] == " tallest tree"


def test_a_react_loop_ends_by_a_choice() -> None:
    notes = {"moon": "The moon is 384,400 km away.", "light": "Light makes 299,792 km a second."}

    @sgl.function
    def react(s: Any, question: str, most: int) -> int:
        s += "Question: " + question + "\n"
        for step in range(1, most + 1):
            s += f"Thought {step}:" + sgl.gen(f"thought_{step}", stop="\n") + "\n"
            s += f"Action {step}: " + sgl.gen(f"action_{step}", choices=["look up", "finish"])
            if s[f"action_{step}"] == "finish":
                s += " with" + sgl.gen("answer", stop="\n") + "\n"
                break
            s += sgl.gen(f"word_{step}", stop="\n") + "\n"
            s += f"Observation {step}: " + notes[s[f"word_{step}"].strip()] + "\n"
        return step

    play(
        " How far?\n",
        " moon\n",
        " How fast?\n",
        " light\n",
        " Divide.\n",
        " 1.3 seconds\n",
        scores=lambda prompt, choice: [-1.0 if ("3:" in prompt) == (choice == "finish") else -2.0],
    )
    state = react.run("How long does light need to the moon?", most=8)
    assert state.value == 3
    assert state["answer"] == " 1.3 seconds"
    assert state.text().count("Observation") == 2


@sgl.function
def expand(s: Any, topic: str, points: int) -> None:
    s += sgl.system("You write short texts.")
    s += sgl.user(f"Name {points} points on {topic}.")
    s += sgl.assistant(
        "".join(f"{i}. point {i}\n" for i in range(1, points + 1))  # the skeleton
    )
    forks = s.fork(points)
    for i, f in enumerate(forks):
        f += sgl.user(f"Expand point {i + 1}.")
        f += sgl.assistant(sgl.gen("detail", max_tokens=24, stop="\n\n"))
    forks.join()
    s += sgl.user("Sum up: " + " ".join(s["detail"]))
    s += sgl.assistant(sgl.gen("summary", max_tokens=24))


def about(prompt: str) -> str:
    number = re.findall(r"Expand point (\d)", prompt)
    return f"detail {number[0]}.\n\nMore" if number else "all of it"


def test_a_skeleton_is_expanded_in_parallel_and_joined() -> None:
    backend = play_by(about, delay=0.2)
    state = expand.run(topic="bread", points=3)
    assert state["detail"] == ["detail 1.", "detail 2.", "detail 3."]
    assert state["summary"] == "all of it"
    assert "Sum up: detail 1. detail 2. detail 3." in backend.prompts[-1]
    assert backend.most_running == 3


def test_branches_are_written_back_into_their_parent_in_order() -> None:
    @sgl.function
    def document(s: Any, titles: list[str]) -> None:
        s += "Chapters\n"
        forks = s.fork(len(titles))
        for i in range(len(titles)):
            forks[i] += f"# {titles[i]}\n"
            forks[i] += sgl.gen("text", max_tokens=8) + "\n"
        for title, fork in zip(titles, forks, strict=True):
            s += f"# {title}\n" + fork["text"] + "\n"

    play_by(lambda prompt: "about " + prompt.split("# ")[-1].strip())
    state = document.run(["eggs", "milk"])
    assert state.text() == "Chapters\n# eggs\nabout eggs\n# milk\nabout milk\n"


def test_forks_take_one_expression_one_each_or_a_function() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "p"
        forks = s.fork(3)
        forks += lambda i: f" {i}:" + sgl.gen("x")
        forks += [", a", ", b", ", c"]
        forks += "!" + sgl.gen("y")
        s["texts"] = [f.text() for f in forks]

    play_by(lambda prompt: f"[{prompt[-1]}]")
    assert program.run()["texts"] == [f"p {i}:[:], {c}![!]" for i, c in enumerate("abc")]


def test_a_copy_gives_its_variables_back_as_lists() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "p"
        with s.copy() as tmp:
            tmp += "aside" + sgl.gen("x")
        s += "q"

    play(" told")
    state = program.run()
    assert (state["x"], state.text()) == ([" told"], "pq")


def test_several_samples_of_one_prompt() -> None:
    play("a", "b", "c")
    program = sgl.function(lambda s: s.append("p" + sgl.gen("x", n=3)))
    assert program.run()["x"] == ["a", "b", "c"]


def test_one_variable_is_streamed() -> None:
    play("one", "t w o", pieces=3, delay=0.05)
    state = chat_of_wrappers.run(first="a", second="b", stream=True)
    assert list(state.text_iter("answer_2")) == ["t ", "w ", "o"]
    assert "".join(state.text_iter()) == state.text()


def test_one_variable_is_streamed_into_async_code() -> None:
    async def read() -> list[str]:
        state = chat_of_wrappers.run(first="a", second="b", stream=True)
        return [piece async for piece in state.text_async_iter("answer_2")]

    play("one", "t w o", pieces=3, delay=0.05)
    assert asyncio.run(read()) == ["t ", "w ", "o"]


def test_every_sampling_parameter_has_sglangs_name() -> None:
    backend = play("x")
    given = {
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_regex": "c+",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "ignore_eos": True,
    }
    sgl.function(lambda s: s.append(sgl.gen("x", return_logprob=True, **given))).run()
    params = backend.calls[0].params
    assert params is not None
    assert params.logprobs
    expected = {**given, "stop": ("a", "b")}
    assert {name: getattr(params, name) for name in given} == expected
    stopped = sgl.gen("x", stop_token_ids=[7])
    assert isinstance(stopped, Gen)
    assert stopped.params.stop_token_ids == (7,)


def test_parameters_may_be_positional_in_sglangs_order() -> None:
    by_name = sgl.gen("x", max_tokens=16, min_tokens=4, n=1, stop="\n")
    assert sgl.gen("x", 16, 4, 1, "\n") == by_name
    by_name = sgl.select("x", choices=["a"], choices_method=sgl.greedy_token_selection)
    assert sgl.select("x", ["a"], 0.0, sgl.greedy_token_selection) == by_name


def test_a_batch_of_dicts_and_of_tuples_in_order() -> None:
    play_by(lambda prompt: " " + prompt.split("has a")[-1].split("?")[0] + "\n")
    questions = [f"How many legs has a {animal}?" for animal in ("cow", "hen", "bee")]
    expected = ["  cow", "  hen", "  bee"]
    states = few_shot.run_batch([{"question": q} for q in questions], temperature=0)
    assert [state["answer"] for state in states] == expected
    states = few_shot.run_batch([(q,) for q in questions], num_threads=2, max_new_tokens=9)
    assert [state["answer"] for state in states] == expected
    assert few_shot.run_batch([]) == []


def test_bound_arguments() -> None:
    play("a", "b")
    polite = chat_of_wrappers.bind(second="Thank you")
    assert polite.run(first="Hello").messages()[3]["content"] == "Thank you"


def test_a_backend_may_be_named_by_the_run_and_its_cache_flushed() -> None:
    play()
    other = sgl.MockBackend([" Four."])
    assert few_shot.run("?", backend=other)["answer"] == " Four."
    assert sgl.flush_cache() == sgl.flush_cache(other) == 0


def test_programs_call_programs() -> None:
    @sgl.function
    def outer(s: Any) -> str:
        inner = few_shot.run(question="How many legs has a cow?")
        s += "It has" + inner["answer"].lower() + sgl.gen("more")
        return "done"

    play(" Four.", " Really.")
    state = outer.run()
    assert state.text() == "It has four. Really."

"""What the words of the language build, and what they refuse on the line that is written."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest

import stemma as st
from stemma.lang.errors import InvalidArgument, UnsupportedByBackend
from stemma.lang.ops import Chain, Gen, RoleBegin, RoleEnd, Select, Text


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_an_operation_knows_the_line_that_made_it() -> None:
    operation, here = st.gen("x"), line()
    assert operation.site.file == __file__
    assert operation.site.line == here
    assert "test_an_operation_knows" in operation.site.function


def test_an_operation_inside_a_message_knows_its_own_line() -> None:
    message = st.user("hello " + st.gen("x"))
    assert {part.site.line for part in message} == {line() - 1}


def test_plus_joins_text_and_operations_in_order() -> None:
    chain = "a" + st.gen("x") + "b" + st.select("y", ["c"])
    assert isinstance(chain, Chain)
    kinds = [type(part) for part in chain]
    assert kinds == [Text, Gen, Text, Select]
    assert [part.text for part in chain if isinstance(part, Text)] == ["a", "b"]


def test_chains_join_from_either_side() -> None:
    assert "a" + (st.gen("x") + "b") == ("a" + st.gen("x")) + "b"


@pytest.mark.parametrize("value", [3, None, ["a"], b"a"])
def test_what_is_neither_text_nor_operation_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="None" if value is None else type(value).__name__):
        st.gen("x") + value


def test_an_operation_in_an_f_string_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="f-string"):
        f"answer: {st.gen('x')}"


def test_operations_are_frozen_and_the_lists_of_the_program_stay_its_own() -> None:
    stops, choices = ["\n"], ["a", "b"]
    generation, selection = st.gen("x", stop=stops), st.select("y", choices)
    stops.append("."), choices.append("c")
    assert isinstance(generation, Gen)
    assert generation.params.stop == ("\n",)
    assert selection.choices == ("a", "b")
    with pytest.raises(AttributeError):
        generation.name = "z"  # type: ignore[misc]


def test_only_what_was_written_counts_as_given() -> None:
    operation = st.gen("x", temperature=1.0, stop="\n")
    assert isinstance(operation, Gen)
    assert operation.given == {"temperature", "stop"}


def test_sglang_names_of_logprobs_are_taken() -> None:
    operation = st.gen("x", return_logprob=True, top_logprobs_num=2)
    assert isinstance(operation, Gen)
    assert operation.params.logprobs
    assert operation.params.top_logprobs == 2
    assert operation.given == {"logprobs", "top_logprobs"}


def test_an_impossible_sampling_value_is_refused_where_it_is_written() -> None:
    with pytest.raises(InvalidArgument, match="temperature=-1"):
        st.gen("x", temperature=-1)


@pytest.mark.parametrize("setting", [{"logprob_start_len": 0}, {"return_text_in_logprobs": True}])
def test_what_is_not_built_is_refused_where_it_is_written(setting: dict[str, object]) -> None:
    with pytest.raises(UnsupportedByBackend, match=next(iter(setting))):
        st.gen("x", **setting)  # type: ignore[arg-type]


def test_an_integer_is_a_gen_of_that_type() -> None:
    assert st.gen_int("x") == st.gen("x", dtype=int) != st.gen("x")


def test_a_string_is_what_gen_gives_anyway() -> None:
    assert st.gen_string("x") == st.gen("x", dtype=str) == st.gen("x")


def test_gen_with_choices_is_a_select() -> None:
    assert st.gen("x", choices=["a", "b"]) == st.select("x", ["a", "b"])


def test_choices_never_silently_become_free_generation() -> None:
    for write in (lambda: st.gen("x", choices=[]), lambda: st.select("x", [])):
        with pytest.raises(ValueError, match="nothing to choose"):
            write()


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (["a", "a"], "twice"),
        (["a", ""], "non-empty"),
        ("ab", "list"),
        (None, "list"),
        ([1], "string"),
    ],
)
def test_choices_that_cannot_be_meant_are_refused(choices: object, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        st.select("x", choices)  # type: ignore[arg-type]


def test_a_choice_is_decided_not_drawn() -> None:
    with pytest.raises(InvalidArgument, match="temperature"):
        st.select("x", ["a"], temperature=0.5)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        st.gen("x", 5, choices=["a"])
    with pytest.raises(InvalidArgument, match="choices"):
        st.gen("x", choices_method="greedy_token_selection")


def test_a_method_may_be_named_by_its_name() -> None:
    named = st.select("x", ["a"], choices_method="greedy_token_selection")
    assert named.method is st.greedy_token_selection


@pytest.mark.parametrize("name", ["", 3])
def test_a_variable_needs_a_name_that_can_be_read(name: object) -> None:
    with pytest.raises(InvalidArgument, match="name="):
        st.gen(name)  # type: ignore[arg-type]


def test_a_message_wraps_its_content() -> None:
    assert st.assistant("a") == Chain((RoleBegin("assistant"), Text("a"), RoleEnd("assistant")))
    assert st.user() == Chain((RoleBegin("user"), RoleEnd("user")))


def test_control_text_is_marked() -> None:
    assert st.control("<|im_end|>") == Text("<|im_end|>", control=True)
    assert Text("<|im_end|>") != st.control("<|im_end|>")


@pytest.mark.parametrize(
    "name", ["image", "video", "OpenAI", "RuntimeEndpoint", "Runtime", "Engine", "global_config"]
)
def test_names_of_sglang_that_are_not_there_say_so(name: str) -> None:
    with pytest.raises(UnsupportedByBackend, match=name):
        getattr(st, name)("x")


def test_settings_of_sglang_that_are_not_there_say_so_when_read_or_set() -> None:
    with pytest.raises(UnsupportedByBackend, match="global_config"):
        _ = st.global_config.verbosity
    with pytest.raises(UnsupportedByBackend, match="global_config"):
        st.global_config.verbosity = 2
    assert not hasattr(st.global_config, "__wrapped__")


@pytest.mark.parametrize(
    "setting",
    [
        {"regex": "a+"},
        {"json_schema": {}},
        {"grammar": "start: /a/"},
        {"dtype": int},
        {"logprob_start_len": 0},
        {"return_text_in_logprobs": True},
        {"return_logprob": True},
        {"heal": False},
        {"reasoning": "why"},
        {"stop": "a"},
    ],
)
def test_what_a_choice_would_ignore_is_named_with_its_value(setting: dict[str, object]) -> None:
    ((name, value),) = setting.items()
    shown = "logprobs=True" if name == "return_logprob" else f"{name}={value!r}"
    with pytest.raises(InvalidArgument, match=re.escape(shown)):
        st.gen("x", choices=["a"], **setting)  # type: ignore[arg-type]


def test_a_choice_is_a_string_anyway() -> None:
    assert st.gen_string("x", choices=["a"]) == st.select("x", ["a"])


@pytest.mark.parametrize("name", ["heal", "include_stop", "ignore_eos", "logprobs"])
@pytest.mark.parametrize("value", ["no", 0, 1.0])
def test_a_switch_is_true_or_false(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}={value!r}.*True or False"):
        st.gen("x", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda: st.control(3), r"control\(3\)"),
        (lambda: st.gen("x", logprobs=True, return_logprob=True), "logprobs=True and return_lo"),
        (lambda: st.gen("x", top_logprobs=1, top_logprobs_num=2), "give one"),
        (lambda: st.select("x", {"a"}), "set has no order.*sorted"),
        (lambda: st.gen("x", choices=frozenset("a")), "set has no order.*sorted"),
        (lambda: st.select(["a", "b"]), "name comes first"),
        (lambda: st.select("x", 3), "choices=3.*list"),
        (lambda: st.gen("x", stop=3), "stop=3"),
        (lambda: st.gen("x", stop=b"ab"), "stop=b'ab'"),
        (lambda: st.gen("x", stop_token_ids=3), "stop_token_ids=3"),
        (lambda: st.gen("x", stop_regex="("), r"stop_regex='\('"),
        (lambda: st.gen("x", stop_regex=["a", "b"]), r"stop_regex=\['a', 'b'\].*one\|other"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_remedy(
    write: Callable[[], object], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        write()


def test_what_a_state_has_appended_is_not_appended_again() -> None:
    program = st.function(lambda s: s.__iadd__(s.user("x")))
    with pytest.raises(TypeError, match=r"None.*st\.user"):
        program.run(backend=st.MockBackend())

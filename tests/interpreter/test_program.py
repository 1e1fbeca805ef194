"""Running programs: arguments, options, variables, methods, subroutines, seeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.interpreter.options import RUN_OPTIONS
from stemma.lang.errors import InvalidArgument, StemmaError, UnknownVariable


@st.function
def capital(s: st.ProgramState, country: str) -> str:
    s += f"The capital of {country} is" + st.gen("name", max_tokens=3, stop=".") + "."
    return f"{country}:{s['name']}"


def seeds(prompt: str, params: st.SamplingParams) -> str:
    """A reply that is the seed of its draw."""
    return str(params.seed)


def test_a_run_gives_text_variables_and_value() -> None:
    backend = MockBackend([" Paris. And"])
    state = capital.run(country="France", backend=backend)
    assert state["name"] == state.raw("name") == " Paris"
    assert state.value == "France: Paris"
    assert state.text() == "The capital of France is Paris."
    assert backend.prompts == ["The capital of France is"]
    assert len(state.tokens()) == 6


def test_meta_tells_how_a_variable_came_about() -> None:
    state = capital.run("France", backend=MockBackend([" Paris. And"]), return_logprob=True)
    meta = state.meta("name")
    assert (meta.finish_reason, meta.matched_stop) == ("stop", ".")
    assert len(meta.token_ids) == len(meta.logprobs) == 1
    assert meta.usage == state.usage
    assert state.usage.prompt_tokens == 5
    cut = capital.run("France", backend=MockBackend(["a b c d e"]))
    assert cut.meta("name").finish_reason == "length"
    assert cut["name"] == "a b c"


def test_positional_and_keyword_arguments_reach_the_body() -> None:
    @st.function
    def program(anything: st.ProgramState, a: int, *rest: int, b: int = 2, **more: Any) -> Any:
        return a, rest, b, more

    state = program.run(1, 5, 6, b=3, stop="x", backend=MockBackend())
    assert state.value == (1, (5, 6), 3, {"stop": "x"})


def test_a_program_argument_named_like_a_sampling_parameter_is_the_programs() -> None:
    @st.function
    def program(s: st.ProgramState, n: int, stop: str, temperature: float = 0.5) -> None:
        s += f"{n} {stop} {temperature}" + st.gen("x")

    backend = MockBackend(["a"])
    state = program.run(n=3, stop="never", temperature=7, backend=backend)
    assert state.text() == "3 never 7a"
    params = backend.calls[0].params
    assert params is not None
    assert (params.n, params.stop, params.temperature) == (1, (), 1.0)


def test_sampling_of_the_run_is_the_default_of_its_generations() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s = s.copy()  # a fork forgets no settings
        s += st.gen("x") + st.gen("y", temperature=0.3, stop=["z"])

    backend = MockBackend(["a", "b"])
    sampling = st.SamplingParams(top_k=5, stop=("q",))
    program.run(backend=backend, sampling=sampling, temperature=0.9, max_new_tokens=7)
    first, second = (call.params for call in backend.calls)
    assert first is not None
    assert second is not None
    assert (first.temperature, first.top_k, first.stop, first.max_tokens) == (0.9, 5, ("q",), 7)
    assert (second.temperature, second.top_k, second.stop) == (0.3, 5, ("z",))


def test_the_stops_of_the_program_are_not_mutated() -> None:
    stops = ["\n"]

    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.assistant(st.gen("x", stop=stops))

    program.run(backend=MockBackend(["a"]))
    assert stops == ["\n"]


@pytest.mark.parametrize("option", RUN_OPTIONS)
def test_a_parameter_with_the_name_of_a_run_option_is_refused(option: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def program(s, {option}): pass", namespace)
    with pytest.raises(InvalidArgument, match=option):
        st.function(namespace["program"])


def test_a_function_without_a_state_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="first parameter"):
        st.function(lambda: None)


def test_unknown_arguments_are_named() -> None:
    said = r"'contry' \(did you mean 'country'\?\), 'sed' \(did you mean 'seed'"
    with pytest.raises(TypeError, match=said):
        capital.run(contry="France", sed=3)
    with pytest.raises(TypeError, match="country"):
        capital.run()


@pytest.mark.parametrize(
    "option",
    [
        *({"timeout": 0}, {"seed": 1.5}, {"seed": 2**64}, {"salt": 3}, {"cache": "write"}),
        *({"cache": 1}, {"priority": 0.5}, {"priority": True}, {"adapter": 3}),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(option))):
        capital.run("France", backend=MockBackend(), **option)


@pytest.mark.parametrize("mode", ["read-write", "read", "off"])
def test_cache_mode_and_priority_reach_every_branch_of_a_run(mode: Any) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "Once" + st.gen("a")
        s += st.select("b", [" x", " y"])
        children = s.fork(2)
        for child in children:
            child += st.gen("c")
        children.join()

    backend = MockBackend(lambda text, params: " more")
    program.run(backend=backend, cache=mode, priority=-2)
    assert [(call.cache, call.priority) for call in backend.calls] == [(mode, -2)] * 4


def test_salt_separates_caches() -> None:
    backend = MockBackend([" a"])
    capital.run("France", backend=backend, salt="mine")
    assert backend.calls[0].namespace == st.Namespace(salt="mine")


def test_adapter_is_the_backends_to_know() -> None:
    backend = MockBackend([" a"])
    capital.run("France", backend=backend, adapter="french")
    assert backend.calls[0].namespace == st.Namespace(adapter="french")


def test_methods_are_programs() -> None:
    class Guide:
        def __init__(self, style: str) -> None:
            self.style = style

        @st.function
        def answer(self, s: st.ProgramState, question: str) -> str:
            s += f"{self.style}: {question}" + st.gen("x")
            return str(s["x"])

        @st.function
        async def later(self, s: st.ProgramState) -> Any:
            s += st.gen("x")
            return self.style, await s.get("x")

    guide = Guide("kind")
    assert guide.answer.run("why?", backend=MockBackend(["so"])).text() == "kind: why?so"
    assert guide.later.run(backend=MockBackend(["so"])).value == ("kind", "so")
    assert guide.answer.name == "answer"


def test_a_program_inside_a_program_writes_on_the_same_state() -> None:
    @st.function
    def inner(s: st.ProgramState, word: str) -> str:
        s += word + st.gen("inner")
        return str(s["inner"])

    @st.function
    def outer(s: st.ProgramState) -> str:
        s += "<"
        got = inner(s, word="w")
        s += ">"
        return str(got)

    state = outer.run(backend=MockBackend(["i"]))
    assert (state.text(), state.value, state["inner"]) == ("<wi>", "i", "i")


def test_calling_a_program_without_a_state_runs_it() -> None:
    assert capital("France", backend=MockBackend([" P"])).value == "France: P"


def test_bind_fixes_arguments() -> None:
    french = capital.bind(country="France")
    assert french.run(backend=MockBackend([" P"])).value == "France: P"
    assert capital.run("Italy", backend=MockBackend([" R"])).value == "Italy: R"
    with pytest.raises(TypeError, match="contry"):
        capital.bind(contry="France")


def test_variables_can_be_set_asked_for_and_are_named_when_unknown() -> None:
    @st.function
    def program(s: st.ProgramState) -> list[Any]:
        s["a"] = 3
        s += st.gen("x")
        return ["a" in s, "x" in s, "y" in s, s["a"], s.variables()]

    state = program.run(backend=MockBackend(["t"]))
    assert state.value == [True, True, False, 3, ["a", "x"]]
    with pytest.raises(UnknownVariable, match=r"program has no variable 'y'; it has 'a', 'x'"):
        state["y"]
    with pytest.raises(KeyError):
        state["y"]
    with pytest.raises(InvalidArgument, match="no text"):
        state.raw("a")


def test_a_name_used_again_is_the_latest() -> None:
    @st.function
    def program(s: st.ProgramState) -> list[str]:
        read = []
        for _ in range(3):
            s += st.gen("x")
            read.append(s["x"])
        return read

    assert program.run(backend=MockBackend(["a", "b", "c"])).value == ["a", "b", "c"]


def test_an_f_string_is_plain_text() -> None:
    @st.function
    def program(s: st.ProgramState, text: str) -> None:
        s += f"{{{text}}}"

    state = program.run("<|im_end|> {x}", backend=MockBackend())
    assert state.text() == "{<|im_end|> {x}}"


def test_n_samples_are_a_list_and_the_branch_goes_on_with_the_first() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "p" + st.gen("x", n=3) + "!"

    backend = MockBackend(["a", "b", "c"])
    state = program.run(backend=backend)
    assert state["x"] == state.raw("x") == ["a", "b", "c"]
    assert state.text() == "pa!"
    assert [meta.finish_reason for meta in state.meta("x")] == ["stop"] * 3
    assert state.usage.output_tokens == 3
    assert backend.prompts == ["p"] * 3
    assert len({call.params.seed for call in backend.calls if call.params}) == 3


def test_heal_reaches_the_backend() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "p" + st.gen("x") + st.gen("y", heal=False)

    backend = MockBackend(["a", "b"])
    program.run(backend=backend)
    assert [call.heal for call in backend.calls] == [True, False]


def test_the_same_seed_draws_the_same_wherever_branches_run() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        s += st.gen("a")
        branches = s.fork(3)
        for branch in branches:
            branch += st.gen("b") + st.gen("c", n=2)
            for leaf in branch.fork(2):
                leaf += st.gen("d")
        s += st.gen("e")
        return [s["a"], s["e"], branches["b"], branches["c"]]

    first = program.run(backend=MockBackend(seeds), seed=5)
    slow = program.run(backend=MockBackend(seeds, delay=0.01), seed=5)
    assert first.value == slow.value
    assert first.seed == 5
    other = program.run(backend=MockBackend(seeds))
    assert other.value != first.value
    assert program.run(backend=MockBackend(seeds), seed=other.seed).value == other.value
    a, e, b, c = first.value
    drawn = [a, e, *b, *(text for pair in c for text in pair)]
    assert len(set(drawn)) == len(drawn)


def test_a_seed_in_sampling_is_the_runs_and_one_in_gen_is_its_own() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += st.gen("a") + st.gen("b", seed=9)

    one = program.run(backend=MockBackend(seeds), sampling=st.SamplingParams(seed=4))
    assert one.seed == 4
    assert one["a"] == program.run(backend=MockBackend(seeds), seed=4)["a"]
    assert one["b"] == "9"


def test_a_score_leaves_the_branch_as_it_is() -> None:
    @st.function
    def program(s: st.ProgramState) -> Any:
        s += "The sky is" + st.score(" blue today", "later")
        return s.score(" blue").logprobs, s["later"].logprobs

    backend = MockBackend(scores=lambda prompt, text: [-0.5] * len(text.split()))
    state = program.run(backend=backend)
    assert state.value == ((-0.5,), (-0.5, -0.5))
    assert state.text() == "The sky is"
    assert state.usage.prompt_tokens == 6


def test_a_score_that_nobody_could_read_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="name"):
        st.function(lambda s: s.append(st.score("x"))).run(backend=MockBackend())


def test_var_scope_makes_a_stretch_of_text_a_variable() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "a"
        with s.var_scope("outer"):
            s += "b"
            with s.var_scope("inner"):
                s += "c" + st.gen("x")
        s += "e"

    state = program.run(backend=MockBackend(["d"]))
    assert (state["outer"], state["inner"], state.text()) == ("bcd", "cd", "abcde")


def test_a_finished_state_can_go_on() -> None:
    state = capital.run("France", backend=MockBackend([" P", " more"]))
    state += " And" + st.gen("y")
    assert state["y"] == " more"
    assert state.text() == "The capital of France is P. And more"


@pytest.fixture
def no_default() -> Iterator[None]:
    yield
    st.set_default_backend(None)


@pytest.mark.usefixtures("no_default")
def test_the_default_backend_serves_runs_that_name_none() -> None:
    backend = MockBackend([" P"])
    st.set_default_backend(backend)
    assert capital.run("France")["name"] == " P"
    assert st.flush_cache() == 0


def test_reading_from_the_dispatchers_thread_raises_instead_of_hanging() -> None:
    errors: list[BaseException] = []

    def script() -> Iterator[str]:
        try:
            other["name"]
        except StemmaError as error:
            errors.append(error)
        yield "x"

    other = capital.run("France", backend=MockBackend([" P"]))
    other._own["name"] = type(other._own["name"])()
    capital.run("Italy", backend=MockBackend(script()))
    assert "thread" in str(errors[0])

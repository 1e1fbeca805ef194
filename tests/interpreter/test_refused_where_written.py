"""What cannot be meant is refused on the program's own line, on whatever backend."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.interpreter.fork import branch_names
from stemma.lang.errors import InvalidArgument

HALF = "a\ud800b"


def refused(write: Callable[[Any], object], match: str) -> None:
    """The line of `write` in this file raises, before the backend is asked anything."""

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "before"
        write(s)

    backend = MockBackend()
    with pytest.raises(InvalidArgument, match=match) as caught:
        program.run(backend=backend)
    ours = [
        f.name for f in traceback.extract_tb(caught.value.__traceback__) if f.filename == __file__
    ]
    assert ours[-1] == "<lambda>"
    assert backend.calls == []


@pytest.mark.parametrize(
    "write",
    [
        lambda s: s.append(HALF),
        lambda s: s.append("x" + st.gen("x") + HALF),
        lambda s: s.append(st.control(HALF)),
        lambda s: s.user(HALF),
        lambda s: s.append(st.system(HALF)),
        lambda s: s.append(st.select("x", ["a", HALF])),
        lambda s: s.append(st.score(HALF, "x")),
        lambda s: s.score(HALF),
        lambda s: st.function(lambda t: None).run(messages=[{"role": "user", "content": HALF}]),
    ],
)
def test_half_a_surrogate_pair_is_refused(write: Callable[[Any], object]) -> None:
    refused(write, r"character 1 is '\\ud800'")


def test_all_that_is_a_character_is_taken() -> None:
    text = "\U0001f600 \u00e4 \x00 \uffff"
    assert st.function(lambda s: s.append(text)).run(backend=MockBackend()).text() == text


@pytest.mark.parametrize("labels", [["a/b"], ["2:x"], ["10:"], ["/"]])
def test_a_label_that_could_be_another_branchs_place_is_refused(labels: list[str]) -> None:
    refused(lambda s: s.fork(labels), "slash")


def test_labels_that_only_look_a_little_alike_are_taken_and_are_unique() -> None:
    @st.function
    def program(s: st.ProgramState) -> list[str]:
        first, second = s.fork(["x", ":2", "a:b", "0"]), s.fork(["x", "0"])
        below = first[0].fork(["x"])
        return [branch.label for branch in (*first, *second, *below)]

    labels = program.run(backend=MockBackend()).value
    assert len(set(labels)) == len(labels) == 7


@pytest.mark.parametrize("name", [None, 3, "", b"x"])
def test_a_name_that_is_no_string_is_refused(name: Any) -> None:
    refused(lambda s: s.var_scope(name), "non-empty string")
    refused(lambda s: s.__setitem__(name, 1), "non-empty string")
    refused(lambda s: s.set_var(name, 1), "non-empty string")


def generator(s: st.ProgramState) -> Iterator[int]:
    yield 1


async def async_generator(s: st.ProgramState) -> AsyncIterator[int]:
    yield 1


class Yields:
    def __call__(self, s: st.ProgramState) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    "body", [generator, async_generator, Yields(), functools.partial(generator), lambda s: (yield)]
)
def test_a_body_with_yield_is_no_program(body: Any) -> None:
    with pytest.raises(InvalidArgument, match="`yield` would not run"):
        st.function(body)


class Awaits:
    async def __call__(self, s: st.ProgramState) -> str:
        s += st.gen("x")
        return str(await s.get("x"))


def test_an_object_with_an_async_call_is_an_async_program() -> None:
    assert st.function(Awaits()).run(backend=MockBackend(["a"])).value == "a"


async def asynchronous(s: st.ProgramState) -> None:
    s += "never"


def hidden(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(body)
    def wrapper(s: Any) -> Awaitable[None]:
        return body(s)  # type: ignore[no-any-return]

    return wrapper


@pytest.mark.parametrize("body", [hidden(asynchronous), hidden(generator), hidden(async_generator)])
def test_a_plain_body_that_returns_what_has_yet_to_run_raises(body: Any) -> None:
    program = st.function(body)
    with pytest.raises(InvalidArgument, match="of which nothing has run"):
        program.run(backend=MockBackend())
    with pytest.raises(InvalidArgument, match="of which nothing has run"):
        st.function(lambda s: program(s)).run(backend=MockBackend())


@pytest.mark.parametrize("seed", ["a", "7", 1.9, True, 2**100, -(2**63) - 1])
def test_a_seed_is_checked_alike_wherever_it_is_given(seed: Any) -> None:
    program = st.function(lambda s: s.append(st.gen("x", n=2)))
    backend = MockBackend(lambda prompt, params: "a")
    for give in (
        lambda: program.run(seed=seed, backend=backend),
        lambda: program.run(sampling=st.SamplingParams(seed=seed), backend=backend),
        lambda: program.run_batch([{}], seed=seed, backend=backend),
        lambda: program.run_batch([{"seed": seed}], backend=backend),
        lambda: st.gen("x", seed=seed),
        lambda: st.function(lambda s: s.fork(2, seed=seed)).run(backend=backend),
    ):
        with pytest.raises(InvalidArgument, match="seed="):
            give()
    assert backend.calls == []


@pytest.mark.parametrize("make", [str, "x {}".format, lambda op: "x %s" % op, lambda op: f"{op}"])  # noqa: UP031
@pytest.mark.parametrize("operation", [st.gen("a"), st.user("hi"), st.select("a", ["b"])])
def test_an_operation_never_becomes_text(make: Callable[[Any], str], operation: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"join it with \+"):
        make(operation)
    assert type(operation).__name__ in repr(operation)


def test_thousands_of_labels_and_choices_are_checked_in_a_moment() -> None:
    names = [f"n{i}" for i in range(20_000)]
    start = time.process_time()
    st.select("x", names)
    branch_names(names)
    assert time.process_time() - start < 1  # each against all before it: tens of seconds


def test_control_text_without_a_control_token_is_refused_naming_the_near_miss() -> None:
    backend = MockBackend()
    backend.control_tokens = ("<|im_start|>", "<|im_end|>")
    for text, said in (
        ("<|im_edn|>", r"control\('<\|im_edn\|>'\).*did you mean '<\|im_end\|>'\?"),
        ("nope", "it would be plain text$"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            st.function(lambda s, text=text: s.append(st.control(text))).run(backend=backend)  # type: ignore[misc]
    taken = st.control("<|im_start|>user\n")
    state = st.function(lambda s: s.append(taken)).run(backend=backend)
    assert state.text() == "<|im_start|>user\n"


def test_control_text_is_not_empty() -> None:
    with pytest.raises(InvalidArgument, match="non-empty"):
        st.control("")


def test_a_local_model_knows_its_control_tokens(tiny_model: Callable[..., Path]) -> None:
    with st.LocalBackend(tiny_model(), kv_tokens=256) as backend:
        for text in ("<|im_end|>", "<|im_start|>user\n"):
            st.function(lambda s, text=text: s.append(st.control(text))).run(backend=backend)  # type: ignore[misc]
        with pytest.raises(InvalidArgument, match=r"did you mean '<\|im_end\|>'"):
            st.function(lambda s: s.append(st.control("<|im_ende|>"))).run(backend=backend)

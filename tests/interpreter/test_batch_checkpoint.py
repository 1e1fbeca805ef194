"""Checkpoints: an interrupted batch goes on where it was, and never takes what is not its own."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as draw

import stemma as st
from stemma.backend.mock import MockBackend
from stemma.interpreter.checkpoint import Checkpoint
from stemma.interpreter.json_values import decode, encode
from stemma.lang.errors import InvalidArgument


def echo(prompt: str, params: st.SamplingParams) -> str:
    return f" reply {params.seed} to {prompt[-1]}|"


@st.function
def program(s: st.ProgramState, word: str, fail: bool = False) -> dict[str, Any]:
    s += st.user("Say " + word)
    s += st.assistant(st.gen("x", stop="|") + st.select("choice", ["a", "b"]))
    s += st.user_begin() + st.gen("both", n=2) + st.score("so", "score")
    s["set"] = ({"a", "b"}, float("inf"), {1: None})
    with s.var_scope("scope"):
        s += "in scope"
    for branch in (branches := s.fork(2)):
        branch += st.gen("part")
    branches.join()
    if fail:
        raise ZeroDivisionError(word)
    return {"word": word, "x": s["x"]}


ITEMS = [{"word": word} for word in ("ash", "elm", "fir", "oak")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def read(state: st.ProgramState) -> dict[str, Any]:
    """All that can be read of a state."""
    return {
        "value": state.value,
        "variables": {name: state[name] for name in state.variables()},
        "raw": [state.raw(name) for name in state.variables() if name != "set"],
        "meta": [state.meta(name) for name in state.variables()],
        "text": state.text(),
        "messages": state.messages(),
        "usage": state.usage,
        "seed": state.seed,
        "label": state.label,
        "segments": state.picture().segments,
        "own usage": state.picture().usage,
        "pieces": list(state.text_iter()),
        "of x": list(state.text_iter("x")),
        "of scope": list(state.text_iter("scope")),
    }


def test_what_is_finished_is_not_run_again_and_reads_as_it_did(path: Path) -> None:
    backend = MockBackend(echo)
    first = program.run_batch(ITEMS[:2], backend=backend, checkpoint=path)
    asked = len(backend.calls)
    again = program.run_batch(ITEMS, backend=backend, checkpoint=str(path))
    assert len(backend.calls) == 2 * asked
    assert [read(state) for state in again[:2]] == [read(state) for state in first]
    assert [state.value["word"] for state in again] == ["ash", "elm", "fir", "oak"]
    program.run_batch(ITEMS, backend=backend, checkpoint=path)
    assert len(backend.calls) == 2 * asked


def test_a_resumed_state_goes_on_as_the_first_one_would(path: Path) -> None:
    backend = MockBackend(echo)
    (first,) = program.run_batch(ITEMS[:1], backend=backend, checkpoint=path)
    (again,) = program.run_batch(ITEMS[:1], backend=backend, checkpoint=path)
    for state in (first, again):
        state += st.gen("more", stop="|") + st.user_end()
        part = state.fork(1)[0]
        part += st.gen("part")
        state["last"] = part["part"]
    assert (again["more"], again["last"], again.text()) == (
        first["more"],
        first["last"],
        first.text(),
    )
    assert again.messages() == first.messages()


def test_the_seed_of_the_file_is_taken_where_none_is_given(path: Path) -> None:
    backend = MockBackend(echo)
    options: dict[str, Any] = {"backend": backend, "checkpoint": path}
    first = program.run_batch(ITEMS[:2], **options)
    seed = json.loads(path.read_text().splitlines()[0])["seed"]
    resumed = program.run_batch(ITEMS, **options)
    whole = program.run_batch(ITEMS, backend=backend, seed=seed)
    assert [s.text() for s in resumed] == [s.text() for s in whole]
    assert [s.text() for s in first] == [s.text() for s in whole[:2]]


def test_a_seed_in_the_sampling_stays_the_seed(path: Path) -> None:
    sampling = st.SamplingParams(seed=5)
    states = program.run_batch(
        ITEMS[:1], backend=MockBackend(echo), sampling=sampling, checkpoint=path
    )
    assert states[0].seed == 5
    own = program.run_batch(
        [{"word": "ash", "seed": 7}], backend=MockBackend(echo), checkpoint=path.with_suffix(".b")
    )
    assert own[0].seed == 7


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "with seed 1, and now it is 2"),
        ({"model": "another"}, "with model 'mock', and now it is 'another'"),
        ({"version": "2"}, "with other weights of mock, or computed in another way"),
        ({"program": "other"}, "with program 'program', and now it is 'other'"),
        ({"code": "changed"}, "with another source text of program 'program'"),
    ],
)
def test_the_file_of_another_batch_is_refused(
    change: dict[str, Any], named: str, path: Path
) -> None:
    program.run_batch(ITEMS, backend=MockBackend(echo), seed=1, checkpoint=path)
    before = path.read_bytes()
    backend = MockBackend(echo)
    backend.model_name = change.get("model", "mock")
    backend.model_version = change.get("version", "")

    def other(s: st.ProgramState, word: str) -> None:
        s += word

    def changed(s: st.ProgramState, word: str) -> None:
        s += word

    changed.__name__ = "program"
    bodies = {"program": other, "code": changed}
    which = next((st.function(bodies[key]) for key in change if key in bodies), program)
    with pytest.raises(InvalidArgument, match=named) as caught:
        which.run_batch(ITEMS, backend=backend, seed=change.get("seed", 1), checkpoint=path)
    assert "remove it to begin anew" in str(caught.value)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before


def test_comments_and_spaces_do_not_make_another_program(tmp_path: Path) -> None:
    from stemma.interpreter.checkpoint import code_key

    texts = [
        "def body(s):\n    s += 'a'\n",
        "def body(s):  # says a\n\n    s += (\n        'a'\n    )\n",
        "def body(s):\n    s += 'b'\n",
    ]
    keys = []
    for i, text in enumerate(texts):
        (tmp_path / f"m{i}.py").write_text(text)
        namespace: dict[str, Any] = {}
        exec(compile(text, str(tmp_path / f"m{i}.py"), "exec"), namespace)
        keys.append(code_key(namespace["body"]))
    assert keys[0] == keys[1] != keys[2]


def test_a_lambda_and_a_method_have_a_key_of_their_own() -> None:
    from stemma.interpreter.checkpoint import code_key

    class Class:
        def one(self, s: Any) -> None:
            s += "one"

        def two(self, s: Any) -> None:
            s += "two"

        def __call__(self, s: Any) -> None:
            s += "three"

    one, two = st.function(Class.one).__get__(Class()), st.function(Class.two).__get__(Class())
    keys = [code_key(one.body), code_key(two.body), code_key(Class())]
    keys += [code_key(lambda s: s), code_key(lambda s: s + 1)]
    assert len(set(keys)) == 5
    assert code_key(one.body) == code_key(st.function(Class.one).__get__(Class()).body)


def test_an_item_that_has_changed_is_run_anew_with_a_warning(path: Path) -> None:
    backend = MockBackend(echo)
    program.run_batch(ITEMS, backend=backend, seed=1, checkpoint=path)
    asked = len(backend.calls)
    changed = [ITEMS[0], {"word": "yew"}, *ITEMS[2:]]
    with pytest.warns(RuntimeWarning, match=r"item 1 has other arguments") as warned:
        states = program.run_batch(changed, backend=backend, seed=1, checkpoint=path)
    assert len(warned) == 1
    assert [state.value["word"] for state in states] == ["ash", "yew", "fir", "oak"]
    assert len(backend.calls) == asked // 4 * 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # both are in the file now
        program.run_batch(changed, backend=backend, seed=1, checkpoint=path)
        program.run_batch(ITEMS, backend=backend, seed=1, checkpoint=path)
    assert len(backend.calls) == asked // 4 * 5


@pytest.mark.filterwarnings("ignore:.*other arguments")
@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({"temperature": 0.5}, True),
        ({"sampling": st.SamplingParams(top_k=3)}, True),
        ({"messages": [{"role": "user", "content": "Hi."}]}, True),
        ({"timeout": 60}, False),
        ({"salt": "mine"}, False),
        ({"cache": "read"}, False),
    ],
)
def test_options_that_change_the_text_make_another_item(
    options: dict[str, Any], again: bool, path: Path
) -> None:
    backend = MockBackend(echo)
    program.run_batch(ITEMS[:1], backend=backend, checkpoint=path)
    asked = len(backend.calls)
    program.run_batch(ITEMS[:1], backend=backend, checkpoint=path, **options)
    assert (len(backend.calls) > asked) == again


def test_bound_arguments_count_like_an_items_own(path: Path) -> None:
    backend = MockBackend(echo)
    for word in ("ash", "elm", "ash"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bound = program.bind(word=word)
            (state,) = bound.run_batch([{}], backend=backend, checkpoint=path)
        assert state.value["word"] == word
    assert len(path.read_text().splitlines()) == 3


def test_failures_are_not_kept(path: Path) -> None:
    items = [{"word": "a"}, {"word": "b", "fail": True}]
    backend = MockBackend(echo)
    options: dict[str, Any] = {"backend": backend, "checkpoint": path, "return_exceptions": True}
    program.run_batch(items, **options)
    assert len(path.read_text().splitlines()) == 2
    results = program.run_batch(items, **options)
    assert isinstance(results[1], ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        program.run_batch(items, backend=backend, checkpoint=path)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_half_written_last_line_is_cut_off(cut: int, path: Path) -> None:
    backend = MockBackend(echo)
    options: dict[str, Any] = {"backend": backend, "seed": 1, "checkpoint": path}
    program.run_batch(ITEMS, concurrency=1, **options)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    asked = len(backend.calls)
    states = program.run_batch(ITEMS, **options)
    assert len(backend.calls) == asked // 4 * 5
    assert [state.value["word"] for state in states] == ["ash", "elm", "fir", "oak"]
    assert path.read_bytes() == whole


def test_a_half_written_first_line_is_begun_anew(path: Path) -> None:
    for half in (b"", b"{", b'{"stemma_ba', b'{"stemma_batch": 1, "program": "pro'):
        path.write_bytes(half)
        program.run_batch(ITEMS[:1], backend=MockBackend(echo), checkpoint=path)
        assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"my notes", "no checkpoint of a batch"),
        (b"my notes\nand more\n", "no checkpoint of a batch"),
        (b'{"other": "json"}\n', "no checkpoint of a batch"),
        (b'{"stemma_batch": 99}\n', "another version"),
        (b'{"stemma_batch": \n', "line 1: cannot be read"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_left_alone(content: bytes, named: str, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=named):
        program.run_batch(ITEMS, backend=MockBackend(echo), checkpoint=path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("line", [b"nonsense", b"[]", b"{}", b'{"index": 0, "key": "KEY"}'])
def test_a_line_that_cannot_be_read_is_named(line: bytes, path: Path) -> None:
    options: dict[str, Any] = {"backend": MockBackend(echo), "checkpoint": path}
    program.run_batch(ITEMS[:2], **options)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines, line, b""]))
    with pytest.raises(InvalidArgument, match="line 4: cannot be read"):
        program.run_batch(ITEMS[:2], **options)


def test_a_record_that_is_none_is_named(path: Path) -> None:
    options: dict[str, Any] = {"backend": MockBackend(echo), "checkpoint": path}
    program.run_batch(ITEMS[:1], **options)
    header, line = path.read_text().splitlines()
    path.write_text(f"{header}\n{json.dumps({**json.loads(line), 'result': {'value': 1}})}\n")
    with pytest.raises(InvalidArgument, match="line 2: cannot be read"):
        program.run_batch(ITEMS[:1], **options)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="there is no folder"):
        program.run_batch(ITEMS, backend=MockBackend(), checkpoint=tmp_path / "no" / "run.jsonl")
    with pytest.raises(InvalidArgument, match="path of a file"):
        program.run_batch(ITEMS, backend=MockBackend(), checkpoint=7)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["record", "replay"])
def test_a_record_beside_a_checkpoint_is_refused(name: str, path: Path, tmp_path: Path) -> None:
    options = {name: tmp_path / "record.jsonl"}
    with pytest.raises(InvalidArgument, match=f"checkpoint= and {name}="):
        program.run_batch(ITEMS, checkpoint=path, **options)
    assert list(tmp_path.iterdir()) == []


def test_two_batches_do_not_write_to_one_file(path: Path) -> None:
    backend = MockBackend(echo)
    states = program.iter_batch(ITEMS, backend=backend, checkpoint=path)
    next(states)
    with pytest.raises(InvalidArgument, match="another batch is writing to it"):
        program.run_batch(ITEMS, backend=backend, checkpoint=path)
    list(states)
    program.run_batch(ITEMS, backend=backend, checkpoint=path)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int


@pytest.mark.parametrize("value", [object(), {"a": [b"bytes"]}, MockBackend(), Point])
def test_what_json_cannot_give_back_fails_its_item(value: Any, path: Path) -> None:
    returns = st.function(lambda s, word: value)
    sets = st.function(lambda s, word: s.set_var("it", value))
    for which, named in ((returns, "what <lambda> returned"), (sets, "the variable 'it'")):
        path.unlink(missing_ok=True)
        with pytest.raises(InvalidArgument, match=f"{named}.* is a .*checkpoint cannot give back"):
            which.run_batch(ITEMS[:1], backend=MockBackend(), checkpoint=path)


def test_arguments_of_any_kind_are_known_again_or_refused(path: Path) -> None:
    takes = st.function(lambda s, it: repr(it))
    for it in (Colour.RED, Point(1), Path("a"), {1, 2}, b"bytes", (1, "a"), {"a": None}):
        path.unlink(missing_ok=True)
        calls = [takes.run_batch([(it,)], backend=MockBackend(), checkpoint=path) for _ in "ab"]
        assert calls[0][0].value == calls[1][0].value
        assert len(path.read_text().splitlines()) == 2
    with pytest.raises(InvalidArgument, match=r"argument 0 of item 0: .* cannot be pickled"):
        takes.run_batch([(threading.Lock(),)], backend=MockBackend(), checkpoint=path)


def test_an_iterator_resumes_too(path: Path) -> None:
    backend = MockBackend(echo)
    states = program.iter_batch(ITEMS, backend=backend, checkpoint=path, concurrency=1)
    next(states)
    states.close()  # type: ignore[attr-defined]
    kept = len(path.read_text().splitlines()) - 1
    assert kept >= 1
    asked = len(backend.calls)
    found = dict(program.iter_batch(ITEMS, backend=backend, checkpoint=path, seed=None))
    assert sorted(found) == [0, 1, 2, 3]
    assert len(backend.calls) > asked or kept == 4


def test_a_branch_that_cancelled_itself_is_kept_as_that(path: Path) -> None:
    @st.function
    def gives_up(s: st.ProgramState) -> str:
        s += "a" + st.gen("x")
        value: str = s["x"]
        s += st.gen("y")
        s.cancel()
        return value

    options: dict[str, Any] = {"backend": MockBackend(echo), "checkpoint": path}
    first, again = (gives_up.run_batch([{}], **options)[0] for _ in "ab")
    assert first.value == again.value


def test_a_trace_leaves_no_record(path: Path) -> None:
    outer = st.function(
        lambda s: program.run_batch([{"word": "a"}], backend=MockBackend(), checkpoint=path)
    )
    outer.trace()
    assert not path.exists()


def test_texts_that_are_no_utf8_are_kept(path: Path) -> None:
    odd = st.function(lambda s, it: it)
    options: dict[str, Any] = {"backend": MockBackend(), "checkpoint": path}
    items = [("\ud800",), ("ä\n\x00\u2028",)]
    for _ in "ab":
        assert [state.value for state in odd.run_batch(items, **options)] == [
            each for (each,) in items
        ]


plain = draw.recursive(
    draw.none() | draw.booleans() | draw.integers() | draw.text() | draw.floats(allow_nan=False),
    lambda inner: (
        draw.lists(inner)
        | draw.lists(inner).map(tuple)
        | draw.dictionaries(draw.text() | draw.just("$") | draw.integers(), inner)
        | draw.sets(draw.integers() | draw.text())
        | draw.frozensets(draw.integers())
    ),
    max_leaves=12,
)


@given(plain)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value, "it"), allow_nan=False)))
    assert same(back, value)


def same(one: Any, other: Any) -> bool:
    """Equal, and of equal types throughout."""
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, list | tuple):
        return all(map(same, one, other))
    if isinstance(one, dict):
        return all(map(same, one, other)) and all(map(same, one.values(), other.values()))
    return repr(one) == repr(other) or isinstance(one, set | frozenset)


SCRIPT = """
import itertools, sys
import stemma as st

@st.function
def program(s, i):
    s += f"{i}" + st.gen("x")
    return s["x"]

answers, numbers = int(sys.argv[2]), itertools.count(1)

def reply(text, params):
    backend.delay = 600 if next(numbers) > answers else 0
    return f"{text} {params.seed}"

backend = st.MockBackend(reply)
states = program.run_batch(
    [(i,) for i in range(40)], backend=backend, seed=3, concurrency=2, checkpoint=sys.argv[1]
)
print(len(backend.calls), [state.value for state in states])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_killed_loses_nothing_that_was_finished(
    number: int, path: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    def command(answers: int, file: Path) -> list[str]:
        return [sys.executable, str(tmp_path / "script.py"), str(file), str(answers)]

    whole = subprocess.run(
        command(40, tmp_path / "other"), capture_output=True, text=True, check=True
    ).stdout
    process = subprocess.Popen(command(10, path), stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < 11:
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(process.pid, number)
    assert process.wait(60) != 0
    assert path.read_bytes().count(b"\n") == 11  # a first line, and one for each answer
    resumed = subprocess.run(command(40, path), capture_output=True, text=True, check=True).stdout
    asked, values = resumed.split(" ", 1)
    assert int(asked) == 30
    assert values == whole.split(" ", 1)[1]


def test_records_may_be_others_than_of_states(path: Path) -> None:
    def checkpoint() -> Checkpoint:
        return Checkpoint(
            path, encode=lambda state: state.text(), decode=lambda state, text: text.upper()
        )

    says = st.function(lambda s, word: s.append(word))
    options: dict[str, Any] = {"backend": MockBackend()}
    (first,) = says.run_batch([("a",)], checkpoint=checkpoint(), **options)
    assert first.text() == "a"
    assert says.run_batch([("a",)], checkpoint=checkpoint(), **options) == ["A"]

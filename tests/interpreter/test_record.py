"""`record=` and `replay=`: on recorded answers a run is what it was, and no model is asked."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.lang.errors import InvalidArgument, ReplayMismatch, UnsupportedByBackend
from stemma.lang.sampling import SamplingParams


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that would go to a model fails."""
    monkeypatch.setattr("stemma.interpreter.recorded.default_backend", None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def write(prompt: str, params: SamplingParams) -> str:
    """A reply that only the same seed brings again."""
    return f" {params.seed} of {len(prompt)}"


@st.function
def talk(s: st.ProgramState, topic: str, count: int = 3) -> list[str]:
    s += st.system("You answer.")
    s += st.user(f"About {topic}.")
    branches = s.fork(count)
    for i, branch in enumerate(branches):
        branch += st.assistant(f"{i}:" + st.gen("line", max_tokens=8, stop="\n"))
        branch += st.select("mood", [" happy", " angry"])
    branches.join()
    s += st.assistant(st.gen("samples", n=4, logprobs=True) + "." + st.gen("end", temperature=0))
    return branches["line"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def same(recorded: st.ProgramState, played: st.ProgramState) -> None:
    assert played.value == recorded.value
    assert played.text() == recorded.text()
    assert played.messages() == recorded.messages()
    assert played.seed == recorded.seed
    assert played.usage == recorded.usage


def test_a_replay_needs_no_backend_and_gives_what_was_recorded(path: Path) -> None:
    recorded = talk.run("tea", backend=st.MockBackend(write), record=path)
    played = talk.run("tea", replay=str(path))
    same(recorded, played)
    assert len(set(recorded["samples"])) == 4
    assert played["samples"] == recorded["samples"]
    assert played.meta("samples") == recorded.meta("samples")
    assert played.meta("samples")[0].logprobs
    assert played["end"] == recorded["end"]


def test_a_recorded_run_is_the_run_that_it_would_be_unrecorded(path: Path) -> None:
    alone = talk.run("tea", backend=st.MockBackend(write), seed=5)
    same(alone, talk.run("tea", backend=st.MockBackend(write), seed=5, record=path))


def test_a_seed_that_is_given_is_not_that_of_the_record(path: Path) -> None:
    talk.run("tea", backend=st.MockBackend(write), record=path, seed=5)
    assert talk.run("tea", replay=path).seed == 5
    with pytest.raises(ReplayMismatch, match=r"other settings .*\n +seed: \d+ in the record, \d+"):
        talk.run("tea", replay=path, seed=6)


def test_a_record_is_json_lines_with_a_header_and_every_prompt_once(path: Path) -> None:
    state = talk.run("tea", backend=st.MockBackend(write), record=path)
    header, *rest = lines(path)
    assert header["stemma_record"] == 1
    assert (header["program"], header["model"], header["seed"]) == ("talk", "mock", state.seed)
    prompts = [line["prompt"] for line in rest if "parts" in line]
    assert len(prompts) == len(set(prompts))
    calls = [line["call"] for line in rest if "call" in line]
    assert (calls.count("generate"), calls.count("score")) == (3 + 4 + 1, 3)
    assert {line["role"] for line in rest if "turn" in line} == {"system", "user", "assistant"}


def test_what_is_not_recorded_is_told_beside_what_is_most_like_it(path: Path) -> None:
    talk.run("tea", backend=st.MockBackend(write), record=path)
    with pytest.raises(ReplayMismatch) as caught:
        talk.run("coffee", replay=path)
    said = str(caught.value)
    assert "-About tea.<|im_end|>\n" in said
    assert "+About coffee.<|im_end|>\n" in said
    assert f"run(record={str(path)!r})" in said
    assert re.search(r"\(line \d+\) differs", said)
    assert caught.value.site is not None
    assert caught.value.site.file == __file__


def test_a_request_that_is_made_once_more_is_no_part_of_the_record(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState, times: int) -> None:
        for branch in s.fork(times):
            branch += "Same" + st.gen("x", seed=1)

    program.run(2, backend=st.MockBackend(["a", "b"]), record=path)
    assert program.run(2, replay=path).value is None
    with pytest.raises(ReplayMismatch, match=r"2 times \(line \d+\), and it is asked for once"):
        program.run(3, replay=path)


def test_equal_requests_get_the_recorded_answers_in_their_order(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> list[str]:
        found = []
        for _ in range(3):
            branch = s.copy()
            branch += "Same" + st.gen("x", seed=1)
            found.append(branch["x"])
        return found

    program.run(backend=st.MockBackend(["a", "b", "c"]), record=path)
    assert program.run(replay=path).value == ["a", "b", "c"]


def test_a_turn_of_a_role_that_the_recorded_run_had_not_is_named(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState, roles: list[str]) -> None:
        for role in roles:
            s += getattr(st, role)("text")
        s += st.gen("x")

    program.run(["user"], backend=st.MockBackend(write), record=path)
    with pytest.raises(
        ReplayMismatch, match=r"no begin of a turn of 'assistant' after turns of us"
    ):
        program.run(["user", "assistant"], replay=path)


def test_a_role_that_the_model_refused_is_refused_again(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        try:
            s += st.system("x")
        except UnsupportedByBackend as error:
            return str(error)
        return ""

    recorded = program.run(backend=st.MockBackend(chat=None), record=path).value
    assert "no chat template" in recorded
    assert program.run(replay=path).value == recorded


class Odd(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            st.errors.ContextOverflow("too long", needed=9, limit=3),
            st.errors.ContextOverflow,
            "too",
        ),
        (st.errors.Timeout("slow"), st.errors.Timeout, "slow"),
        (ConnectionError("lost"), ConnectionError, "lost"),
        (Odd("odd"), st.StemmaError, "Odd: odd"),
    ],
)
def test_what_failed_fails_again(path: Path, error: Exception, kind: type, said: str) -> None:
    @st.function
    def program(s: st.ProgramState) -> Exception | None:
        s += "A" + st.gen("x")
        try:
            s["x"]
        except Exception as failed:
            return failed
        return None

    for options in ({"backend": st.MockBackend([error]), "record": path}, {"replay": path}):
        with pytest.raises((kind, Odd)) as caught:
            program.run(**options)
    assert type(caught.value) is kind
    assert said in str(caught.value)
    if kind is st.errors.ContextOverflow:
        assert (caught.value.needed, caught.value.limit) == (9, 3)


def test_streams_come_in_the_recorded_pieces(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "A" + st.gen("x")

    def pieces(**options: Any) -> list[str]:
        return [e.text for e in program.stream(**options) if isinstance(e, st.TextAdded)]

    recorded = pieces(backend=st.MockBackend(["one two three"], pieces=4, delay=0.1), record=path)
    assert len(recorded) == 5
    assert pieces(replay=path) == recorded


def test_async_programs_are_recorded_and_played(path: Path) -> None:
    @st.function
    async def program(s: st.ProgramState) -> str:
        s += "A" + st.gen("x")
        return await s.get("x")

    recorded = asyncio.run(program.arun(backend=st.MockBackend(write, delay=0.01), record=path))
    same(recorded, asyncio.run(program.arun(replay=path)))


def test_scores_and_token_ids_are_recorded(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> tuple[Any, ...]:
        s += "A b" + st.gen("x")
        s += st.score(" more text", name="y")
        return s.tokens(), s.meta("y")

    recorded = program.run(backend=st.MockBackend(write), record=path)
    assert recorded.value[0]
    same(recorded, program.run(replay=path))


def test_a_batch_is_one_record_and_replays_without_a_seed(path: Path) -> None:
    items = [{"topic": topic} for topic in ("tea", "coffee", "milk", "tea")]
    backend = st.MockBackend(write, delay=0.001)
    recorded = talk.run_batch(items, backend=backend, record=path, num_threads=3)
    assert len({state["end"] for state in recorded}) == 4
    for threads in (1, 4):
        for one, other in zip(
            recorded, talk.run_batch(items, replay=path, num_threads=threads), strict=True
        ):
            same(one, other)
    assert sum("stemma_record" in line for line in lines(path)) == 1


def test_a_batch_whose_items_share_a_seed_replays_with_it(path: Path) -> None:
    sampling = SamplingParams(seed=4)
    items = [{"topic": topic} for topic in ("tea", "coffee")]
    recorded = talk.run_batch(items, backend=st.MockBackend(write), record=path, sampling=sampling)
    for one, other in zip(
        recorded, talk.run_batch(items, replay=path, sampling=sampling), strict=True
    ):
        same(one, other)


def test_a_generation_that_the_program_cancelled_is_cancelled_again(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        branch = s.copy()
        branch += "A" + st.gen("x")
        text = ""
        for piece in branch.text_iter("x"):
            text += piece
            if "two" in text:
                branch.cancel()
                break
        return text

    backend = st.MockBackend(["one two three four five six"], pieces=6, delay=0.6)
    recorded = program.run(backend=backend, record=path)
    assert "five" not in recorded.value
    assert "two" in program.run(replay=path).value


def test_a_generation_that_nothing_cancels_now_fails_and_does_not_hang(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @st.function
    def program(s: st.ProgramState, cancel: bool) -> None:
        branch = s.copy()
        branch += "A" + st.gen("x")
        if cancel:
            next(iter(branch.text_iter("x")))
            branch.cancel()
        else:
            branch["x"]

    backend = st.MockBackend(["one two three four five six"], pieces=6, delay=0.6)
    program.run(True, backend=backend, record=path)
    monkeypatch.setattr("stemma.backend.replay.CANCEL_S", 0.05)
    with pytest.raises(ReplayMismatch, match="was cancelled, and nothing has cancelled it now"):
        program.run(False, replay=path)


def test_a_time_limit_that_was_met_is_met_again(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        branch = s.copy()
        branch += "A" + st.gen("x", timeout=0.15)
        try:
            branch["x"]
        except st.errors.Timeout as error:
            return error.partial
        return "no limit was met"

    backend = st.MockBackend(["one two three four five six"], pieces=6, delay=0.6)
    partial = program.run(backend=backend, record=path).value
    assert partial.startswith("one")
    assert program.run(replay=path).value == partial


def test_a_time_limit_of_a_choice_is_met_again(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> str:
        branch = s.copy()
        branch += "A" + st.select("x", ["a", "b"], timeout=0.1)
        with pytest.raises(st.errors.Timeout) as caught:
            branch["x"]
        return type(caught.value).__name__

    backend = st.MockBackend(delay=0.6)
    assert program.run(backend=backend, record=path).value == "Timeout"
    assert program.run(replay=path).value == "Timeout"


def test_half_a_last_line_is_survived_and_what_is_missing_is_told(path: Path) -> None:
    talk.run("tea", backend=st.MockBackend(write), record=path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ReplayMismatch, match=r"no generation after this text"):
        talk.run("tea", replay=path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "nothing is recorded"),
        (b"name,age\nAda,36\n", "no record of Stemma's"),
        (b"\xff\xfe\n", "no record of Stemma's"),
        (b'{"stemma_record": 2}\n', "newer Stemma"),
        (b"[]\n", "no record of Stemma's"),
    ],
)
def test_a_file_that_is_no_record_is_refused(path: Path, content: bytes, said: str) -> None:
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=said):
        talk.run("tea", replay=path)


def test_a_damaged_line_is_named(path: Path) -> None:
    talk.run("tea", backend=st.MockBackend(write), record=path)
    text = path.read_text(encoding="utf-8").split("\n")
    text[3] = text[3][:20]
    path.write_text("\n".join(text), encoding="utf-8")
    with pytest.raises(InvalidArgument, match="damaged in line 4"):
        talk.run("tea", replay=path)


def test_two_runs_in_one_file_at_once_are_told(path: Path) -> None:
    talk.run("tea", backend=st.MockBackend(write), record=path)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(InvalidArgument, match="two runs were recorded into the file at once"):
        talk.run("tea", replay=path)


def test_a_file_that_is_missing_is_told_how_to_make(path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"No such file .*record one by run\(record="):
        talk.run("tea", replay=path)


def test_a_record_is_written_anew_and_no_other_file_is(path: Path) -> None:
    talk.run("tea", backend=st.MockBackend(write), record=path)
    recorded = talk.run("milk", backend=st.MockBackend(write), record=path)
    same(recorded, talk.run("milk", replay=path))
    path.write_text("my thesis")
    with pytest.raises(InvalidArgument, match="no record of Stemma's"):
        talk.run("tea", backend=st.MockBackend(write), record=path)
    assert path.read_text() == "my thesis"
    with pytest.raises(InvalidArgument, match="cannot be written"):
        talk.run("tea", backend=st.MockBackend(write), record=path.parent / "no" / "x")


@pytest.mark.parametrize(
    "options",
    [
        {"record": "a", "replay": "b"},
        {"replay": "a", "backend": st.MockBackend()},
        {"record": 3},
        {"replay": True},
        {"record": st.MockBackend()},
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        talk.run("tea", **options)
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        talk.run_batch([{"topic": "tea"}], **options)


def test_a_record_that_cannot_be_written_on_fails_the_run_that_it_is_of() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    with pytest.raises(st.StemmaError, match="cannot be written"):
        talk.run("tea", backend=st.MockBackend(write), record=full)


def test_a_trace_records_nothing(path: Path) -> None:
    @st.function
    def outer(s: st.ProgramState) -> None:
        talk.run("tea", record=path)
        talk.run_batch([{"topic": "tea"}], record=path)

    assert outer.trace().error is None
    assert not path.exists()


def test_a_bias_that_forbids_is_found_again(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "A" + st.gen("x")

    backend = st.MockBackend(write)
    backend_options = {"sampling": SamplingParams(frequency_penalty=0.5, stop=["\n", "é"])}
    recorded = program.run(backend=backend, record=path, **backend_options)
    same(recorded, program.run(replay=path, **backend_options))
    assert math.isfinite(recorded.usage.total_s)


def test_a_long_conversation_makes_no_long_record(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState, turns: int) -> None:
        for i in range(turns):
            s += st.user(f"Question {i}") + st.assistant(st.gen("x"))

    sizes = []
    for turns in (50, 200):
        recorded = program.run(turns, backend=st.MockBackend(write), record=path)
        sizes.append(path.stat().st_size)
        same(recorded, program.run(turns, replay=path))
    assert sizes[1] < 5 * sizes[0]


def test_what_prompts_share_is_written_once(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState, document: str, count: int) -> None:
        s += st.system(document) + st.user(document)
        for i, branch in enumerate(s.fork(count)):
            branch += f" Question {i} and" + st.assistant(st.gen("x") + document + st.gen("y"))
        s += st.gen("z")

    document = "Some text that is long. " * 200
    recorded = program.run(document, 20, backend=st.MockBackend(write), record=path)
    assert path.stat().st_size < 30 * len(document)
    same(recorded, program.run(document, 20, replay=path))
    with pytest.raises(ReplayMismatch) as caught:
        program.run(document.replace("long", "short", 1), 20, replay=path)
    assert len(str(caught.value)) < 10_000


@pytest.mark.slow
def test_a_run_on_a_model_is_played_without_it(path: Path, tiny_model: Any) -> None:
    backend = st.LocalBackend(tiny_model(), kv_tokens=2000)
    try:
        recorded = talk.run("tea", backend=backend, record=path, max_tokens=12)
        alone = talk.run("tea", backend=backend, seed=recorded.seed, max_tokens=12)
    finally:
        backend.close()
    assert recorded.text() == alone.text()
    played = talk.run("tea", replay=path, max_tokens=12)
    same(recorded, played)
    assert played["samples"] == recorded["samples"]
    assert played.meta("samples") == recorded.meta("samples")


def test_an_item_that_has_moved_in_its_batch_is_told_so(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState, word: str) -> None:
        s += word + st.gen("x")

    program.run_batch([("a",), ("b",)], backend=st.MockBackend(write), record=path)
    with pytest.raises(
        ReplayMismatch, match=r"only the seed .*items of a batch in the same places"
    ):
        program.run_batch([("b",), ("a",)], replay=path)


def test_a_read_after_the_run_is_recorded_if_it_was_made(path: Path) -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "a" + st.gen("x")

    recorded = program.run(backend=st.MockBackend([" b"]), record=path)
    with pytest.raises(ReplayMismatch):
        program.run(replay=path).tokens()
    ids = recorded.tokens()
    assert program.run(replay=path).tokens() == ids

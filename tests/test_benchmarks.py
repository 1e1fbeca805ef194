"""The benchmark suite on a tiny model: its figures mean nothing here, its work is whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies
from rich.console import Console
from suite import command
from suite.command import run_suite
from suite.contenders import Contender, Peer, Stemma, run_program
from suite.floor import Floor
from suite.measure import Measured, Runs
from suite.peers.llama_cpp_peer import Line, shared_parts, shares
from suite.peers.serve import Setup
from suite.recorder import Recorder
from suite.report import as_json, latency_table, parts_table, table, write_plot
from suite.work import Call, Outcome, Ready, Replay, common_length
from suite.workloads import WORKLOADS, Size

import stemma as st
from tests.conftest import TinyModel

TINY = Size(count=0.1, length=0.03)
CONSOLE = Console(file=sys.stderr, width=200)


@pytest.fixture(scope="module")
def setup(tiny_model: TinyModel) -> Setup:
    folder = tiny_model(max_position_embeddings=8192)
    return Setup(model=str(folder), gguf=None, threads=1, kv_tokens=32_768, seed=7)


@pytest.fixture(scope="module")
def backend(setup: Setup) -> Iterator[st.LocalBackend]:
    with st.LocalBackend(setup.model, compile=False, kv_tokens=setup.kv_tokens) as backend:
        yield backend


def suite_on(
    setup: Setup, contenders: list[Contender], names: list[str], *, pairs: int = 1
) -> Measured:
    return run_suite(
        contenders, names, setup, size=TINY, pairs=pairs, patience_s=60, console=CONSOLE
    )


def test_every_workload_runs_on_ours_and_on_a_peer(setup: Setup, tmp_path: Path) -> None:
    ours = Stemma("ours", "fp32", compile=False)
    peer = Peer("", "transformers", sys.executable, remedy="none", log=tmp_path / "log")
    missing = Peer("llama.cpp", "llama-cpp", None, remedy="install it", log=tmp_path / "log")
    measured = suite_on(setup, [ours, peer, missing], list(WORKLOADS))

    assert len(measured.runs) == len(WORKLOADS)
    for runs in measured.runs:
        assert not runs.failures
        assert [len(outcomes) for outcomes in runs.outcomes.values()] == [1, 1]
        own, others = runs.outcomes["fp32"][0], runs.outcomes["transformers"][0]
        assert own.output_tokens == others.output_tokens
        assert 0 < own.rows < others.rows
        assert runs.ratio("fp32", "fp32") == 1
        assert 0 < runs.floors["fp32"] < runs.seconds("fp32")
    by_name = dict(zip(WORKLOADS, measured.runs, strict=True))
    assert by_name["no-sharing"].hit_rate("fp32") < 0.1 < by_name["rag"].hit_rate("fp32")

    console = Console(width=200, record=True, file=sys.stderr)
    console.print(table(measured, "the title"))
    console.print(latency_table(measured))
    printed = console.export_text()
    assert "the title" in printed
    assert "llama-cpp: left out: no interpreter that has it: install it" in printed
    assert "8 chats at once" in printed
    found = json.loads(json.dumps(as_json(measured, {})))
    assert found["workloads"][0]["results"]["transformers"]["ratios"]["fp32"] > 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_replay_asks_for_the_texts_that_the_program_asked_for(
    backend: st.LocalBackend, name: str
) -> None:
    recorder = Recorder(backend, quiet_s=0.05)
    prompts: dict[int, list[int]] = {}
    try:
        run_program(WORKLOADS[name](TINY), recorder, seed=7)
    finally:
        recorder.close()
    replay = Replay(recorder.calls)
    for ready in replay.rounds():
        for call in ready:
            prompts[call.index] = call.prompt
            written = recorder.texts[call.index][len(call.prompt) :]
            replay.wrote(call.index, written)
            assert bool(call.new) != bool(call.choices)
            assert call.choices or len(written) <= call.new
    assert len(prompts) == len(recorder.calls)
    for index, text in enumerate(recorder.texts):
        assert text[: len(prompts[index])] == prompts[index]


def test_a_peer_that_fails_is_told_and_the_others_go_on(setup: Setup, tmp_path: Path) -> None:
    ours = Stemma("ours", "fp32", compile=False)
    broken = Peer("", "vllm", sys.executable, remedy="install vLLM", log=tmp_path / "log")
    measured = suite_on(setup, [broken, ours], ["no-sharing"], pairs=2)
    assert len(measured.runs[0].outcomes["fp32"]) == 2
    assert list(measured.names) == ["fp32"]
    assert "No module named 'vllm'" in measured.skipped["vllm"]
    assert "install vLLM" in measured.skipped["vllm"]


def test_ratios_are_medians_of_pairs() -> None:
    runs = Runs("work", calls=1, rounds=1)
    for key, times in {"int8": [1.0, 2.0, 4.0], "peer": [3.0, 2.0, 20.0]}.items():
        runs.outcomes[key] = [Outcome(s, 1, 1, 1, 1) for s in times]
    assert runs.seconds("peer") == 3
    assert runs.ratio("peer", "int8") == 3
    runs.outcomes["peer"].pop()
    assert runs.ratio("peer", "int8") == 2
    assert runs.ratio("peer", "none") is None


@pytest.fixture
def own_threads() -> Iterator[None]:
    """The command sets how many threads torch has, for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("own_threads")
def test_the_command_writes_its_results(setup: Setup, tmp_path: Path) -> None:
    chosen = ["--only", "judge", "--peers", "fp32,no-cache", "--out", str(tmp_path)]
    command.main([*chosen, "--model", setup.model, "--quick", "--no-compile", "--threads", "1"])
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["contenders"].keys() == {"fp32", "no-cache"}
    assert [each["name"] for each in written["workloads"]] == ["LLM judge"]


def test_parts_of_the_time_are_all_of_it(setup: Setup) -> None:
    ours = Stemma("ours", "fp32", compile=False)
    measured = suite_on(setup, [ours], ["no-sharing"], pairs=2)
    for outcome in measured.runs[0].outcomes["fp32"]:
        assert sum(outcome.parts.values()) == pytest.approx(outcome.seconds)
        assert min(outcome.parts.values()) > 0
    found = parts_table(measured)
    assert found is not None
    assert found.row_count == 1


def test_the_command_refuses_names_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "mmlu,nothing"])
    assert "--only: there is no 'nothing', only mmlu" in capsys.readouterr().err


@settings(deadline=None)
@given(
    texts=strategies.lists(
        strategies.lists(strategies.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8
    ),
    kept=strategies.lists(strategies.lists(strategies.integers(0, 2), max_size=8), max_size=3),
)
def test_by_hand_every_token_is_in_every_sequence_once(
    texts: list[list[int]], kept: list[list[int]]
) -> None:
    lines = [Line(Ready(i, text, 1, [], -1), i, text) for i, text in enumerate(texts)]
    held: dict[int, list[int]] = {}
    for line in lines:
        longest = max((common_length(text, line.ids) for text in kept), default=0)
        line.have = min(longest, len(line.ids) - 1)
        held[line.sequence] = line.ids[: line.have]
    decoded = 0
    for parts in shared_parts(lines, grouped=True):
        for group, begin, end in parts:
            decoded += end - begin
            assert len(held[group[0].sequence]) == begin
            for line in group:
                held[line.sequence] += group[0].ids[max(begin, line.have) : end]
    assert [held[line.sequence] for line in lines] == texts
    if not kept:
        assert decoded == len({tuple(text[: n + 1]) for text in texts for n in range(len(text))})


def test_buffers_are_shared_only_where_texts_are() -> None:
    text = list(range(100))
    alone = [Call(0, None, 0, [i, *text], new=4) for i in range(3)]
    assert not shares(alone)
    assert not shares([*alone, Call(1, 0, 105, [1], new=4), Call(1, 1, 105, [1], choices=[[1]])])
    assert shares([*alone, Call(1, 0, 105, [1], new=4), Call(1, 0, 90, [1], new=4)])
    assert shares([Call(0, None, 0, [*text, i], new=4) for i in range(3)])
    assert shares([Call(0, None, 0, text, choices=[[1, 2], [3, 4]])])


def test_the_plot_has_a_bar_for_each_peer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    runs = Runs("work", calls=1, rounds=1)
    for key, seconds in {"int8": 1.0, "a peer": 3.0, "another": 2.0}.items():
        runs.outcomes[key] = [Outcome(seconds, 1, 1, 1, 1)]
    names = {key: f"the name of {key}" for key in runs.outcomes}
    write_plot(tmp_path / "plot.svg", Measured(names, {}, Floor(1.0, 1.0, 1.0), [runs]))
    drawn = (tmp_path / "plot.svg").read_text()
    assert "<svg" in drawn
    assert all(name in drawn for name in names.values())

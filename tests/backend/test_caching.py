"""`CachedBackend`: a request that was answered before is not asked again, and nobody can tell."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.backend.base import Branch, Namespace
from stemma.backend.caching import CachedBackend
from stemma.backend.mock import MockBackend
from stemma.backend.response_cache import ResponseCache
from stemma.lang.errors import Cancelled, InvalidArgument, StemmaError
from stemma.lang.sampling import SamplingParams

SEEDED = SamplingParams(seed=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.db"


@pytest.fixture
def cached(path: Path) -> Iterator[CachedBackend]:
    numbers = iter(range(1000))
    with CachedBackend(MockBackend(lambda prompt, params: f" n{next(numbers)}"), path) as backend:
        yield backend


def asked(backend: CachedBackend) -> int:
    assert isinstance(backend.inner, MockBackend)
    return len(backend.inner.calls)


def write(
    backend: CachedBackend,
    text: str = "A",
    params: SamplingParams = SEEDED,
    *,
    namespace: Namespace = Namespace(),
    heal: bool = True,
    **mode: Any,
) -> str:
    branch = backend.open(namespace, **mode)
    branch.append(text)
    return branch.generate(params, heal=heal).result().text


def test_the_same_request_is_asked_once(cached: CachedBackend) -> None:
    assert write(cached) == write(cached) == " n0"
    assert asked(cached) == 1
    stats = cached.responses.stats()
    assert (stats.hits, stats.misses, stats.entries, stats.unwritten) == (1, 1, 1, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"text": "B"},
        {"params": SamplingParams(seed=2)},
        {"params": SamplingParams(seed=1, max_tokens=4)},
        {"params": SamplingParams(seed=1, stop="x")},
        {"namespace": Namespace(salt="s")},
        {"namespace": Namespace(extra_key="s")},
        {"heal": False},
    ],
)
def test_a_request_that_differs_is_asked(cached: CachedBackend, other: dict[str, Any]) -> None:
    assert write(cached) == " n0"
    assert write(cached, **other) == " n1"
    assert (write(cached), write(cached, **other)) == (" n0", " n1")


def test_other_weights_are_another_model(path: Path) -> None:
    for version in ("a", "b", "a"):
        inner = MockBackend(lambda prompt, params, version=version: version)
        inner.model_version = version
        with CachedBackend(inner, path) as backend:
            assert write(backend) == version


def test_control_text_is_not_the_same_text_in_the_key(cached: CachedBackend) -> None:
    texts = []
    for control in (True, False):
        branch = cached.open()
        branch.append("A", control=control)
        texts.append(branch.generate(SEEDED).result().text)
    assert texts == [" n0", " n1"]


def test_without_a_seed_only_the_most_probable_text_is_kept(cached: CachedBackend) -> None:
    free, greedy = SamplingParams(), SamplingParams(temperature=0)
    assert write(cached, params=free) != write(cached, params=free)
    assert write(cached, params=greedy) == write(cached, params=greedy.but(seed=9)) == " n2"


def test_a_cache_mode_says_what_is_looked_up_and_kept(cached: CachedBackend) -> None:
    assert write(cached, cache="read") == " n0"
    assert write(cached) == " n1"
    assert write(cached, cache="read") == " n1"
    assert write(cached, cache="off") == " n2"
    assert write(cached) == " n1"


def test_scores_are_kept(path: Path) -> None:
    inner = MockBackend(scores=lambda prompt, choice: [-float(len(prompt + choice))])
    with CachedBackend(inner, path) as backend:
        found = []
        for _ in range(2):
            branch = backend.open()
            branch.append("A")
            scored = branch.score([" b", " cc"], unconditional=True).result()
            found.append(scored.choices)
            branch.commit(scored.choices[1])
            branch.append("!")
            assert branch.token_ids() == inner.open().token_ids() + list(inner._ids("A cc!"))
        assert found[0] == found[1]
        assert len(inner.calls) == 1
        assert scored.usage.cached_responses == 1
        branch.score([" b", " cc"]).result()
        assert len(inner.calls) == 2


def test_a_failure_is_not_kept(path: Path) -> None:
    inner = MockBackend([ConnectionError("lost"), " there"])
    with CachedBackend(inner, path) as backend:
        with pytest.raises(ConnectionError):
            write(backend)
        assert write(backend) == write(backend) == " there"


def test_a_cancelled_request_is_not_kept(path: Path) -> None:
    with CachedBackend(MockBackend([" one two", " three"], delay=0.2), path) as backend:
        branch = backend.open()
        branch.append("A")
        generation = branch.generate(SEEDED)
        generation.cancel()
        with pytest.raises(Cancelled):
            generation.result(5)
        assert write(backend) == " three"


@st.function
def program(s: st.ProgramState, topic: str) -> list[str]:
    s += st.user(topic)
    for branch in (branches := s.fork(2)):
        branch += st.assistant(st.gen("line", max_tokens=8) + " and" + st.gen("more", n=3))
        branch += st.select("mood", ["happy", "angry"])
    return [*branches["line"], *branches["more"][0], *branches["mood"]]


def test_a_program_is_the_same_on_answers_from_the_cache(cached: CachedBackend) -> None:
    first = program.run("tea", backend=cached, seed=3)
    count = asked(cached)
    again = program.run("tea", backend=cached, seed=3)
    assert asked(cached) == count == first.usage.cached_responses + 10
    assert (again.value, again.text()) == (first.value, first.text())
    assert again.usage.cached_responses == 10
    assert again.usage.computed_tokens == 0
    assert again.usage.prompt_tokens == again.usage.cached_tokens == first.usage.prompt_tokens
    assert again.usage.output_tokens == first.usage.output_tokens


def test_more_samples_ask_only_for_those_that_are_new(cached: CachedBackend) -> None:
    draws = [SamplingParams(seed=seed) for seed in range(4)]

    def texts(some: list[SamplingParams]) -> list[str]:
        branch = cached.open()
        branch.append("A")
        found = [handle.result().text for handle in branch.sample(some)]
        branch.append("!")
        ids = cached.inner._ids("A" + found[0] + "!")  # type: ignore[attr-defined]
        assert branch.token_ids() == list(ids)
        return found

    assert texts(draws[:2]) == [" n0", " n1"]
    assert texts(draws) == [" n0", " n1", " n2", " n3"]
    assert texts(draws) == [" n0", " n1", " n2", " n3"]
    assert cached.inner.open_branches == 3  # type: ignore[attr-defined]
    # One that was drawn beside others says nothing of how a branch goes on from it.
    assert texts(draws[1:]) == [" n4", " n2", " n3"]
    assert texts(draws[1:]) == [" n4", " n2", " n3"]


def test_a_branch_that_is_closed_closes_what_it_asked_beside_itself(path: Path) -> None:
    inner = MockBackend(lambda prompt, params: " x y", delay=0.05)
    with CachedBackend(inner, path) as backend:
        write(backend)
        branch = backend.open()
        branch.append("A")
        first, second = branch.sample([SEEDED, SamplingParams(seed=2)])
        assert first.result().usage.cached_responses == 1
        branch.close()
        with pytest.raises(Cancelled):
            second.result(5)
        assert inner.open_branches == 1


def test_answers_outlive_the_process_that_asked(path: Path) -> None:
    code = (
        "import sys, stemma as st; inner = st.MockBackend([' there']);"
        "backend = st.CachedBackend(inner, sys.argv[1]);"
        "branch = backend.open(); branch.append('A');"
        "print(branch.generate(st.SamplingParams(seed=1)).result().text)"
    )
    for _ in range(2):  # without closing: the end of the process waits until all is written
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd="/"
        )
        assert (done.stdout, done.stderr) == (" there\n", "")
    with CachedBackend(MockBackend(), path) as backend:
        assert write(backend) == " there"


# The file


def test_the_oldest_used_answers_go_first(path: Path) -> None:
    with ResponseCache(path, max_bytes=400) as cache:
        for name in (b"a", b"b", b"c"):
            cache.put(name, "x" * 99)
            cache.flush()
        cache.note_hit(b"a")
        cache.flush()
        cache.put(b"d", "x" * 99)
        cache.put(b"e", "x" * 99)
        stats = cache.stats()
        kept = [name for name in (b"a", b"b", b"c", b"d", b"e") if cache.get(name)]
        assert kept == [b"a", b"c", b"d", b"e"]
        assert (stats.entries, stats.bytes) == (4, 400)
        cache.put(b"f", "x" * 1000)
        assert cache.stats().entries == 4
        cache.put(b"a", "y")
        assert cache.stats().bytes == 302
        cache.clear()
        assert (cache.stats().entries, cache.stats().bytes) == (0, 0)
        assert cache.get(b"a") is None


def test_what_was_put_is_found_at_once_and_by_others_soon(path: Path) -> None:
    with ResponseCache(path) as one, ResponseCache(path) as other:
        one.put(b"k", "v")
        assert one.get(b"k") == "v"
        one.flush()
        assert other.get(b"k") == "v"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(b"not a database" * 100), "is damaged, or no cache"),
        (lambda path: sqlite3.connect(path).execute("create table t (x)"), "another program"),
        (lambda path: path.mkdir(), "cannot be opened"),
    ],
)
def test_another_file_is_refused(path: Path, make: Callable[[Path], object], said: str) -> None:
    made = make(path)
    if isinstance(made, sqlite3.Cursor):
        made.connection.close()
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(InvalidArgument, match=said) as caught:
        ResponseCache(path)
    assert str(path) in str(caught.value)
    assert not before or path.read_bytes() == before


def test_another_format_is_refused(path: Path) -> None:
    ResponseCache(path).close()
    connection = sqlite3.connect(path)
    connection.execute("pragma user_version = 9")
    connection.close()
    with pytest.raises(InvalidArgument, match="format 9"):
        ResponseCache(path)


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_bytes": 1.5}, {"path": 3}])
def test_settings_that_cannot_be_meant_are_refused(path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        ResponseCache(**{"path": path, **options})
    with pytest.raises(InvalidArgument, match="goes around a Backend"):
        CachedBackend("model", path)  # type: ignore[arg-type]


def test_a_file_that_is_damaged_while_it_is_open_is_told(path: Path) -> None:
    with ResponseCache(path) as cache:
        cache.put(b"k", "v")
        cache.flush()
        cache._connection.execute("pragma wal_checkpoint(truncate)")
        cache._connection.execute("drop table answers")
        with pytest.raises(StemmaError, match=r"cannot be read: .*remove the file"):
            cache.get(b"k")


def test_what_cannot_be_written_is_counted_and_warned_of_once(path: Path) -> None:
    with ResponseCache(path) as cache:
        cache._connection.execute("pragma query_only = on")
        cache.put(b"a", "v")
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            cache.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.put(b"b", "v")
            cache.flush()
        assert cache.stats().unwritten == 2


def test_a_closed_cache_says_so(path: Path) -> None:
    cache = ResponseCache(path)
    cache.close()
    cache.close()
    with pytest.raises(StemmaError, match="was closed"):
        cache.get(b"k")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_is_told_to_open_its_own(path: Path, monkeypatch: Any) -> None:
    cache = ResponseCache(path)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(StemmaError, match="forked: open it in this one"):
        cache.get(b"k")
    monkeypatch.undo()
    cache.close()


def test_threads_and_processes_write_at_once(path: Path) -> None:
    code = (
        "import sys; from stemma.backend.response_cache import ResponseCache\n"
        "with ResponseCache(sys.argv[1]) as cache:\n"
        "    for i in range(200): cache.put(f'{sys.argv[2]}-{i}'.encode(), 'v'); cache.get(b'k')\n"
    )
    others = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(n)], cwd="/") for n in range(2)
    ]

    with ResponseCache(path) as cache:

        def put(n: int) -> None:
            for i in range(100):
                cache.put(f"t{n}-{i}".encode(), "v")

        threads = [threading.Thread(target=put, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [other.wait(60) for other in others] == [0, 0]
        assert cache.stats().entries == 2 * 200 + 3 * 100
        assert cache.stats().bytes == sum(
            len(f"{n}-{i}") + 1 for n in ("0", "1") for i in range(200)
        ) + sum(len(f"t{n}-{i}") + 1 for n in range(3) for i in range(100))


# On an engine


TEXTS = ["", "The capital", " of Fr", "é", "  ", "<|im_end|>", "1, 2, 3,", "\n", "a" * 30]


@pytest.mark.slow
def test_a_branch_goes_on_from_an_answer_as_if_it_had_been_computed(
    path: Path, tiny_model: Any
) -> None:
    """Random branches twice: the second time every answer is the cache's, and no id differs."""
    import random

    def walk(backend: st.Backend, seed: int) -> list[Any]:
        choose = random.Random(seed)
        branch: Branch = backend.open()
        branch.append("Once upon")
        told: list[Any] = []
        for _ in range(6):
            branch.append(choose.choice(TEXTS), control=choose.random() < 0.2)
            params = SamplingParams(
                seed=choose.randrange(9),
                max_tokens=choose.randrange(1, 9),
                temperature=choose.choice([0, 1, 1.5]),
                stop=choose.choice([(), ("e",), ("a", "b", "c", "d"), ("\n", " t")]),
                include_stop=choose.random() < 0.3,
                top_logprobs=choose.choice([0, 2]),
            )
            heal = choose.random() < 0.7
            if choose.random() < 0.3:
                scored = branch.score([" yes", " no"], unconditional=True).result()
                branch.commit(scored.choices[choose.randrange(2)])
                told.append([(c.start, c.token_ids) for c in scored.choices])
            draws = [params.but(seed=params.seed), params.but(seed=99)][: choose.randrange(1, 3)]
            found = [handle.result() for handle in branch.sample(draws, heal=heal)]
            told += [(c.text, c.token_ids, c.rest, c.finish_reason) for c in found]
            told.append([len(c.logprobs or ()) for c in found])
            told.append(branch.token_ids())
            told.append(branch.fork(1)[0].token_ids())
        branch.close()
        return told

    with st.LocalBackend(tiny_model(), kv_tokens=2000) as inner:
        cached = CachedBackend(inner, path)
        rests = 0
        for seed in range(25):
            plain = walk(inner, seed)
            assert walk(cached, seed) == plain
            rests += sum(bool(each[2]) for each in plain if isinstance(each, tuple))
        assert rests > 10
        misses, steps = cached.responses.stats().misses, inner.stats().steps
        for seed in range(25):
            assert walk(cached, seed) == walk(inner, seed)
        stats = cached.responses.stats()
        again = stats.misses - misses
        assert again < 0.05 * stats.hits, (again, stats.hits, steps)
        cached.responses.close()


@pytest.mark.slow
def test_weights_and_how_they_are_computed_tell_models_apart(tiny_model: Any) -> None:
    identities = []
    for seed, dtype in ((0, None), (1, None), (0, "float64"), (0, None)):
        with st.LocalBackend(tiny_model(seed=seed), dtype=dtype, kv_tokens=100) as backend:
            identities.append(backend.identity())
    assert identities[0] == identities[3]
    assert len(set(identities)) == 3

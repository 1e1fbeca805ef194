"""A recording of a real engine on a tiny model: what each moment tells."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stemma.backend.base import Namespace
from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.cache.printing import plain
from stemma.lang.sampling import SamplingParams
from stemma.treeview import Mark, MarkedTree, Recorder, save_page, save_svg

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
STEM = list(range(3, 43))


@pytest.fixture
def backend(tiny_model: Callable[..., Path]) -> Iterator[LocalBackend]:
    backend = LocalBackend(tiny_model(), dtype="float64", kv_tokens=120)
    backend.engine.check_every_step = True
    yield backend
    backend.close()


def marks(tree: MarkedTree) -> list[tuple[str, Mark, int]]:
    return [(node.name, node.mark, node.token_count) for node in tree.nodes()]


def test_moments_tell_what_was_computed_reused_and_evicted(backend: LocalBackend) -> None:
    recorder = Recorder(backend)
    assert marks(recorder.note("empty").tree) == []

    backend.generate([[*STEM, 50]], GREEDY)
    first = recorder.note("first")
    assert marks(first.tree) == [("a", Mark.NEW, 48)]
    assert [node.output_tokens for node in first.tree.nodes()] == [7]  # the last has no KV
    assert (first.counts.computed, first.counts.reused, first.counts.output) == (48, 0, 8)

    backend.generate([[*STEM, 60]], GREEDY)
    second = recorder.note("second")
    assert marks(second.tree) == [
        ("b", Mark.HIT, 40),
        ("a", Mark.KEPT, 8),
        ("c", Mark.NEW, 8),
    ]
    assert (second.counts.computed, second.counts.reused, second.counts.evicted) == (8, 40, 0)

    backend.generate([[*range(100, 170)]], GREEDY)
    third = recorder.note("third")
    assert marks(third.tree)[-1][1:] == (Mark.NEW, 77)
    evicted = third.tree.marked(Mark.EVICTED)
    assert third.counts.evicted == sum(node.token_count for node in evicted) > 0
    assert third.tree.total_tokens == backend.tree().total_tokens <= third.pool_tokens == 120
    assert [m.number for m in recorder.moments] == [1, 2, 3, 4]


def test_recording_begins_with_what_is_there(backend: LocalBackend) -> None:
    backend.generate([STEM], GREEDY)
    recorder = Recorder(backend)
    (node,) = recorder.note("now").tree.nodes()
    assert node.mark is Mark.KEPT
    assert recorder.moments[0].counts.computed == 0


def test_what_a_running_request_uses_is_locked(backend: LocalBackend) -> None:
    recorder = Recorder(backend)
    branch = backend.open(Namespace())
    branch.append("The quick brown fox")
    gate = threading.Event()
    with ThreadPoolExecutor() as pool:
        held = pool.submit(backend.engine.call, gate.wait)  # until somebody listens
        generation = branch.generate(GREEDY)
        generation.subscribe(lambda piece: recorder.note(piece))
        gate.set()
        held.result(60)
    generation.result(60)
    (node,) = recorder.note("done").tree.children
    assert node.held == 1  # the branch, which can go on
    first, *_, last = ({node.state for node in m.tree.nodes()} for m in recorder.moments)
    assert first == {"locked"}
    assert last == {"idle"}


def test_moment_prints_its_title_caption_numbers_and_tree(backend: LocalBackend) -> None:
    recorder = Recorder(backend)
    backend.generate([STEM], GREEDY)
    printed = plain(recorder.note("A title", "And a caption.")).splitlines()
    assert printed[:5] == [
        "",
        "1. A title",
        "And a caption.",
        "47 tokens computed, 0 reused, 0 evicted; 47 of 120 in the cache",
        "radix tree  47 tokens in 1 edge",
    ]


def test_tree_of_a_backend_is_saved_as_picture_and_page(
    backend: LocalBackend, tmp_path: Path
) -> None:
    backend.generate([STEM], GREEDY)
    save_svg(backend.tree(), tmp_path / "tree.svg")
    save_page(backend.tree(), tmp_path / "tree.html")
    assert (tmp_path / "tree.svg").read_text(encoding="utf-8").startswith("<svg ")
    assert (tmp_path / "tree.html").read_text(encoding="utf-8").startswith("<!doctype html>")

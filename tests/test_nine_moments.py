"""The nine moments by which RadixAttention is explained happen in the real engine: the tree with
its hit, new and evicted edges, the tokens computed and the tokens reused.

What must be in the tree is said here as texts (whose prompt and output are cached at each moment);
which edges that makes, and what became of each, is worked out from sets of prefixes alone.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.request import Request
from stemma.treeview import Mark, MarkedNode, MarkedTree, Moment
from stemma.treeview.page import page_data

Tokens = tuple[int, ...]


def example() -> ModuleType:
    path = Path(__file__).parent.parent / "examples" / "nine_moments.py"
    spec = importlib.util.spec_from_file_location("example_nine_moments", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


nine_moments = example()
# Twice as many tokens as the default model's tokenizer makes of the same texts.
SMALL = nine_moments.Sizes(pool=563, story=240)


@dataclass
class Story:
    """A recording, and the requests that were computed before each of its moments."""

    backend: LocalBackend
    moments: list[Moment] = field(default_factory=list)
    requests: list[list[Request]] = field(default_factory=list)

    def cached(self, moment: int, number: int = 0) -> Tokens:
        """What a request of a moment leaves in the cache: all but the last token it sampled, which
        nothing was computed for.
        """
        tokens = self.requests[moment - 1][number].tokens.view()
        return tuple(tokens[:-1].tolist())


def tell(backend: LocalBackend, sizes: Any, monkeypatch: pytest.MonkeyPatch) -> Story:
    story = Story(backend)
    asked: list[Request] = []
    submit = backend.submit

    def watched(requests: Sequence[Request]) -> None:
        asked.extend(requests)
        submit(requests)

    def show(moment: Moment) -> None:
        backend.check()
        story.moments.append(moment)
        story.requests.append(list(asked))
        asked.clear()

    monkeypatch.setattr(backend, "submit", watched)
    assert nine_moments.record(backend, sizes, show=show) == story.moments
    return story


@pytest.fixture
def small(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    backend = LocalBackend(tiny_model(), dtype="float64", kv_tokens=SMALL.pool, eviction="lru")
    backend.engine.check_every_step = True
    yield tell(backend, SMALL, monkeypatch)
    backend.close()


@pytest.fixture(scope="module")
def real(default_model_folder: Path) -> Any:
    sizes = nine_moments.Sizes()
    backend = LocalBackend(default_model_folder, kv_tokens=sizes.pool, eviction="lru")
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield tell(backend, sizes, monkeypatch)
    backend.close()


# What is in the tree at each moment


def expected_texts(story: Story) -> list[list[Tokens]]:
    """For each moment, whose tokens are in the tree."""
    first, second = (
        [story.cached(2), story.cached(3), story.cached(8)],
        [
            story.cached(4),
            story.cached(5),
        ],
    )
    what, others = story.cached(6), [story.cached(7, 0), story.cached(7, 1)]
    system = common(first[0], second[0])
    return [
        [],
        [first[0]],  # the first turn
        [first[1]],  # goes on
        [first[1], second[0]],  # a second chat
        [second[1]],  # goes on: the branch of the first chat is gone, the system prompt stays
        [second[1], what],  # a question after examples
        [second[1], what, *others],  # two more
        [first[2], what, *others],  # the first chat is back, the branch of the second is gone
        [system, *(story.cached(9, n) for n in range(4))],  # samples; chat and others are gone
    ]


def common(a: Tokens, b: Tokens) -> Tokens:
    length = next(n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return a[:length]


def prefixes(texts: Sequence[Tokens]) -> set[Tokens]:
    return {text[:end] for text in texts for end in range(1, len(text) + 1)}


def expected_marks(story: Story, number: int) -> dict[Tokens, Mark]:
    """What became of every prefix that was in the tree before the moment or is at it."""
    texts = expected_texts(story)
    before = prefixes(texts[number - 2]) if number > 1 else set()
    after = prefixes(texts[number - 1])
    used = prefixes([story.cached(number, n) for n in range(len(story.requests[number - 1]))])
    return {
        **dict.fromkeys(before - after, Mark.EVICTED),
        **dict.fromkeys(after - before, Mark.NEW),
        **dict.fromkeys(after & before & used, Mark.HIT),
        **dict.fromkeys((after & before) - used, Mark.KEPT),
    }


def expected_edges(marks: dict[Tokens, Mark]) -> set[tuple[Mark, int, Tokens]]:
    """The edges that these prefixes make: where tokens part or their mark changes, one ends."""
    below: dict[Tokens, list[Tokens]] = {}
    for prefix in marks:
        below.setdefault(prefix[:-1], []).append(prefix)
    edges = set()
    for prefix, mark in marks.items():
        children = below.get(prefix, [])
        if len(children) == 1 and marks[children[0]] is mark:
            continue
        start = len(prefix) - 1
        while start > 0 and marks[prefix[:start]] is mark and len(below[prefix[:start]]) == 1:
            start -= 1
        edges.add((mark, start, prefix[start:]))
    return edges


def edges_of(tree: MarkedTree) -> set[tuple[Mark, int, Tokens]]:
    return {(node.mark, node.start, node.token_ids) for node in tree.nodes()}


def assert_story_happens(story: Story) -> None:
    assert len(story.moments) == 9
    for moment, requests in zip(story.moments, story.requests, strict=True):
        marks = expected_marks(story, moment.number)
        assert edges_of(moment.tree) == expected_edges(marks), moment.title
        assert_texts_are_those_of_the_tokens(story, moment.tree)
        new, gone = (sum(m is mark for m in marks.values()) for mark in (Mark.NEW, Mark.EVICTED))
        counts = moment.counts
        assert counts.evicted == gone
        assert counts.output == sum(len(r.output_ids) for r in requests)
        # Each token is computed once or reused; of samples, those that come a step late compute
        # the last token of the prompt again.
        rows = sum(len(r.tokens) - 1 for r in requests)
        assert counts.computed + counts.reused == rows
        late = len(requests) - 1 if moment.number == 9 else 0
        assert new <= counts.computed <= new + late
        assert moment.tree.total_tokens <= moment.pool_tokens


def assert_texts_are_those_of_the_tokens(story: Story, tree: MarkedTree) -> None:
    stack: list[tuple[Tokens, str, MarkedNode]] = [((), "", child) for child in tree.children]
    while stack:
        ids, text, node = stack.pop()
        ids, text = ids + node.token_ids, text + node.text
        if not node.children:
            assert text == story.backend.decode(ids)
        stack.extend((ids, text, child) for child in node.children)


def test_nine_moments_happen_on_a_tiny_model(small: Story) -> None:
    assert_story_happens(small)
    evicted = [moment.counts.evicted for moment in small.moments]
    assert [n > 0 for n in evicted] == [False] * 4 + [True] + [False] * 2 + [True] * 2
    assert small.backend.stats().retractions == 0


def test_edges_keep_their_names_from_moment_to_moment(small: Story) -> None:
    named: dict[str, Tokens] = {}
    for moment in small.moments:
        stack: list[tuple[Tokens, MarkedNode]] = [((), child) for child in moment.tree.children]
        while stack:
            above, node = stack.pop()
            assert named.setdefault(node.name, above + node.token_ids) == above + node.token_ids
            stack.extend((above + node.token_ids, child) for child in node.children)
    assert len(set(named.values())) == len(named)


def test_page_of_the_moments_tells_the_same(small: Story) -> None:
    data = page_data(small.moments)
    mark = data["fields"].index("mark")
    assert [[row[mark] for row in moment["nodes"]] for moment in data["moments"]] == [
        [node.mark for node in moment.tree.nodes()] for moment in small.moments
    ]


@pytest.mark.slow
def test_nine_moments_happen_on_the_default_model(real: Story) -> None:
    assert_story_happens(real)
    assert real.backend.stats().retractions == 0


SYSTEM = "You are a helpful assistant."
HELLO = "Hello! Here is a problem"
EXAMPLES = "Question 1: Where do fish live?"
BEES, OWLS, SNAKES = "What do bees make?", "When do owls sleep?", "How do snakes move?"

# Tokens computed and reused; of each edge its mark, its tokens, and a piece of its text.
ON_THE_DEFAULT_MODEL: list[tuple[int, int, list[tuple[str, int, str]]]] = [
    (0, 0, []),
    (123, 0, [("new", 123, HELLO)]),
    (34, 123, [("hit", 123, HELLO), ("new", 34, "Solve this problem")]),
    (24, 14, [("hit", 14, SYSTEM), ("kept", 143, HELLO), ("new", 24, "What can you do?")]),
    (
        147,
        38,
        [
            ("hit", 14, SYSTEM),
            ("evicted", 143, HELLO),
            ("hit", 24, "What can you do?"),
            ("new", 147, "Write a story"),
        ],
    ),
    (53, 0, [("kept", 185, SYSTEM), ("new", 53, EXAMPLES)]),
    (
        28,
        78,
        [
            ("kept", 185, SYSTEM),
            ("hit", 39, EXAMPLES),
            ("kept", 14, BEES),
            ("new", 14, OWLS),
            ("new", 14, SNAKES),
        ],
    ),
    (
        176,
        14,
        [
            ("hit", 14, SYSTEM),
            ("evicted", 171, "What can you do?"),
            ("new", 176, HELLO),
            ("kept", 39, EXAMPLES),
            ("kept", 14, BEES),
            ("kept", 14, OWLS),
            ("kept", 14, SNAKES),
        ],
    ),
    (
        63,
        221,
        [
            ("kept", 14, SYSTEM),
            ("evicted", 176, HELLO),
            ("hit", 39, EXAMPLES),
            ("hit", 14, BEES),
            ("new", 3, "Explanation:"),
            ("evicted", 14, OWLS),
            ("evicted", 14, SNAKES),
        ],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 10))
def test_moment_on_the_default_model(real: Story, number: int) -> None:
    moment = real.moments[number - 1]
    computed, reused, edges = ON_THE_DEFAULT_MODEL[number - 1]
    late = moment.counts.computed - computed  # of the samples, see above
    assert late == 0 or (number == 9 and 0 < late < 4)
    assert moment.counts.reused == reused - late
    samples: list[MarkedNode] = []
    for node in moment.tree.nodes():
        if node.text.endswith("Explanation:"):
            samples = list(node.nodes())[1:]
    assert {node.mark for node in samples} <= {Mark.NEW}
    found = [node for node in moment.tree.nodes() if node not in samples]
    assert len(found) == len(edges)
    for mark, tokens, piece in edges:
        # In one step the branches of two questions may come in either order.
        assert any(n.mark == mark and n.token_count == tokens and piece in n.text for n in found)

"""Where idle branches stand: a hint for eviction that follows them, and nothing more."""

from __future__ import annotations

import gc
import random
import weakref

from stemma.backend.base import Branch
from stemma.backend.local.backend import LocalBackend
from stemma.backend.local.branch import common_length
from stemma.backend.local.cache.eviction import ProgramAware
from stemma.lang.sampling import SamplingParams
from tests.backend.conftest import Make

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
TEXT = "The quick brown fox jumps over the lazy dog. "


def held(backend: LocalBackend) -> tuple[int, int]:
    """How many places there are, and how many cached tokens lead to one."""

    def look() -> tuple[int, int]:
        tree = backend.engine.scheduler.memory.cache._tree
        return tree.root.held, sum(len(node) for node in tree.nodes() if node.held)

    return backend.engine.call(look)


def begun(backend: LocalBackend, text: str = TEXT) -> Branch:
    """A branch after its first generation."""
    branch = backend.open()
    branch.append(text)
    branch.generate(GREEDY).result(30)
    return branch


def test_idle_branch_stands_at_its_end_and_holds_no_lock(make: Make) -> None:
    backend = make()
    branch = begun(backend)
    length = len(branch.token_ids()) - 1  # the last token has no KV yet
    assert held(backend) == (1, length)
    assert backend.stats().protected_tokens == 0
    branch.append("And then")
    branch.generate(GREEDY).result(30)
    assert held(backend) == (1, len(branch.token_ids()) - 1)


def test_branch_that_a_stop_cut_stands_where_its_own_text_ends(make: Make) -> None:
    backend = make()
    first = backend.generate([TEXT], GREEDY)[0]
    stop = backend.decode(first.token_ids[2:3])
    branch = backend.open()
    branch.append(TEXT)
    generation = branch.generate(GREEDY.but(stop=(stop,)), heal=False).result(30)
    assert generation.matched_stop == stop
    kept = len(backend.encode(TEXT)) + len(generation.token_ids)
    assert held(backend)[0] == 1
    assert held(backend)[1] <= kept + 1  # a BOS may stand before
    assert held(backend)[1] >= kept - 1


def test_closed_branch_stands_nowhere(make: Make) -> None:
    backend = make()
    branch = begun(backend)
    branch.close()
    assert held(backend) == (0, 0)
    assert backend.tree().total_tokens > 0
    branch.close()
    assert held(backend) == (0, 0)


def test_branch_that_nobody_refers_to_stands_nowhere_without_the_collector(make: Make) -> None:
    backend = make()
    gc.collect()
    gc.disable()
    try:
        branch = begun(backend)
        assert held(backend)[0] == 1
        gone = weakref.ref(branch)
        del branch
        assert gone() is None
        assert held(backend) == (0, 0)
    finally:
        gc.enable()


def test_forks_share_their_parents_place_until_the_last_of_them_goes_on(make: Make) -> None:
    backend = make()
    branch = begun(backend)
    start = held(backend)[1]
    forks = branch.fork(3)
    assert held(backend) == (1, start)
    branch.close()
    forks[0].close()
    assert held(backend) == (1, start)
    for i, fork in enumerate(forks[1:]):
        fork.append(f" {i}!")
        fork.generate(GREEDY).result(30)
    assert held(backend)[0] == 2
    assert held(backend)[1] > start
    for fork in forks[1:]:
        fork.close()
    assert held(backend) == (0, 0)


def test_branch_that_chose_stands_behind_its_choice(make: Make) -> None:
    backend = make()
    branch = begun(backend)
    branch.append(" Yes or no?")
    scores = branch.score([" yes", " no"]).result(30).choices
    branch.commit(scores[1])
    places, tokens = held(backend)
    assert places == 1
    assert len(branch.token_ids()) - 1 <= tokens + 1
    assert tokens <= len(branch.token_ids())


def test_failed_and_cancelled_branches_stand_where_they_stood(make: Make) -> None:
    backend = make()
    branch = begun(backend)
    before = held(backend)
    branch.append(" And then")
    generation = branch.generate(SamplingParams(max_tokens=900, seed=1, ignore_eos=True))
    generation.cancel()
    assert generation.future.exception(30) is not None
    assert held(backend) == before
    branch.close()
    assert held(backend)[0] == 0


def test_branch_that_uses_no_cache_stands_nowhere(make: Make) -> None:
    backend = make()
    branch = backend.open(cache="off")
    branch.append(TEXT)
    branch.generate(GREEDY).result(30)
    assert held(backend) == (0, 0)


def test_place_outlives_flush_and_eviction_and_a_closed_backend(make: Make) -> None:
    backend = make(kv_tokens=150, max_running=2, max_step_tokens=128)
    branch = begun(backend)
    backend.flush_cache()
    assert held(backend) == (1, 0)
    second = begun(backend)
    rng = random.Random(1)
    backend.generate([[rng.randrange(3, 500) for _ in range(140)]], GREEDY)
    assert held(backend) == (2, 0)
    branch.append(" And then")
    branch.generate(GREEDY).result(30)
    assert held(backend)[0] == 2
    second.close()
    assert held(backend)[0] == 1
    backend.check()
    backend.close()
    branch.close()


def test_open_branches_keep_their_text_longer_than_finished_ones(make: Make) -> None:
    """With `program-aware`; under `lru` the open branch, the oldest of all, loses its text."""
    lost = {}
    for eviction in ("program-aware", "lru"):
        backend = make(eviction=eviction, kv_tokens=250, max_running=2, max_step_tokens=128)
        branch = begun(backend, TEXT * 2)
        for i in range(30):
            begun(backend, f"{i}: {TEXT}").close()
        assert backend.stats().evicted_tokens > 0
        known = len(branch.token_ids()) - 1  # the last token of an output has no KV
        branch.append(" And then")
        usage = branch.generate(GREEDY, heal=False).result(30).usage
        lost[eviction] = known - usage.cached_tokens
    assert lost["program-aware"] == 0
    assert lost["lru"] > 20


def test_outputs_of_requests_without_a_branch_are_as_good_as_prompts(make: Make) -> None:
    """Their next turn may come, as a request without a branch again."""
    backend = make()
    first = backend.generate([TEXT], GREEDY)[0]
    begun(backend, "Another text").close()

    def made() -> set[tuple[bool, bool]]:
        nodes = backend.engine.scheduler.memory.cache._tree.nodes()
        return {(n.output, n.own) for n in nodes}

    assert backend.engine.call(made) == {(False, False), (True, False), (True, True)}
    follow = [*backend.encode(TEXT), *first.token_ids, 7]
    assert backend.generate([follow], GREEDY)[0].usage.cached_tokens >= len(follow) - 2


def test_losing_choices_are_the_first_to_go(make: Make) -> None:
    backend = make()
    branch = begun(backend)
    branch.append(" Yes or no?")
    winner, loser = branch.score([" yes", " no, never"]).result(30).choices
    branch.commit(winner)

    def first_to_go() -> int:
        nodes = backend.engine.scheduler.memory.cache._tree.nodes()
        return sum(len(n) for n in nodes if ProgramAware().key(n)[0] == 0)

    unreachable = backend.engine.call(first_to_go)
    shared = common_length(winner.token_ids, loser.token_ids)
    assert unreachable == len(loser.token_ids) - shared - 1  # the last token is not computed

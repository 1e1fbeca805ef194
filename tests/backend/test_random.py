"""The counter-based random numbers: uniform, independent along every walk, the same forever."""

from __future__ import annotations

from typing import cast
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from stemma.backend.local import random
from stemma.backend.local.random import exponentials, words

MANY = 1 << 16
WRITTEN_DOWN = [1552542996267382703, 3933780439430933506]  # of seed 42, counter 7


def chi_square_excess(counts: NDArray[np.int64]) -> float:
    """How many standard deviations chi-square lies above its mean, for equally likely cells."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


def unit(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Words as numbers in [0, 1), of which the last bits count too."""
    return (words >> np.uint64(11)).astype(np.float64).ravel() * 2.0**-53


def walks() -> dict[str, NDArray[np.float64]]:
    """The ways an engine goes through seeds and counters."""
    ascending = list(range(MANY))
    bits = [seed << 48 for seed in ascending]
    return {
        "counters of seed 0": unit(words([0] * MANY, ascending, 1)),
        "counters of a large seed": unit(words([2**64 - 1] * MANY, ascending, 1)),
        "first draws of neighbouring seeds": unit(words(ascending, [0] * MANY, 1)),
        "seeds that differ in high bits only": unit(words(bits, [0] * MANY, 1)),
        "seed equals counter": unit(words(ascending, ascending, 1)),
        "within one draw": unit(words([7], [7], MANY)),
        "draw after draw": unit(words([0] * (MANY // 512), ascending[: MANY // 512], 512)),
        "the same entrant of each draw": unit(words([0] * MANY, ascending, 300)[:, -1]),
    }


@pytest.fixture(params=list(walks().values()), ids=list(walks()))
def numbers(request: pytest.FixtureRequest) -> NDArray[np.float64]:
    return cast(NDArray[np.float64], request.param)


def test_waiting_times_are_above_zero_and_follow_the_words() -> None:
    seeds, counters = [-1, 0, 2**63, 2**64 - 1, 2**70, -(2**63)], [0, 0, 2**64, -1, 5, 2**32]
    times = exponentials(seeds, counters, 1000)
    assert times.shape == (6, 1000)
    assert times.dtype == np.float64
    assert (times > 0).all()
    assert np.isfinite(times).all()
    assert np.allclose(np.exp(-times).ravel(), unit(words(seeds, counters, 1000)))
    with patch.object(random, "words", lambda *_: np.array([[0, 2**64 - 1]], dtype=np.uint64)):
        longest, shortest = exponentials([0], [0], 2)[0]
    assert 0 < shortest < 1e-15
    assert 36 < longest < 38


def test_numbers_never_change() -> None:
    """Recorded runs replay only if these stay: computed by hand with unbounded integers."""

    def mix(word: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = (word ^ (word >> shift)) * factor % 2**64
        return word ^ (word >> 31)

    for seed, counter in [(0, 0), (1, 0), (0, 1), (12345, 678), (2**64 - 1, 2**40), (-3, 7)]:
        left = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
        start = left ^ mix((counter + 0xD1B54A32D192ED03) % 2**64)
        row = [mix((start + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(1, 5)]
        assert words([seed], [counter], 4).tolist() == [row]
    assert words([42], [7], 2).tolist() == [WRITTEN_DOWN]


def test_every_walk_is_uniform(numbers: NDArray[np.float64]) -> None:
    assert chi_square_excess(np.bincount((numbers * 1024).astype(int), minlength=1024)) < 4
    low = (numbers * 2**53).astype(np.int64) % 1024  # the last bits as well as the first
    assert chi_square_excess(np.bincount(low, minlength=1024)) < 4


def test_neighbours_of_a_walk_are_independent(numbers: NDArray[np.float64]) -> None:
    cells = (numbers * 32).astype(int)
    for distance in (1, 2, 16):
        pairs = cells[:-distance] * 32 + cells[distance:]
        assert chi_square_excess(np.bincount(pairs, minlength=1024)) < 4


def test_swapping_seed_and_counter_is_another_draw() -> None:
    ascending = list(range(1000))
    following = [a + 1 for a in ascending]
    assert not (words(ascending, following, 1) == words(following, ascending, 1)).any()


def test_one_flipped_bit_changes_half_of_the_bits() -> None:
    seeds = [int(s) for s in np.random.default_rng(0).integers(0, 2**63, 500)]
    before = words(seeds, seeds, 2)
    for bit in range(64):
        flipped = [s ^ (1 << bit) for s in seeds]
        for after in (words(flipped, seeds, 2), words(seeds, flipped, 2)):
            changed = np.bitwise_count(before ^ after).mean(axis=0)
            assert (changed > 31).all()
            assert (changed < 33).all()

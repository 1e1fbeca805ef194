"""The counter-based random numbers: uniform, independent along every walk, the same forever."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from stemma.backend.local.random import uniforms

MANY = 1 << 16


def chi_square_excess(counts: NDArray[np.int64]) -> float:
    """How many standard deviations chi-square lies above its mean, for equally likely cells."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


def walks() -> dict[str, NDArray[np.float64]]:
    """The ways an engine goes through seeds and counters."""
    ascending = list(range(MANY))
    bits = [seed << 48 for seed in ascending]
    return {
        "counters of seed 0": uniforms([0] * MANY, ascending),
        "counters of a large seed": uniforms([2**64 - 1] * MANY, ascending),
        "first draws of neighbouring seeds": uniforms(ascending, [0] * MANY),
        "seeds that differ in high bits only": uniforms(bits, [0] * MANY),
        "seed equals counter": uniforms(ascending, ascending),
    }


@pytest.fixture(params=list(walks().values()), ids=list(walks()))
def numbers(request: pytest.FixtureRequest) -> NDArray[np.float64]:
    return cast(NDArray[np.float64], request.param)


def test_numbers_lie_in_the_half_open_unit_interval() -> None:
    numbers = uniforms([-1, 0, 2**63, 2**64 - 1, 2**70, -(2**63)], [0, 0, 2**64, -1, 5, 2**32])
    assert numbers.dtype == np.float64
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_numbers_never_change() -> None:
    """Recorded runs replay only if these stay: computed by hand with unbounded integers."""

    def mix(word: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = (word ^ (word >> shift)) * factor % 2**64
        return word ^ (word >> 31)

    for seed, counter in [(0, 0), (1, 0), (0, 1), (12345, 678), (2**64 - 1, 2**40), (-3, 7)]:
        left = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
        right = mix((counter + 0xD1B54A32D192ED03) % 2**64)
        assert uniforms([seed], [counter])[0] == (mix(left ^ right) >> 11) / 2**53
    assert uniforms([42], [7])[0] == 0.08168117731967917


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
    assert not (uniforms(ascending, following) == uniforms(following, ascending)).any()


def test_one_flipped_bit_changes_half_of_the_bits() -> None:
    seeds = [int(s) for s in np.random.default_rng(0).integers(0, 2**63, 500)]

    def words(seed: list[int], counter: list[int]) -> NDArray[np.uint64]:
        return (uniforms(seed, counter) * 2**53).astype(np.uint64)

    before = words(seeds, seeds)
    for bit in range(64):
        flipped = [s ^ (1 << bit) for s in seeds]
        for after in (words(flipped, seeds), words(seeds, flipped)):
            changed = np.bitwise_count(before ^ after).mean()
            assert 25.5 < changed < 27.5  # of 53

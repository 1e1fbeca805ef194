"""Random numbers without state: a draw is a pure function of (seed, counter).

So a request's draws do not depend on which other requests run, in what order, or what was retracted
and redone. Called by the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_WORD = (1 << 64) - 1
# Odd constants with random bits: they keep small seeds and counters away from 0, which the mixer
# maps to itself, and being different they make (a, b) and (b, a) different draws.
_SEED_OFFSET = np.uint64(0x9E3779B97F4A7C15)
_COUNTER_OFFSET = np.uint64(0xD1B54A32D192ED03)
_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, as SplitMix64 takes it


def exponentials(seeds: Sequence[int], counters: Sequence[int], count: int) -> NDArray[np.float64]:
    """[n, count] waiting times of rate 1, `count` of them for each (seed, counter); all above 0."""
    halves = (words(seeds, counters, count) >> np.uint64(12)).astype(np.float64) + 0.5
    return -np.log(halves * 2.0**-52)


def words(seeds: Sequence[int], counters: Sequence[int], count: int) -> NDArray[np.uint64]:
    """[n, count] random words: row i is the SplitMix64 sequence of seeds[i] and counters[i].

    Both are taken modulo 2**64. A sequence starts at mix(seed + a) xor mix(counter + b), where mix
    is the finaliser of SplitMix64 (Steele, Lea, Flood 2014). Both sides are mixed before they meet,
    so the draws of two seeds are not shifted copies of each other.
    """
    seed = np.array([s & _WORD for s in seeds], dtype=np.uint64)
    counter = np.array([c & _WORD for c in counters], dtype=np.uint64)
    start = _mix(seed + _SEED_OFFSET) ^ _mix(counter + _COUNTER_OFFSET)
    return _mix(start[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _STEP)


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words in which each input bit changes about half of the output bits."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))

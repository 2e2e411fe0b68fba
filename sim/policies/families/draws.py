"""Chance for a policy whose rule asks for it: the n-th draw is a function of a stated key and n, and of nothing else.

Source: SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

from __future__ import annotations

from statistics import NormalDist

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


class Draws:
    """A sequence of draws by `key`; equal keys draw alike."""

    def __init__(self, key: int) -> None:
        self._state = key & _MASK

    def bits(self) -> int:
        """The next 64 bits."""
        self._state = x = (self._state + _STEP) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return x ^ (x >> 31)

    def uniform(self) -> float:
        """A number above 0 and below 1."""
        return ((self.bits() >> 11) + 0.5) / (1 << 53)

    def normal(self, mean: float, std: float) -> float:
        """A number of a normal law."""
        return NormalDist(mean, std).inv_cdf(self.uniform())

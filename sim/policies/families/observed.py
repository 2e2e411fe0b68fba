"""What an agent in front of a real engine may see: quantities with a name and a bound, rounded to 32 bits and cut
there.

Nothing of it knows an output length before its end.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import exp, log1p
from typing import NamedTuple

FAST_NS, SLOW_NS = 1_000_000_000, 10_000_000_000


class Quantity(NamedTuple):
    """One number of an observation, from 0 to `high`."""

    name: str
    high: float


def observation(quantities: tuple[Quantity, ...], values: Iterable[float]) -> tuple[float, ...]:
    """`values` of `quantities`, cut to their bounds and rounded to what 32 bits hold."""
    return tuple(array("f", [min(max(v, 0.0), q.high) for q, v in zip(quantities, values, strict=True)]))


class ArrivalRates:
    """Requests a second over about the last second, and over about the last ten: sums that decay exponentially."""

    __slots__ = ("_at_ns", "_fast", "_slow")

    def __init__(self) -> None:
        self._at_ns, self._fast, self._slow = 0, 0.0, 0.0

    def arrived(self, at_ns: int) -> None:
        """Counts a request that arrived at `at_ns`, not before the one before."""
        self._decay(at_ns)
        self._fast += 1e9 / FAST_NS
        self._slow += 1e9 / SLOW_NS

    def logs(self, now_ns: int) -> tuple[float, float]:
        """log(1 + rate) of both at `now_ns`."""
        self._decay(now_ns)
        return log1p(self._fast), log1p(self._slow)

    def _decay(self, now_ns: int) -> None:
        gone_ns = now_ns - self._at_ns
        if gone_ns > 0:
            self._fast *= exp(-gone_ns / FAST_NS)
            self._slow *= exp(-gone_ns / SLOW_NS)
            self._at_ns = now_ns

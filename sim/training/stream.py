"""Examples that arrive while training goes on: windows that are packed when full or when time is up, and how old an
example is by the time its step begins.

Examples come as a Poisson process, in their order. A window opens with its first example and closes with its last one
or when its timeout is over; what it holds is packed by itself. A step begins when the one before has ended and the
windows of all its micro-batches are closed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from batchsim.base.ranges import Config, PositiveInt, check_ranges
from batchsim.base.units import NS_PER_S, PositiveDuration, Rate, format_duration

STREAMED = ("rows", "pieces", "row_batches", "samples", "order")
"""What a packer may make to pack windows of a stream."""


@dataclass(frozen=True)
class Cut:
    """When a window closes: with this many examples, or these seconds after its first one."""

    window: int | None
    timeout_s: float | None

    def __str__(self) -> str:
        if self.timeout_s is not None:
            return format_duration(self.timeout_s * NS_PER_S)
        return f"{self.window:,}"


@dataclass(frozen=True)
class StreamConfig(Config):
    """How examples arrive, and when what has come is packed: one epoch for each window or timeout."""

    rate: Rate
    """Examples a second on average, of a Poisson process."""
    windows: tuple[PositiveInt, ...] = ()
    """Examples of a window; of several each is tried."""
    timeouts: tuple[PositiveDuration, ...] = ()
    """How long after its first example a window is packed; of several each is tried."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.windows and not self.timeouts:
            raise ValueError("stream has neither windows nor timeouts. Write windows: [1000], or timeouts: [5s].")
        for name, values in (("windows", self.windows), ("timeouts", self.timeouts)):
            if len(set(values)) < len(values):
                raise ValueError(f"stream.{name} has one value twice. Keep one.")

    def cuts(self) -> list[Cut]:
        """Every window and timeout, in their order."""
        return [Cut(window, None) for window in self.windows] + [Cut(None, ns / NS_PER_S) for ns in self.timeouts]


def arrivals_s(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which examples arrive, keyed by `seed`; the first n do not hang on `count`."""
    gaps = np.random.default_rng([seed, 2]).exponential(1 / rate, count)
    return list(accumulate(gaps.tolist()))


def windows(arrivals: Sequence[float], cut: Cut) -> Iterator[tuple[range, float]]:
    """The places of the examples of each window, and the second at which it closes."""
    first = 0
    while first < len(arrivals):
        if cut.window is not None:
            end = min(first + cut.window, len(arrivals))
            closed = arrivals[end - 1]
        else:
            closed = arrivals[first] + (cut.timeout_s or 0.0)
            end = bisect_right(arrivals, closed, lo=first)
        yield range(first, end), closed
        first = end


@dataclass(frozen=True)
class StreamTimes:
    """Steps on the clock of the stream.

    `ages_s` are of all examples, from arrival to the start of their step, and `step_ages_s` their means by step.
    `behind` counts the examples that have arrived between a step's newest one and its end, when its update is there;
    `idle_s` is the time in which no step ran though some were still to come; `left` counts the examples whose step had
    not begun when the last one arrived.
    """

    starts_s: list[float]
    ends_s: list[float]
    ages_s: list[float]
    step_ages_s: list[float]
    behind: list[int]
    idle_s: float
    left: int


def stream_times(
    arrivals: Sequence[float], ready_s: Sequence[float], times_s: Sequence[float], examples: Sequence[Sequence[int]]
) -> StreamTimes:
    """When steps that are `ready_s` at those times, and take `times_s`, begin and end; `examples` are those of each."""
    starts: list[float] = []
    ends: list[float] = []
    by_step: list[list[float]] = []
    behind: list[int] = []
    now = idle = 0.0
    for ready, time, held in zip(ready_s, times_s, examples, strict=True):
        start = max(now, ready)
        idle += start - now
        now = start + time
        starts.append(start)
        ends.append(now)
        by_step.append([start - arrivals[i] for i in held])
        newest = max((arrivals[i] for i in held), default=start)
        behind.append(bisect_right(arrivals, now) - bisect_right(arrivals, newest))
    left = sum(start > arrivals[-1] for start, held in zip(starts, examples, strict=True) for _ in held)
    means = [sum(ages) / len(ages) if ages else 0.0 for ages in by_step]
    return StreamTimes(starts, ends, [age for ages in by_step for age in ages], means, behind, idle, left)

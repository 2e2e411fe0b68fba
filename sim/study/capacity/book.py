"""The book of a capacity search: its trials by load and seed, and what they show.

A probe is one load with some seeds. Its margin is the mean over all its requests, with a t-interval over seeds, since a
seed with more requests says more. A probe passes where the whole interval is at 0 or above, fails where it is below or
where the queue grows in most seeds, and is undecided between. No interval shows more than as many requests without a
miss would. Between probes the logarithm of what misses is interpolated: it is close to a straight line where misses
grow by factors.

The capacity is where the mean margin crosses 0, the highest crossing where there are several. The interval around it is
that of the loads at which the verdict is not certain: it holds the crossing of endlessly many seeds in about 95 of 100
searches. Each of its ends has a load beyond it that was tried and decided; where there is none, there is no such end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchsim.metrics.intervals import half_width, unseen

_LARGEST = 50.0  # exponent: keeps an interval finite that says nothing
_ROUNDING = 0.05  # of the largest margin: keeps the logarithm of no misses at all finite


@dataclass(frozen=True)
class Trial:
    """Result of one seed at one load: the margin of the objective, the number of measured requests, and whether the
    queue grew.

    `is_share`: the margin is that of a share of the requests, not of a mean. `requests` 0: no request could be
    measured.
    """

    margin: float
    requests: float
    grows: bool = False
    is_share: bool = True


NO_TRIAL = Trial(0.0, 0.0)


Book = dict[float, dict[int, Trial]]
"""Trials by load and seed."""


@dataclass(frozen=True)
class Probe:
    """One load with its seeds: mean margin, its interval from `low` to `high`, None with one seed."""

    load: float
    margin: float
    low: float | None
    high: float | None
    grows: bool
    num_seeds: int
    num_requests: int

    @classmethod
    def of(cls, load: float, trials: Sequence[Trial], most: float) -> Probe:
        """The probe that `trials` at a load make; `most` is the largest margin that any trial had.

        What is lacking to `most` is taken for lognormal over seeds, since one bad seed among many good ones says more
        of the others' luck than a t-interval hears. Of a share, `low` is never above what as many requests without a
        miss show: seeds that are all alike prove no more than that.
        """
        weights = np.array([trial.requests for trial in trials], dtype=float)
        margins = np.array([trial.margin for trial in trials])
        mean = float((margins * weights).sum() / weights.sum())
        low = high = None
        if len(trials) > 1:  # of a ratio of means, by its linear part
            residuals = (margins - mean) * weights / weights.mean()
            half = half_width(residuals.tolist())
            lack = most - mean
            factor = math.exp(min(half / lack, _LARGEST)) if lack > 0 else 1.0
            low, high = most - lack * factor, most - lack / factor
            if any(trial.is_share for trial in trials if trial.requests):
                low = min(low, mean - unseen(float(weights.sum())))
        grows = 2 * sum(trial.grows for trial in trials) > len(trials)
        return cls(load, mean, low, high, grows, len(trials), int(weights.sum()))

    @property
    def passes(self) -> bool:
        """Whether the mean margin is 0 or more, and the queue grows in no more than half of the seeds."""
        return self.margin >= 0 and not self.grows

    @property
    def decided(self) -> bool:
        """Whether the interval leaves no doubt, as a queue that grows does; so does one seed, of what is not random."""
        return self.grows or self.low is None or self.high is None or self.low >= 0 or self.high < 0


@dataclass(frozen=True)
class Capacity:
    """What a search found. `load` is None where the objective is met at no load tried (`never`), or at every one, from
    `lowest` to `highest`. `low` is up to where it is decided to be met, `high` from where to be missed; None where no
    load tried decides it. `undecided` are the loads tried that nothing was decided of, `fails_below` lists those below
    the capacity at which it is missed."""

    load: float | None
    low: float | None
    high: float | None
    never: bool
    num_seeds: int
    lowest: float
    highest: float
    undecided: tuple[float, ...] = ()
    fails_below: tuple[float, ...] = ()


def probes(book: Book, num_seeds: int | None = None, *, without: int | None = None) -> list[Probe]:
    """Every load, ascending, with measured requests; with `num_seeds`, of the first seeds alone and only loads that
    have them all.

    `without` leaves one of these seeds out.
    """
    seeds, most = range(num_seeds or 0), most_margin(book)
    kept = [seed for seed in seeds if seed != without]
    tried = [
        (load, [trials[s] for s in kept] if num_seeds else list(trials.values()))
        for load, trials in sorted(book.items())
        if all(seed in trials for seed in seeds)
    ]
    return [Probe.of(load, trials, most) for load, trials in tried if any(trial.requests for trial in trials)]


def unmeasured(book: Book) -> list[float]:
    """The tried loads at which no seed had measured requests."""
    return sorted(load for load, trials in book.items() if not any(trial.requests for trial in trials.values()))


def most_margin(book: Book) -> float:
    """The largest margin that any trial had, which is approached at light load, where no request misses."""
    margins = [trial.margin for trials in book.values() for trial in trials.values() if trial.requests]
    return max(margins, default=0.0)


def bracket_of(tried: Sequence[Probe]) -> tuple[Probe | None, Probe | None]:
    """The highest load that passes and the lowest above it that fails."""
    low = max((p for p in tried if p.passes), key=lambda p: p.load, default=None)
    above = [p for p in tried if not p.passes and (low is None or p.load > low.load)]
    return low, min(above, key=lambda p: p.load, default=None)


def capacity(book: Book, num_seeds: int | None = None, *, without: int | None = None) -> Capacity:
    """The capacity that the trials in the book show; with `num_seeds`, the first seeds of the loads that have them all.

    By default the seeds that the loads around the crossing have. `without` leaves one seed out.
    """
    if num_seeds is None:
        low, high = bracket_of(probes(book))
        counts = [p.num_seeds for p in (low, high) if p is not None]
        num_seeds = min(counts, default=1)
    used, every = probes(book, num_seeds, without=without), probes(book)
    low, high = bracket_of(used)
    middle = least = largest = None
    if low is not None and high is not None:
        most = most_margin(book)
        middle, least, largest = (
            _crossing([(p.load, p.margin if value is None else value, p.grows) for p, value in values], most)
            for values in ([(p, p.margin) for p in used], [(p, p.low) for p in used], [(p, p.high) for p in used])
        )
        if num_seeds == 1 or (high.grows and high.margin >= 0):  # no interval, or the queue alone fails
            least = None if least is None else min(least, low.load)
            largest = None if largest is None else max(largest, high.load)
        elif middle is not None and largest is not None and largest < middle:
            largest = high.load  # at its upper end the queue alone fails, somewhere up to there
    if least is None:
        sure = [p.load for p in every if p.decided and p.passes and (middle is None or p.load <= middle)]
        least = max(sure, default=None)
    if largest is None:
        sure = [p.load for p in every if p.decided and not p.passes and (middle is None or p.load >= middle)]
        largest = min(sure, default=None)
    failing = tuple(p.load for p in every if middle and low and p.load < low.load and not p.passes and p.decided)
    open_ = tuple(p.load for p in every if not p.decided)
    lowest, highest = (every[0].load, every[-1].load) if every else (0.0, 0.0)
    return Capacity(middle, least, largest, low is None, num_seeds, lowest, highest, open_, failing)


def _crossing(points: Sequence[tuple[float, float, bool]], most: float) -> float | None:
    """The highest load at which the values (load, value, whether the queue grows) go from 0 or above to below 0.

    None where all are below, or the last is not. Where it is the queue that fails, the middle of both loads by factor.
    """
    last = max((i for i, (_, value, grows) in enumerate(points) if value >= 0 and not grows), default=None)
    if last is None or last + 1 == len(points):
        return None
    low, value, _ = points[last]
    high, after, grows = points[last + 1]
    if grows and after >= 0:
        return math.sqrt(low * high)
    a, b = _straight(value, most), _straight(after, most)
    return low + (high - low) * a / (a - b)


def _straight(margin: float, most: float) -> float:
    """A margin on a scale on which it falls evenly: 0 where it is 0, and of the same sign.

    It is the logarithm of what misses, the largest margin seen standing for no misses.
    """
    if most <= 0:
        return margin
    return math.log(1 + _ROUNDING) - math.log(max(1 - margin / most, 0.0) + _ROUNDING)


def jackknife(book: Book, num_seeds: int) -> dict[int, float | None]:
    """A value a seed whose mean is close to the capacity and whose spread is that of its estimate: n times the capacity
    less n - 1 times that without the seed. None where leaving it out leaves no crossing.

    Source: Quenouille 1956, Tukey 1958. Made for paired differences between policies.
    """
    whole = capacity(book, num_seeds).load
    values: dict[int, float | None] = {}
    for seed in range(num_seeds):
        rest = capacity(book, num_seeds, without=seed).load
        values[seed] = None if whole is None or rest is None else num_seeds * whole - (num_seeds - 1) * rest
    return values

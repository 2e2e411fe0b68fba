"""Clocks of arrival processes whose rate changes: from the number of arrivals expected so far to the time of the run.

A process of rate r(t) is one of unit rate in the time R(t), the integral of r; a clock inverts R exactly, so that no
arrival is drawn and thrown away, and the n-th arrival at every load is the n-th of the same unit process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.workload.processes import (
    DiurnalArrivals,
    MmppArrivals,
    OnOffArrivals,
    Process,
    Profiled,
    ProfiledArrivals,
    RampArrivals,
    StepsArrivals,
)
from batchsim.workload.traces.random_stream import random_stream

Floats = NDArray[np.float64]
MOST_SOJOURNS = 20_000_000
"""Changes of state in a run: as many as it may have requests."""


class Clock(Protocol):
    """Converts operational time, in which arrivals have mean gap 1, to ns of the run."""

    def times_ns(self, operational: Floats, end_ns: float) -> Floats:
        """The times in ns of sorted `operational` times; inf where surely after `end_ns`."""
        ...


@dataclass(frozen=True)
class SteadyClock:
    """One rate for ever, with a gap of `gap_ns` on average."""

    gap_ns: float

    def times_ns(self, operational: Floats, end_ns: float) -> Floats:
        return operational * self.gap_ns


class ProfileClock:
    """A rate that goes in straight lines: from `begins[j]` to `ends[j]` per ns during `widths_ns[j]`, then the next.

    With `repeats` the pieces begin anew after the last, `offset_ns` into them at time 0; else the last rate stays.
    """

    def __init__(
        self, begins: Floats, ends: Floats, widths_ns: Floats, *, repeats: bool = False, offset_ns: float = 0.0
    ) -> None:
        self._begins, self._ends, self._widths_ns = begins, ends, widths_ns
        self._starts_ns = np.concatenate(([0.0], np.cumsum(widths_ns)))
        self._expected = np.concatenate(([0.0], np.cumsum((begins + ends) / 2 * widths_ns)))
        self._repeats, self._offset_ns = repeats, offset_ns

    def times_ns(self, operational: Floats, end_ns: float) -> Floats:
        if not self._repeats:
            return self._inverse(operational)
        whole, whole_ns = self._expected[-1], self._starts_ns[-1]
        since = operational + self._integral(np.array(self._offset_ns % whole_ns))
        periods = np.floor(since / whole)
        times_ns = periods * whole_ns + self._inverse(since - periods * whole) - self._offset_ns % whole_ns
        return np.maximum.accumulate(times_ns)  # where a period ends, rounding must not turn two of them around

    @property
    def ends_per_ns(self) -> tuple[Floats, float]:
        """The rate at the beginning of each piece, and at the end of the last."""
        return self._begins, float(self._ends[-1])

    @property
    def total(self) -> float:
        """The arrivals expected in all pieces."""
        return float(self._expected[-1])

    def arrivals_by(self, times_ns: Floats) -> Floats:
        """The arrivals expected from 0 to each time: what `times_ns` inverts."""
        if not self._repeats:
            return self._integral(times_ns)
        whole_ns, offset_ns = self._starts_ns[-1], self._offset_ns % self._starts_ns[-1]
        periods, inside_ns = np.divmod(times_ns + offset_ns, whole_ns)
        return periods * self.total + self._integral(inside_ns) - self._integral(np.array(offset_ns))

    def rates_per_ns(self, times_ns: Floats) -> Floats:
        """The rate at each time."""
        if self._repeats:
            times_ns = (times_ns + self._offset_ns) % self._starts_ns[-1]
        piece, inside_ns = self._place(times_ns)
        return self._begins[piece] + (self._ends[piece] - self._begins[piece]) * inside_ns / self._widths_ns[piece]

    def _integral(self, times_ns: Floats) -> Floats:
        """The arrivals expected from 0 to each time, within the pieces or after them."""
        piece, inside_ns = self._place(times_ns)
        slope = (self._ends[piece] - self._begins[piece]) / self._widths_ns[piece]
        later = np.maximum(times_ns - self._starts_ns[-1], 0) * self._ends[-1]
        return self._expected[piece] + inside_ns * (self._begins[piece] + slope * inside_ns / 2) + later

    def _place(self, times_ns: Floats) -> tuple[NDArray[np.int64], Floats]:
        """The piece in which each time lies, and how far into it; after the last one, its end."""
        piece = np.clip(np.searchsorted(self._starts_ns, times_ns, side="right") - 1, 0, len(self._begins) - 1)
        return piece, np.minimum(times_ns - self._starts_ns[piece], self._widths_ns[piece])

    def _inverse(self, expected: Floats) -> Floats:
        """The time at which `expected` arrivals were to be expected; of a stretch without any, its end."""
        piece = np.clip(np.searchsorted(self._expected, expected, side="right") - 1, 0, len(self._begins) - 1)
        left = np.minimum(expected, self._expected[-1]) - self._expected[piece]
        begin, end = self._begins[piece], self._ends[piece]
        # The root of begin s + slope s^2 / 2 = left in the form that loses no digits where the slope is small.
        root = np.sqrt(np.maximum(begin**2 + 2 * left * (end - begin) / self._widths_ns[piece], 0))
        speed = begin + root
        within = np.divide(2 * left, speed, out=np.zeros_like(left), where=speed > 0)
        beyond = np.maximum(expected - self._expected[-1], 0)
        late = np.divide(beyond, self._ends[-1], out=np.zeros_like(left), where=beyond > 0)
        return self._starts_ns[piece] + np.minimum(within, self._widths_ns[piece]) + late


class OnOffClock:
    """The clock of an on/off process; begins in the stationary state. `expected`: the number of arrivals to draw
    for."""

    def __init__(self, process: OnOffArrivals, seed: int, expected: float) -> None:
        mean_gap_ns = NS_PER_S / process.mean_rate
        cycles = _sojourns(expected * mean_gap_ns, process.on + process.off, "on and off change")
        self._on_gap_ns = mean_gap_ns * (process.on / (process.on + process.off))
        self._means_ns = np.array([process.on, process.off], float)
        self._rng = random_stream(seed, "sojourns")
        self._sojourns = np.empty((0, 2))
        start = random_stream(seed, "first sojourn")
        begins_on = start.random() < process.on / (process.on + process.off)
        self._first_off_ns = 0.0 if begins_on else start.standard_exponential() * process.off
        self._ask = math.ceil(cycles) + 16

    def times_ns(self, operational: Floats, end_ns: float) -> Floats:
        on_ns = operational * self._on_gap_ns
        inside = on_ns[: np.searchsorted(on_ns, end_ns)]
        times_ns = np.full(len(on_ns), np.inf)
        if len(inside):
            while self._sojourns[:, 0].sum() <= inside[-1]:
                more = self._rng.standard_exponential((self._ask, 2)) * self._means_ns
                self._sojourns = np.concatenate((self._sojourns, more))
            on_so_far, off_so_far = np.cumsum(self._sojourns, axis=0).T
            off_before = self._first_off_ns + np.concatenate(([0.0], off_so_far[:-1]))
            times_ns[: len(inside)] = inside + off_before[np.searchsorted(on_so_far, inside, side="right")]
        return times_ns


class MmppClock:
    """The clock of a Markov-modulated Poisson process; begins in the stationary state."""

    def __init__(self, process: MmppArrivals, seed: int, expected: float) -> None:
        states, shares = process.states, process.time_shares
        self._stays_ns = np.array([state.stay for state in states], float)
        rates = np.array([state.rate for state in states])
        self._rates_per_ns = rates / (shares @ rates) * process.mean_rate / NS_PER_S
        mean_stay_ns = 1 / float(shares @ (1 / self._stays_ns))
        count = _sojourns(expected * NS_PER_S / process.mean_rate, mean_stay_ns, "states change")
        self._ask = math.ceil(count) + 16
        self._rng = random_stream(seed, "sojourns")
        weights = np.array([state.weight for state in states])
        others = np.tile(weights, (len(states), 1))
        np.fill_diagonal(others, 0.0)
        self._edges = np.cumsum(others / others.sum(axis=1, keepdims=True), axis=1)
        self._edges[:, -1] = 1.0
        start = random_stream(seed, "first sojourn").random()
        self._next = int(np.searchsorted(np.cumsum(shares)[:-1], start, side="right"))
        self._rates, self._widths_ns = np.empty(0), np.empty(0)

    def times_ns(self, operational: Floats, end_ns: float) -> Floats:
        while (clock := self._clock()).total <= operational[-1] and self._widths_ns.sum() <= end_ns:
            self._draw()
        early = operational[: np.searchsorted(operational, clock.total)]
        return np.concatenate((clock.times_ns(early, end_ns), np.full(len(operational) - len(early), np.inf)))

    def _clock(self) -> ProfileClock:
        return ProfileClock(self._rates, self._rates, self._widths_ns)

    def _draw(self) -> None:
        """Draws `ask` sojourns more."""
        visited = np.empty(self._ask, np.int64)
        draws = self._rng.random((self._ask, 2))
        edges = self._edges.tolist()
        state = self._next
        for i, uniform in enumerate(draws[:, 0].tolist()):
            visited[i] = state
            row = edges[state]
            state = next(j for j, edge in enumerate(row) if uniform < edge)
        self._next = state
        stays_ns = -np.log1p(-draws[:, 1]) * self._stays_ns[visited]
        self._rates = np.concatenate((self._rates, self._rates_per_ns[visited]))
        self._widths_ns = np.concatenate((self._widths_ns, stays_ns))


@dataclass(frozen=True)
class ChainedClock:
    """The clock of a process in the time of another one of unit rate `per_ns`: that of `states` seen by `profile`."""

    states: Clock
    per_ns: float
    profile: Clock

    def times_ns(self, operational: Floats, end_ns: float) -> Floats:
        even_ns = self.states.times_ns(operational, np.inf)
        return self.profile.times_ns(even_ns * self.per_ns, end_ns)


def clock_of(process: Process, seed: int, expected: float) -> Clock:
    """The clock of `process` for a run of some `expected` arrivals. ScenarioError if its states change too often."""
    if isinstance(process, ProfiledArrivals) and process.residual is not None:
        states = MmppClock(process.residual, seed, expected)
        return ChainedClock(states, process.mean_rate / NS_PER_S, profile_of(process))
    if isinstance(process, OnOffArrivals):
        return OnOffClock(process, seed, expected)
    if isinstance(process, MmppArrivals):
        return MmppClock(process, seed, expected)
    if isinstance(process, RampArrivals | StepsArrivals | DiurnalArrivals):
        return profile_of(process)
    return SteadyClock(NS_PER_S / process.mean_rate)


def profile_of(process: Profiled) -> ProfileClock:
    """The clock of the rate over time alone, whatever else makes arrivals bursty."""
    rate_per_ns = process.mean_rate / NS_PER_S
    if isinstance(process, RampArrivals):
        begin = 2 * rate_per_ns / (1 + process.growth)
        ends = np.array([begin * process.growth])
        return ProfileClock(np.array([begin]), ends, np.array([float(process.over)]))
    if isinstance(process, StepsArrivals):
        rates = rate_per_ns * np.array(process.rates) / np.mean(process.rates)
        return ProfileClock(rates, rates, np.full(len(rates), float(process.every)))
    return _diurnal(process, rate_per_ns)


def ends_rps(process: Process) -> tuple[float, float] | None:
    """The first and the last rate of a ramp, the lowest and the highest of steps and days; None of one rate."""
    if not isinstance(process, RampArrivals | StepsArrivals | DiurnalArrivals):
        return None
    begins, last = profile_of(process).ends_per_ns
    rates = np.append(begins, last) * NS_PER_S
    ends = (rates[0], rates[-1]) if isinstance(process, RampArrivals) else (rates.min(), rates.max())
    return float(ends[0]), float(ends[1])


def _diurnal(process: DiurnalArrivals, rate_per_ns: float) -> ProfileClock:
    middles = rate_per_ns * np.array(process.profile) / np.mean(process.profile)
    edges = (middles + np.roll(middles, 1)) / 2  # the rate where a part begins; each half of a part is a straight line
    begins = np.column_stack((edges, middles)).ravel()
    ends = np.column_stack((middles, np.roll(edges, -1))).ravel()
    widths_ns = np.full(len(begins), process.period / len(begins))
    return ProfileClock(begins, ends, widths_ns, repeats=True, offset_ns=process.start)


def _sojourns(span_ns: float, mean_ns: float, what: str) -> float:
    count = span_ns / mean_ns
    if count > MOST_SOJOURNS:
        raise ScenarioError(f"workload: {what} {count:.3g} times in the run. Make them longer.")
    return count

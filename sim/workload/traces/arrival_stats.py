"""How bursty a series of arrivals is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from batchsim.base.units import NS_PER_S
from batchsim.workload.traces.trace_rows import Ints

_FEWEST, _PARTS = 4, 16  # equal parts of the time in which rates are compared
_ARRIVALS_A_PART, _FINER = 10, 4
_SURE = 3.5  # standard errors by which they must differ: of 4,000 steady series one does by chance


@dataclass(frozen=True)
class RateChange:
    """Rates over equal parts of the time, one after another, that differ by more than chance makes them.

    `way`: `rises` or `falls` where all but a few follow each other so, else `changes`.
    """

    every_s: float
    rates_rps: tuple[float, ...]
    way: str

    @property
    def ends_rps(self) -> tuple[float, float]:
        """The first and the last rate of one that rises or falls, else the lowest and the highest."""
        rates = self.rates_rps
        return (min(rates), max(rates)) if self.way == "changes" else (rates[0], rates[-1])


@dataclass(frozen=True)
class ArrivalStats:
    """Rate and burstiness of arrivals. A figure is None where there are too few arrivals to define it.

    `rate_rps` is (n - 1) / (last - first). `cv` is std / mean of the gaps (population std; 1 for Poisson),
    `zero_gap_share` the share of gaps of length 0. `idc_1s` and `idc_60s` are the indices of dispersion for counts:
    variance / mean of the arrivals in consecutive whole windows from the first arrival on (1 for Poisson).
    """

    requests: int
    span_s: float
    rate_rps: float | None
    cv: float | None
    zero_gap_share: float | None
    idc_1s: float | None
    idc_60s: float | None
    change: RateChange | None = None


def describe_arrivals(arrival_ns: Ints) -> ArrivalStats:
    """The statistics of sorted arrival times in ns."""
    requests = len(arrival_ns)
    span_ns = int(arrival_ns[-1] - arrival_ns[0]) if requests else 0
    if span_ns == 0:
        return ArrivalStats(requests, 0.0, None, None, None, None, None)
    gaps = np.diff(arrival_ns)
    return ArrivalStats(
        requests=requests,
        span_s=span_ns / NS_PER_S,
        rate_rps=(requests - 1) * NS_PER_S / span_ns,
        cv=float(gaps.std() / gaps.mean()),
        zero_gap_share=float(np.count_nonzero(gaps == 0) / len(gaps)),
        idc_1s=index_of_dispersion(arrival_ns, NS_PER_S),
        idc_60s=index_of_dispersion(arrival_ns, 60 * NS_PER_S),
        change=rate_change(arrival_ns),
    )


def rate_change(arrival_ns: Ints) -> RateChange | None:
    """How the rate changes over the time of sorted arrivals; None where it may be steady, or they are too few to judge.

    Counts of parts are compared by their dispersion, in units of that of finer parts from each to the next, which
    measures bursts and no trend.
    """
    parts = min(_PARTS, len(arrival_ns) // _ARRIVALS_A_PART)
    if parts < _FEWEST or arrival_ns[0] == arrival_ns[-1]:
        return None
    span_ns = int(arrival_ns[-1] - arrival_ns[0]) + 1
    shares = (arrival_ns[1:] - arrival_ns[0]) / span_ns  # the first arrival says where the time begins
    fine = np.bincount((shares * (parts * _FINER)).astype(np.int64), minlength=parts * _FINER).astype(float)
    counts = fine.reshape(parts, _FINER).sum(axis=1)
    bursts = max(float((np.diff(fine) ** 2).mean() / 2 / fine.mean()), 1.0)
    dispersion = float(((counts - counts.mean()) ** 2).sum() / counts.mean()) / bursts
    error = 2 / (9 * (parts - 1))  # a cube root of chi squared is normal: Wilson and Hilferty 1931
    if dispersion / (parts - 1) <= (1 - error + _SURE * math.sqrt(error)) ** 3:
        return None
    order = float(np.corrcoef(np.argsort(np.argsort(counts, kind="stable")), np.arange(parts))[0, 1])
    way = "rises" if order > 0.9 else "falls" if order < -0.9 else "changes"
    every_s = span_ns / parts / NS_PER_S
    return RateChange(every_s, tuple((counts / every_s).tolist()), way)


def index_of_dispersion(arrival_ns: Ints, window_ns: int) -> float | None:
    """Variance / mean of the counts in consecutive whole windows; None if fewer than two windows fit."""
    windows = int(arrival_ns[-1] - arrival_ns[0]) // window_ns
    if windows < 2:
        return None
    at, counts = np.unique((arrival_ns - arrival_ns[0]) // window_ns, return_counts=True)  # few of very many windows
    counts = counts[at < windows]
    total, squares = int(counts.sum()), int((counts**2).sum())
    return (windows * squares - total**2) / (windows * total)

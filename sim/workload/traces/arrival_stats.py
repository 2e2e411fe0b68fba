"""How bursty a series of arrivals is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchsim.base.units import NS_PER_S
from batchsim.workload.traces.trace_rows import Ints


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
    )


def index_of_dispersion(arrival_ns: Ints, window_ns: int) -> float | None:
    """Variance / mean of the counts in consecutive whole windows; None if fewer than two windows fit."""
    windows = int(arrival_ns[-1] - arrival_ns[0]) // window_ns
    if windows < 2:
        return None
    at, counts = np.unique((arrival_ns - arrival_ns[0]) // window_ns, return_counts=True)  # few of very many windows
    counts = counts[at < windows]
    total, squares = int(counts.sum()), int((counts**2).sum())
    return (windows * squares - total**2) / (windows * total)

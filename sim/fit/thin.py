"""Full runs cut to what a fit needs: of thousands of requests the first ones say as much of a step's terms as all.

The rule looks at no result: the first requests of each run by their sending, as many of each as bring all given runs to
MOST_REQUESTS together. Those that are sent while the first ones are in flight are played, too, and not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from batchsim.check.measured.run import MISSING, MeasuredRequests, MeasuredRun

MOST_REQUESTS = 40_000
"""Requests of all given runs that are simulated, twice a round: two minutes for most engines, at some 0.1 ms each."""


def first_of_each(runs: Sequence[MeasuredRun], most: int = MOST_REQUESTS) -> int | None:
    """The most requests of each run that keep all of them to `most` together; None where they have no more."""
    counts = sorted(map(_count, runs))
    if sum(counts) <= most:
        return None
    left = most
    for number, count in enumerate(counts):
        share = left // (len(counts) - number)
        if count > share:
            return max(share, 1)
        left -= count
    return None


def thinned(run: MeasuredRun, first: int | None, most: int = MOST_REQUESTS) -> MeasuredRun:
    """`run` with the figures of its `first` requests alone, and a note; as it is with fewer, or None."""
    count = _count(run)
    if first is None or count <= first:
        return run
    note = f"its first {first:,} requests of {count:,} are fitted and judged, so that those given are {most:,}"
    notes = (*run.notes, f"{note} at most")
    if run.requests is None:
        fewer = {name: run.means[name] * first / count for name in ("requests", "given_up") if name in run.means}
        return replace(run, means={**run.means, **fewer}, notes=notes)
    requests = _first(run.requests, first, run.client.max_concurrency or 0)
    return replace(run, requests=requests, figures=requests.figures(), notes=notes)


def _count(run: MeasuredRun) -> int:
    if run.requests is not None:
        return len(run.requests)
    return round(run.means.get("requests", 0) + run.means.get("given_up", 0))


def _first(requests: MeasuredRequests, first: int, users: int) -> MeasuredRequests:
    """The `first` requests, and without latencies those that were sent until the last of them had ended."""
    kept = min(first + users, len(requests))
    if requests.sent_ns is not None:
        ends_ns = (requests.sent_ns + np.maximum(requests.e2e_ns, requests.ttft_ns))[:first]
        kept = int(np.searchsorted(requests.sent_ns, ends_ns.max(), "right"))
    found = requests.picked(np.arange(max(kept, first)))
    mine = (np.arange(len(found)) < first) | ~found.ok
    return replace(found, ttft_ns=np.where(mine, found.ttft_ns, MISSING), e2e_ns=np.where(mine, found.e2e_ns, MISSING))

"""The gaps between a request's tokens, pooled over requests, from the step and state records alone.

Nothing is kept or expanded per token: the members of a decode group get their tokens at the ends of its steps, so that
a gap between two steps is counted once with the number of sequences that ran in both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchsim.drive.fleet.fleet_records import by_engine
from batchsim.kernel.record import DECODE, FINISHED, PREFILL, RECOMPUTE, Records
from batchsim.metrics.attribution import Intervals, state_intervals


def token_gaps(records: Records, wanted: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Gaps in ns between consecutive tokens of the `wanted` requests (a mask over the rows), and how often each occurs.

    A member that also ran in the group's previous decode step contributes the time between the two steps' ends, which
    is counted per step; a joiner contributes its own gap. Nothing is expanded to a row a token.
    """
    found = []
    for _, rows, engine in by_engine(records):
        found.append(_gaps_of_engine(engine, (rows >= 0) & wanted[rows]))
    return np.concatenate([gaps for gaps, _ in found]), np.concatenate([counts for _, counts in found])


def _gaps_of_engine(records: Records, wanted: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    steps, spans = records.step_columns, state_intervals(records)
    decoded = steps["num_decode"] > 0
    starts = steps["start_ns"][decoded]
    ends = starts + steps["duration_ns"][decoded]
    request, first_ns, last_ns, lo, hi = _token_runs(records, spans, wanted, starts, ends)
    if not len(request):
        return np.empty(0), np.empty(0, dtype=np.int64)
    # How many of the wanted requests ran both in decode step k - 1 and in k, for k from 1 on.
    change = np.zeros(len(starts) + 1, dtype=np.int64)
    in_group = hi > lo
    np.add.at(change, lo[in_group] + 1, 1)
    np.add.at(change, hi[in_group], -1)
    together = np.cumsum(change)[1 : len(starts)]
    same = request[1:] == request[:-1]
    own = (first_ns[1:] - last_ns[:-1])[same]
    shared = together > 0
    gaps = np.concatenate((np.diff(ends)[shared], own)).astype(np.float64)
    return gaps, np.concatenate((together[shared], np.ones(len(own), dtype=np.int64)))


def _token_runs(
    records: Records, spans: Intervals, wanted: NDArray[np.bool_], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], ...]:
    """Tokens in a row, by request and time: (request, first token, last token, decode steps lo up to hi).

    A run is the one token that ends a prefill or recompute (lo = hi), or the decode steps of one stay in the group.
    """
    finished = records.requests["outcome"][spans.request] == FINISHED
    next_state = np.append(spans.state[1:], 0)
    computes = (spans.state == PREFILL) | (spans.state == RECOMPUTE)
    sampled = computes & np.where(spans.is_last, finished, next_state == DECODE)
    decodes = spans.state == DECODE
    lo, hi = np.searchsorted(starts, spans.start_ns), np.searchsorted(starts, spans.end_ns)
    keep = wanted[spans.request] & (sampled | (decodes & (hi > lo)))
    lo, hi, decodes, end_ns = lo[keep], hi[keep], decodes[keep], spans.end_ns[keep]
    hi = np.where(decodes, hi, lo)
    first_ns, last_ns = end_ns.copy(), end_ns.copy()
    first_ns[decodes], last_ns[decodes] = ends[lo[decodes]], ends[hi[decodes] - 1]
    return spans.request[keep], first_ns, last_ns, lo, hi

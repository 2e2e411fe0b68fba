"""The gaps between a request's tokens, pooled over requests, from the step and state records alone.

Nothing is kept or expanded per token: the members of a decode group get their tokens at the ends of its steps, so that
a gap between two steps is counted once with the number of sequences that ran in both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchsim.drive.fleet.fleet_records import by_engine
from batchsim.kernel.record import DECODE, FINISHED, PREEMPTED, PREFILL, RECOMPUTE, SAT_OUT, Records
from batchsim.metrics.attribution import Intervals, state_intervals


def token_gaps(records: Records, wanted: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Gaps in ns between consecutive tokens of the `wanted` requests (a mask over the rows), and how often each occurs.

    A member that also ran in the group's previous decode step contributes the time between the two steps' ends, which
    is counted per step; a joiner contributes its own gap. Nothing is expanded to a row a token. Empty where the records
    do not say which step made which token: with draft tokens, and in pipelines with several groups of decodes.
    """
    engines = []
    for _, rows, engine in by_engine(records):
        engines.append(_gaps_of_engine(engine, (rows >= 0) & wanted[rows]))
    return np.concatenate([gaps for gaps, _ in engines]), np.concatenate([counts for _, counts in engines])


def _gaps_of_engine(records: Records, wanted: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    steps, spans = records.step_columns, state_intervals(records)
    decoded = steps["num_decode"] > 0
    starts = steps["start_ns"][decoded]
    ends = starts + steps["duration_ns"][decoded]
    if (steps["num_decode_tokens"] > steps["num_decode"]).any():
        return np.empty(0), np.empty(0, dtype=np.int64)
    if len(records.lanes):
        ends = records.lanes["processed_ns"][decoded]
        request, first_ns, last_ns, lo, hi = _token_runs_ahead(records, spans, wanted, decoded)
    else:
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


def _token_runs_ahead(
    records: Records, spans: Intervals, wanted: NDArray[np.bool_], decoded: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], ...]:
    """As `_token_runs`, of an engine that schedules ahead of results, whose tokens come when results are processed.

    A sequence sits out or is preempted when the scheduler is called; the step in flight then still makes its token,
    which some engines give up. Empty unless all tokens are found: each request's runs hold as many as it got.
    """
    called, processed = records.lanes["called_ns"], records.lanes["processed_ns"]
    requests, steps = records.requests, records.step_columns
    none = (np.empty(0, np.int64),) * 5
    if (steps["start_ns"][1:] < (steps["start_ns"] + steps["duration_ns"])[:-1]).any():
        return none  # a pipeline
    previous, following = np.append(0, spans.state[:-1]), np.append(spans.state[1:], 0)
    finished = requests["outcome"][spans.request] == FINISHED
    computes = (spans.state == PREFILL) | (spans.state == RECOMPUTE)
    decodes = spans.state == DECODE
    after_a_chunk = (previous == PREFILL) | (previous == RECOMPUTE)
    by_start = np.searchsorted(processed, spans.start_ns) + 1  # behind the step whose token began the span
    lo = np.where(after_a_chunk, by_start, np.searchsorted(called, spans.start_ns))
    at_end = np.searchsorted(called, spans.end_ns)  # the call at which it left
    hi = np.where(spans.is_last, np.searchsorted(processed, spans.end_ns) + 1, at_end)
    # A prompt may end in the step before the one that it sits out, or in flight as it is preempted.
    before = processed[np.maximum(at_end - 1, 0)]
    leaves = ~spans.is_last & ((following == SAT_OUT) | (following == PREEMPTED))
    hidden = computes & leaves & (requests["first_token_ns"][spans.request] == before)
    sampled = computes & np.where(spans.is_last, finished, following == DECODE) | hidden
    in_flight = decodes & ~spans.is_last & (following == PREEMPTED) & (before > spans.end_ns)
    count = np.concatenate((np.zeros(1, np.int64), np.cumsum(decoded, dtype=np.int64)))  # decode steps before each step
    lo, hi = count[np.minimum(lo, len(decoded))], count[np.minimum(hi, len(decoded))]
    made = np.bincount(spans.request, np.where(decodes, hi - lo, sampled), len(requests))
    surplus = made > requests["output_tokens"]
    hi = np.where(in_flight & surplus[spans.request], hi - 1, hi)
    made = np.bincount(spans.request, np.where(decodes, hi - lo, sampled), len(requests))
    # What was computed anew may end in flight too: the tokens that lack are of such chunks, where there are as many.
    unsure = computes & leaves & ~hidden & (before > spans.end_ns)
    lacks = requests["output_tokens"] - made == np.bincount(spans.request, unsure, len(requests))
    lost = unsure & lacks[spans.request]
    hidden, sampled = hidden | lost, sampled | lost
    made = np.bincount(spans.request, np.where(decodes, hi - lo, sampled), len(requests))
    if (made != requests["output_tokens"])[wanted].any():
        return none
    keep = wanted[spans.request] & (sampled | (decodes & (hi > lo)))
    ends = processed[decoded]
    token_ns = np.where(hidden, before, spans.end_ns)
    lo, hi, decodes, token_ns = lo[keep], hi[keep], decodes[keep], token_ns[keep]
    hi = np.where(decodes, hi, lo)
    first_ns, last_ns = token_ns.copy(), token_ns.copy()
    first_ns[decodes], last_ns[decodes] = ends[lo[decodes]], ends[hi[decodes] - 1]
    return spans.request[keep], first_ns, last_ns, lo, hi

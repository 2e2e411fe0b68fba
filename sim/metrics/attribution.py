"""Where each request's time went: every nanosecond of its life in exactly one part, so that the parts sum to its E2E.

A life runs from `sent_ns` to `delivered_ns`, or to `ended_ns` where nothing was delivered. Parts:

    frontend                on the way to the engine, a late load source's lag included, or from the engine that handed
                            it over to the next; delivery of the last chunk
    failover                lived on replicas that failed, until it could be sent to another
    waiting_step            arrived while a step ran, until that step ended
    queued:REASON           in the queue; REASON is what held its head at the time, until that head left. `no_replica`:
                            at the router, while no replica was up, its gate was closed or the model slept. `waking`:
                            at a model that wakes up. `adapter`: others overtook the request itself, since its LoRA
                            adapter would have been one too many. Where prefill and decode are apart, at a decode
                            engine: `waiting_decode_blocks`, until it has blocks for the
                            prompt; `launch`, until it launches its next step; `transfer_queue`, until the link is
                            free; `transfer`, until the KV is there; `pulled`, until it has noticed and goes on.
                            Where KV is kept in the host's memory: `kv_storing`, until what it could load is stored
                            there; `kv_disk`, until a disk below has said what it has, and brought that there;
                            `kv_load_queue`, until the steps and loads before are over; `kv_load`, until its KV
                            is there; `kv_loaded`, until the engine has noticed and goes on
    prefill, recompute      steps with a chunk of its own, for the first time or again after a preemption
    decode_alone decode steps without prefill chunks
    decode_beside_prefill   decode steps that also ran prefill chunks
    adapter_load            in a step that first loaded LoRA adapters, of its own requests or of others
    waiting_for_gpu         in a step until those of other models on the GPU that were launched before were over
    encoding                in a step that first encoded images, audios or videos of its own
    encoding_of_others      in a step that first encoded those of others
    mask_wait               in a step whose sampling waited for masks of constrained answers, its own or others'
    sat_out:REASON          running, but left out of the step. `prefill_first`: the step ran prefills only;
                            `empty_step`: it only preempted or swapped
    preempted:REASON        lost its place and KV; `blocker` is the request that took them
    swapped:REASON          lost its place, KV kept in host memory
    waiting_for_ranks       of ranks that step together: in a step until all others had launched theirs, and for as long
                            as a slower one took; and while its rank ran a dummy for the others
    padding_of_ranks        in a step, computing padding up to the size of the fullest rank
    kv_load                 in a step that waited for KV which was loaded from the host beside it, layer by layer, its
                            own or another request's
    kv_store_flush          running, while no step ran since KV was to be stored before its blocks are used again
    host_gap                running, or about to and held by nothing, while no step ran: host work between steps, and
                            in rollouts the pause of engines that load weights with answers under way
    response_held           last token made, response kept until its batch ended
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchsim.drive.fleet.fleet_records import by_engine
from batchsim.kernel.record import (
    DECODE,
    FINISHED,
    MISSING,
    PREEMPTED,
    PREFILL,
    RECOMPUTE,
    SAT_OUT,
    STATE_NAMES,
    SWAPPED,
    WAITING,
    Records,
)
from batchsim.metrics.encoding import OTHERS, OWN, encoding_times
from batchsim.metrics.lives import (
    KV_LOAD,
    Coverage,
    Int,
    Intervals,
    given_up,
    held_back,
    queue_holds,
    queue_waits,
    queueing,
    state_intervals,
    step_kinds,
    step_leads,
    step_spans,
)
from batchsim.metrics.masks import MASK_WAIT, mask_times
from batchsim.metrics.rank_waits import FOR_GPU, PADDING
from batchsim.metrics.rank_waits import WAITING as FOR_RANKS
from batchsim.metrics.tiers import FLUSH, flush_times

PARTS = (
    "frontend",
    "failover",
    "waiting_step",
    "queued",
    "prefill",
    "recompute",
    "decode_alone",
    "decode_beside_prefill",
    "adapter_load",
    FOR_GPU,
    KV_LOAD,
    FOR_RANKS,
    PADDING,
    OWN,
    OTHERS,
    MASK_WAIT,
    "sat_out",
    "preempted",
    "swapped",
    FLUSH,
    "host_gap",
    "response_held",
)
"""The parts of a request's life, without their reasons."""

NO_REPLICA = "no_replica"
UNSTATED = "unstated"
"""The reason where a policy gave none."""


class PartTimes(NamedTuple):
    """Time that requests spent in one part of their lives: parallel arrays, a row a span or request; 0 ns is left in.

    `request` is a row of the requests table, `blocker` the id of the request that took the place, or MISSING.
    `after_first`: the time lies after the first token, so that it counts for TPOT and not for TTFT.
    """

    part: str
    request: Int
    ns: Int
    blocker: Int
    after_first: NDArray[np.bool_]


def part_times(records: Records, per_chunk_ns: int = 0) -> Iterator[PartTimes]:
    """The time of all requests, part by part; a part may come more than once.

    `per_chunk_ns` is the front end's time to deliver one chunk of a response.
    """
    for _, rows, engine in by_engine(records):
        for times in _part_times(engine, per_chunk_ns):
            request_rows = rows[times.request]
            if request_rows.min(initial=0) >= 0:
                yield times._replace(request=request_rows)
            else:
                kept = request_rows >= 0
                blocker, after_first = times.blocker[kept], times.after_first[kept]
                yield PartTimes(times.part, request_rows[kept], times.ns[kept], blocker, after_first)


def _part_times(records: Records, per_chunk_ns: int) -> Iterator[PartTimes]:
    """The times of one engine's requests, by their rows in its own table."""
    intervals = state_intervals(records)
    yield from _ends(records, per_chunk_ns)
    yield from _queue(records, intervals)
    yield from _running(records, intervals)
    for times_of in (encoding_times, mask_times, flush_times):
        for part, request, ns, after_first in times_of(records, intervals, _is_after_first_token):
            yield _times(part, request, ns, after_first)
    for state in (WAITING, SAT_OUT, PREEMPTED, SWAPPED):
        here = intervals.state == state
        for code in np.unique(intervals.reason[here]):
            at = here & (intervals.reason == code)
            length = intervals.end_ns[at] - intervals.start_ns[at]
            request = intervals.request[at]
            after_first = _is_after_first_token(records, request, intervals.start_ns[at])
            yield PartTimes(
                named(STATE_NAMES[state], records.texts[code]),
                request,
                length,
                intervals.blocker[at],
                after_first,
            )


def attribute(records: Records, per_chunk_ns: int = 0) -> pd.DataFrame:
    """Columns request_id, part, ns, blocker (null without one): what each request's time went to, without zeros.

    Rows are by request, then in the order of PARTS; the `ns` of a finished request sum to its E2E exactly.
    """
    all_times = sorted(
        part_times(records, per_chunk_ns), key=lambda times: (PARTS.index(times.part.split(":")[0]), times.part)
    )
    names = list(dict.fromkeys(times.part for times in all_times))
    code = np.concatenate([np.full(len(times.ns), names.index(times.part)) for times in all_times])
    request = np.concatenate([times.request for times in all_times])
    blocker = np.concatenate([times.blocker for times in all_times])
    ns = np.concatenate([times.ns for times in all_times])
    some = ns != 0
    code, request, blocker, ns = code[some], request[some], blocker[some], ns[some]
    order = np.lexsort((blocker, code, request))
    code, request, blocker, ns = code[order], request[order], blocker[order], ns[order]
    first = np.ones(len(ns), dtype=bool)
    first[1:] = (code[1:] != code[:-1]) | (request[1:] != request[:-1]) | (blocker[1:] != blocker[:-1])
    if len(ns):
        ns = np.add.reduceat(ns, np.flatnonzero(first))
    some = ns != 0  # a first piece that came late may weigh nothing in the whole
    code, request, blocker, ns = code[first][some], request[first][some], blocker[first][some], ns[some]
    return pd.DataFrame(
        {
            "request_id": records.requests["request_id"][request],
            "part": pd.Categorical.from_codes(code, names),
            "ns": ns,
            "blocker": pd.arrays.IntegerArray(blocker, blocker == MISSING),
        }
    )


def named(part: str, reason: str) -> str:
    """A part with its reason, `queued:no_slot`."""
    return f"{part}:{reason or UNSTATED}"


def _times(part: str, request: Int, ns: Int, after_first: NDArray[np.bool_] | None = None) -> PartTimes:
    return PartTimes(
        part, request, ns, np.full(len(ns), MISSING), np.zeros(len(ns), bool) if after_first is None else after_first
    )


def _is_after_first_token(records: Records, request: Int, start_ns: Int) -> NDArray[np.bool_]:
    """Whether each span in one state lies after the first token, at which states change, so that no span is across."""
    first_ns = records.requests["first_token_ns"][request]
    return (first_ns != MISSING) & (start_ns >= first_ns)


def _ends(records: Records, per_chunk_ns: int) -> Iterator[PartTimes]:
    """The times before the arrival at the engine and after the last token."""
    requests = records.requests
    everyone = np.arange(len(requests))
    # The end of a run may come before requests that are still on their way have arrived.
    handed_ns = requests["arrival_ns"] + requests["lag_ns"]
    before_ns = requests["router_ns"] + requests["failover_ns"]
    way_ns = _span(requests["sent_ns"] + before_ns, np.minimum(handed_ns, requests["ended_ns"]))
    yield _times("frontend", everyone, way_ns, _is_after_first_token(records, everyone, requests["sent_ns"]))
    yield _times(named("queued", NO_REPLICA), everyone, requests["router_ns"])
    yield _times("failover", everyone, requests["failover_ns"])
    finished = np.flatnonzero(requests["outcome"] == FINISHED)
    done = requests[finished]
    held_ns = done["delivered_ns"] - per_chunk_ns - done["ended_ns"]
    yield _times("response_held", finished, held_ns, np.ones(len(finished), bool))
    lost = np.flatnonzero(given_up(requests))
    lost_ns = requests["ended_ns"][lost] - requests["last_token_ns"][lost]
    yield _times("response_held", lost, lost_ns, np.ones(len(lost), bool))
    yield _times("frontend", finished, np.full(len(finished), per_chunk_ns))
    # What the first piece took longer than the others counts for TTFT; later pieces have caught up with it by the end.
    late_ns = np.where(done["first_delivery_ns"] < done["delivered_ns"], done["first_delivery_ns"], 0)
    late_ns = _span(done["first_token_ns"] + per_chunk_ns, late_ns)
    yield _times("frontend", finished, late_ns)
    yield _times("frontend", finished, -late_ns, np.ones(len(finished), bool))


def _span(start_ns: Int, end_ns: Int) -> Int:
    return np.maximum(end_ns - start_ns, 0)


def _queue(records: Records, intervals: Intervals) -> Iterator[PartTimes]:
    """The times from arrival to first state: the rest of the step that ran, then what held the head of the queue.

    Time that nothing held the queue is `host_gap` where the very next step took the request; else `queued:unstated`.
    """
    everyone = np.arange(len(records.requests))
    queue = queueing(records, intervals)
    arrival, entered, until, soon = queue
    held = held_back(records, queue)
    after_first = _is_after_first_token(records, everyone, arrival)
    holds = queue_holds(records, intervals)
    length, left, waited = holds.end_ns - holds.start_ns, until - entered, entered - arrival
    if (of_ranks := queue_waits(records, holds)) is not None:
        in_step, in_queue = of_ranks[0].between(arrival, entered), of_ranks[1].between(entered, until)
        yield _times(FOR_RANKS, everyone, in_step + in_queue, after_first)
        left, waited = left - in_queue, waited - in_step
    yield _times("waiting_step", everyone, waited, after_first)
    for code in np.unique(held.reason):
        at = held.reason == code
        ns = np.zeros(len(everyone), np.int64)
        np.add.at(ns, held.request[at], held.end_ns[at] - held.start_ns[at])
        left = left - ns
        yield _times(named("queued", records.texts[code]), everyone, ns, after_first)
    for code in np.unique(holds.reason):
        at = holds.reason == code
        cover = Coverage(holds.start_ns[at], length[at])
        ns = cover.between(entered, until)
        if len(held.request):
            np.subtract.at(ns, held.request, cover.between(held.start_ns, held.end_ns))
        left = left - ns
        yield _times(named("queued", records.texts[code]), everyone, ns, after_first)
    yield _times("host_gap", everyone, np.where(soon, left, 0), after_first)
    yield _times(named("queued", ""), everyone, np.where(soon, 0, left), after_first)


def _running(records: Records, intervals: Intervals) -> Iterator[PartTimes]:
    """The times in steps: own prefill and recompute, decode by what ran beside it; and the gaps between steps."""
    starts, lengths = step_spans(records)
    kinds = step_kinds(records)
    covers = {part: Coverage(starts[kind], lengths[kind]) for part, kind in kinds.items()}
    any_step = Coverage(starts, lengths)
    leads = step_leads(records)
    for state, name in ((PREFILL, "prefill"), (RECOMPUTE, "recompute")):
        at = intervals.state == state
        start, end, request = intervals.start_ns[at], intervals.end_ns[at], intervals.request[at]
        ns = any_step.between(start, end)
        after_first = _is_after_first_token(records, request, start)
        yield _times("host_gap", request, end - start - ns, after_first)
        for lead in leads:
            lead_ns = Coverage(lead.start_ns, lead.length_ns).between(start, end)
            ns = ns - lead_ns
            yield _times(lead.part, request, lead_ns, after_first)
        yield _times(name, request, ns, after_first)
    at = intervals.state == DECODE
    start, end, request = intervals.start_ns[at], intervals.end_ns[at], intervals.request[at]
    left, after_first = end - start, np.ones(len(start), bool)
    for part, cover in covers.items():
        ns = cover.between(start, end)
        left = left - ns
        for lead in leads:
            kind = kinds[part]
            lead_ns = Coverage(lead.start_ns[kind], lead.length_ns[kind]).between(start, end)
            ns = ns - lead_ns
            yield _times(lead.part, request, lead_ns, after_first)
        yield _times(part, request, ns, after_first)
    yield _times("host_gap", request, left, after_first)

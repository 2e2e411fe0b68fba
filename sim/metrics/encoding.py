"""How long steps began with encoding images, audios and videos: in all, and for each request's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.record import DECODE, ENCODED, PREFILL, RECOMPUTE, Records
from batchsim.metrics.lives import Coverage, Int, Intervals, remarked_ns, step_kinds, step_spans

OWN, OTHERS = "encoding", "encoding_of_others"
"""The parts of a request's life in steps that encode: its own items, and those of other requests."""


class OwnEncoding(NamedTuple):
    """The encoding of requests' own items: parallel arrays, a row for each request of each step that encodes some.
    `request` is a row of `records.requests`, `start_ns` the start of the step."""

    request: Int
    start_ns: Int
    ns: Int


def own_encoding(records: Records) -> OwnEncoding:
    """What was encoded for each request; no further than to its end, where the step was cut."""
    rows = records.states[records.states["state"] == ENCODED]
    request = np.searchsorted(records.requests["request_id"], rows["request_id"])
    left_ns = np.maximum(records.requests["ended_ns"][request] - rows["time_ns"], 0)
    return OwnEncoding(request, rows["time_ns"], np.minimum(rows["blocker"], left_ns))


def step_encode_ns(records: Records) -> Int:
    """How long each recorded step encodes before its forward, in ns; empty where none does."""
    return remarked_ns(records, ENCODED)


Yielded = tuple[str, Int, Int, NDArray[np.bool_]]
"""A part, requests by their rows, ns that are to be added to the part, and whether they lie after the first token."""


def encoding_times(
    records: Records, intervals: Intervals, is_after_first: Callable[[Records, Int, Int], NDArray[np.bool_]]
) -> Iterator[Yielded]:
    """What steps that encode take off other parts of requests' lives, and add to OWN and OTHERS."""
    encode_ns = step_encode_ns(records)
    if not len(encode_ns):
        return
    starts, lengths = step_spans(records)
    yield from taken_of_steps(records, intervals, is_after_first, starts, np.minimum(encode_ns, lengths), OTHERS)
    own = own_encoding(records)
    after_first = is_after_first(records, own.request, own.start_ns)
    yield OTHERS, own.request, -own.ns, after_first
    yield OWN, own.request, own.ns, after_first


def taken_of_steps(
    records: Records,
    intervals: Intervals,
    is_after_first: Callable[[Records, Int, Int], NDArray[np.bool_]],
    start_ns: Int,
    length_ns: Int,
    part: str,
) -> Iterator[Yielded]:
    """What a span of each step, all in ns, takes off the parts of requests' lives in which they compute, and adds to
    `part`."""
    whole = {"": np.ones(len(start_ns), bool)}
    for state, name in ((PREFILL, "prefill"), (RECOMPUTE, "recompute"), (DECODE, "")):
        at = intervals.state == state
        start, end, request = intervals.start_ns[at], intervals.end_ns[at], intervals.request[at]
        after_first = is_after_first(records, request, start) if name else np.ones(len(start), bool)
        for kind_name, kind in (whole if name else step_kinds(records)).items():
            ns = Coverage(start_ns[kind], length_ns[kind]).between(start, end)
            yield name or kind_name, request, -ns, after_first
            yield part, request, ns, after_first

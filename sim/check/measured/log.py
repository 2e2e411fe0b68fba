"""A service's own log as a measured run: the rows of a trace that have TTFT or E2E."""

from __future__ import annotations

import numpy as np

from batchsim.base.errors import MeasuredError
from batchsim.check.measured.run import MISSING, Client, MeasuredRequests, MeasuredRun
from batchsim.workload.traces.trace_rows import TraceRows


def tells_latencies(rows: TraceRows) -> bool:
    """Whether a log has latencies (TTFT or E2E)."""
    return bool({"ttft", "e2e"} & rows.labels.keys())


def measured_log(rows: TraceRows) -> MeasuredRun:
    """The rows of a log, in the order of sending, as a run of open arrivals.

    MeasuredError where no row has a latency, the log has no arrival times, or a TTFT is above its E2E.
    """
    if rows.arrival_ns is None:
        raise MeasuredError(f"{rows.source}: has no arrival times to replay it by. Name columns.arrival.")
    untold = np.full(len(rows), MISSING)
    ttft_ns, e2e_ns = rows.labels.get("ttft", untold), rows.labels.get("e2e", untold)
    has_latency = (ttft_ns != MISSING) | (e2e_ns != MISSING)
    if not has_latency.any():
        raise MeasuredError(f"{rows.source}: none of {len(rows):,} rows tells a latency. Fill columns.ttft or e2e.")
    crossed = (ttft_ns > e2e_ns) & (e2e_ns != MISSING)
    if crossed.any():
        row = int(np.flatnonzero(crossed)[0])
        raise MeasuredError(
            f"{rows.source}: {int(crossed.sum()):,} rows have a TTFT above their E2E, the first of"
            f" {int(ttft_ns[row]) / 1e9:g} s above {int(e2e_ns[row]) / 1e9:g} s. Look at duration_unit."
        )
    requests = MeasuredRequests(
        sent_ns=rows.arrival_ns,
        intended_ns=None,
        ttft_ns=ttft_ns,
        e2e_ns=e2e_ns,
        prompt_tokens=rows.prompt_tokens,
        output_tokens=rows.output_tokens,
        ok=np.ones(len(rows), np.bool_),
        chunks=untold,
        hash_ids=rows.hash_ids,
    )
    notes = list(rows.notes)
    if missing := int((~has_latency).sum()):
        notes.append(f"{missing:,} of {len(rows):,} rows tell no latency: replayed, and compared with nothing")
    return MeasuredRun(rows.source, "log", "", Client("open"), requests.figures(), requests, notes=tuple(notes))

"""What tests and the bench make of traces: longer ones, and the word on which format a file has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from batchsim.workload.traces.formats import lay_out
from batchsim.workload.traces.trace_config import TraceConfig
from batchsim.workload.traces.trace_file import open_source, reading
from batchsim.workload.traces.trace_rows import TraceRows


def recognised(path: Path) -> str:
    """The format of the file and the reason, in a line."""
    with reading(path):
        layout = lay_out(open_source(TraceConfig(str(path)), Path()), TraceConfig(str(path)))
    return f"{'ambiguous' if layout.ambiguous else layout.format}: {layout.reason}"


def tiled(rows: TraceRows, count: int) -> TraceRows:
    """The trace repeated end to end to `count` rows, a mean gap between copies, which share no prompts."""
    index = np.arange(count)
    source, copy = index % len(rows), index // len(rows)
    times = None
    if rows.arrival_ns is not None:
        span_ns = int(rows.arrival_ns[-1] - rows.arrival_ns[0])
        times = rows.arrival_ns[source] + copy * (span_ns + max(1, round(span_ns / (len(rows) - 1))))
    return replace(rows.picked(source, times, copy), notes=(*rows.notes, f"tiled end to end to {count:,}"))

"""Recorded requests: readers of public trace formats, any other file by mapping, and changes of their load."""

from batchsim.workload.traces.inspect import inspect_trace
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.scale import rescale, spread
from batchsim.workload.traces.trace_config import Columns, RateScale, TraceConfig

__all__ = [
    "Columns",
    "RateScale",
    "TraceConfig",
    "inspect_trace",
    "read_trace",
    "rescale",
    "spread",
]

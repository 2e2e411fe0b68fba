"""Recorded requests: readers of public trace formats, any other file by mapping, and changes of their load."""

from sim.workload.traces.config import Columns, RateScale, TraceConfig
from sim.workload.traces.inspect import inspect_trace
from sim.workload.traces.read import read_trace, recognise
from sim.workload.traces.scale import rescale, spread, tile

__all__ = [
    "Columns",
    "RateScale",
    "TraceConfig",
    "inspect_trace",
    "read_trace",
    "recognise",
    "rescale",
    "spread",
    "tile",
]

"""Workloads without patience, deadlines or a warm-up, to learn what an engine can do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchsim.workload.lengths import TraceLengths
from batchsim.workload.workload_config import AllAtOnce, ClosedLoop, WorkloadConfig


def patient(
    workload: WorkloadConfig, arrivals: AllAtOnce | ClosedLoop, requests: int, **changes: Any
) -> WorkloadConfig:
    """`workload` with `requests` requests of its lengths and classes that come by `arrivals`, without deadlines,
    patience, warm-up or a time limit; `changes`: further fields."""
    workload = workload.of_any_number
    rows = workload.lengths is None and workload.trace is not None
    return replace(
        workload,
        arrivals=arrivals,
        requests=requests,
        lengths=TraceLengths() if rows else workload.lengths,
        trace=None if workload.trace is None else replace(workload.trace, rate_scale=None),
        classes={name: replace(each, deadline=None, patience=None) for name, each in workload.classes.items()},
        duration=None,
        warmup=0,
        drain=None,
        deadline=None,
        patience=None,
        **changes,
    )

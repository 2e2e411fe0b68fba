"""What `trace inspect` shows of a trace."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.scale import rescale
from batchsim.workload.traces.trace_config import TraceConfig
from batchsim.workload.traces.trace_rows import Ints, TraceRows

_QUANTILES = {"p50": 50, "p90": 90, "p99": 99}


def inspect_trace(config: TraceConfig, base: Path) -> dict[str, Any]:
    """The trace as the simulator would replay it, `rate_scale` included, in figures fit for JSON.

    Keys: source, format, rows, notes; `arrivals` (rate_rps, cv, idc_1s, idc_60s, ...; None without times);
    `prompt_tokens` and `output_tokens` (mean, cv, min, p50, p90, p99, max); `hash_ids` (block_tokens, reused_share:
    the share of blocks that stand in an earlier row; None without); where rows tell classes, `classes` (rows,
    mean_prompt_tokens, mean_output_tokens by name).
    """
    trace = read_trace(config, base)
    if config.rate_scale is not None:
        trace = rescale(trace, config.rate_scale, 0)
    return summary(trace)


def summary(trace: TraceRows) -> dict[str, Any]:
    """The figures of rows already read; see `inspect_trace`."""
    from batchsim.workload.traces.arrival_stats import describe_arrivals

    hashed = trace.hash_ids
    return {
        "source": trace.source,
        "format": trace.format,
        "rows": len(trace),
        "arrivals": None if trace.arrival_ns is None else asdict(describe_arrivals(trace.arrival_ns)),
        "prompt_tokens": _lengths(trace.prompt_tokens),
        "output_tokens": _lengths(trace.output_tokens),
        **_by_class(trace),
        "hash_ids": None
        if hashed is None
        else {"block_tokens": hashed.block_tokens, "reused_share": hashed.reused_share},
        "notes": list(trace.notes),
    }


def _by_class(trace: TraceRows) -> dict[str, Any]:
    """How many rows each class has, and their mean lengths; {} where rows tell no classes."""
    if "request_class" not in trace.labels:
        return {}
    classes: dict[str, Any] = {}
    for name, count in trace.class_counts.items():
        in_class = trace.labels["request_class"] == trace.texts["request_class"].index(name)
        classes[name] = {
            "rows": count,
            "mean_prompt_tokens": float(trace.prompt_tokens[in_class].mean()),
            "mean_output_tokens": float(trace.output_tokens[in_class].mean()),
        }
    return {"classes": classes}


def _lengths(tokens: Ints) -> dict[str, float]:
    """Mean, CV (population std), extremes and linearly interpolated percentiles of lengths in tokens."""
    quantiles = {name: float(np.percentile(tokens, percent)) for name, percent in _QUANTILES.items()}
    mean = float(tokens.mean())
    return {
        "mean": mean,
        "cv": float(tokens.std()) / mean,
        "min": int(tokens.min()),
        **quantiles,
        "max": int(tokens.max()),
    }

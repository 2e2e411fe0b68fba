"""Fitted traffic as the text of a scenario, which needs the trace no more."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from batchsim.base.errors import cut
from batchsim.base.ranges import INT32_MAX
from batchsim.scenario.document import scalar
from batchsim.scenario.written import as_written
from batchsim.workload.workload_config import WorkloadConfig

_PLAIN = re.compile(r"[\w./][\w./%-]*", re.ASCII)  # what YAML reads as the same word without quotes
_WORDS = ("true", "false", "null")
_NOT_OURS = ("workload", "load", "plan", "vary", "seeds", "replicas")
SEEDS = 3
_COMMENT = 1000  # letters of a line


def scenario_text(engine: Mapping[str, Any], workload: WorkloadConfig, comments: tuple[str, ...]) -> str:
    """The YAML text of a scenario of `workload` for the engine of another, whose plain values are `engine`."""
    lines = [f"# {cut(comment, _COMMENT)}" for comment in comments]  # they name the trace's file, whatever is in that
    kept = {name: value for name, value in engine.items() if name not in _NOT_OURS}
    lines += [f"{name}: {flow(value)}" for name, value in kept.items() if name not in ("policies", "slo")]
    lines.append("workload:")
    lines += [f"  {name}: {flow(value)}" for name, value in as_written(workload).items()]
    rate = workload.arrivals.mean_rate  # type: ignore[union-attr]
    rates = ", ".join(f"{rate * times:.6g}/s" for times in (0.5, 1, 1.5))
    lines += [f"policies: {flow(kept['policies'])}", f"load: {{mean_rate: [{rates}]}}", f"slo: {flow(kept['slo'])}"]
    return "\n".join([*lines, f"seeds: {SEEDS}", ""])


def cap_above(longest: int) -> int:
    """A cap on output tokens that cuts no answer of up to `longest`: the smallest such power of two from 64 on, but at
    most INT32_MAX."""
    return min(max(64, 1 << (longest - 1).bit_length()), INT32_MAX)


def flow(value: Any) -> str:
    """Plain values on one line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(str(name))}: {flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and isinstance(scalar(value), str) and value.lower() not in _WORDS
        return value if is_plain else json.dumps(value)
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return json.dumps(int(value) if is_whole else value)

"""The text of the scenario that `batchsim init` writes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import ScenarioError

if TYPE_CHECKING:
    from sim.workload.traces import TraceConfig

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*", re.ASCII)  # what YAML reads as the same word without quotes
_TP = (1, 2, 4, 8)  # GPUs of one server

_SYNTHETIC = """\
# Question: which of these policies holds the SLO up to which request rate?
# Source:   none: rates and lengths are examples, replace them by what you measured
# Expect:   static batching fails the SLO at every rate, continuous batching holds it
model: {model}  # catalog name (batchsim catalog), or the path of a config.json
cost: {cost}
workload:
  arrivals: {{kind: poisson, mean_rate: 4/s}}  # or gamma, on_off, constant, closed_loop, all_at_once, trace
  lengths:
    prompt: {{kind: lognormal, mean: 1000, cv: 1, max: 8000}}  # tokens
    output: {{kind: lognormal, mean: 200, cv: 1, max: 1000}}
  output_cap: 1024  # what clients ask for at most
  duration: 2min
  warmup: 20s  # left out of the latencies
{policies}load: {{mean_rate: [2/s, 4/s, 8/s]}}  # one simulation a policy, load and seed
slo: ttft<1s & tpot<50ms @ 99%
seeds: 3
"""

_TRACE = """\
# Question: how do these policies serve the recorded requests, at their own rate and at others?
# Source:   {path}: {rows} requests{rate}
# Expect:   continuous batching serves a higher rate within the SLO than static batching
model: {model}  # catalog name (batchsim catalog), or the path of a config.json
cost: {cost}
workload:
  arrivals: {arrivals}
{lengths}  trace:
{trace}  output_cap: {cap}  # what clients ask for at most; the longest output of the trace is {longest}
{end}{policies}load: {load}
slo: ttft<1s & tpot<50ms @ 99%
seeds: {seeds}
"""

_POLICIES = """\
policies:  # batchsim policies lists all, with their knobs
  static: {batch_size: 16, max_wait: 2s, respond: row_end}
  continuous: {max_num_seqs: 256, max_num_batched_tokens: 8192}
"""


def starter_text(model: str, gpu: str, folder: Path, trace: TraceConfig | None, figures: dict[str, Any] | None) -> str:
    """A scenario for a file in `folder`; with a trace, its figures are those of `inspect_trace`.

    ScenarioError if model or GPU is unknown, or no number of GPUs up to 8 holds the model.
    """
    cost = _cost(model, gpu)
    name = model if not Path(model).exists() else _relative(Path(model), folder)
    common = {"model": _word(name), "cost": cost, "policies": _POLICIES}
    if trace is None or figures is None:
        return _SYNTHETIC.format(**common)
    path = _relative(Path(trace.path), folder)
    arrivals = figures["arrivals"]
    timed = arrivals is not None and arrivals["rate_rps"] is not None
    longest = figures["output_tokens"]["max"]
    rate = ", no times"
    if timed and arrivals is not None:
        rate = f", {arrivals['rate_rps']:.4g}/s, CV of the gaps {arrivals['cv']:.3g}"
    return _TRACE.format(
        **common,
        path=_word(path),
        rows=f"{figures['rows']:,}",
        rate=rate,
        arrivals="{kind: trace}" if timed else "{kind: poisson, mean_rate: 4/s}  # the trace has no times",
        lengths="" if timed else "  lengths: {kind: trace}\n",
        trace=_trace_block(trace, path, timed),
        cap=_cap(longest),
        longest=f"{longest:,}",
        end="" if timed else "  duration: 2min\n  warmup: 20s\n",
        load="{rate_scale: [0.5, 1, 2]}  # times the recorded rate" if timed else "{mean_rate: [2/s, 4/s, 8/s]}",
        seeds="1  # a replayed trace has nothing random" if timed else "3",
    )


def _cost(model: str, gpu: str) -> str:
    """The cost block: one GPU, or as many as the model needs."""
    from sim.catalog import load_gpu, load_model
    from sim.model import derive_kv

    spec, device = load_model(model), load_gpu(gpu)
    for tp in _TP:
        try:
            derive_kv(spec, device, tp=tp)
        except ScenarioError:
            continue
        if tp == 1:
            return f"{gpu}  # the GPU"
        return f"{{kind: roofline, gpu: {gpu}, tp: {tp}}}  # the fewest GPUs that hold the model"
    derive_kv(spec, device)
    raise AssertionError("one GPU cannot be enough here")


def _trace_block(trace: TraceConfig, path: str, timed: bool) -> str:
    lines = [f"path: {_word(path)}"]
    if trace.format != "auto":
        lines.append(f"format: {trace.format}")
    columns = trace.columns
    if columns is not None:
        roles = {"arrival": columns.arrival, "prompt": columns.prompt, "output": columns.output}
        named = ", ".join(f"{role}: {_word(name)}" for role, name in roles.items() if name is not None)
        lines.append(f"columns: {{{named}}}")
    if trace.time_unit is not None:
        lines.append(f"time_unit: {trace.time_unit}")
    if timed:
        lines.append("rate_scale: {factor: 1, by: compress}  # how load changes the rate; or overlay, thin")
    return "".join(f"    {line}\n" for line in lines)


def _cap(longest: int) -> int:
    """The smallest power of two, from 64, that cuts no output of the trace."""
    cap = 64
    while cap < longest:
        cap *= 2
    return cap


def _relative(path: Path, folder: Path) -> str:
    """`path` as a scenario in `folder` names it."""
    return str(path) if path.is_absolute() else Path(os.path.relpath(path, folder)).as_posix()


def _word(text: str) -> str:
    """`text` as a YAML scalar that reads as this string."""
    return text if _PLAIN.fullmatch(text) and text.lower() not in ("true", "false", "null") else json.dumps(text)

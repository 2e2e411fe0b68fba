"""Keeps a live run in the layout of simulated ones, so that every table, picture and `batchsim explain` works on it.

results/<scenario>-live/raw/<hash>.npz   the run as it was made, with the times of kernels and host of every step
results/<scenario>-live/...              as `batchsim.results.read` says
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from batchsim.base.files import file_hash, writing
from batchsim.base.units import NS_PER_S, format_duration
from batchsim.check.validation.live_runs import Played
from batchsim.deployment.memory import KvBudget
from batchsim.drive.live import lag_verdict, sent_lags_ns, tail_ns
from batchsim.kernel.acceptance import DraftCounts
from batchsim.metrics.measure import Measured, measure
from batchsim.metrics.point_inputs import PointInputs
from batchsim.results.heading import measured_at
from batchsim.results.keep import check_cohort, keep_measured, keep_run, point_inputs
from batchsim.results.provenance import identity, short_hash
from batchsim.results.read import POINTS, Results
from batchsim.scenario import Point
from batchsim.scenario.point import Run
from batchsim.scenario.setup import Setup

RAW = "raw"
_OF_ALL = ("cohort", "uncompleted_share")


class Kept(Played, Protocol):
    """A live run as `batchsim.calibrate.engine.session` leaves it, which can be saved."""

    def save(self, path: Path) -> None: ...


def keep_live(setup: Setup, point: Point, played: Kept, out: Path) -> Results:
    """Writes the raw run, its tables and metrics, and a manifest whose `live` says how it went; returns these results.

    `live` holds device, weights, software, the reason of a cut run, the lag and, in `void`, why it does not count, ""
    if it does. ScenarioError where `out` cannot be written, or no request was sent in the window: the raw run is kept.
    """
    setup = _only(setup, point, played.num_blocks)
    home = out / f"{setup.scenario.name}-live"
    name = short_hash([identity(setup), point.spec.name, point.load, point.seed, played.made, time.time_ns()])
    with writing(out, "Give another folder with --out."):
        (home / RAW).mkdir(parents=True, exist_ok=True)
        raw = f"{RAW}/{name}.npz"
        played.save(home / raw)
        workload = setup.workload(point.load, point.seed)
        run = Run(point, workload, played.records, played.streams, played.end_ns, played.window_ns)
        check_cohort(run)
        inputs = real_inputs(setup, run)
        result = keep_measured(run, _measured(played, inputs), home / POINTS / name)
        facts = {
            "heading": real_heading(setup, played.made),
            "sources": [real_source(played.made)],
            "live": _live_facts(played, point) | {"raw": raw, "raw_sha256": file_hash(home / raw)},
            "wall_s": round(played.end_ns / NS_PER_S, 2),
        }
        return keep_run(setup, home, [result], reused=0, facts=facts)


def live_lines(results: Results) -> list[str]:
    """What has to be said of a live run beside its table; what speaks against it starts with `! `."""
    live = results.manifest["live"]
    lag = live["lag_ns"]
    lines = [
        f"load source: lag mean {format_duration(lag['mean'])}, p99 {format_duration(lag['p99'])},"
        f" max {format_duration(lag['max'])} over {lag['requests']:,} requests"
    ]
    if counts := live.get("drafts"):
        drafts = DraftCounts(**counts)
        lines.append(f"drafts: {drafts.tokens_per_decode:.3g} tokens a decode; as measured here, {drafts.law}")
    if live["reason"]:
        why = results.manifest["details"].get(live["policy"], {}).get(live["reason"], "")
        lines.append(f"! CUT at {format_duration(live['end_ns'])}: {live['reason']}{f': {why}' if why else ''}")
    if live["void"]:
        lines.append(f"! VOID: {live['void']}")
    return lines


def _only(setup: Setup, point: Point, num_blocks: int) -> Setup:
    """`setup` of a scenario that asks for this point alone, with the KV memory that the run had."""
    scenario, label = setup.scenario, point.spec.label
    file = replace(scenario.file, policies={label: scenario.file.policies[label]}, seeds=1)
    kv = KvBudget(num_blocks, setup.kv.block_size, "as the live run had them")
    return replace(setup, scenario=replace(scenario, file=file, specs=(point.spec,), loads=(point.load,)), kv=kv)


def _measured(played: Kept, inputs: PointInputs) -> Measured:
    """The metrics of a run. One that was cut has rates and latencies up to the cut, shares of all that was offered, and
    no verdict on objectives: the rest of the run is unknown."""
    start_ns, end_ns = inputs.window_ns
    whole = measure(inputs)
    if not played.reason:
        return whole
    until_ns = min(end_ns, played.end_ns) if played.end_ns > start_ns else end_ns
    measured = measure(replace(inputs, window_ns=(start_ns, until_ns)))
    shares = {name: x for name, x in whole.values.items() if name in _OF_ALL or name.startswith("in_slo")}
    return replace(measured, values=measured.values | shares | {"slo_met": None, "slo_margin": None})


def real_inputs(setup: Setup, run: Run) -> PointInputs:
    """What the metrics need to know of a run on a model, whose steps only a profile measured so explains."""
    inputs = point_inputs(setup, run)
    if setup.cost.profile is not None and setup.cost.profile.origin == "measured":
        return inputs
    return replace(inputs, cost_terms=None, step_watts=None, idle_watts=None, peak_flops=None, memory_bandwidth=None)


def real_source(made: dict[str, Any]) -> str:
    """Where step times come from that were measured in the run itself; `made` says on what it ran."""
    return f"step times: measured in this run on {_machine(made)}"


def _machine(made: dict[str, Any]) -> str:
    hardware = made["hardware"]
    return str(hardware.get("gpu") or f"cpu ({hardware['cpu']})")


def real_heading(setup: Setup, made: dict[str, Any]) -> str:
    """What ran where, in the place of the cost in a simulation's heading."""
    model, on = setup.model, f"live on {_machine(made)}, torch {made['software']['torch']}"
    dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[model.dtype]
    weights = f"weights {made['weights']}"
    return f"{setup.scenario.name} · {model.name} {dtype} · {on}, {weights} · measured at: {measured_at(setup)}"


def _live_facts(played: Kept, point: Point) -> dict[str, Any]:
    lags_ns = sent_lags_ns(played.records)
    num_sent, lags_ns = len(lags_ns), lags_ns or [0]
    return {
        "policy": point.spec.name,
        "load": point.load,
        "seed": point.seed,
        "reason": played.reason,
        "void": lag_verdict(played.records),
        "end_ns": played.end_ns,
        "lag_ns": {
            "mean": sum(lags_ns) / len(lags_ns),
            "p99": tail_ns(lags_ns),
            "max": lags_ns[-1],
            "requests": num_sent,
        },
        **played.made,
    }

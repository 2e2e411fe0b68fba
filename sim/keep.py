"""Keeps what was run, in the layout that `sim.results` reads: a point's tables and metrics, a run's summary.

A point is written whole or not at all, so a killed run continues where it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sim.errors import ScenarioError
from sim.frames import tables_are_there, write_tables
from sim.inputs import PointInputs
from sim.metrics import Measured, combine, measure
from sim.point import Run, Setup
from sim.pool import is_running
from sim.provenance import as_json, provenance, short_hash, write_csv, write_text
from sim.record import FINISHED, STEP_DTYPE
from sim.results import Results, load_results
from sim.scenario import Scenario
from sim.slo import parse_slo
from sim.units import format_duration
from sim.workload.config import ClosedLoop, Frontend

# ---- one point


def point_inputs(setup: Setup, run: Run) -> PointInputs:
    """What the metrics need to know of a point that was run."""
    file, workload, gpu = setup.scenario.file, run.workload, setup.gpu
    class_slos = {name: parse_slo(c.slo) for name, c in file.workload.classes.items() if c.slo is not None}
    steps = run.records.steps
    return PointInputs(
        records=run.records,
        window_ns=run.window_ns,
        num_blocks=setup.kv.num_blocks,
        block_size=setup.kv.block_size,
        streams=run.streams,
        num_gpus=setup.num_gpus,
        num_offered=workload.num_offered,
        all_at_once=workload.all_at_once,
        closed_loop=isinstance(file.workload.arrivals, ClosedLoop),
        max_num_seqs=getattr(run.point.spec.config, "max_num_seqs", None),
        per_chunk_ns=workload.frontend.per_chunk,
        slo=parse_slo(file.slo),
        class_slos=class_slos,
        class_names=tuple(file.workload.classes),
        has_prefix_cache=bool(getattr(run.point.spec.config, "prefix_cache", "")),
        cost_terms=setup.cost.explain({name: steps[name].astype(np.int64) for name in STEP_DTYPE.names or ()}),
        peak_flops=None if gpu is None else gpu.peak_flops * setup.num_gpus,
        memory_bandwidth=None if gpu is None else gpu.memory_bandwidth * setup.num_gpus,
    )


def keep_point(setup: Setup, run: Run, inputs: PointInputs, folder: Path) -> dict[str, Any]:
    """Measures a point and writes it to `folder`; returns what its point.json holds."""
    check_cohort(run)
    return keep_measured(run, measure(inputs), folder)


def keep_measured(run: Run, measured: Measured, folder: Path) -> dict[str, Any]:
    """Writes a point with its metrics to `folder`; returns what its point.json holds."""
    point = run.point
    result = {
        "policy": point.spec.label,
        "variant": point.spec.variant,
        "name": point.spec.name,
        "kind": point.spec.kind,
        "load": point.load,
        "seed": point.seed,
        "point": folder.name,
        "end_ns": run.end_ns,
        "num_finished": int((run.records.requests["outcome"] == FINISHED).sum()),
        "unstable": measured.unstable,
        "bound_by": measured.bound_by,
        "values": measured.values,
        "few": sorted(measured.few),
        "reasons": measured.reasons,
        "details": run.records.details,
        "workload": {"notes": run.workload.notes, **run.workload.describe},
    }
    unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
    unfinished.mkdir(parents=True)
    write_tables(run.records, unfinished)
    (unfinished / "point.json").write_text(as_json(result), encoding="utf-8")
    _put(unfinished, folder)
    return result


def _put(unfinished: Path, folder: Path) -> None:
    """Makes `unfinished` be `folder`, in place of what is there. Another run may do the same at the same time."""
    aside = unfinished.with_name(f".old{unfinished.name}")
    try:
        if folder.exists():
            folder.rename(aside)
        unfinished.rename(folder)
    except OSError:  # the other run was faster, with the same bytes
        if not folder.exists():
            raise
        shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)


def check_cohort(run: Run) -> None:
    """ScenarioError where nothing can be measured."""
    start_ns, end_ns = run.window_ns
    sent = run.records.requests["sent_ns"]
    if not ((sent >= start_ns) & (sent <= end_ns)).any() or (end_ns <= start_ns and not run.workload.all_at_once):
        raise ScenarioError(
            f"{run.point.spec.name} at load {run.point.load:g}, seed {run.point.seed}: nobody arrives between the end"
            f" of the warm-up at {format_duration(start_ns)} and the last arrival at {format_duration(end_ns)}."
            " Lengthen the workload, or use all_at_once."
        )


def sweep_unfinished(points: Path) -> None:
    """Removes what a killed run left half-written; folders of live processes stay."""
    for folder in points.glob(".*-*"):
        pid = folder.name.rpartition("-")[2]
        if not pid.isdigit() or not is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def kept_point(folder: Path) -> dict[str, Any] | None:
    """The result of a point that is there already, whole."""
    try:
        result = json.loads((folder / "point.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(result, dict) and {"seed", "values", "workload"} <= set(result)
    return result if whole and tables_are_there(folder) else None


# ---- a run of points


def keep_run(
    setup: Setup, home: Path, results: Sequence[dict[str, Any]], *, reused: int, facts: dict[str, Any]
) -> Results:
    """Writes summary.csv, points.csv and manifest.json of the points in `results`, all that the scenario asks for.

    `facts` are further entries of the manifest, or others in place of its own.
    """
    scenario = setup.scenario
    summary, points = _tabulate(scenario, results)
    folder = home / short_hash([result["point"] for result in results])
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "summary.csv", summary)
    write_csv(folder / "points.csv", points)
    write_text(folder / "scenario.yaml", scenario.text)
    write_text(folder / "manifest.json", as_json(_manifest(setup, results, reused) | facts, indent=2))
    return load_results(folder)


def _manifest(setup: Setup, results: Sequence[dict[str, Any]], reused: int) -> dict[str, Any]:
    """What was run and how it was obtained."""
    scenario = setup.scenario
    return {
        "scenario_name": scenario.name,
        "scenario": scenario.plain,
        "heading": heading(setup),
        "kv": str(setup.kv),
        "num_blocks": setup.kv.num_blocks,
        "workload": _describe_workload(results),
        "slo": scenario.file.slo,
        "objective": _objective(scenario),
        "measured_at": measured_at(setup),
        "sources": setup.cost.sources(),
        "outcomes": _outcomes(results),
        "details": _details(results),
        "identical_seeds": _identical_seeds(results),
        "points_run": len(results) - reused,
        "points_reused": reused,
        **provenance(),
    }


def heading(setup: Setup) -> str:
    """Scenario, model, GPU and cost in one line."""
    gpu = "" if setup.gpu is None else f" on {setup.gpu.name}" + (f" × {setup.num_gpus}" if setup.num_gpus > 1 else "")
    dtype = {"bfloat16": "bf16", "float16": "fp16"}.get(setup.model.dtype, setup.model.dtype)
    model = f"{setup.model.name} {dtype}{gpu}"
    return f"{setup.scenario.name} · {model} · {setup.cost.describe()} · measured at: {measured_at(setup)}"


def measured_at(setup: Setup) -> str:
    """Where latencies are taken: at the engine, or at the client where the scenario models the way there."""
    return "engine" if setup.scenario.file.workload.frontend == Frontend() else "client, front end modelled"


# ---- tables


def _measured(result: dict[str, Any]) -> Measured:
    return Measured(
        result["values"], frozenset(result["few"]), result["reasons"], result["unstable"], result["bound_by"]
    )


def _tabulate(scenario: Scenario, results: Sequence[dict[str, Any]]) -> tuple[list[dict], list[dict]]:
    """Rows of summary.csv and points.csv. Of a policy's `best_of` variants only the best at each load is kept."""
    by_spec: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda r: r["seed"]):
        by_spec.setdefault((result["policy"], result["load"], result["variant"]), []).append(result)
    summary, points = [], []
    for label in scenario.file.policies:
        for load in scenario.loads:
            variants = {key[2]: runs for key, runs in by_spec.items() if key[:2] == (label, load)}
            best = max(variants, key=lambda variant: _merit(variants[variant]))
            runs = variants[best]
            combined = combine([_measured(run) for run in runs])
            common = {
                "policy": label,
                "kind": runs[0]["kind"],
                "label": runs[0]["name"],
                "variant": best,
                "load_name": scenario.load_name,
                "load": load,
            }
            row = common | {
                "num_seeds": combined.num_seeds,
                "unstable": combined.unstable,
                "bound_by": combined.bound_by,
                "few": " ".join(sorted(combined.few)),
            }
            for name, value in combined.mean.items():
                row[name], row[f"{name}_ci"] = value, combined.half_width[name]
            summary.append(row)
            for run in runs:
                head = common | {key: run[key] for key in ("seed", "point", "unstable", "bound_by")}
                points.append(head | {"few": " ".join(run["few"])} | run["values"])
    return summary, points


def _merit(runs: list[dict[str, Any]]) -> tuple[float, ...]:
    """How good a variant is at a load: stable, the SLO met, more within it, the lower normalised latency."""
    combined = combine([_measured(run) for run in runs])
    latency = combined.mean["norm_latency_mean_s"]
    return (
        float(not combined.unstable),
        float((combined.mean["slo_met"] or 0.0) > 0.5),  # in most seeds
        combined.mean["in_slo"] or 0.0,
        float("-inf") if latency is None else -latency,
    )


def _details(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """By policy (and variant) and reason: the numbers of the first case."""
    found: dict[str, dict[str, str]] = {}
    for result in results:
        for reason, text in result["details"].items():
            found.setdefault(result["name"], {}).setdefault(reason, text)
    return found


def _outcomes(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By policy (and variant), load and seed: how many requests ended how, and why."""
    counted: dict[str, Any] = {}
    for result in results:
        name = result["name"]
        by_reason = {outcome: result["reasons"].get(outcome, {}) for outcome in ("rejected", "cancelled", "unfinished")}
        totals = {outcome: sum(counts.values()) for outcome, counts in by_reason.items()}
        finished = result["num_finished"]
        counted.setdefault(name, []).append(
            {
                "load": result["load"],
                "seed": result["seed"],
                "submitted": finished + sum(totals.values()),
                "finished": finished,
                **totals,
                **{f"{outcome}_by_reason": counts for outcome, counts in by_reason.items()},
            }
        )
    return counted


def _describe_workload(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The arrivals of every load and seed, with what was dropped or changed: the same for all policies."""
    described = {(r["load"], r["seed"]): r["workload"] for r in results}
    return [{"load": load, "seed": seed, **described[load, seed]} for load, seed in sorted(described)]


def _identical_seeds(results: Sequence[dict[str, Any]]) -> bool:
    """Whether all seeds gave the same: then nothing is random and an interval of 0 says nothing."""
    by_point: dict[Any, list[Any]] = {}
    for result in results:
        by_point.setdefault((result["name"], result["load"]), []).append(result["values"])
    return all(len(seeds) > 1 and all(seed == seeds[0] for seed in seeds) for seeds in by_point.values())


def _objective(scenario: Scenario) -> str:
    """What `slo_met` means: the SLO, or every class's own where classes have theirs."""
    classes = scenario.file.workload.classes
    own = [f"{name} {traffic.slo}" for name, traffic in classes.items() if traffic.slo is not None]
    others = [scenario.file.slo] if len(own) < len(classes) or not classes else []
    return f"every class's objective ({'; '.join([*own, *others])})" if own else scenario.file.slo

"""Keeps what was run, in the layout that `batchsim.results.read` reads: a point's tables and metrics, a run's summary.

A point is written whole or not at all, so a killed run continues where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from batchsim.base.errors import NobodyToMeasure
from batchsim.base.files import write_text
from batchsim.base.units import format_duration
from batchsim.drive.fleet.fleet_plan import UP, ReplicaSpan
from batchsim.drive.fleet.fleet_records import EngineLife, by_engine, merged
from batchsim.kernel.record import CAP_CUT, FINISHED, Recorder, Records
from batchsim.metrics.adapter_table import adapter_table
from batchsim.metrics.adapters import adapter_use
from batchsim.metrics.measure import Measured, combine, measure, measured_of
from batchsim.metrics.point_inputs import PointInputs
from batchsim.metrics.replica_table import replica_table
from batchsim.metrics.rollouts import training_rows
from batchsim.metrics.slo import Slo, parse_slo
from batchsim.metrics.tiers import TierUse, tier_use
from batchsim.results.checksums import file_facts, sealed
from batchsim.results.cost_ends import CostEnds, add_ends
from batchsim.results.digests import digest_of
from batchsim.results.failed import Failed, points_failed
from batchsim.results.fleet_inputs import cost_terms, fleet_inputs, idle_watts, is_lasting, step_watts
from batchsim.results.frames import pack_tables
from batchsim.results.heading import heading, kv_text, measured_at
from batchsim.results.minute_frames import pack_minutes
from batchsim.results.point_files import PackedPoint, write_point
from batchsim.results.provenance import as_json, cost_sources, csv_text, provenance, short_hash
from batchsim.results.read import (
    ADAPTERS,
    MANIFEST,
    POINTS_TABLE,
    REPLICAS,
    SCENARIO,
    SUMMARY,
    TRAININGS,
    Results,
    load_results,
)
from batchsim.results.rollout_bounds import rollout_bounds_ns
from batchsim.scenario import Point, Scenario
from batchsim.scenario.point import Run
from batchsim.scenario.setup import Setup
from batchsim.workload.build import intended_ns, task_of, turn_of
from batchsim.workload.closed_loop import ClosedLoopWorkload
from batchsim.workload.offline import OfflineWorkload
from batchsim.workload.processes import ProfiledArrivals
from batchsim.workload.rollout import RolloutWorkload
from batchsim.workload.rollout_config import Rollout
from batchsim.workload.tasks import TaskWorkload
from batchsim.workload.workload_config import AllAtOnce, ClosedLoop, TraceArrivals

_CHANGING = (ClosedLoop, Rollout, TraceArrivals, AllAtOnce, ProfiledArrivals)
"""Arrivals without a steady state: caused by answers, recorded, all at once, or of a changing rate."""

# ---- one point


def point_inputs(setup: Setup, run: Run) -> PointInputs:
    """What the metrics need to know of a point that was run."""
    file, workload, deployment = setup.scenario.file, run.workload, setup.cost.deployment
    traits = run.point.spec.config.traits
    class_slos = {name: parse_slo(c.slo) for name, c in file.workload.classes.items() if c.slo is not None}
    terms = None if run.lives else cost_terms(setup, run.records, run.point.spec.config)
    inputs = PointInputs(
        records=run.records,
        window_ns=run.window_ns,
        num_blocks=setup.kv.num_blocks,
        block_size=setup.kv.block_size,
        streams=run.streams,
        num_gpus=setup.num_gpus,
        num_offered=workload.num_offered,
        all_at_once=workload.all_at_once,
        closed_loop=isinstance(file.workload.arrivals, ClosedLoop | Rollout),
        stationary=not isinstance(file.workload.arrivals, _CHANGING) and is_lasting(setup, run),
        max_num_seqs=traits.max_num_seqs,
        per_chunk_ns=workload.frontend.per_chunk,
        slo=parse_slo(file.slo),
        class_slos=class_slos,
        class_names=tuple(file.workload.classes),
        has_prefix_cache=bool(traits.prefix_cache),
        cost_terms=terms,
        step_watts=None if terms is None else step_watts(setup, run.records, terms),
        idle_watts=idle_watts(setup),
        peak_flops=None if deployment is None else deployment.peak_flops,
        memory_bandwidth=None if deployment is None else deployment.memory_bandwidth,
        fleet=fleet_inputs(setup, run) if setup.groups else None,
        intended_ns=intended_ns(workload),
        task_of=task_of(workload),
        turn=turn_of(workload, run.records.requests["request_id"]),
        prunable=workload.prunable if isinstance(workload, TaskWorkload) else None,
        adapters=adapter_use(run.records.requests, _engines(run)) if setup.traffic.lora_rank is not None else None,
        tiers=_tiers(setup, run),
        **_logs(setup, run),
    )
    return replace(inputs, digest=digest_of(setup, run, inputs)) if run.lives else inputs


def _engines(run: Run) -> list[Records]:
    """The records of each engine of a run."""
    return [life.records for life in run.lives] or [engine for _, _, engine in by_engine(run.records)]


def _tiers(setup: Setup, run: Run) -> TierUse | None:
    """The use of the host's memory for KV in a run; None where no engine keeps any there."""
    tiers = [group.setup.tier for group in setup.groups] or [setup.tier]
    sizes = [tier.token_bytes for tier in tiers if tier is not None]
    return tier_use(run.records.requests, _engines(run), max(sizes)) if sizes else None


def _logs(setup: Setup, run: Run) -> dict[str, Any]:
    """What became of offline jobs, or of the groups of a rollout, with bounds on what they could take; nothing of other
    workloads."""
    if isinstance(run.workload, OfflineWorkload):
        return {"offline": run.workload.log}
    if not isinstance(run.workload, RolloutWorkload):
        return {}
    log = run.workload.log
    return {"rollout": log, "rollout_bounds_ns": rollout_bounds_ns(setup, run.point.spec.config, log)}


def metric_names(setup: Setup, point: Point) -> list[str]:
    """The names of a point's metrics, those of classes and replicas too, from measuring a run without any request."""
    workload, records, spans = setup.workload(point.load, point.seed), Recorder().records(), ()
    if setup.groups:
        records, spans = merged([EngineLife(0, records)]), (ReplicaSpan(0, UP, 0, 1),)
    run = Run(point, workload, records, streams=False, end_ns=1, window_ns=(0, 1), spans=spans)
    return list(measure(point_inputs(setup, run)).values)


def measured_point(setup: Setup, run: Run, name: str) -> PackedPoint:
    """Measures a point that was run and packs it, to be written to a folder of this name."""
    check_cohort(run)
    inputs = point_inputs(setup, run)
    tables = pack_minutes(inputs, run.lives or (EngineLife(0, run.records),)) if run.keep == "minutes" else None
    rows = {"replicas": replica_table(inputs), "trainings": training_rows(inputs), "adapters": adapter_table(inputs)}
    return pack_point(run, measure(inputs), name, tables=tables, **rows)


def keep_measured(run: Run, measured: Measured, folder: Path) -> dict[str, Any]:
    """Writes a point with its metrics to `folder`; returns what its point.json holds."""
    packed = pack_point(run, measured, folder.name)
    write_point(packed, folder)
    return packed.result


def pack_point(
    run: Run,
    measured: Measured,
    name: str,
    replicas: Sequence[dict[str, Any]] = (),
    tables: dict[str, bytes] | None = None,
    trainings: Sequence[dict[str, Any]] = (),
    adapters: Sequence[dict[str, Any]] = (),
) -> PackedPoint:
    """A point with its metrics and those of each of its `replicas`, `trainings` and LoRA `adapters`, to be written to a
    folder of this name.

    `tables` are the bytes of its tables by file name, by default those of its records that are to be kept.
    """
    point = run.point
    result = {
        "policy": point.spec.label,
        "variant": point.spec.variant,
        "name": point.spec.name,
        "kind": point.spec.kind,
        "load": point.load,
        "seed": point.seed,
        "point": name,
        "end_ns": run.end_ns,
        "num_finished": int((run.records.requests["outcome"] == FINISHED).sum()),
        "unstable": measured.unstable,
        "bound_by": measured.bound_by,
        "values": measured.values,
        "few": sorted(measured.weak_percentiles),
        "reasons": measured.reasons,
        "details": run.records.details,
        "workload": {"notes": list(run.workload.notes), **run.workload.describe},
    }
    if replicas:
        result["replicas"] = list(replicas)
        result["replica_spans"] = [asdict(span) for span in run.spans]
    if trainings:
        result["trainings"] = list(trainings)
    if adapters:
        result["adapters"] = list(adapters)
    if tables is None:
        tables = pack_tables(run.records, intended_ns=intended_ns(run.workload), requests_only=run.keep == "requests")
    return PackedPoint.of(result, tables)


def check_cohort(run: Run) -> None:
    """NobodyToMeasure where no request was sent in the arrival window, or the window has no length."""
    start_ns, end_ns = run.window_ns
    sent = run.records.requests["sent_ns"]
    if not ((sent >= start_ns) & (sent <= end_ns)).any() or (end_ns <= start_ns and not run.workload.all_at_once):
        who = f"{run.point.spec.name} at load {run.point.load:g}, seed {run.point.seed}"
        after = f"between the end of the warm-up at {format_duration(start_ns)} and"
        if isinstance(run.workload, ClosedLoopWorkload):
            raise NobodyToMeasure(
                f"{who}: no user sends {after} the end at {format_duration(end_ns)}. Lengthen the workload, shorten"
                " its warm-up, or have more users."
            )
        raise NobodyToMeasure(
            f"{who}: nobody arrives {after} the last arrival at {format_duration(end_ns)}."
            " Lengthen the workload, or shorten its warm-up."
        )


# ---- a run of points


def keep_run(
    setup: Setup,
    home: Path,
    outcomes: Sequence[dict[str, Any] | Failed],
    *,
    reused: int,
    facts: dict[str, Any],
    ends: Sequence[CostEnds] = (),
) -> Results:
    """Writes summary.csv, points.csv and manifest.json of the points in `outcomes`, all that the scenario asks for.

    A policy need not have been run at every load. PointsFailed if all of them failed; where some did, the summary has
    no means of theirs. `facts` are further entries of the manifest, or others in place of its own; `ends` are of points
    whose load may lie within the cost's error of saturation.
    """
    scenario = setup.scenario
    failed = [each for each in outcomes if isinstance(each, Failed)]
    results = [each for each in outcomes if not isinstance(each, Failed)]
    if not results:
        raise points_failed(failed, len(outcomes))
    summary, points = tabulate(scenario, outcomes)
    add_ends(summary, ends)
    folder = home / short_hash([each.point if isinstance(each, Failed) else each["point"] for each in outcomes])
    folder.mkdir(parents=True, exist_ok=True)
    files = {SUMMARY: csv_text(summary), POINTS_TABLE: csv_text(points), SCENARIO: scenario.text}
    for name, of in ((REPLICAS, "replicas"), (TRAININGS, "trainings"), (ADAPTERS, "adapters")):
        if rows := _rows_of(results, of):
            files[name] = csv_text(rows)
    for name, text in files.items():
        write_text(folder / name, text)
    facts = facts | {"files": {name: file_facts(text.encode()) for name, text in files.items()}}
    manifest = sealed(_manifest(setup, results, failed, reused) | facts)
    write_text(folder / MANIFEST, as_json(manifest, indent=2))
    return load_results(folder)


def _manifest(setup: Setup, results: Sequence[dict[str, Any]], failed: Sequence[Failed], reused: int) -> dict[str, Any]:
    """The entries of manifest.json: what was run and how it was obtained."""
    scenario = setup.scenario
    return {
        "scenario_name": scenario.name,
        "scenario": scenario.plain,
        "heading": heading(setup),
        "kv": kv_text(setup),
        "num_blocks": setup.kv.num_blocks,
        "workload": _describe_workload(results),
        "slo": scenario.file.slo,
        "objective": objective_text(scenario),
        "measured_at": measured_at(setup),
        "sources": cost_sources(setup),
        "outcomes": _outcomes(results),
        "details": _details(results),
        "identical_seeds": _identical_seeds(results),
        "points_run": len(results) - reused,
        "points_reused": reused,
        "failed": [asdict(each) for each in failed],
        **provenance(),
    }


# ---- tables


def _rows_of(results: Sequence[dict[str, Any]], of: str) -> list[dict[str, Any]]:
    """Rows of replicas.csv, trainings.csv or adapters.csv, by policy (and variant), load, seed and what they are of."""
    head = ("policy", "variant", "load", "seed", "point")
    ordered = sorted(results, key=lambda result: [result[name] for name in head])
    return [{name: result[name] for name in head} | row for result in ordered for row in result.get(of, [])]


def summary_rows(scenario: Scenario, outcomes: Sequence[dict[str, Any] | Failed]) -> list[dict[str, Any]]:
    """Rows of summary.csv: a policy at each of its loads, means over seeds. None if all points failed."""
    return tabulate(scenario, outcomes)[0] if any(not isinstance(each, Failed) for each in outcomes) else []


def tabulate(scenario: Scenario, outcomes: Sequence[dict[str, Any] | Failed]) -> tuple[list[dict], list[dict]]:
    """Rows of summary.csv and points.csv. Of a policy's `best_of` variants only the best at each load is kept.

    Policies come in the order of `outcomes`, the loads of each from the lowest up. Where a seed failed there is no
    mean: that of the others would flatter. `failed` counts the seeds; variants that failed are not compared unless all
    did.
    """
    heads = [_head(each) for each in outcomes]
    by_policy: dict[str, dict[float, dict[str, list[int]]]] = {}
    for i, head in enumerate(heads):
        by_load = by_policy.setdefault(head["policy"], {})
        by_load.setdefault(head["load"], {}).setdefault(head["variant"], []).append(i)
    metrics = next(list(each["values"]) for each in outcomes if not isinstance(each, Failed))
    summary, points = [], []
    for by_load in by_policy.values():
        for load, variants in sorted(by_load.items()):
            runs = {
                variant: sorted((r for i in members if isinstance(r := outcomes[i], dict)), key=lambda r: r["seed"])
                for variant, members in variants.items()
            }
            failures = {variant: len(members) - len(runs[variant]) for variant, members in variants.items()}
            whole = [variant for variant in variants if not failures[variant]]
            best = best_variant({variant: runs[variant] for variant in whole or variants})
            head = heads[variants[best][0]]
            common = {
                "policy": head["policy"],
                "kind": head["kind"],
                "label": head["name"],
                "variant": best,
                "load_name": scenario.load_name,
                "load": load,
            }
            if scenario.vary_key:
                common |= {"vary_key": scenario.vary_key, "vary": head["vary"]}
            summary.append(common | _summary_row(runs[best], failures[best], metrics))
            for run in runs[best]:
                row = common | {key: run[key] for key in ("seed", "point", "unstable", "bound_by")}
                points.append(row | {"few": " ".join(run["few"])} | run["values"])
    return summary, points


def _head(each: dict[str, Any] | Failed) -> dict[str, Any]:
    """The entries that identify a point: policy, load, variant, name, kind and the value of the varied key."""
    names = ("policy", "load", "variant", "name", "kind")
    if isinstance(each, Failed):
        return {name: getattr(each, name) for name in (*names, "vary")}
    return {name: each[name] for name in names} | {"vary": each.get("vary")}


def _summary_row(runs: list[dict[str, Any]], failures: int, metrics: list[str]) -> dict[str, Any]:
    """The columns of summary.csv for the seeds of a point: no metric where any failed."""
    row: dict[str, Any] = {"num_seeds": len(runs), "failed": failures}
    if failures:
        row |= {"unstable": False, "bound_by": "", "few": ""}
        return row | {name: None for metric in metrics for name in (metric, f"{metric}_ci")}
    combined = combine([measured_of(run) for run in runs])
    row |= {
        "unstable": combined.unstable,
        "bound_by": combined.bound_by,
        "few": " ".join(sorted(combined.weak_percentiles)),
    }
    for name, value in combined.mean.items():
        row[name], row[f"{name}_ci"] = value, combined.half_width[name]
    return row


def best_variant(runs: Mapping[str, list[dict[str, Any]]]) -> str:
    """Which variant of a `best_of` is best at a load, by the results of its seeds; the first if none has any."""
    return max(runs, key=lambda variant: _merit(runs[variant]) if runs[variant] else ())


def _merit(runs: list[dict[str, Any]]) -> tuple[float, ...]:
    """A sort key of variants, the best last: stable, the SLO met, more within it, the lower normalised latency."""
    combined = combine([measured_of(run) for run in runs])
    latency = combined.mean["norm_latency_mean_s"]
    return (
        float(not combined.unstable),
        float((margin := combined.mean["slo_margin"]) is not None and margin >= 0),
        combined.mean["in_slo"] or 0.0,
        float("-inf") if latency is None else -latency,
    )


def _details(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """By policy (and variant) and reason: the first case in words, with its numbers."""
    details: dict[str, dict[str, str]] = {}
    for result in results:
        for reason, text in result["details"].items():
            details.setdefault(result["name"], {}).setdefault(reason, text)
    return details


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
                CAP_CUT: result["reasons"].get("finished", {}).get(CAP_CUT, 0),
            }
        )
    return counted


def _describe_workload(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The arrivals of every load and seed, with what was dropped or changed: the same for all policies, but for what a
    varied key changes, so that a load and seed may come more than once."""
    described: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for r in results:
        same = described.setdefault((r["load"], r["seed"]), [])
        if r["workload"] not in same:
            same.append(r["workload"])
    return [{"load": load, "seed": seed, **each} for load, seed in sorted(described) for each in described[load, seed]]


def _identical_seeds(results: Sequence[dict[str, Any]]) -> bool:
    """Whether all seeds gave the same: then nothing is random and an interval of 0 says nothing."""
    by_point: dict[Any, list[Any]] = {}
    for result in results:
        by_point.setdefault((result["name"], result["load"]), []).append(result["values"])
    return all(len(seeds) > 1 and all(seed == seeds[0] for seed in seeds) for seeds in by_point.values())


def objective_of_all(scenario: Scenario) -> Slo | None:
    """The objective of every request; None where classes have their own."""
    return parse_slo(scenario.file.slo) if objective_text(scenario) == scenario.file.slo else None


def objective_text(scenario: Scenario) -> str:
    """What `slo_met` means: the SLO, or every class's own where classes have theirs."""
    classes = scenario.file.workload.classes
    own = [f"{name} {traffic.slo}" for name, traffic in classes.items() if traffic.slo is not None]
    others = [scenario.file.slo] if len(own) < len(classes) or not classes else []
    return f"every class's objective ({'; '.join([*own, *others])})" if own else scenario.file.slo

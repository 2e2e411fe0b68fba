"""Why requests missed the SLO, per policy and request class: as data and as a table. See `batchsim.explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from batchsim.base.errors import ScenarioError
from batchsim.base.units import counted, format_duration
from batchsim.explain.causes import NEVER_LET_IN, Objectives, slo_misses
from batchsim.explain.task_causes import TaskObjectives, task_misses
from batchsim.report.layout import aligned, fit
from batchsim.report.reading import at_load, load_name, sweeps_at
from batchsim.results.read import Results, scenario_of


def causes(results: Results, policies: Sequence[str], load: float, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each policy and request class: how many of `counted`, requests or tasks, were offered and missed, and
    the `causes` of the misses. Tasks follow on requests where both are bounded.

    A cause has metric, cause, misses and median_ns (of the time blamed). Counts are summed over `seeds`; the most
    frequent cause comes first. ScenarioError for an objective that judges neither, or where none was measured.

    >>> (row,) = batchsim.misses(results, ["static"], load=20, seeds=[0, 1])
    >>> row["offered"], row["missed"]
    (386, 0)
    """
    if not seeds:
        raise ScenarioError(f"{results.path}: the misses of no seed were asked for. Give at least one, like [0].")
    names = {s.policy: s.labels[s.index(load)] for s in sweeps_at(results, load)}
    groups = []
    for policy in policies:
        scenario = scenario_of(results, policy)
        of_tasks = TaskObjectives.of(scenario)
        head = {"policy": policy, "label": names[policy]}
        if of_tasks is None or of_tasks.stated.judges_requests:
            groups += [head | row for row in _of_requests(results, policy, load, seeds, Objectives.of(scenario))]
        if of_tasks is not None:
            every = [task_misses(results.records(policy, load, seed), of_tasks) for seed in seeds]
            judged = sum((Counter(counts) for _, counts in every), Counter[str]())
            misses = pd.concat([frame for frame, _ in every], ignore_index=True)
            groups += [head | row for row in _by_class(misses, judged, sorted(judged), "tasks")]
    if not groups:
        raise ScenarioError(
            f"{results.path}: nothing that the SLO bounds was measured {at_load(load_name(results), load)}: all of it"
            " began within the warm-up, or none ended. Lengthen the run, or shorten workload.warmup."
        )
    return groups


def _of_requests(
    results: Results, policy: str, load: float, seeds: Sequence[int], objectives: Objectives
) -> list[dict[str, Any]]:
    """The rows of the requests of a policy."""
    missed, offered = [], Counter[str]()
    for seed in seeds:
        records = results.records(policy, load, seed)
        cohort = records.requests[objectives.cohort(records)]
        for code, count in zip(*np.unique(cohort["request_class"], return_counts=True), strict=True):
            offered[records.texts[code]] += int(count)
        missed.append(slo_misses(records, objectives))
        lost = _never_let_in(results, policy, load, seed, len(cohort))
        if lost:
            offered["?" if objectives.class_names else ""] = lost + offered.get("", 0)
            missed.append(_lost_frame(lost, "?" if objectives.class_names else ""))
    order = [name for name in ("", *objectives.class_names, "?") if name in offered]
    return _by_class(pd.concat(missed, ignore_index=True), offered, order, "requests")


def _by_class(
    misses: pd.DataFrame, offered: Mapping[str, int], order: Sequence[str], counted: str
) -> list[dict[str, Any]]:
    return [
        {"request_class": name, "counted": counted, "offered": offered[name]}
        | _counted(misses.loc[misses["request_class"] == name])
        for name in order
    ]


def _never_let_in(results: Results, policy: str, load: float, seed: int, known: int) -> int:
    """How many judged requests the run never let in, so that its records lack them; `known` are the recorded ones."""
    points = results.points
    of_point = (points["policy"] == policy) & (points["load"] == load) & (points["seed"] == seed)
    return round(float(points.loc[of_point, "cohort"].iloc[0])) - known


def _lost_frame(count: int, request_class: str) -> pd.DataFrame:
    row = {
        "request_id": -1,
        "request_class": request_class,
        "metric": "unfinished",
        "cause": NEVER_LET_IN,
        "cause_ns": 0,
    }
    return pd.DataFrame([row] * count).astype({"cause_ns": np.int64})


def _counted(misses: pd.DataFrame) -> dict[str, Any]:
    rows = []
    for keys, ns in misses.groupby(["metric", "cause"])["cause_ns"]:
        metric, cause = map(str, keys)  # type: ignore[arg-type]
        rows.append({"metric": metric, "cause": cause, "misses": len(ns), "median_ns": int(np.median(ns))})
    return {"missed": len(misses), "causes": sorted(rows, key=lambda row: -row["misses"])}


# ---- the table


def causes_text(results: Results, groups: list[dict[str, Any]], load: float, num_seeds: int) -> str:
    """What `causes` returned, as a table: a line for each policy (and request class), below it one for each cause."""
    seeds = counted(num_seeds, "seed")
    lines = [fit(f"SLO misses {at_load(load_name(results), load)} ({seeds}): {results.manifest['objective']}")]
    for one in groups:
        request_class = f", class {one['request_class']}" if one["request_class"] else ""
        share = f"{100 * one['missed'] / one['offered']:.3g} %"
        counts = f"{one['missed']:,} of {one['offered']:,} {one['counted']} missed ({share})"
        lines.append(fit(f"{one['label']}{request_class}: {counts}"))
        grid = [["  missed", "cause", "misses", "share", "median"]]
        for row in one["causes"]:
            share = f"{100 * row['misses'] / one['missed']:.0f} %"
            time = format_duration(row["median_ns"]) if row["median_ns"] else "–"
            grid.append([f"  {row['metric']}", row["cause"], f"{row['misses']:,}", share, time])
        lines += aligned(grid, left=(0, 1)) if one["causes"] else []
    return "\n".join(lines)

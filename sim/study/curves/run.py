"""Runs all points of a scenario and keeps their results; `batchsim.results.read` says where and reads them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.metrics.latencies import OF_TOKENS
from batchsim.metrics.point_inputs import NO_TASKS
from batchsim.metrics.slo import parse_slo
from batchsim.results.failed import Failed
from batchsim.results.heading import engine_kv_text
from batchsim.results.keep import keep_run
from batchsim.results.known_gaps import check_gaps
from batchsim.results.read import Results
from batchsim.scenario import Scenario
from batchsim.scenario.longest_prompt import check_reach
from batchsim.scenario.setup import Setup
from batchsim.study.curves.auto import find_loads
from batchsim.study.curves.cost_ends import find_ends
from batchsim.study.curves.lines import ANY_LOAD, Line, lines_of, same_requests
from batchsim.study.curves.precision import Precision, check_metric, refine
from batchsim.study.sweep.points import Progress, Sweep, keeping
from batchsim.study.sweep.size import Limits, largest_load
from batchsim.workload.build import task_of


def run_scenario(
    scenario: Scenario,
    *,
    out: Path | str = "results",
    jobs: int = 1,
    ray: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
    precision: Precision | None = None,
    limits: Limits | None = None,
    begin: Callable[[Setup, Sequence[Line]], None] | None = None,
) -> Results:
    """Runs what is not there yet, writes summary.csv, points.csv and manifest.json, and returns the results.

    Points run on `jobs` processes, or on the Ray cluster at the address `ray`. With `precision` they get more seeds
    than the scenario's where they need them. The manifest's `failed` lists failed points; PointsFailed if all failed.
    ScenarioError, where there would be more than `limits` allows, before the first; then `begin` gets setup and curves.

    >>> batchsim.run_scenario(scenario, jobs=2).points.groupby("policy").size().to_dict()
    {'static': 4, 'vllm': 4}
    """
    started = time.monotonic()
    setup = Setup.of(scenario)
    lines = lines_of(setup)
    home = Path(out) / scenario.name
    sweep = Sweep(home, jobs=jobs, ray=ray, force=force, progress=progress, limits=limits)
    setups = list({id(line.setup): line.setup for line in lines}.values())
    _check_size(sweep, lines, setups, 0 if precision is None else precision.max_seeds)
    for each in setups:
        check_inputs(each)
        with each.scenario.at("cost"):
            check_reach(each, each.scenario.specs, max(scenario.loads, default=ANY_LOAD), range(scenario.file.seeds))
    if precision is not None:
        check_metric(lines[0], min(scenario.loads, default=ANY_LOAD), precision.metric)
    sweep.hold()
    if begin is not None:
        begin(setup, lines)
    facts: dict[str, Any] = {}
    if scenario.auto:
        results, facts["saturation_rps"] = find_loads(lines, sweep)
    else:
        results = run_lines(lines, sweep)
    if precision is not None:
        results, facts["precision"] = refine(results, lines, sweep, precision)
    reused = sweep.reused
    ends, facts["cost_ends_failed"] = find_ends(results, lines, sweep)
    facts["cost_ends"] = [one.facts for one in ends]
    facts["cost_error"] = {line.policy: asdict(line.setup.cost_error) for line in lines}
    if scenario.vary_key:
        facts["vary"] = _varied(scenario, lines)
    facts |= {"wall_s": round(time.monotonic() - started, 2), "jobs": jobs if ray is None else None, "ray": ray}
    with keeping(home):
        return keep_run(setup, home, results, reused=reused, facts=facts, ends=ends)


def _check_size(sweep: Sweep, lines: Sequence[Line], setups: Sequence[Setup], max_seeds: int) -> None:
    scenario = lines[0].setup.scenario
    load = scenario.file.load
    num_loads = load.num_points if load is not None and load.is_auto else len(scenario.loads)
    points = sum(len(line.specs) for line in lines) * num_loads * max(scenario.file.seeds, max_seeds)
    largest = [(setup, largest_load(setup)) for setup in setups]
    sweep.check_size(points, largest, scenario.places.get("seeds", scenario.source))


def run_lines(lines: Sequence[Line], sweep: Sweep) -> list[dict[str, Any] | Failed]:
    """The results of every line at the scenario's own loads; the heaviest run first so that parallel runs end together.

    They are in the order of the lines.
    """
    asked = [
        (number, line, point)
        for load in sorted(lines[0].setup.scenario.loads, reverse=True)
        for number, line in enumerate(lines)
        for point in line.points(load)
    ]
    results = sweep.attempt([point for _, _, point in asked])
    named = [(number, line.named(result)) for (number, line, _), result in zip(asked, results, strict=True)]
    return [result for _, result in sorted(named, key=lambda pair: pair[0])]


def _varied(scenario: Scenario, lines: Sequence[Line]) -> dict[str, Any]:
    """What the manifest says of the varied key: its values, whether requests differ, and what each curve is of."""
    key = scenario.vary_key
    return {
        "key": key,
        "values": (scenario.file.vary or {})[key],
        "same_requests": same_requests(lines, min(scenario.loads, default=ANY_LOAD)),
        "policies": {
            line.policy: {
                "policy": line.label,
                "value": line.value,
                "kv": engine_kv_text(line.setup),
                "num_blocks": line.setup.kv.num_blocks,
            }
            for line in lines
        },
    }


def check_inputs(setup: Setup) -> None:
    """Finds, before anything is written, what would make every point fail: a broken trace, a class's wrong SLO."""
    check_objectives(setup)
    scenario = setup.scenario
    axis = ANY_LOAD if scenario.auto else min(scenario.loads)
    workload = setup.workload(axis, seed=0)
    if task_of(workload) is None and any(parse_slo(text).of_tasks for text in _objectives(setup)):
        with scenario.at("slo"):
            raise ScenarioError(NO_TASKS)


def check_objectives(setup: Setup) -> None:
    """ScenarioError for an objective that no request of the workload could meet or miss."""
    scenario = setup.scenario
    with scenario.at("slo"):
        parse_slo(scenario.file.slo)
    for traffic in scenario.file.workload.classes.values():
        if traffic.slo is not None:
            with scenario.at("workload"):
                parse_slo(traffic.slo)
    check_gaps(setup)
    if scenario.file.workload.makes_no_tokens:
        with scenario.at("slo"):
            _check_no_tokens(_objectives(setup))


def _objectives(setup: Setup) -> list[str]:
    """The objectives of all requests and of the classes, as they are written."""
    file = setup.scenario.file
    return [text for text in (file.slo, *(each.slo for each in file.workload.classes.values())) if text is not None]


def _check_no_tokens(texts: list[str]) -> None:
    """ScenarioError where an objective bounds tokens, of which pooling models make none."""
    for text in texts:
        for bound in parse_slo(text).bounds:
            if bound.metric in OF_TOKENS:
                raise ScenarioError(
                    f"slo '{text}': {bound.metric} is of tokens, and requests with output 0 get none. Bound e2e or"
                    " queue_time."
                )

"""All findings of a validation, as one value and as one JSON document."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from batchsim.base.units import NS_PER_S
from batchsim.check.validation.compare_runs import ComparedRun, PointReport
from batchsim.check.validation.verdicts import Bounds, Verdict, all_steps, verdicts
from batchsim.kernel.record import FINISHED, Records
from batchsim.report.cost_words import HOW, off_by
from batchsim.report.reading import load_text
from batchsim.results.provenance import as_json

_NUMBERS = re.compile(r"\[\s*(-?\d+(?:,\s+-?\d+)*)\s*\]")


@dataclass(frozen=True)
class Validation:
    """All points of a validation. `heading` names the scenario and the machine; `made` is the provenance, for the JSON.

    `saturation_rps` is each policy's saturation in requests/s, empty where the load axis is not a rate.
    """

    name: str
    scenario: str
    heading: str
    load_name: str
    bounds: Bounds
    made: dict[str, Any]
    saturation_rps: dict[str, float]
    points: tuple[PointReport, ...]

    @property
    def verdicts(self) -> list[Verdict]:
        return verdicts(self.points, self.bounds)

    def where(self, point: PointReport) -> str:
        """The point's policy and load in words: `static at 12.3 req/s (50% of saturation)`."""
        share = "" if point.share is None else f" ({point.share:.0%} of saturation)"
        return f"{point.policy.name} at {load_text(self.load_name, float(f'{point.load:.4g}'))}{share}"

    def warnings(self) -> list[str]:
        """Lines on the points and runs that cannot be judged, and why."""
        lines = []
        for point in self.points:
            where = self.where(point)
            lines += [
                f"{where}, repeat {run.played.repeat}: VOID, left out: {run.void}" for run in point.runs if run.void
            ]
            if point.is_within_error:
                lines.append(
                    f"{where}: within the cost's error of saturation ({off_by(point.cost_error)}): TTFT and E2E are"
                    f" those of the shortest and of the longest steps; which they are {HOW}"
                )
            if lost := len(point.runs) - len(point.counted):
                lines.append(f"{where}: {lost} of {len(point.runs)} live runs do not count")
            if not point.counted:
                lines.append(f"{where}: no live run counts, nothing is claimed")
            elif point.unfit:
                lines.append(f"{where}: THIS MACHINE IS UNFIT: {point.unfit}. Nothing is claimed")
            elif len(point.counted) == 1:
                lines.append(f"{where}: one live run, so its spread is not known")
        return lines


def to_json(found: Validation) -> str:
    """The whole validation as JSON; lists of numbers on one line each. Times in ns, errors and shares as fractions."""
    whole = {
        "name": found.name,
        "scenario": found.scenario,
        "heading": found.heading,
        "made": found.made,
        "bounds": asdict(found.bounds),
        "verdicts": [asdict(verdict) for verdict in found.verdicts],
        "warnings": found.warnings(),
        "steps": [asdict(row) for row in all_steps(found.points)],
        "saturation_rps": found.saturation_rps,
        "load_name": found.load_name,
        "points": [_point(point) for point in found.points],
    }
    text = as_json(whole, indent=1)
    return _NUMBERS.sub(lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", text) + "\n"


def _point(point: PointReport) -> dict[str, Any]:
    simulated = point.simulated.records
    return {
        "policy": point.policy.name,
        "kind": point.policy.kind,
        "load": point.load,
        "share_of_saturation": point.share,
        "unfit": point.unfit,
        "live_runs": len(point.runs),
        "live_runs_not_counted": len(point.runs) - len(point.counted),
        "machine_drift": point.drift,
        "step_bias": point.bias,
        "step_bias_at_par": point.bias_at_par,
        "live_runs_calm": len(point.calm),
        "errors": [
            asdict(metric) | {"agrees": point.agrees(metric), "error_ends": metric.error_ends}
            for metric in point.metrics
        ],
        "within_cost_error_of_saturation": point.is_within_error,
        "cost_error": asdict(point.cost_error),
        "load_equivalent": point.shifts,
        "drafts": None if point.drafts is None else asdict(point.drafts),
        "steps": [asdict(row) for row in point.steps],
        "intended_arrival_ns": simulated.requests["arrival_ns"].tolist(),
        "simulated": _side(simulated) | {"end_ns": point.simulated.end_ns},
        "live": [_run(run) for run in point.runs],
    }


def _run(run: ComparedRun) -> dict[str, Any]:
    divergence = run.divergence
    return _side(run.played.records) | {
        "repeat": run.played.repeat,
        "end_ns": run.played.end_ns,
        "void": run.void,
        "machine_drift": run.played.made.get("drift"),
        "machine_drift_of_means": run.played.made.get("drift_of_means"),
        "calm": run.calm,
        "first_step_that_differs": None if divergence is None else asdict(divergence),
    }


def _side(records: Records) -> dict[str, Any]:
    """One run in numbers; `actual_arrival_ns` is when the load source really submitted each request."""
    requests = records.requests
    return {
        "num_steps": records.num_steps,
        "busy_s": float(records.steps["duration_ns"].sum()) / NS_PER_S,
        "finished": int((requests["outcome"] == FINISHED).sum()),
        "preemptions": int(requests["num_preemptions"].sum()),
        "actual_arrival_ns": (requests["arrival_ns"] + requests["lag_ns"]).tolist(),
    }

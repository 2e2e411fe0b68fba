"""All findings of a validation, as one value and as one JSON document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from batchsim.base.units import NS_PER_S
from batchsim.check.measured.run import FIGURES
from batchsim.check.validation.comparison import Comparison
from batchsim.check.validation.live_runs import LivePoint, LiveRun
from batchsim.check.validation.verdicts import Bounds, Verdict, all_steps, verdicts
from batchsim.cost.cost_error import CostError
from batchsim.kernel.record import FINISHED, Records
from batchsim.report.cost_words import HOW, off_by
from batchsim.report.reading import load_text
from batchsim.results.provenance import as_json

_NUMBERS = re.compile(r"\[\s*(-?\d+(?:,\s+-?\d+)*)\s*\]")


@dataclass(frozen=True)
class Judged:
    """What live runs are judged by: the axis of their loads, the bounds of their device, and each policy's saturation
    in requests/s, empty where the load axis is not a rate."""

    load_name: str
    bounds: Bounds
    saturation_rps: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Validation:
    """Simulations beside measured runs: of live runs `judged`, of files of other engines None.

    `heading` names the scenario and the machine, or the files; `made` is the provenance, for the JSON.
    """

    name: str
    scenario: str
    heading: str
    made: dict[str, Any]
    points: tuple[Comparison, ...]
    judged: Judged | None = None

    @property
    def beside(self) -> str:
        """What the simulations stand beside, in a word."""
        return "measured" if self.judged is None else "live"

    @property
    def live(self) -> list[LivePoint]:
        """The points with live runs."""
        return [point for point in self.points if isinstance(point, LivePoint)]

    @property
    def verdicts(self) -> list[Verdict]:
        """A verdict on each bound; [] where nothing is judged."""
        return [] if self.judged is None else verdicts(self.live, self.judged.bounds)

    def run_text(self, point: Comparison) -> str:
        """Which run of the policy: `12.3 req/s (50% of saturation)`, or its part of a file, "" for the only one."""
        if not isinstance(point, LivePoint) or self.judged is None:
            return point.part
        share = "" if point.share is None else f" ({point.share:.0%} of saturation)"
        return load_text(self.judged.load_name, float(f"{point.load:.4g}")) + share

    def where(self, point: Comparison) -> str:
        """The point's policy and run in words: `static at 12.3 req/s (50% of saturation)`, `vllm, stage 1`."""
        run = self.run_text(point)
        return f"{point.policy}{' at ' if self.judged else ', '}{run}" if run else point.policy

    def warnings(self) -> list[str]:
        """Lines on the points and runs that cannot be judged, or whose queue makes of a latency what it likes."""
        lines = [f"{self.where(point)}{line}" for point in self.live for line in _of_live(point)]
        queues = [f"{self.where(point)}: {line}" for point in self.points if (line := _of_queue(point))]
        return lines + queues + [f"which they are {HOW}"] * bool(queues)


def _of_live(point: LivePoint) -> Iterator[str]:
    """What cannot be judged of a point's live runs, and why."""
    for run in point.lives:
        if run.void:
            yield f", repeat {run.played.repeat}: VOID, left out: {run.void}"
    if lost := len(point.lives) - len(point.counted):
        yield f": {lost} of {len(point.lives)} live runs do not count"
    if not point.counted:
        yield ": no live run counts, nothing is claimed"
    elif point.unfit:
        yield f": THIS MACHINE IS UNFIT: {point.unfit}. Nothing is claimed"
    elif len(point.counted) == 1:
        yield ": one live run, so its spread is not known"


def _of_queue(point: Comparison) -> str:
    """That the load lies within the cost's error of saturation, or may, as the queue grows; "" where it does not."""
    off = off_by(point.cost_error)
    if point.is_within_error:
        beyond = [name for name in ("ttft", "e2e") if point.error(f"{name}_mean_s").is_beyond]
        but = " and ".join(map(str.upper, beyond))
        return (
            f"the load lies within the cost's error of saturation ({off}): TTFT and E2E are those of the shortest and"
            " of the longest steps"
            + (f"; the measured {but} is beyond them: the cost errs by more here" if beyond else "")
        )
    if point.grows and not isinstance(point.cost_error, CostError):
        return f"in simulation the queue grows, and the error of step times is {off}: TTFT and E2E may be anything"
    return ""


def to_json(validation: Validation) -> str:
    """The whole validation as JSON; lists of numbers on one line each. Seconds, rates and shares; `_ns` in ns."""
    whole: dict[str, Any] = {"name": validation.name, "scenario": validation.scenario}
    whole |= {"heading": validation.heading, "made": validation.made, "warnings": validation.warnings()}
    if validation.judged is None:
        whole["figures"] = list(FIGURES)
    else:
        whole |= asdict(validation.judged) | {
            "verdicts": [asdict(verdict) for verdict in validation.verdicts],
            "steps": [asdict(row) for row in all_steps(validation.live)],
        }
    text = as_json(whole | {"points": [_point(point) for point in validation.points]}, indent=1)
    return _NUMBERS.sub(lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", text) + "\n"


def _point(point: Comparison) -> dict[str, Any]:
    errors = [asdict(error) | {"agrees": point.agrees(error), "error_ends": error.error_ends} for error in point.errors]
    return {
        "policy": point.policy,
        "errors": errors,
        "within_cost_error_of_saturation": point.is_within_error,
        "cost_error": asdict(point.cost_error),
        "load_equivalent": point.shifts,
        **(_live(point) if isinstance(point, LivePoint) else _replayed(point)),
    }


def _replayed(point: Comparison) -> dict[str, Any]:
    run = point.runs[0]
    return {
        "part": point.part,
        "files": [each.source for each in point.runs],
        "form": run.form,
        "client": str(run.client),
        "notes": list(point.notes),
        "queue_grows": point.grows,
        "impossible": dict(run.impossible),
        "first_request_that_parts": None if point.parting is None else asdict(point.parting),
    }


def _live(point: LivePoint) -> dict[str, Any]:
    simulated = point.simulation.records
    return {
        "kind": point.kind,
        "load": point.load,
        "share_of_saturation": point.share,
        "unfit": point.unfit,
        "live_runs": len(point.lives),
        "live_runs_not_counted": len(point.lives) - len(point.counted),
        "machine_drift": point.drift,
        "step_bias": point.bias,
        "step_bias_at_par": point.bias_at_par,
        "live_runs_calm": len(point.calm),
        "drafts": None if point.drafts is None else asdict(point.drafts),
        "steps": [asdict(row) for row in point.steps],
        "intended_arrival_ns": simulated.requests["arrival_ns"].tolist(),
        "simulated": _side(simulated) | {"end_ns": point.simulation.end_ns},
        "live": [_run(run) for run in point.lives],
    }


def _run(run: LiveRun) -> dict[str, Any]:
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

"""Which points of a run lie within their cost's error of saturation, or of the objective: both ends of it simulated.

Steps that take f times as long at a load are, but for the length of the run, the same as steps that do not at f times
that load. So only loads next to where the queue begins to grow, or to where the objective is lost, can be judged
differently at the two ends. From there the search goes on, away from that border, for as long as the first seed says
otherwise at the end that lies beyond it: one seed at one end for each policy where nothing is near, both ends of all
seeds where a load is. No load is asked where an engine has more time to spare than the error takes.

A closed loop is not asked: its users wait for answers, so that its queue is never longer than they are, and saturation
is where it works. Neither are requests that all wait from the start, nor a cost whose error is unknown.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.cost.cost_error import STEEP, CostError
from batchsim.metrics.stability import JUDGED
from batchsim.results.cost_ends import CostEnds, combined, meets
from batchsim.results.failed import Failed
from batchsim.results.keep import best_variant
from batchsim.scenario import Point
from batchsim.scenario.setup import Setup
from batchsim.study.curves.lines import Line
from batchsim.study.sweep.points import Sweep
from batchsim.study.sweep.search import side_by_side
from batchsim.workload.rollout_config import Rollout
from batchsim.workload.workload_config import AllAtOnce, ClosedLoop

Result = dict[str, Any] | Failed
FAST, SLOW = 0, 1
Trial = tuple[float, int, int]
"""A load, an end, and which of the load's seeds."""


@dataclass
class _Tested:
    """One curve with the results of its seeds by load, of the best variant, and its setup at both ends of the error."""

    line: Line
    error: CostError
    runs: dict[float, list[dict[str, Any]]]
    setups: tuple[Setup, Setup]
    book: dict[Trial, Result] = field(default_factory=dict)

    def points(self, trials: Sequence[Trial]) -> Iterator[tuple[Setup, Point]]:
        for load, end, number in trials:
            run = self.runs[load][number]
            spec = next(spec for spec in self.line.specs if spec.variant == run["variant"])
            yield self.setups[end], Point(spec, load, run["seed"])

    def differs(self, load: float, end: int) -> bool:
        """Whether the first seed says at an end what it does not say of the cost as it is: of the queue, of the
        objective, or of a mean latency, by half of what both ends must differ."""
        base, other = self.runs[load][0], self.book[load, end, 0]
        if isinstance(other, Failed):
            return False
        one, two = combined([base]), combined([other])
        if one.unstable != two.unstable or meets(one) != meets(two):
            return True
        factor = self.error.factors[end]
        ratios = [two.mean[name] / one.mean[name] for name in JUDGED if one.mean[name] and two.mean[name]]  # type: ignore[operator]
        return not one.unstable and any(max(r / factor, factor / r) > sqrt(STEEP) for r in ratios)


def find_ends(
    first: Sequence[Result], lines: Sequence[Line], sweep: Sweep
) -> tuple[list[CostEnds], list[dict[str, Any]]]:
    """The points among `first`, results of `lines`, that an end of their cost's error judges differently, simulated at
    both ends; and a row (policy, load, reason) where that could not be simulated."""
    curves = [curve for line in lines if (curve := _tested(line, first)) is not None]

    def run(wanted: list[tuple[int, list[Trial]]]) -> None:
        trials = [(curves[i], trial) for i, of_curve in wanted for trial in of_curve]
        points = [point for curve, trial in trials for point in curve.points([trial])]
        try:
            results: Sequence[Result] = sweep.attempt(points, may_be_empty=True)
        except (ScenarioError, CalibrationError) as error:  # of other steps alone: the run without them is right
            results = [Failed.of(point, "", str(error)) for _, point in points]
        for (curve, trial), result in zip(trials, results, strict=True):
            curve.book[trial] = result

    loads = side_by_side([_search(curve) for curve in curves], run)
    every = [_ends(curve, load) for i, curve in enumerate(curves) for load in loads[i]]
    failed = {
        (curve.line.policy, load): result.reason
        for curve in curves
        for (load, _, _), result in curve.book.items()
        if isinstance(result, Failed)
    }
    lacking = [{"policy": policy, "load": load, "reason": reason} for (policy, load), reason in failed.items()]
    return [ends for ends in every if ends is not None and (ends.within_error or ends.disagree)], lacking


def _tested(line: Line, results: Sequence[Result]) -> _Tested | None:
    """The curve of a line; None where its error is unknown, or has no saturation to lie near."""
    error, arrivals = line.setup.cost_error, line.setup.traffic.arrivals
    closed = line.setup.traffic.max_concurrency is not None or isinstance(arrivals, ClosedLoop | AllAtOnce | Rollout)
    if closed or not isinstance(error, CostError):
        return None
    of_line = [each for each in results if (each.policy if isinstance(each, Failed) else each["policy"]) == line.policy]
    failed = {each.load for each in of_line if isinstance(each, Failed)}
    by_load: dict[float, dict[str, list[dict[str, Any]]]] = {}
    for each in of_line:
        if isinstance(each, dict) and each["load"] not in failed:
            by_load.setdefault(each["load"], {}).setdefault(each["variant"], []).append(each)
    runs = {load: variants[best_variant(variants)] for load, variants in sorted(by_load.items())}
    return _Tested(line, error, runs, tuple(line.setup.stretched(factor) for factor in error.factors))  # type: ignore[arg-type]


def _search(curve: _Tested) -> Generator[list[Trial], None, list[float]]:
    """Yields the trials that it wants made; returns the loads of which both ends were simulated."""
    points = {load: combined(runs) for load, runs in curve.runs.items()}
    stable, met = ([load for load, point in points.items() if holds(point)] for holds in (_stable, meets))
    spare = {load for load in stable if (points[load].mean["engine_busy_share"] or 1.0) * (1 + curve.error.high) < 1}
    downs = [[load for load in stable if load not in spare][::-1]]
    ups = [[load for load in points if load not in stable]]
    if len(points) > 1:  # of one load alone nothing is said but what it is
        downs.append(met[::-1])
        ups.append([load for load in points if not met or load > met[-1]])
    near: dict[float, None] = {}
    for end, walks in ((SLOW, downs), (FAST, ups)):
        for walk in walks:
            for load in walk:
                if (load, end, 0) not in curve.book:
                    yield [(load, end, 0)]
                if not curve.differs(load, end):
                    break
                near[load] = None
    every = [(load, end, n) for load in near for end in (FAST, SLOW) for n in range(len(curve.runs[load]))]
    if rest := [trial for trial in every if trial not in curve.book]:
        yield rest
    return list(near)


def _stable(point: Any) -> bool:
    return not point.unstable


def _ends(curve: _Tested, load: float) -> CostEnds | None:
    """Both ends of a load; None where a simulation failed there."""
    sides = [[curve.book[load, end, n] for n in range(len(curve.runs[load]))] for end in (FAST, SLOW)]
    if any(isinstance(each, Failed) for side in sides for each in side):
        return None
    named = [tuple(curve.line.named(each) for each in side) for side in sides]
    return CostEnds(curve.line.policy, load, curve.error, *named)  # type: ignore[arg-type]

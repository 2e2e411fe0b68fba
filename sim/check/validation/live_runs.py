"""Simulated and live runs of the same requests, side by side: how wrong the simulation was, and how sure that is.

A live run is a measured run whose steps are known too. A point is one policy at one load, its live runs are repeats.
Runs that were cut, whose load source came late, or that something else on the machine disturbed are left out, and
reported. No claim is made where the spread is above UNFIT, where more than half of the runs are left out, or where the
machine is slower or faster than when the cost was measured by more than UNFIT_DRIFT. It is measured by the sentinel, a
step of the profile that is timed again before and after every run: by its mean, since what interrupts steps now and
then is in the times of a run and in no median. A run is calm where median and mean, before and after, agree to CALM.
The prediction is never moved by the drift; beside stand the errors at par, those of the calm runs had the machine been
as when the cost was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import format_duration
from batchsim.check.measured.run import Client, MeasuredRequests, MeasuredRun
from batchsim.check.validation.comparison import Comparison, MetricError
from batchsim.check.validation.cost_ends import cost_ends
from batchsim.check.validation.divergence import Divergence, first_divergence
from batchsim.check.validation.load_shift import load_shifts
from batchsim.check.validation.replay import Ran, simulated_requests
from batchsim.check.validation.step_error import RegionError, StepPairs
from batchsim.cost.base import Cost
from batchsim.cost.periods import periods_ns
from batchsim.cost.scaled import Scaled
from batchsim.drive.live import lag_verdict
from batchsim.drive.simulate import simulate
from batchsim.kernel.acceptance import DraftCounts
from batchsim.kernel.record import Records
from batchsim.metrics.measure import Measured, measure
from batchsim.metrics.point_inputs import PointInputs, between
from batchsim.metrics.table import METRICS
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.saturation import overloaded, saturation_rps
from batchsim.scenario.setup import Setup
from batchsim.workload.build import BuiltWorkload
from batchsim.workload.open_loop import OpenWorkload
from batchsim.workload.workload_config import ClosedLoop

UNFIT = 0.10
"""Largest spread of mean TPOT and mean E2E over the live runs at which anything is claimed, as a share."""

UNFIT_DRIFT = 0.05
"""Largest drift of the machine since its calibration, as a share. Source: from there on calibrations flag their own."""

CALM = 0.02
"""Largest distance between the sentinel's readings of a calm run (median and mean, before and after), as a share: a
bias cannot be judged to 2 % on a machine whose speed is known less exactly.
"""

DISTURBED_SHARE, DISTURBED_FACTOR = 0.10, 1.25
"""A run is void if in this share of its decoding time steps took, on average, that many times their usual time."""

_WINDOW_NS = 250e6  # busy time of a window in which a disturbance is looked for
_FEWEST_WINDOWS = 4

_ROUNDING = 1e-9  # relative rounding error of a difference of two readings

FIGURES = (
    *(f"{latency}_{of}_s" for latency in ("ttft", "tpot", "itl", "e2e") for of in ("mean", "p50", "p90", "p99")),
    "throughput_rps",
    "output_tokens_per_s",
    "kv_utilisation_mean",
    "kv_utilisation_peak",
    "preemption_rate",
)
OF_DRAFTS = ("acceptance_length", "rejected_share")
"""Figures of policies that verify draft tokens."""
SHIFTED = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s")
"""Metrics whose error is also given along the load axis."""


class Played(Ran, Protocol):
    """A live run as `batchsim.calibrate.engine.session` leaves it: `reason` says why it was cut, "" if it was not."""

    @property
    def policy(self) -> str: ...
    @property
    def load(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def repeat(self) -> int: ...
    @property
    def kernel_ns(self) -> NDArray[Any]: ...
    @property
    def rested(self) -> NDArray[Any]: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def window_ns(self) -> tuple[int, int]: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def made(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Simulated:
    """The simulation of the point that live runs played."""

    records: Records
    workload: BuiltWorkload
    streams: bool
    end_ns: int


@dataclass(frozen=True)
class ValidationSetup:
    """What all points of a validation share: the scenario with the step times that predict, and the seed."""

    setup: Setup
    seed: int

    def simulate(self, policy: PolicySpec, load: float) -> Simulated:
        """The simulation of `policy` at `load`."""
        workload = self.setup.workload(load, self.seed)
        core = self.setup.simulator(policy, workload, self.setup.cost)
        end_ns = simulate(core, workload)
        core.check_returned()
        return Simulated(core.recorder.records(), workload, core.scheduler.streams, end_ns)

    def saturation_rps(self, policy: PolicySpec) -> float:
        """Requests/s that `policy` completes when all wait from the start. ScenarioError where too few complete."""
        many = overloaded(self.setup)
        records = replace(self, setup=many).simulate(policy, many.loads[0]).records
        try:
            return saturation_rps(records)
        except ScenarioError as error:
            raise ScenarioError(f"{self.setup.scenario.name}, {policy.name}: {error} Or give --loads.") from None

    def _inputs(self, run: Ran, workload: BuiltWorkload, window_ns: tuple[int, int]) -> PointInputs:
        """The inputs of a run's metrics, alike for simulated and live runs: latencies count from the intended arrival.
        Only where answers decide when requests are sent each run has a window of its own.
        """
        return PointInputs(
            records=run.records,
            window_ns=window_ns,
            num_blocks=self.setup.kv.num_blocks,
            block_size=self.setup.kv.block_size,
            streams=run.streams,
            num_offered=workload.num_offered,
            all_at_once=workload.all_at_once,
            closed_loop=isinstance(self.setup.traffic.arrivals, ClosedLoop)
            or self.setup.traffic.max_concurrency is not None,
            per_chunk_ns=workload.frontend.per_chunk,
        )

    def measure(self, run: Simulated) -> Measured:
        """The metrics of a simulation."""
        return measure(self._inputs(run, run.workload, run.workload.window_ns))

    def measure_live(self, run: Played, workload: BuiltWorkload) -> Measured:
        """The metrics of a live run of `workload`."""
        return measure(self._inputs(run, workload, run.window_ns))


@dataclass(frozen=True)
class LiveRun:
    """One live run of a point. `void` says why it does not count, "" if it does.

    `drift` is the share by which the machine was slower around the run than at calibration, by the sentinel's mean,
    None without a sentinel (runs of older versions: by its median; they are never calm). `calm`: whether all readings
    agree. `divergence` is the first step that differs from the simulation's, None where none does or the run was cut.
    """

    played: Played
    void: str
    divergence: Divergence | None

    @property
    def drift(self) -> float | None:
        readings = self.played.made.get("drift_of_means") or self.played.made.get("drift")
        return float(np.mean(readings)) if readings else None

    @property
    def calm(self) -> bool:
        made = self.played.made
        readings = [*made.get("drift", ()), *made.get("drift_of_means", ())]
        return "drift_of_means" in made and max(readings) - min(readings) <= CALM + _ROUNDING


@dataclass(frozen=True, kw_only=True)
class LivePoint(Comparison):
    """One policy, of a `kind`, at one load beside its live runs, judged. `share` is the load over the policy's
    saturation, None where that is not known.

    `pairs` are the steps of all runs that count; `pairs_at_par` those of the calm runs, their measured times scaled to
    a machine that had not drifted.
    """

    kind: str
    load: float
    share: float | None
    simulation: Simulated
    lives: tuple[LiveRun, ...]
    pairs: StepPairs | None
    pairs_at_par: StepPairs | None

    @property
    def counted(self) -> list[LiveRun]:
        """The live runs that count."""
        return [run for run in self.lives if not run.void]

    @property
    def steps(self) -> list[RegionError]:
        """Step-time errors by region of steps, all steps last; [] without a live run that counts."""
        return [] if self.pairs is None else self.pairs.errors()

    @property
    def bias(self) -> float | None:
        """Σ predicted / Σ measured − 1 over all step times; None without a live run that counts."""
        return self.steps[-1].bias if self.pairs is not None else None

    @property
    def calm(self) -> list[LiveRun]:
        """The live runs that count and that the sentinel calls calm."""
        return [run for run in self.counted if run.calm]

    @property
    def drift(self) -> float | None:
        """Share by which the machine was slower than at calibration, mean of the runs that count; None if not known."""
        known = [run.drift for run in self.counted if run.drift is not None]
        return float(np.mean(known)) if known else None

    @property
    def bias_at_par(self) -> float | None:
        """`bias` of the calm runs had the machine not drifted; None without a calm run."""
        return None if self.pairs_at_par is None else self.pairs_at_par.errors()[-1].bias

    @property
    def drafts(self) -> DraftCounts | None:
        """What became of draft tokens in the live runs that count; None without."""
        counted = [run.played.made["drafts"] for run in self.counted if "drafts" in run.played.made]
        counts = [DraftCounts(**counts) for counts in counted]
        return reduce(DraftCounts.__add__, counts) if counts else None

    @property
    def unfit(self) -> str:
        """Why nothing can be judged on this machine at this point; "" if it can, or if a single run cannot show it."""
        reasons: list[str] = []
        if 2 * len(self.counted) < len(self.lives):
            reasons.append("more than half of the live runs do not count")
        if self.drift is not None and abs(self.drift) > UNFIT_DRIFT:
            word = "slower" if self.drift > 0 else "faster"
            reasons.append(
                f"the machine was {abs(self.drift):.1%} {word} than when the profile was made (limit"
                f" {UNFIT_DRIFT:.0%}): calibrate again"
            )
        for metric in (self.error("tpot_mean_s"), self.error("e2e_mean_s")):
            if metric.spread is not None and metric.spread > UNFIT:
                spread = f"± {metric.spread:.0%} (limit {UNFIT:.0%})"
                reasons.append(f"live runs spread by {spread} in {METRICS[metric.name].words}")
        return "; ".join(reasons)


def judge(
    case: ValidationSetup, policy: PolicySpec, load: float, share: float | None, lives: Sequence[Played]
) -> LivePoint:
    """Compares the live runs of a point with its simulation. `share` is the load over the policy's saturation."""
    simulation = case.simulate(policy, load)
    judged = [_judged(live, simulation) for live in lives]
    counted = [live for live in judged if not live.void]
    predicted = case.measure(simulation)
    measured = [case.measure_live(live.played, simulation.workload) for live in counted]
    runs = tuple(_as_measured(live.played, each) for live, each in zip(counted, measured, strict=True))

    def at_factor(factor: float) -> tuple[dict[str, Any], bool]:
        other = replace(case, setup=replace(case.setup, cost=Scaled(case.setup.cost, factor)))
        metrics = other.measure(other.simulate(policy, load))
        return metrics.values, metrics.unstable

    is_rate = case.setup.load_name in ("mean_rate", "rate_scale")
    ends = cost_ends(case.setup.cost.error, at_factor) if counted and is_rate else {}
    weak = set(predicted.weak_percentiles).union(*(each.weak_percentiles for each in measured))
    errors = tuple(
        MetricError.of(name, predicted.values[name], runs, few=name in weak, ends=ends)
        for name in (FIGURES if policy.config.traits.speculation is None else FIGURES + OF_DRAFTS)
    )
    shifts: dict[str, float | None] = {}
    if counted and is_rate:
        targets = {error.name: error.live for error in errors if error.name in SHIFTED}
        shifts = load_shifts(lambda at: case.measure(case.simulate(policy, at)).values, load, targets)
    by_run = [(live, _step_pairs(live.played, case.setup.cost)) for live in counted]
    at_par = [pairs.at_par(live.drift) for live, pairs in by_run if live.calm and live.drift is not None]
    return LivePoint(
        policy=policy.name,
        part="",
        runs=runs,
        simulated=(_in_window(simulation, simulation.workload.window_ns),),
        errors=errors,
        shifts=shifts,
        cost_error=case.setup.cost.error,
        kind=policy.kind,
        load=load,
        share=share,
        simulation=simulation,
        lives=tuple(judged),
        pairs=StepPairs.join([pairs for _, pairs in by_run]) if by_run else None,
        pairs_at_par=StepPairs.join(at_par) if at_par else None,
    )


def _judged(live: Played, simulation: Simulated) -> LiveRun:
    differs = None if live.reason else first_divergence(simulation.records, live.records)
    return LiveRun(live, void(live), differs)


def _as_measured(live: Played, measured: Measured) -> MeasuredRun:
    """A live run as others are measured: its figures, and its requests of the window."""
    figures = {name: value for name, value in measured.values.items() if value is not None}
    return MeasuredRun(f"repeat {live.repeat}", "live run", "", Client(), figures, _in_window(live, live.window_ns))


def _in_window(run: Played | Simulated, window_ns: tuple[int, int]) -> MeasuredRequests:
    requests = simulated_requests(run)
    assert requests.sent_ns is not None, "our own records have all sendings"
    return requests.picked(np.flatnonzero(between(requests.sent_ns, window_ns)))


def _step_pairs(live: Played, cost: Cost) -> StepPairs:
    """The steps of a live run beside what `cost` says of them."""
    steps, rested = live.records.steps, live.rested.tolist()
    if len(live.records.lanes):
        return StepPairs.of(steps, rested, live.kernel_ns, cost.without_host(), beside=cost.host_part)
    return StepPairs.of(steps, rested, live.kernel_ns, cost)


def void(live: Played) -> str:
    """Why a live run does not count; "" if it does. The cost model has no say in it."""
    if live.reason:
        return f"cut: {live.reason}"
    if not live.records.num_steps:
        return "none of its requests was ever run"
    return lag_verdict(live.records) or _disturbance(live)


def _disturbance(live: Played) -> str:
    """How another program on the machine slowed the run, in words; "" if none did.

    Detected from the run itself: in windows of a quarter of a second its decode-only steps took much longer than its
    median step of as many rows. Fewer than `_FEWEST_WINDOWS` windows are not judged.
    """
    steps = live.records.steps
    plain = (steps["num_chunks"] == 0) & (steps["swap_blocks"] == 0)
    periods = periods_ns(steps, live.rested.tolist())[plain]
    group = np.unique((steps["num_decode_tokens"] + steps["pad_decode_rows"])[plain], return_inverse=True)[1]
    medians = np.array([np.median(periods[group == code]) for code in range(group.max(initial=-1) + 1)])
    window = np.unique((np.cumsum(periods) / _WINDOW_NS).astype(np.int64), return_inverse=True)[1]
    if window.max(initial=-1) + 1 < _FEWEST_WINDOWS:
        return ""
    taken, usual = (np.bincount(window, weights=part) for part in (periods, medians[group]))
    slow = taken > DISTURBED_FACTOR * usual
    slow_ns, busy_ns = float(taken[slow].sum()), float(taken.sum())
    if slow_ns <= DISTURBED_SHARE * busy_ns:
        return ""
    return (
        f"disturbed: for {format_duration(round(slow_ns))} of {format_duration(round(busy_ns))} of decoding its steps"
        f" took {slow_ns / usual[slow].sum():.1f} times as long as is usual in it. Something else used the machine"
    )


def served(workload: BuiltWorkload, records: Records) -> bool:
    """Whether `records` are of the requests of `workload`; where answers decide
    when these are sent, whether there are any."""
    requests = records.requests
    if not isinstance(workload, OpenWorkload):
        return len(requests) > 0
    columns = workload.columns()
    if len(requests) != len(columns["arrival_ns"]):
        return False
    return all(np.array_equal(requests[name], columns[name]) for name in ("arrival_ns", "prompt_tokens"))

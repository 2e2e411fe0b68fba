"""Simulated and live runs of the same requests, side by side: how wrong the simulation was, and how sure that is.

A point is one policy at one load. Its live runs are repeated; `spread` is half the range of a figure over the repeats,
as a share of their mean, and an error within SPREADS times the spread counts as agreement. Runs that were cut, whose
load source came late, or that something else on the machine disturbed are left out, and said. No claim is made where
the spread is above UNFIT, where more than half of the runs are left out, or where the machine is slower or faster than
when the cost was measured by more than UNFIT_DRIFT. That is told by the sentinel, a step of the profile that is timed
again before and after every run: by its mean, since what interrupts steps now and then is in the times of a run and in
no median. A run is calm where median and mean, before and after, agree to CALM. The prediction is never moved by the
drift; beside stand the errors at par, those of the calm runs had the machine been as when the cost was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import format_duration
from batchsim.check.validation.cost_ends import cost_ends
from batchsim.check.validation.divergence import Divergence, first_divergence
from batchsim.check.validation.load_shift import load_shifts
from batchsim.check.validation.step_error import RegionError, StepPairs
from batchsim.cost import Cost, CostError, Scaled, Unknown
from batchsim.cost.periods import periods_ns
from batchsim.drive.live import lag_verdict
from batchsim.drive.resolved import Resolved
from batchsim.drive.resolved_policy import ResolvedPolicy
from batchsim.drive.saturation import overloaded, saturation_rps
from batchsim.drive.simulate import simulate
from batchsim.kernel.acceptance import DraftCounts
from batchsim.kernel.record import Records
from batchsim.kv.choice import new_kv
from batchsim.metrics.measure import Measured, measure
from batchsim.metrics.point_inputs import PointInputs
from batchsim.metrics.table import METRICS
from batchsim.workload.build import BuiltWorkload
from batchsim.workload.open_loop import OpenWorkload
from batchsim.workload.workload_config import ClosedLoop

SPREADS = 2
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

_ROUNDING = 1e-9  # relative rounding error of a mean of equal values

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


class Played(Protocol):
    """A live run as `batchsim.calibrate.session` leaves it: `reason` says why it was cut, "" if it was not."""

    @property
    def policy(self) -> str: ...
    @property
    def load(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def repeat(self) -> int: ...
    @property
    def records(self) -> Records: ...
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
    def streams(self) -> bool: ...
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
    """What all points of a validation share: the scenario, the cost model that predicts, the KV blocks, the seed."""

    resolved: Resolved
    cost: Cost
    num_blocks: int
    seed: int

    def simulate(self, policy: ResolvedPolicy, load: float) -> Simulated:
        """The simulation of `policy` at `load`."""
        return _simulate(self.resolved, policy, load, self)

    def saturation_rps(self, policy: ResolvedPolicy) -> float:
        """Requests/s that `policy` completes when all wait from the start. ScenarioError where too few complete."""
        many = overloaded(self.resolved)
        records = _simulate(many, policy, many.loads[0], self).records
        try:
            return saturation_rps(records)
        except ScenarioError as error:
            raise ScenarioError(f"{self.resolved.name}, {policy.name}: {error} Or give --loads.") from None

    def inputs(
        self, records: Records, workload: BuiltWorkload, window_ns: tuple[int, int], streams: bool
    ) -> PointInputs:
        """The inputs of a run's metrics, alike for simulated and live runs: latencies count from the intended arrival.
        Only where answers decide when requests are sent each run has a window of its own.
        """
        return PointInputs(
            records=records,
            window_ns=window_ns,
            num_blocks=self.num_blocks,
            block_size=self.resolved.block_size,
            streams=streams,
            num_offered=workload.num_offered,
            all_at_once=workload.all_at_once,
            closed_loop=isinstance(self.resolved.workload.arrivals, ClosedLoop)
            or self.resolved.workload.max_concurrency is not None,
            per_chunk_ns=workload.frontend.per_chunk,
        )

    def measure(self, run: Simulated) -> Measured:
        return measure(self.inputs(run.records, run.workload, run.workload.window_ns, run.streams))


def _simulate(resolved: Resolved, policy: ResolvedPolicy, load: float, case: ValidationSetup) -> Simulated:
    workload = resolved.built_workload(load, case.seed)
    kv = new_kv(policy.config, case.num_blocks, resolved.block_size, resolved.num_swap_blocks, ids=False)
    core = resolved.simulator(policy, workload, kv, case.cost)
    end_ns = simulate(core, workload)
    core.check_returned()
    return Simulated(core.recorder.records(), workload, core.scheduler.streams, end_ns)


@dataclass(frozen=True)
class MetricError:
    """One metric: simulated, the mean over live runs, simulated / live − 1, and the spread of the live runs as a share.

    None where a value is not defined: a spread of one run, an error relative to 0. `few`: a percentile with fewer than
    20 observations beyond it. `ends`: where the load lies within the cost's error of saturation, what is simulated with
    the shortest and the longest steps that this allows; there is no `error` then, but `error_ends`.
    """

    name: str
    simulated: float | None
    live: float | None
    error: float | None
    spread: float | None
    few: bool
    ends: tuple[float, float] | None = None

    @property
    def error_ends(self) -> tuple[float, float] | None:
        """The errors of both `ends`, as shares; None where there are none."""
        if self.ends is None or not self.live:
            return None
        return self.ends[0] / self.live - 1, self.ends[1] / self.live - 1

    @property
    def agrees(self) -> bool:
        """Whether the error is within SPREADS times the spread of the live runs."""
        if self.error is None or self.spread is None:
            return False
        return abs(self.error) <= SPREADS * self.spread + _ROUNDING


@dataclass(frozen=True)
class ComparedRun:
    """One live run of a point. `void` says why it does not count, "" if it does.

    `drift` is the share by which the machine was slower around the run than at calibration, by the sentinel's mean,
    None without a sentinel (runs of older versions: by its median; they are never calm). `calm`: whether all readings
    agree.
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


@dataclass(frozen=True)
class PointReport:
    """One policy at one load, judged. `share` is the load over the policy's saturation, None where that is not known.

    `shifts` are load-equivalent errors by metric, empty where the load axis is not a rate. `pairs` are the steps of all
    runs that count; `pairs_at_par` those of the calm runs, their measured times scaled to a machine that had not
    drifted.
    """

    policy: ResolvedPolicy
    load: float
    share: float | None
    simulated: Simulated
    runs: tuple[ComparedRun, ...]
    metrics: tuple[MetricError, ...]
    pairs: StepPairs | None
    pairs_at_par: StepPairs | None
    shifts: dict[str, float | None]
    cost_error: CostError | Unknown

    @property
    def is_within_error(self) -> bool:
        """Whether the load lies within the cost's error of saturation."""
        return any(metric.ends is not None for metric in self.metrics)

    @property
    def counted(self) -> list[ComparedRun]:
        """The live runs that count."""
        return [run for run in self.runs if not run.void]

    @property
    def steps(self) -> list[RegionError]:
        """Step-time errors by region of steps, all steps last; [] without a live run that counts."""
        return [] if self.pairs is None else self.pairs.errors()

    @property
    def bias(self) -> float | None:
        """Σ predicted / Σ measured − 1 over all step times; None without a live run that counts."""
        return self.steps[-1].bias if self.pairs is not None else None

    @property
    def calm(self) -> list[ComparedRun]:
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

    def metric(self, name: str) -> MetricError:
        return next(metric for metric in self.metrics if metric.name == name)

    def agrees(self, metric: MetricError) -> bool:
        """Whether the metric's error counts as agreement: within the spread, on a machine fit to judge on."""
        return metric.agrees and not self.unfit

    @property
    def unfit(self) -> str:
        """Why nothing can be judged on this machine at this point; "" if it can, or if one run alone cannot tell."""
        found: list[str] = []
        if 2 * len(self.counted) < len(self.runs):
            found.append("more than half of the live runs do not count")
        if self.drift is not None and abs(self.drift) > UNFIT_DRIFT:
            word = "slower" if self.drift > 0 else "faster"
            found.append(
                f"the machine was {abs(self.drift):.1%} {word} than when the profile was made (limit"
                f" {UNFIT_DRIFT:.0%}): calibrate again"
            )
        for metric in (self.metric("tpot_mean_s"), self.metric("e2e_mean_s")):
            if metric.spread is not None and metric.spread > UNFIT:
                spread = f"± {metric.spread:.0%} (limit {UNFIT:.0%})"
                found.append(f"live runs spread by {spread} in {METRICS[metric.name].words}")
        return "; ".join(found)


def judge(
    case: ValidationSetup, policy: ResolvedPolicy, load: float, share: float | None, lives: Sequence[Played]
) -> PointReport:
    """Compares the live runs of a point with its simulation. `share` is the load over the policy's saturation."""
    voids = [void(live) for live in lives]
    counted = [live for live, why in zip(lives, voids, strict=True) if not why]
    simulated = case.simulate(policy, load)
    runs = tuple(
        ComparedRun(live, why, None if live.reason else first_divergence(simulated.records, live.records))
        for live, why in zip(lives, voids, strict=True)
    )
    predicted = case.measure(simulated)
    measured = [
        measure(case.inputs(live.records, simulated.workload, live.window_ns, live.streams)) for live in counted
    ]
    names = FIGURES if policy.config.traits.speculation is None else FIGURES + OF_DRAFTS

    def at_factor(factor: float) -> tuple[dict[str, Any], bool]:
        other = replace(case, cost=Scaled(case.cost, factor))
        found = other.measure(other.simulate(policy, load))
        return found.values, found.unstable

    is_rate = case.resolved.load_name in ("mean_rate", "rate_scale")
    ends = cost_ends(case.cost.error, at_factor) if counted and is_rate else {}
    metrics = tuple(with_ends(_metric_error(name, predicted, measured), ends) for name in names)
    by_run = [(run, _step_pairs(run.played, case.cost)) for run in runs if not run.void]
    at_par = [found.at_par(run.drift) for run, found in by_run if run.calm and run.drift is not None]
    shifts: dict[str, float | None] = {}
    if counted and is_rate:
        targets = {metric.name: metric.live for metric in metrics if metric.name in SHIFTED}
        shifts = load_shifts(lambda at: case.measure(case.simulate(policy, at)).values, load, targets)
    pairs = [found for _, found in by_run]
    joined = _joined(pairs), _joined(at_par)
    return PointReport(policy, load, share, simulated, runs, metrics, *joined, shifts, case.cost.error)


def _step_pairs(live: Played, cost: Cost) -> StepPairs:
    """The steps of a live run beside what `cost` says of them."""
    steps, rested = live.records.steps, live.rested.tolist()
    if len(live.records.lanes):
        return StepPairs.of(steps, rested, live.kernel_ns, cost.without_host(), beside=cost.host_part)
    return StepPairs.of(steps, rested, live.kernel_ns, cost)


def _joined(several: Sequence[StepPairs]) -> StepPairs | None:
    return StepPairs.join(several) if several else None


def void(live: Played) -> str:
    """Why a live run does not count; "" if it does. The cost model has no say in it."""
    if live.reason:
        return f"cut: {live.reason}"
    if not live.records.num_steps:
        return "none of its requests was ever run"
    return lag_verdict(live.records) or _disturbance(live)


def _disturbance(live: Played) -> str:
    """How another program on the machine slowed the run, in words; "" if none did.

    Told from the run itself: in windows of a quarter of a second its decode-only steps took much longer than its median
    step of as many rows. Less than `_FEWEST_WINDOWS` windows tell nothing.
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


def _metric_error(name: str, predicted: Measured, measured: Sequence[Measured]) -> MetricError:
    simulated = predicted.values[name]
    values = [value for run in measured if (value := run.values[name]) is not None]
    few = name in predicted.weak_percentiles or any(name in run.weak_percentiles for run in measured)
    if not values or len(values) < len(measured):
        return MetricError(name, simulated, None, None, None, few)
    live = float(np.mean(values))
    error = None if simulated is None else relative(simulated - live, live)
    spread = relative((max(values) - min(values)) / 2, live) if len(values) > 1 else None
    return MetricError(name, simulated, live, error, spread, few)


def with_ends(metric: MetricError, ends: Mapping[str, tuple[float, float]]) -> MetricError:
    """`metric` without an error, and with its `ends` where it has any."""
    return replace(metric, error=None, ends=ends[metric.name]) if metric.name in ends else metric


def relative(part: float, whole: float) -> float | None:
    """part / whole; 0 of anything is 0, and a share of 0 is None."""
    return 0.0 if part == 0 else part / whole if whole else None

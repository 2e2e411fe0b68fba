"""What a run is judged by: its records, its arrival window, and the facts about the engine that records do not hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import DRAINING, HELD, UP, ReplicaSpan
from batchsim.kernel.record import UNFINISHED, Records, Replicas
from batchsim.metrics.adapters import AdapterUse
from batchsim.metrics.digest import Digest
from batchsim.metrics.slo import Slo
from batchsim.metrics.tiers import TierUse
from batchsim.workload.offline import OfflineLog
from batchsim.workload.rollout_log import RolloutLog

NO_TASKS = (
    "slo: task_e2e is of tasks, and this workload has none. Write workload.tasks, or replay a trace whose rows name"
    " their parents (columns.parent) or their task (columns.task)."
)
"""What is wrong with an objective of tasks where requests are of none."""


@dataclass(frozen=True)
class FleetInputs:
    """The replicas that wrote a run's records: arrays by replica number, and what each was doing when.

    `group` is the name of each replica's kind, "" where all are alike. Peaks, and W between steps, are of all GPUs of a
    replica; None unless all are known. `are_ranks`: the replicas are ranks that step together. `sleeps`: they are
    models that take turns on a GPU; `shares`: models awake side by side on one, which the first of them counts.
    """

    group: tuple[str, ...]
    num_blocks: NDArray[np.int64]
    num_gpus: NDArray[np.int64]
    peak_flops: NDArray[np.float64] | None
    memory_bandwidth: NDArray[np.float64] | None
    idle_watts: NDArray[np.float64] | None
    spans: tuple[ReplicaSpan, ...]
    are_ranks: bool = False
    sleeps: bool = False
    shares: bool = False

    def replica_ns(self, span_ns: tuple[int, int], states: tuple[str, ...]) -> NDArray[np.int64]:
        """For each replica, the ns within the span in which its state was one of `states`."""
        total = np.zeros(len(self.group), np.int64)
        for span in self.spans:
            if span.state in states:
                total[span.replica] += max(min(span.end_ns, span_ns[1]) - max(span.start_ns, span_ns[0]), 0)
        return total


@dataclass(frozen=True)
class PointInputs:
    """A run of one policy at one load with one seed, and what is needed to judge it.

    `window_ns` is (end of warm-up, end of arrivals). `num_offered` counts what the workload offered in all; those the
    run never let in are unfinished requests of the cohort. `max_num_seqs` is the number of slots, None without a limit.
    `stationary`: the arrivals are drawn by a law that stays the same, and the same replicas serve them all along, so
    that a steady state may exist.
    `streams`: tokens are delivered as they are made, each piece `per_chunk_ns` later. A request is judged by the
    objective of its class where `class_slos` has one, else by `slo`. Classes in `class_names` are measured apart too.
    `cost_terms` is what `explain` of the cost model says of the steps; the peaks are of all GPUs together.
    `step_watts` is the power of the GPUs in each step and `idle_watts` that of one engine's GPUs between steps, None
    where it is not known.
    `fleet` is there for several replicas; their blocks, GPUs and peaks are then those it names. `intended_ns`: when
    each request offered, by its id, was to be sent, where its client may have kept it back. `task_of`: the number of
    the task of each request, by its id, sent or not, -1 of one that is of none; None without tasks. `prunable`: which
    of these may be given up, or never sent, since others succeed. `digest` is what the steps and states came to where
    they were not kept: `records` has none then. `turn` counts, from 0, the turns before
    each row of the requests in its session; None without sessions. `rollout` is what became of the groups of a rollout,
    `rollout_bounds_ns` the least time that the generation of each training could take, None where that is not known;
    `offline` is what became of the requests of offline jobs, `adapters` the use of LoRA adapters; None where the
    workload has none. `tiers`: the use of the host's memory for KV; None where engines keep none there.
    """

    records: Records
    window_ns: tuple[int, int]
    num_blocks: int
    block_size: int
    streams: bool
    num_gpus: int = 1
    num_offered: int | None = None
    all_at_once: bool = False
    closed_loop: bool = False
    stationary: bool = False
    max_num_seqs: int | None = None
    per_chunk_ns: int = 0
    slo: Slo | None = None
    class_slos: Mapping[str, Slo] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    has_prefix_cache: bool = False
    cost_terms: Mapping[str, NDArray[np.float64]] | None = None
    step_watts: NDArray[np.float64] | None = None
    idle_watts: float | None = None
    peak_flops: float | None = None
    memory_bandwidth: float | None = None
    fleet: FleetInputs | None = None
    intended_ns: NDArray[np.int64] | None = None
    task_of: NDArray[np.int64] | None = None
    prunable: NDArray[np.bool_] | None = None
    digest: Digest | None = None
    turn: NDArray[np.int64] | None = None
    rollout: RolloutLog | None = None
    rollout_bounds_ns: NDArray[np.float64] | None = None
    offline: OfflineLog | None = None
    adapters: AdapterUse | None = None
    tiers: TierUse | None = None

    def __post_init__(self) -> None:
        start, end = self.window_ns
        if end < start or (end == start and not self.all_at_once):
            raise ValueError(f"window from {start} to {end} ns has no length: nothing can be measured in it")
        if self.task_of is None and any(slo.of_tasks for slo in (self.slo, *self.class_slos.values()) if slo):
            raise ScenarioError(NO_TASKS)
        if self.num_offered is not None and self.num_offered < len(self.records.requests):
            raise ValueError(
                f"{len(self.records.requests)} requests on record, but only {self.num_offered} were offered"
            )

    @property
    def blocks_of_steps(self) -> int | NDArray[np.int64]:
        """The size in blocks of the KV pool that each step ran with; one number for one engine."""
        return self.num_blocks if self.fleet is None else self.fleet.num_blocks[self._replicas.steps]

    def peak_of_steps(self, peak: str) -> float | NDArray[np.float64] | None:
        """`peak_flops`, `memory_bandwidth` or `idle_watts` of the engine of each step; one number for one engine; None
        if unknown."""
        if self.fleet is None:
            return getattr(self, peak)
        by_replica = getattr(self.fleet, peak)
        return None if by_replica is None else by_replica[self._replicas.steps]

    def engine_ns(self, span_ns: tuple[int, int]) -> int:
        """The ns in which steps could have run: the span, times replicas that were up or draining."""
        if self.fleet is None:
            return span_ns[1] - span_ns[0]
        return int(self.fleet.replica_ns(span_ns, (UP, DRAINING)).sum())

    def mean_num_gpus(self, span_ns: tuple[int, int]) -> float:
        """GPUs held, as a mean over the span: those of replicas that start, are up, drain or have failed."""
        if self.fleet is None:
            return self.num_gpus
        held_ns = self.fleet.replica_ns(span_ns, HELD)
        return float(held_ns @ self.fleet.num_gpus) / (span_ns[1] - span_ns[0])

    def idle_joules(self, span_ns: tuple[int, int]) -> float | None:
        """J that the GPUs held would draw within the span if no step ran; None where that is not known."""
        if self.fleet is None:
            return None if self.idle_watts is None else self.idle_watts * (span_ns[1] - span_ns[0]) / NS_PER_S
        idle_watts = self.fleet.idle_watts
        return None if idle_watts is None else float(self.fleet.replica_ns(span_ns, HELD) @ idle_watts) / NS_PER_S

    @property
    def _replicas(self) -> Replicas:
        assert self.records.replicas is not None, "several replicas leave records that say whose they are"
        return self.records.replicas

    @property
    def demand(self) -> tuple[NDArray[np.void], tuple[int, int]]:
        """The requests as if each had been sent when it was meant to be, and the window of these times.

        One that its client never sent is open to the end.
        """
        requests, intended_ns = self.records.requests, self.intended_ns
        if intended_ns is None:
            return requests, self.window_ns
        meant = np.zeros(len(intended_ns), requests.dtype)
        meant["outcome"], meant["ended_ns"] = UNFINISHED, np.iinfo(np.int64).max
        meant[requests["request_id"]] = requests
        meant["sent_ns"] = intended_ns
        return meant, (self.window_ns[0], max(self.window_ns[0], int(intended_ns.max())))

    @property
    def num_missing(self) -> int:
        """Requests offered that the run never let in."""
        return 0 if self.num_offered is None else self.num_offered - len(self.records.requests)


def span_of(inputs: PointInputs, cohort: NDArray[np.bool_]) -> tuple[int, int]:
    """(start, end) in ns that rates are taken over: the arrival window, or the makespan of work that comes at once."""
    return makespan(inputs.records, cohort) if inputs.all_at_once else inputs.window_ns


def makespan(records: Records, cohort: NDArray[np.bool_]) -> tuple[int, int]:
    """(start, end) in ns: when the first of the cohort was sent and the last delivered; of length 0 if none was."""
    measured = records.requests[cohort]
    if not len(measured):
        return 0, 0
    first = int(measured["sent_ns"].min())
    return first, max(int(measured["delivered_ns"].max()), first)


def between(times: NDArray[np.int64], window_ns: tuple[int, int]) -> NDArray[np.bool_]:
    """Which times lie in the window, both ends included."""
    return (times >= window_ns[0]) & (times <= window_ns[1])


def of_class(records: Records, name: str) -> NDArray[np.bool_]:
    """Which requests are of the request class `name`."""
    return records.requests["request_class"] == (records.texts.index(name) if name in records.texts else -1)

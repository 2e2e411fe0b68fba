"""What a run is judged by: its records, its arrival window, and the facts about the engine that records do not hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.record import Records
from sim.slo import Slo


@dataclass(frozen=True)
class PointInputs:
    """A run of one policy at one load with one seed, and what is needed to judge it.

    `window_ns` is (end of warm-up, end of arrivals). `num_offered` counts what the workload offered in all; those the
    run never let in are unfinished requests of the cohort. `max_num_seqs` is the number of slots, None without a limit.
    `stationary`: the arrivals are drawn by a law that stays the same, so that a steady state may exist.
    `streams`: tokens are delivered as they are made, each piece `per_chunk_ns` later. A request is judged by the
    objective of its class where `class_slos` has one, else by `slo`. Classes in `class_names` are measured apart too.
    `cost_terms` is what `explain` of the cost model says of the steps; the peaks are of all GPUs together.
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
    peak_flops: float | None = None
    memory_bandwidth: float | None = None

    def __post_init__(self) -> None:
        start, end = self.window_ns
        if end < start or (end == start and not self.all_at_once):
            raise ValueError(f"window from {start} to {end} ns has no length: nothing can be measured in it")
        if self.num_offered is not None and self.num_offered < len(self.records.requests):
            raise ValueError(
                f"{len(self.records.requests)} requests on record, but only {self.num_offered} were offered"
            )

    @property
    def num_missing(self) -> int:
        """Requests offered that the run never let in."""
        return 0 if self.num_offered is None else self.num_offered - len(self.records.requests)


def span_of(inputs: PointInputs, cohort: NDArray[np.bool_]) -> tuple[int, int]:
    """What rates and KPIs are taken over: the arrival window, or the makespan of work that arrives all at once."""
    return makespan(inputs.records, cohort) if inputs.all_at_once else inputs.window_ns


def makespan(records: Records, cohort: NDArray[np.bool_]) -> tuple[int, int]:
    """From the first of the cohort sent to the last delivered; without length if none was."""
    mine = records.requests[cohort]
    if not len(mine):
        return 0, 0
    first = int(mine["sent_ns"].min())
    return first, max(int(mine["delivered_ns"].max()), first)


def between(times: NDArray[np.int64], window_ns: tuple[int, int]) -> NDArray[np.bool_]:
    """Which times lie in the window, both ends included."""
    return (times >= window_ns[0]) & (times <= window_ns[1])


def of_class(records: Records, name: str) -> NDArray[np.bool_]:
    """Which requests are of that class."""
    return records.requests["klass"] == (records.texts.index(name) if name in records.texts else -1)

"""Per-engine totals that replace the step and state tables where `keep` is not `all`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchsim.drive.fleet.fleet_records import EngineLife
from batchsim.kernel.record import FINISHED, MISSING
from batchsim.metrics.attribution import part_times
from batchsim.metrics.gaps import token_gaps
from batchsim.metrics.histogram import Histogram
from batchsim.metrics.step_totals import StepFacts, StepTotals, step_totals, summed

PIECE_STEPS = 1 << 16
"""Steps of an engine that are unpacked at once, about."""
_BEHIND = 1 << 10  # steps before a piece that may overlap its first one, or have been processed as it was called


@dataclass(frozen=True)
class Digest:
    """The totals of the steps by replica; the gaps in ns between the tokens of the cohort's finished requests, and how
    often each occurred; the ns that these requests spent in each part of their lives.

    Gaps are counted as by Histogram.
    """

    by_replica: Mapping[int, StepTotals]
    gaps: tuple[NDArray[np.float64], NDArray[np.int64]]
    part_ns: Mapping[str, int]

    @property
    def steps(self) -> StepTotals:
        """The totals of all replicas."""
        return summed(self.by_replica.values())

    def of_replica(self, replica: int) -> StepTotals:
        """The totals of one replica; zeros where it never ran."""
        return self.by_replica.get(replica, summed([]))


def digested(
    lives: Sequence[EngineLife],
    facts_of: Callable[[EngineLife], StepFacts],
    window_ns: tuple[int, int],
    span_ns: tuple[int, int],
    *,
    streams: bool,
    per_chunk_ns: int,
) -> Digest:
    """The digest of the records of `lives`: of requests sent in the arrival window, and of steps within `span_ns`, over
    which rates are taken. `facts_of` returns the facts of an engine's steps."""
    by_replica: dict[int, list[StepTotals]] = {}
    gaps = Histogram()
    part_ns: Counter[str] = Counter()
    for life in lives:
        records = replace(life.records)  # whose unpacked steps are forgotten with this turn: the life stays packed
        requests = records.requests
        sent_ns = requests["sent_ns"]
        done = (requests["outcome"] == FINISHED) & (sent_ns >= window_ns[0]) & (sent_ns <= window_ns[1])
        if life.replica == MISSING:  # the router, where nothing finishes
            continue
        totals = [
            step_totals(piece, facts_of(EngineLife(life.replica, piece)), span_ns, behind).packed()
            for behind, piece in records.pieces(PIECE_STEPS, _BEHIND)
        ]
        by_replica.setdefault(life.replica, []).append(summed(totals).packed())
        if streams:
            gaps.add(*token_gaps(records, done))
        for times in part_times(replace(life.records), per_chunk_ns):
            part_ns[times.part] += int(times.ns[done[times.request]].sum())
    totals = {replica: summed(each).packed() for replica, each in sorted(by_replica.items())}
    return Digest(totals, gaps.means_and_counts(), dict(part_ns))

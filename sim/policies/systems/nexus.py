"""Nexus's batches in front of a generative model: one session, one GPU, a plan made once.

Rule: a batch of b is to take l(b) = `alpha` x b + `beta`. The planned size is the largest b of which 2 l(b) is within
`latency_sla`, at least 1. For a stated `workload` it is the largest up to there of which
(b - 1) / workload + l(b) is; its duty cycle is the lesser of latency_sla - l(b) and b / workload, and the requests that
come in a duty cycle, rounded up, are the planned size. A free GPU expects a batch of the planned size, or of all that
wait, and drops from the front each request that would be late if such a batch began now (early drop); where fewer are
left than expected, a batch of these is expected from then on. It waits for no more.
Source: uwsampl/nexus (SOSP 2019): src/nexus/scheduler/backend_delegate.cpp at 0881668b, src/nexus/common/model_db.cpp
and src/nexus/backend/model_exec.cpp at 02ec95b2; l(b) as a line from the paper, where the code has a measured table.
Simplifies: sessions that share a GPU (squishy bin packing), new plans as rates change, backups, time before and behind
the model. Prompts are padded to the longest. Where KV is short the first rows that fit are the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

from batchsim.base.ranges import PositiveInt
from batchsim.base.units import NS_PER_S, Duration, PositiveDuration, Rate, format_duration
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.families.padded_batch import PaddedBatch, WholeBatchesInOrder

_NEARLY_WHOLE = 1e-3  # requests a duty cycle that are not rounded up


@dataclass(frozen=True)
class NexusConfig(PolicyConfig):
    """Knobs."""

    latency_sla: PositiveDuration
    """The latency objective of every request, from its arrival on."""
    alpha: PositiveDuration
    """How long a batch takes longer for each request."""
    beta: Duration
    """What any batch takes besides."""
    workload: Rate | None = None
    """The requests a second that the plan is made for; null: more than a GPU serves."""
    batch: PositiveInt | None = None
    """The planned size, where it is not to follow from the other knobs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch is not None and self.workload is not None:
            raise ValueError(f"workload has no effect beside batch {self.batch}. Leave one of the two out")
        if self.latency_ns(1) > self.latency_sla:
            alone, sla = format_duration(self.latency_ns(1)), format_duration(self.latency_sla)
            raise ValueError(f"alpha + beta {alone} are above latency_sla {sla}, so that no request is in time")

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.planned, knobs=() if self.batch is None else ("batch",))

    def latency_ns(self, size: int) -> int:
        """How long a batch of `size` requests is expected to take."""
        return self.alpha * size + self.beta

    @property
    def planned(self) -> int:
        """The size of the batches that are planned."""
        if self.batch is not None:
            return self.batch
        most = max(1, (self.latency_sla // 2 - self.beta) // self.alpha)
        if self.workload is None:
            return most
        period_ns = NS_PER_S / self.workload
        size = min(most, floor((self.latency_sla - self.beta + period_ns) / (period_ns + self.alpha)))
        duty_ns = min(float(self.latency_sla - self.latency_ns(size)), size * period_ns)
        arrivals = duty_ns / period_ns
        whole = floor(arrivals) if arrivals - floor(arrivals) < _NEARLY_WHOLE else ceil(arrivals)
        return max(1, whole)


class Nexus(WholeBatchesInOrder):
    """The scheduler. A decode step is O(1), a start O(batch log batch + waiting)."""

    evidence = "hand-derived"

    def __init__(self, config: NexusConfig, context: PolicyContext) -> None:
        super().__init__(context, PaddedBatch(context, padding="longest", finished_rows="hold", respond="batch_end"))
        self.config = config
        self.planned = config.planned

    def next_batch(self, now_ns: int, drain: bool) -> Batch | Idle:
        asked = self._in_time(now_ns)
        if not asked:
            return IDLE
        count = self.batch.fitting(asked)
        return self.start(asked[:count], asked[count:], now_ns)

    def _in_time(self, now_ns: int) -> list[Sequence]:
        """The rows of a batch that begins now, which still wait; rejects requests before them that would be late."""
        expected = min(self.planned, len(self.waiting))
        kept: list[Sequence] = []
        for seq in list(self.waiting):
            if len(kept) == expected:
                break
            if seq.request.arrival_ns + self.config.latency_sla < now_ns + self.config.latency_ns(expected):
                self._drop(seq, now_ns)
                expected = min(expected, len(self.waiting))
            else:
                kept.append(seq)
        return kept

    def _drop(self, seq: Sequence, now_ns: int) -> None:
        del self.waiting[seq]
        waited, sla = now_ns - seq.request.arrival_ns, self.config.latency_sla
        detail = f"waited {format_duration(waited)}, latency_sla {format_duration(sla)}"
        self.events.append(Event("rejected", seq, "misses_slo", detail=detail))

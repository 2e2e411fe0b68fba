"""Clockwork's batches in front of a generative model: the scheduler of its release, infer5, with one model on one GPU.

Rule: each batch size has a queue of all requests. A free GPU takes off the front of each queue the requests that would
be late at the end of a batch of that size begun now. Then it takes the largest size whose queue holds a batch, provided
that the queues of all sizes between it and the smallest do too, and runs exactly that batch from the front of its
queue; these requests and all that came before them leave all queues. A batch is expected to take what the longest of
the last 10 of its size took (their P99), before the first what is stated. A request is late if it ends beyond its
`default_slo` less 5 ms, or 15 ms if that is more, from its arrival on.
Source: src/clockwork/controller/infer5/infer5_scheduler.cpp of Clockwork (OSDI 2020), read in malixian/clockwork
fbd2f11c.
Simplifies: a batch is chosen when the GPU is free, not up to 10 ms before; what is in no queue is rejected then, not
at its deadline; no loading of weights, no clocks that change. Prompts are padded to the longest. A size that does not
fit the KV ends the search, as one that is not full does. A batch ended by a cancel is not timed. A request that is
sent anew to another replica has its SLO from then on.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from batchsim.base.ranges import PositiveInt
from batchsim.base.units import NS_PER_S, PositiveDuration, format_duration
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.families.padded_batch import PaddedBatch, WholeBatchesInOrder

_EARLY_NS = 5 * NS_PER_S // 1000  # how much before its SLO a request is to end
_LEAST_NS = 15 * NS_PER_S // 1000  # the shortest time that a request has: what is scheduled ahead, and that
_WINDOW = 10
_UNKNOWN_NS = NS_PER_S // 10_000


@dataclass(frozen=True)
class ClockworkConfig(PolicyConfig):
    """Knobs."""

    default_slo: PositiveDuration
    """The latency objective of every request, from its arrival on."""
    batch_sizes: tuple[PositiveInt, ...] = (1, 2, 4, 8, 16)
    """The sizes of batches that the model was compiled for; they ascend from 1."""
    exec_durations: tuple[PositiveDuration, ...] | None = None
    """How long a batch of each size is expected to take before one has run; 0.1 ms each unless given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = list(self.batch_sizes)
        if sizes != sorted(set(sizes)) or sizes[:1] != [1]:
            raise ValueError(f"batch_sizes {sizes} must ascend from 1")
        if self.exec_durations is not None and len(self.exec_durations) != len(sizes):
            raise ValueError(
                f"exec_durations has {len(self.exec_durations)} and batch_sizes {len(sizes)}. Write one for each"
            )

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.batch_sizes[-1])


class SizeQueue:
    """The requests that may be in a batch of `size`, in order of arrival, and how long such batches take."""

    def __init__(self, size: int, expected_ns: int) -> None:
        self.size = size
        self.rows: OrderedDict[Sequence, None] = OrderedDict()
        self._expected_ns = expected_ns
        self._taken_ns: deque[int] = deque(maxlen=_WINDOW)

    @property
    def holds_batch(self) -> bool:
        return len(self.rows) >= self.size

    @property
    def expected_ns(self) -> int:
        """How long a batch is expected to take."""
        return max(self._taken_ns) if self._taken_ns else self._expected_ns

    def add(self, taken_ns: int) -> None:
        """Adds the time of a batch."""
        self._taken_ns.append(taken_ns)


class Clockwork(WholeBatchesInOrder):
    """The scheduler. A decode step is O(1), a start O(batch log batch + sizes + waiting)."""

    evidence = "hand-derived"
    deviations: ClassVar[dict[str, str]] = {"no_idling": "too few requests for the sizes that end in time wait"}

    def __init__(self, config: ClockworkConfig, context: PolicyContext) -> None:
        super().__init__(context, PaddedBatch(context, padding="longest", finished_rows="hold", respond="batch_end"))
        self.config = config
        durations = config.exec_durations or (_UNKNOWN_NS,) * len(config.batch_sizes)
        self.queues = [SizeQueue(size, ns) for size, ns in zip(config.batch_sizes, durations, strict=True)]
        self._latest = self.queues[0]  # that of the size of the latest batch

    def add(self, seq: Sequence, now_ns: int) -> None:
        super().add(seq, now_ns)
        if seq in self.waiting:
            for queue in self.queues:
                queue.rows[seq] = None

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        for queue in self.queues:
            queue.rows.pop(seq, None)
        return super().cancel(seq, now_ns)

    def next_batch(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._drop_late(now_ns)
        self._reject(now_ns)
        queue, cut = self._largest()
        if queue is not None:
            return self._start(queue, cut, now_ns)
        # Too few for the sizes that would be in time.
        return Idle(self._deadline_ns(next(iter(self.waiting)))) if self.waiting else IDLE

    def ended(self, batch_ns: int) -> None:
        self._latest.add(batch_ns)

    def _deadline_ns(self, seq: Sequence) -> int:
        return seq.request.arrival_ns + max(self.config.default_slo - _EARLY_NS, _LEAST_NS)

    def _drop_late(self, now_ns: int) -> None:
        """Takes off the front of each queue the requests that would be late in a batch of its size."""
        for queue in self.queues:
            end_ns = now_ns + queue.expected_ns
            while queue.rows and self._deadline_ns(next(iter(queue.rows))) < end_ns:
                queue.rows.popitem(last=False)

    def _reject(self, now_ns: int) -> None:
        """Rejects the requests that no queue has any more, which are the first of all that wait."""
        while self.waiting:
            seq = next(iter(self.waiting))
            if any(seq in queue.rows for queue in self.queues):
                return
            del self.waiting[seq]
            waited, slo = now_ns - seq.request.arrival_ns, self.config.default_slo
            detail = f"waited {format_duration(waited)}, default_slo {format_duration(slo)}"
            self.events.append(Event("rejected", seq, "misses_slo", detail=detail))

    def _largest(self) -> tuple[SizeQueue | None, list[Sequence]]:
        """(The queue of the largest size that a batch can have, None if there is none; the rows of the next size, where
        it is the KV that these do not fit)."""
        largest = None
        for at, queue in enumerate(self.queues):
            if queue.holds_batch:
                rows = list(islice(queue.rows, queue.size))
                if self.batch.fitting(rows) < len(rows):
                    return largest, rows
                largest = queue
            elif at:
                break
        return largest, []

    def _start(self, queue: SizeQueue, cut: list[Sequence], now_ns: int) -> Batch:
        rows = list(islice(queue.rows, queue.size))
        for seq in list(self.waiting):
            for each in self.queues:
                each.rows.pop(seq, None)
            if seq is rows[-1]:
                break
        self._latest = queue
        work = self.start(rows, cut, now_ns)
        self._reject(now_ns)  # what came before the rows and is none of them
        return work

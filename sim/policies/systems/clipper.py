"""Clipper's adaptive batches in front of a generative model: ucbrise/clipper 9f25e3fc, one replica of one model.

Rule: a queue by deadline, arrival + `slo_micros`; a free replica drops what has expired and takes at most a batch size
of requests at once, never waiting for more. The size is `batch_size`, or by the budget, 0.92 of the time left to the
first one's deadline. Above the longest latency of a batch so far it explores: the largest size yet if that has 1 to 4
latencies, else one more below 10, else 1 + max(0, N(0.1, 0.05)) times as many; a batch that is short then is filled
with copies of its last row. Else it estimates: a line of size over upper latency (mean + 3 pooled deviations), at the
budget, at least 1.
Source: src/libclipper/src/containers.cpp, include/clipper/task_executor.hpp. So the first size is 2: 1 was never timed.
Simplifies: all requests have one SLO; the line is fitted at once, with a constant ridge of 1e-6 on its slope where
dlib's trainer chooses one; deviations are of samples, n - 1. Prompts are padded to the longest. Clipper knows of no KV
memory: where a batch does not fit, the first rows that do are it, without copies. A batch ended by a cancel is not
timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import floor, sqrt
from typing import Annotated

from batchsim.base.ranges import INT32_MAX, NonNegativeInt, Range
from batchsim.base.units import YEAR_NS, format_duration
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.families.draws import Draws
from batchsim.policies.families.padded_batch import PaddedBatch, WholeBatchesInOrder

_BUDGET = 0.92
_SAMPLES = 5  # latencies of a size that are enough
_DEVIATIONS = 3
_ADDS_BELOW = 10
_RIDGE = 1e-6


@dataclass(frozen=True)
class ClipperConfig(PolicyConfig):
    """Knobs by Clipper's names."""

    slo_micros: Annotated[int, Range(1, YEAR_NS // 1000)]
    """The latency objective of every request; it is dropped where that has passed before it is in a batch."""
    batch_size: Annotated[int, Range(-1, INT32_MAX)] = -1
    """Requests of a batch at most; -1: adaptive."""
    seed: NonNegativeInt = 0
    """The key of the draws by which sizes of 10 and more grow; Clipper's is the time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size == 0:
            raise ValueError("batch_size 0 serves no request. Write at least 1, or -1 for an adaptive size")

    @property
    def traits(self) -> Traits:
        fixed = self.batch_size > 0
        return Traits(max_num_seqs=self.batch_size if fixed else None, knobs=("batch_size",) if fixed else ())


class BatchLatencies:
    """Latencies of batches in ms by their size, and the line of size over upper latency through them."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._of_size: dict[int, tuple[int, float, float]] = {}  # number, mean, sum of squared deviations

    def count(self, size: int) -> int:
        """How many latencies of batches of `size` are known."""
        return self._of_size[size][0] if size in self._of_size else 0

    def add(self, size: int, latency_ms: float) -> None:
        """Adds a batch of `size` requests."""
        number, mean, squares = self._of_size.get(size, (0, 0.0, 0.0))
        off = latency_ms - mean
        mean += off / (number + 1)
        self._of_size[size] = (number + 1, mean, squares + off * (latency_ms - mean))
        self.longest_ms = max(self.longest_ms, latency_ms)

    def size_within(self, budget_ms: float) -> int:
        """The size of a batch that is expected to take `budget_ms` at most, at least 1. Needs a latency."""
        known = [one for one in self._of_size.values() if one[0] >= _SAMPLES]
        freedom = sum(number for number, _, _ in known) - len(self._of_size)
        deviation = sqrt(sum(squares for _, _, squares in known) / max(1, freedom))
        upper = [mean + _DEVIATIONS * deviation for _, mean, _ in self._of_size.values()]
        middle, middle_size = sum(upper) / len(upper), sum(self._of_size) / len(upper)
        along = sum((x - middle) * (size - middle_size) for x, size in zip(upper, self._of_size, strict=True))
        slope = along / (sum((x - middle) ** 2 for x in upper) + _RIDGE)
        return max(1, floor(middle_size + slope * (budget_ms - middle)))


class Clipper(WholeBatchesInOrder):
    """The scheduler. A decode step is O(1), a start O(batch log batch + sizes seen)."""

    evidence = "hand-derived"

    def __init__(self, config: ClipperConfig, context: PolicyContext) -> None:
        super().__init__(context, PaddedBatch(context, padding="longest", finished_rows="hold", respond="batch_end"))
        self.config = config
        self.latencies = BatchLatencies()
        self.largest = 1
        self._draws = Draws(config.seed)
        self._running_size = 0  # requests of the latest batch, and copies

    def next_batch(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._drop_expired(now_ns)
        if not self.waiting:
            return IDLE
        size, explores = self._size(now_ns)
        asked = list(islice(self.waiting, size))
        rows = asked[: self.batch.fitting(asked)]
        copies = size - len(rows) if explores and len(rows) == len(asked) else 0
        self._running_size = len(rows) + copies
        return self.start(rows, asked[len(rows) :], now_ns, copies)

    def ended(self, batch_ns: int) -> None:
        self.latencies.add(self._running_size, batch_ns / 1e6)

    def _deadline_ns(self, seq: Sequence) -> int:
        return seq.request.arrival_ns + 1000 * self.config.slo_micros

    def _drop_expired(self, now_ns: int) -> None:
        while self.waiting and self._deadline_ns(seq := next(iter(self.waiting))) <= now_ns:
            del self.waiting[seq]
            slo = format_duration(1000 * self.config.slo_micros)
            detail = f"waited {format_duration(now_ns - seq.request.arrival_ns)}, slo_micros {slo}"
            self.events.append(Event("rejected", seq, "slo_expired", detail=detail))

    def _size(self, now_ns: int) -> tuple[int, bool]:
        """The size of a batch that starts now, and whether it is to be measured."""
        if self.config.batch_size > 0:
            return self.config.batch_size, False
        budget_ms = _BUDGET * (self._deadline_ns(next(iter(self.waiting))) - now_ns) / 1e6
        explores = budget_ms > self.latencies.longest_ms
        size = self._next_size() if explores else self.latencies.size_within(budget_ms)
        self.largest = max(self.largest, size)
        return size, explores

    def _next_size(self) -> int:
        if 0 < self.latencies.count(self.largest) < _SAMPLES:
            return self.largest
        if self.largest < _ADDS_BELOW:
            return self.largest + 1
        return int((1 + max(0.0, self._draws.normal(0.1, 0.05))) * self.largest)

"""TensorFlow's SerialDeviceBatchScheduler in front of a generative model: as many threads as keep the device's queue.

Rule: as many threads as a limit each take a batch at once, the one of the least score (its time of creation less
`full_batch_scheduling_boost_micros` by its share of a full one), and hold it until the device is through with it. A
thread that finds none sleeps for the mean period, at first 1 ms, and counts a miss. After every
`batches_to_average_over` batches, if misses are fewer than a tenth of them: the period is their mean time with a thread
by the limit; the limit moves by `target_pending` less the mean number of batches left at the device when one ended,
rounded, from 1 to `num_batch_threads`. Threads beyond the limit end, new ones begin at once.
Source: tensorflow/core/kernels/batching_util/serial_device_batch_scheduler.h, read in a copy of a later master.
Simplifies: one queue and requests of one row (`tf_batch_threads.py`); the device is ours, so that what is left at it
are the batches in flight. A thread that wakes at the instant of an arrival sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import copysign, floor
from typing import ClassVar

from batchsim.base.ranges import PositiveInt
from batchsim.base.units import Microseconds
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.systems.tf_batch_threads import BatchThreads, TaskBatch

_FIRST_SLEEP_NS = 1_000_000
_MOST_MISSES = 0.1


@dataclass(frozen=True)
class TfSerialDeviceConfig(PolicyConfig):
    """Knobs by TensorFlow's names, with its defaults."""

    num_batch_threads: PositiveInt
    """Threads at most; the number of CPUs by TensorFlow's default, here to be stated."""
    max_batch_size: PositiveInt = 1000
    """Requests of a batch at most."""
    max_enqueued_batches: PositiveInt = 10
    """Batches that wait for a thread at most; beyond, requests are rejected."""
    initial_in_flight_batches_limit: PositiveInt = 3
    """Threads at first."""
    target_pending: PositiveInt = 2
    """Batches that are to be at the device when one ends."""
    batches_to_average_over: PositiveInt = 1000
    """Batches between two changes of the limit."""
    full_batch_scheduling_boost_micros: Microseconds = 0
    """By how much older a full batch counts when the next one is chosen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_in_flight_batches_limit > self.num_batch_threads:
            raise ValueError(
                f"initial_in_flight_batches_limit {self.initial_in_flight_batches_limit} must be at most"
                f" num_batch_threads {self.num_batch_threads}"
            )

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.max_batch_size, knobs=("max_batch_size", "num_batch_threads"))


class TfSerialDevice(BatchThreads):
    """The scheduler. `limit`: of threads. An arrival is O(threads) besides."""

    evidence = "hand-derived"
    deviations: ClassVar[dict[str, str]] = {"no_idling": "a thread without a batch sleeps for the mean period"}

    def __init__(self, config: TfSerialDeviceConfig, context: PolicyContext) -> None:
        boost = config.full_batch_scheduling_boost_micros
        super().__init__(context, config.max_batch_size, config.max_enqueued_batches, boost)
        self.config = config
        self.limit = config.initial_in_flight_batches_limit
        self.period_ns = 0
        self._wakes_ns = [0] * self.limit  # of each thread without a batch
        self._num_ended = self._num_misses = self._num_pending = self._held_ns = 0

    def closes_full(self) -> bool:
        return False

    def due_ns(self) -> int | None:
        return min(self._wakes_ns) if self.enqueued and self._wakes_ns else None

    def act(self, now_ns: int) -> None:
        self._wakes_ns.remove(now_ns)
        self._look(now_ns)

    def arrived(self, now_ns: int, *, opens: bool, closes: bool) -> None:
        if opens and len(self.enqueued) == 1:
            self._sleep_on(now_ns)

    def ended(self, batch: TaskBatch, now_ns: int, *, is_run: bool) -> None:
        if not self.enqueued:
            self._sleep_on(now_ns)
        if is_run:
            self._num_ended += 1
            self._held_ns += now_ns - batch.taken_ns
            self._num_pending += len(self.in_flight)
            if self._num_ended == self.config.batches_to_average_over:
                self._adjust(now_ns)
        self._look(now_ns)

    def _sleep_on(self, now_ns: int) -> None:
        """Lets threads that woke before `now_ns`, when there was no batch, sleep on until then, or end."""
        period_ns, kept = self.period_ns or _FIRST_SLEEP_NS, list[int]()
        spare = self.limit - len(self.in_flight) - len(self._wakes_ns)
        for wake_ns in sorted(self._wakes_ns):
            misses = max(0, -((wake_ns - now_ns) // period_ns))
            if misses and spare < 0:
                spare += 1
                continue
            self._num_misses += misses
            kept.append(wake_ns + misses * period_ns)
        self._wakes_ns = kept

    def _look(self, now_ns: int) -> None:
        """A thread without a batch ends, takes one, or goes to sleep."""
        if len(self.in_flight) + len(self._wakes_ns) + 1 > self.limit:
            return
        batch = self.best(now_ns, 0)
        if batch is not None:
            self.take(batch, now_ns)
            return
        self._num_misses += 1
        self._wakes_ns.append(now_ns + (self.period_ns or _FIRST_SLEEP_NS))

    def _adjust(self, now_ns: int) -> None:
        """Moves the limit towards that at which `target_pending` batches are at the device."""
        count = self._num_ended
        if self._num_misses < _MOST_MISSES * count:
            self.period_ns = self._held_ns // count // self.limit
            off = self.config.target_pending - self._num_pending / count
            limit = self.limit + int(copysign(floor(abs(off) + 0.5), off))
            self.limit = min(max(limit, 1), self.config.num_batch_threads)
            threads = len(self.in_flight) + len(self._wakes_ns) + 1  # that of the batch that ended among them
            self._wakes_ns += [now_ns] * max(0, self.limit - threads)
        self._num_ended = self._num_misses = self._num_pending = self._held_ns = 0

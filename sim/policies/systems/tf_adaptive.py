"""TensorFlow's AdaptiveSharedBatchScheduler in front of a generative model: it adapts how many batches are in flight.

Rule: a batch is closed when full. It is taken when `batch_timeout_micros` old, if fewer than a limit are in flight; if
less than one below it, with the rest as the probability. Tried when a batch is created, comes of age, or one ends. The
batch of the least score goes: its time of creation less `full_batch_scheduling_boost_micros` by its share of a full
one. Whenever one is closed as full, and when an express batch ends, closed ones are taken beyond the limit, as express
batches, by threads to spare. After every `batches_to_average_over` others their mean age at their end is compared with
that before: if it fell, the step doubles where it had fallen before too, else it halves, from 1/128 to 1/8; if not, the
direction turns. The limit moves by direction x limit x step, from `min_in_flight_batches_limit` to `num_batch_threads`.
Source: tensorflow/core/kernels/batching_util/adaptive_shared_batch_scheduler.h, read in a copy of a later master.
Simplifies: one queue, so that `fifo_scheduling` is a boost of 0; one device under all threads and requests of one row
(`tf_batch_threads.py`); draws by a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batchsim.base.ranges import NonNegativeInt, PositiveInt
from batchsim.base.units import Microseconds
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.families.draws import Draws
from batchsim.policies.systems.tf_batch_threads import BatchThreads, TaskBatch

_LEAST_STEP, _MOST_STEP = 1 / 128, 1 / 8


@dataclass(frozen=True)
class TfAdaptiveConfig(PolicyConfig):
    """Knobs by TensorFlow's names, with its defaults."""

    num_batch_threads: PositiveInt
    """Batches in flight at most; the number of CPUs by TensorFlow's default, here to be stated."""
    max_batch_size: PositiveInt = 1000
    """Requests of a batch at most."""
    max_enqueued_batches: PositiveInt = 10
    """Batches that wait for a thread at most; beyond, requests are rejected."""
    batch_timeout_micros: Microseconds = 0
    """How old a batch is at least when it is taken, unless it is an express one."""
    initial_in_flight_batches_limit: PositiveInt = 3
    """The limit of batches in flight at first."""
    min_in_flight_batches_limit: PositiveInt = 1
    """The least limit of batches in flight."""
    batches_to_average_over: PositiveInt = 1000
    """Batches between two changes of the limit."""
    full_batch_scheduling_boost_micros: Microseconds = 0
    """By how much older a full batch counts when the next one is chosen."""
    seed: NonNegativeInt = 0
    """The key of the draws where a limit is not whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, first, most = (
            self.min_in_flight_batches_limit,
            self.initial_in_flight_batches_limit,
            self.num_batch_threads,
        )
        if not low <= first <= most:
            raise ValueError(
                f"must be min_in_flight_batches_limit {low} <= initial_in_flight_batches_limit {first} <="
                f" num_batch_threads {most}"
            )

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.max_batch_size, knobs=("max_batch_size", "num_batch_threads"))


class TfAdaptive(BatchThreads):
    """The scheduler. `limit`: of batches in flight, express ones aside."""

    evidence = "hand-derived"
    deviations: ClassVar[dict[str, str]] = {"no_idling": "waits until a batch is batch_timeout_micros old"}

    def __init__(self, config: TfAdaptiveConfig, context: PolicyContext) -> None:
        boost = config.full_batch_scheduling_boost_micros
        super().__init__(context, config.max_batch_size, config.max_enqueued_batches, boost)
        self.config = config
        self.limit = float(config.initial_in_flight_batches_limit)
        self.step, self.direction = _MOST_STEP, 1
        self._timeout_ns = 1000 * config.batch_timeout_micros
        self._tried_ns = -1  # batches that came of age by then were tried
        self._draws = Draws(config.seed)
        self._num_averaged = self._ages_ns = 0
        self._last_ms, self._fell = 0.0, False

    def closes_full(self) -> bool:
        return True

    def due_ns(self) -> int | None:
        ages = (one.created_ns + self._timeout_ns for one in self.enqueued)
        return min((at_ns for at_ns in ages if at_ns > self._tried_ns), default=None)

    def act(self, now_ns: int) -> None:
        of_age = sum(one.created_ns + self._timeout_ns == now_ns for one in self.enqueued)
        self._tried_ns = now_ns
        for _ in range(of_age):
            self._take_next(now_ns)

    def arrived(self, now_ns: int, *, opens: bool, closes: bool) -> None:
        if opens and not self._timeout_ns:
            self._tried_ns = now_ns
            self._take_next(now_ns)
        if closes:
            self._take_closed(now_ns)

    def ended(self, batch: TaskBatch, now_ns: int, *, is_run: bool) -> None:
        if batch.is_express:
            self._take_closed(now_ns)
            return
        if is_run:
            self._num_averaged += 1
            self._ages_ns += now_ns - batch.created_ns
            if self._num_averaged == self.config.batches_to_average_over:
                self._adjust()
        self._take_next(now_ns)

    def _take_next(self, now_ns: int) -> None:
        spare = self.limit - sum(not one.is_express for one in self.in_flight)
        if not self.enqueued or spare <= 0 or (spare < 1 and self._draws.uniform() > spare):
            return
        batch = self.best(now_ns, self._timeout_ns)
        if batch is not None:
            self.take(batch, now_ns)

    def _take_closed(self, now_ns: int) -> None:
        spare = self.config.num_batch_threads - len(self.in_flight)
        for batch in [one for one in self.enqueued if one.is_closed][: max(spare, 0)]:
            batch.is_express = True
            self.take(batch, now_ns)

    def _adjust(self) -> None:
        """Moves the limit by whether the mean age of batches at their end fell."""
        mean_ms = self._ages_ns / 1e6 / self._num_averaged
        fell = mean_ms < self._last_ms
        if fell:
            self.step = min(max(self.step * (2 if self._fell else 0.5), _LEAST_STEP), _MOST_STEP)
        else:
            self.direction = -self.direction
        limit = self.limit + self.direction * self.limit * self.step
        self.limit = max(min(limit, self.config.num_batch_threads), self.config.min_in_flight_batches_limit)
        self._last_ms, self._fell = mean_ms, fell
        self._num_averaged = self._ages_ns = 0

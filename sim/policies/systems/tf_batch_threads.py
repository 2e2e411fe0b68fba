"""What TensorFlow's two adaptive batch schedulers have in common: one queue, batches that threads take, one device.

A request joins the queue's open batch; a batch is taken by a thread, which closes it, and then runs on the device in
the order in which batches were taken. The device runs one batch at a time, to its end, its prompts padded to the
longest: a thread that has taken a batch holds it in flight until the device is through with it. Threads act at their
own times, also within a step: arrivals, ends and what is due are taken in the order of their times, of one instant
arrivals first. KV shortage: see `closed_batches.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from dataclasses import dataclass, field

from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.families.closed_batches import ClosedBatches
from batchsim.policies.families.padded_batch import WholeBatches


@dataclass(eq=False, slots=True)
class TaskBatch:
    """A batch that no thread has taken, or one in flight. Times in ns.

    `num_left`: of one in flight, the rows that the device is not through with.
    """

    created_ns: int
    rows: dict[Sequence, None] = field(default_factory=dict[Sequence, None])
    is_closed: bool = False
    is_express: bool = False
    taken_ns: int = 0
    num_left: int = 0


class BatchThreads(WholeBatches):
    """The queue, its batches and the device. A decode step is O(1), an arrival O(batches that wait)."""

    def __init__(
        self, context: PolicyContext, max_batch_size: int, max_enqueued_batches: int, boost_micros: int
    ) -> None:
        self.device = ClosedBatches(context, padding="longest")
        super().__init__(context, self.device.running)
        self.enqueued: list[TaskBatch] = []  # the last one may be open
        self.in_flight: deque[TaskBatch] = deque()  # the first one is on the device
        self._batch_of: dict[Sequence, TaskBatch] = {}  # of the enqueued
        self._size = max_batch_size
        self._most = max_enqueued_batches
        self._boost_ns = 1000 * boost_micros
        self._num_rows = 0  # on the device
        self._ends: deque[tuple[int, TaskBatch, bool]] = deque()  # when, of which, whether run: not acted on yet
        self._seen_ns = 0  # up to where all has been acted on

    # ---- what a scheduler says

    @abstractmethod
    def due_ns(self) -> int | None:
        """The next time at which a thread may take a batch though nothing arrives or ends; None: never."""

    @abstractmethod
    def act(self, now_ns: int) -> None:
        """Does what is due at `now_ns`, which is not before `due_ns`."""

    @abstractmethod
    def arrived(self, now_ns: int, *, opens: bool, closes: bool) -> None:
        """Acts on a request that has joined the last enqueued batch, which it `opens`, or which is closed with it."""

    @abstractmethod
    def ended(self, batch: TaskBatch, now_ns: int, *, is_run: bool) -> None:
        """Acts on the end of a batch in flight; `is_run`: on the device, not by the cancel of its last row."""

    @abstractmethod
    def closes_full(self) -> bool:
        """Whether a batch is closed as it becomes full, not by the request that follows."""

    # ---- the scheduler

    @property
    def num_waiting(self) -> int:
        return len(self._batch_of) + self.device.num_waiting

    def add(self, seq: Sequence, now_ns: int) -> None:
        at_ns = max(seq.request.arrival_ns, self._seen_ns)
        self._catch_up(at_ns)
        refusal = never_fits(self.kv, seq, self.max_model_len) or self._queue_full(seq)
        if refusal is not None:
            self.events.append(refusal)
            return
        opens = not self._has_room()
        if opens:
            if self.enqueued:
                self.enqueued[-1].is_closed = True
            self.enqueued.append(TaskBatch(at_ns))
        last = self.enqueued[-1]
        last.rows[seq] = None
        self._batch_of[seq] = last
        closes = self.closes_full() and len(last.rows) == self._size
        last.is_closed = closes
        self.arrived(at_ns, opens=opens, closes=closes)

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        batch = self._batch_of.pop(seq, None)
        if batch is not None:
            del batch.rows[seq]
            if not batch.rows:
                self.enqueued.remove(batch)
            return []
        if self.device.discard(seq):
            flying = next(one for one in self.in_flight if seq in one.rows)
            flying.num_left -= 1
            if not flying.num_left:
                self._ends.append((now_ns, flying, False))
            return []
        responses = self.batch.cancel(seq)
        if not self.batch.rows:
            self._leave_device(now_ns)
        return responses

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._catch_up(now_ns + 1)
        self._seen_ns = now_ns
        work: Batch | Idle = IDLE
        if self.device.is_running:
            work = self.batch.step()
        elif self.device.batches:
            work = self.device.start()
            self._num_rows = len(self.batch.rows)
        elif self.enqueued:
            work = Idle(self.due_ns())
        self.note_blocked(self.device.head or next((seq for one in self.enqueued for seq in one.rows), None))
        return work

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        due_ns = self.due_ns()
        return (due_ns is None or now_ns < due_ns) and super().repeat(batch, now_ns)

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        responses = super().complete(batch, finished, now_ns)
        if not self.batch.rows:
            self._leave_device(now_ns)
        return responses

    # ---- for schedulers

    def best(self, now_ns: int, wait_ns: int) -> TaskBatch | None:
        """Of the enqueued batches that are at least `wait_ns` old, the one of the least score: its time of creation
        less the boost by how full it is; of equals the oldest. None if there is none."""
        ready = [one for one in self.enqueued if one.created_ns + wait_ns <= now_ns]
        return min(
            ready, key=lambda one: one.created_ns - self._boost_ns * len(one.rows) / float(self._size), default=None
        )

    def take(self, batch: TaskBatch, now_ns: int) -> None:
        """Puts an enqueued batch in flight."""
        self.enqueued.remove(batch)
        batch.is_closed = True
        batch.taken_ns, batch.num_left = now_ns, len(batch.rows)
        for seq in batch.rows:
            del self._batch_of[seq]
        self.in_flight.append(batch)
        self.device.put(batch.rows)

    # ---- inside

    def _has_room(self) -> bool:
        if not self.enqueued:
            return False
        last = self.enqueued[-1]
        return not last.is_closed and len(last.rows) < self._size

    def _queue_full(self, seq: Sequence) -> Event | None:
        if self._has_room() or len(self.enqueued) < self._most:
            return None
        detail = f"{len(self.enqueued)} batches enqueued, max_enqueued_batches {self._most}"
        return Event("rejected", seq, "queue_full", detail=detail)

    def _catch_up(self, before_ns: int) -> None:
        """Acts on all that ends or is due before a time, in order."""
        while True:
            due_ns = self.due_ns()
            if self._ends and (due_ns is None or self._ends[0][0] <= due_ns):
                at_ns, batch, is_run = self._ends[0]
                if at_ns >= before_ns:
                    return
                self._ends.popleft()
                self.in_flight.remove(batch)
                self.ended(batch, at_ns, is_run=is_run)
            elif due_ns is not None and due_ns < before_ns:
                self.act(due_ns)
            else:
                return

    def _leave_device(self, now_ns: int) -> None:
        """Counts the rows that the device has just been through with; with the last ones their batch ends."""
        first = next(one for one in self.in_flight if one.num_left)
        first.num_left -= self._num_rows
        if not first.num_left:
            self._ends.append((now_ns, first, True))

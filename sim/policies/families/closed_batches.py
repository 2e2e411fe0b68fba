"""Closed batches: formed before the engine can run them, and run whole, one after the other.

What Triton calls payloads, TensorFlow Serving closed batches and Ray Serve formed batches: their members are fixed
while others still wait for a batch. Each runs to its end as a padded batch (see `padded_batch.py`) whose ended rows
compute on. None of these systems knows of KV memory: where a batch does not fit the pool, the rows that do run first
and the rest right after them, before all other batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from batchsim.kernel.batch import Batch
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.policies.families.padded_batch import PaddedBatch, Padding, Respond


@dataclass(eq=False, slots=True)
class QueuedBatch:
    """A batch that waits to run. Unless it is closed, rows may still be added."""

    rows: dict[Sequence, None] = field(default_factory=dict[Sequence, None])
    is_closed: bool = True


class ClosedBatches:
    """The closed batches that wait, in the order in which they run, and the one that runs.

    `allowed_sizes` rise; a batch of another size is filled up to the next one with copies of its last row.
    """

    def __init__(
        self,
        context: PolicyContext,
        *,
        padding: Padding,
        respond: Respond = "batch_end",
        allowed_sizes: tuple[int, ...] = (),
    ) -> None:
        self.running = PaddedBatch(context, padding=padding, finished_rows="hold", respond=respond)
        self.batches: deque[QueuedBatch] = deque()  # none of them empty
        self.allowed_sizes = allowed_sizes
        self._batch_of: dict[Sequence, QueuedBatch] = {}

    @property
    def num_waiting(self) -> int:
        """Sequences in waiting batches."""
        return len(self._batch_of)

    @property
    def is_running(self) -> bool:
        """Whether a batch has been started and has not ended."""
        return bool(self.running.rows)

    @property
    def head(self) -> Sequence | None:
        """The first sequence of the batch that runs next."""
        return next(iter(self.batches[0].rows)) if self.batches else None

    def put(self, rows: Iterable[Sequence], *, is_closed: bool = True) -> None:
        """Queues a batch of `rows`; nothing if there are none."""
        batch = QueuedBatch(is_closed=is_closed)
        self.extend(batch, rows)
        if batch.rows:
            self.batches.append(batch)

    def extend(self, batch: QueuedBatch, rows: Iterable[Sequence]) -> None:
        """Adds `rows` to a waiting batch that is not closed."""
        for seq in rows:
            batch.rows[seq] = None
            self._batch_of[seq] = batch

    def discard(self, seq: Sequence) -> bool:
        """Takes `seq` out of its waiting batch; False if it is in none."""
        batch = self._batch_of.pop(seq, None)
        if batch is None:
            return False
        del batch.rows[seq]
        if not batch.rows:
            self.batches.remove(batch)
        return True

    def pop(self) -> list[Sequence]:
        """Takes the next batch out of the queue and returns its sequences."""
        rows = list(self.batches.popleft().rows)
        for seq in rows:
            del self._batch_of[seq]
        return rows

    def start(self) -> Batch:
        """Starts the next batch, or the first rows of it that fit the KV pool; returns the prefill step. Only while no
        batch runs."""
        rows = self.pop()
        count = self.running.fitting(rows)
        rest = rows[count:]
        if rest:
            self.batches.appendleft(QueuedBatch())
            self.extend(self.batches[0], rest)
        return self.running.start(rows[:count], rest, self._copies(count))

    def _copies(self, count: int) -> int:
        at = bisect_left(self.allowed_sizes, count)
        return self.allowed_sizes[at] - count if at < len(self.allowed_sizes) else 0

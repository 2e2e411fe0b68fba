"""Dynamic batching: a batch starts at a size or after a delay, whichever comes first, and runs to its end.

Rule: one FIFO, or one for each priority, scanned from priority 0. An idle engine scans up to `max_batch_size` requests
(fewer where KV is short: such a batch cannot grow) and, in this order: (a) sends the largest preferred size among
them while the oldest of them has waited less than `max_queue_delay`, (b) sends all if the batch cannot grow, (c) sends
all if the oldest has waited `max_queue_delay` or more, or the run drains, (d) else waits for that delay. A delay of 0
always sends preferred sizes first; without any, `max_batch_size` is the one. A request that has waited
`max_queue_time` without being sent is rejected (`queue_timeout`), at once when idle, else at the next step boundary;
like a deadline it comes before a start at the same instant. The batch itself: see `padded_batch.py`.
Source: NVIDIA Triton's dynamic batcher, core commit 73aad7c3, src/dynamic_batch_scheduler.cc.
Simplifies: requests are single rows of any shape; one instance, no payload queued ahead of it; one timeout for all
levels, action REJECT, seen at step boundaries; priorities start at 0 and one outside the levels is rejected.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import chain, islice
from typing import ClassVar

from batchsim.base.ranges import Levels, PositiveInt
from batchsim.base.units import Duration, PositiveDuration, format_duration
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.families.padded_batch import FinishedRows, PaddedBatch, Padding, Respond, WholeBatches


@dataclass(frozen=True)
class DynamicConfig(PolicyConfig):
    """Knobs."""

    max_batch_size: PositiveInt
    """The most requests of a batch."""
    max_queue_delay: Duration = 0
    """How long the oldest request waits for a fuller batch."""
    preferred_batch_sizes: tuple[PositiveInt, ...] = ()
    """Sizes at which a batch starts at once."""
    priority_levels: Levels | None = None
    """Levels of priority, n for priorities 0 to n-1, 0 first; null: one queue, which ignores priorities."""
    max_queue_time: PositiveDuration | None = None
    """Requests that wait longer are rejected."""
    padding: Padding = "longest"
    """How prompts of a batch are padded."""
    finished_rows: FinishedRows = "hold"
    """hold: ended rows compute on to the batch's end; drop: they leave."""
    respond: Respond = "batch_end"
    """batch_end: answers are whole, at the batch's end; row_end: they stream."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.preferred_batch_sizes
        if list(sizes) != sorted(set(sizes)) or (sizes and sizes[-1] > self.max_batch_size):
            raise ValueError(
                f"preferred_batch_sizes {list(sizes)} must rise, to max_batch_size {self.max_batch_size} at most"
            )

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.max_batch_size, knobs=("max_batch_size", "max_queue_delay"))


class Dynamic(WholeBatches):
    """The scheduler. A decode step is O(priority levels), a start O(batch log batch)."""

    evidence = "family"
    deviations: ClassVar[dict[str, str]] = {"no_idling": "waits for a preferred batch size, or for max_queue_delay"}

    def __init__(self, config: DynamicConfig, context: PolicyContext) -> None:
        batch = PaddedBatch(context, padding=config.padding, finished_rows=config.finished_rows, respond=config.respond)
        super().__init__(context, batch)
        self.config = config
        self.levels: list[OrderedDict[Sequence, None]] = [OrderedDict() for _ in range(config.priority_levels or 1)]
        self._preferred = config.preferred_batch_sizes or (config.max_batch_size,)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.levels))

    def add(self, seq: Sequence, now_ns: int) -> None:
        refusal = never_fits(self.kv, seq, self.max_model_len)
        priority, levels = seq.request.priority, self.config.priority_levels
        if levels is not None and not 0 <= priority < levels:
            detail = f"priority {priority}, the levels are 0 to {levels - 1}"
            refusal = Event("rejected", seq, "unknown_priority", detail=detail)
        if refusal is not None:
            self.events.append(refusal)
            return
        self._level(seq)[seq] = None

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        level = self._level(seq)
        if seq in level:
            del level[seq]
            return []
        return self.batch.cancel(seq)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        due_ns = self._next_timeout_ns()
        if due_ns is not None and due_ns <= now_ns:
            self._reject_expired(now_ns)
        work: Batch | Idle = IDLE
        if self.batch.rows:
            work = self.batch.step()
        elif any(self.levels):
            work = self._start_or_wait(now_ns, drain)
        self.note_blocked(next(chain.from_iterable(self.levels), None))
        return work

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        due_ns = self._next_timeout_ns()
        return (due_ns is None or now_ns < due_ns) and super().repeat(batch, now_ns)

    # ---- the queues

    def _level(self, seq: Sequence) -> OrderedDict[Sequence, None]:
        return self.levels[0 if self.config.priority_levels is None else seq.request.priority]

    def _next_timeout_ns(self) -> int | None:
        """The time in ns at which the next queue timeout falls due, if any; the head of a level is its oldest."""
        limit_ns = self.config.max_queue_time
        if limit_ns is None:
            return None
        return min((next(iter(level)).request.arrival_ns + limit_ns for level in self.levels if level), default=None)

    def _reject_expired(self, now_ns: int) -> None:
        limit_ns = self.config.max_queue_time
        assert limit_ns is not None
        for level in self.levels:
            while level and (seq := next(iter(level))).request.arrival_ns + limit_ns <= now_ns:
                del level[seq]
                waited = format_duration(now_ns - seq.request.arrival_ns)
                detail = f"waited {waited}, max_queue_time {format_duration(limit_ns)}"
                self.events.append(Event("rejected", seq, "queue_timeout", detail=detail))

    # ---- the batch

    def _start_or_wait(self, now_ns: int, drain: bool) -> Batch | Idle:
        candidates = list(islice(chain.from_iterable(self.levels), self.config.max_batch_size))
        count = self.batch.fitting(candidates)
        pending = candidates[:count]
        delay_due_ns = min(seq.request.arrival_ns for seq in pending) + self.config.max_queue_delay
        grows = count == len(candidates)  # or is full, where it does not matter: it is sent anyway
        size = self._size_to_send(count, grows, now_ns >= delay_due_ns, drain)
        if size == 0:
            timeout_ns = self._next_timeout_ns()
            return Idle(delay_due_ns if timeout_ns is None else min(delay_due_ns, timeout_ns))
        rows, cut = pending[:size], candidates[count:] if size == count else []
        for seq in rows:
            del self._level(seq)[seq]
        return self.batch.start(rows, cut)

    def _size_to_send(self, pending: int, grows: bool, delayed: bool, drain: bool) -> int:
        """How many of the `pending` requests to send now; 0: wait. `grows`: the batch could still grow, `delayed`: the
        oldest has waited `max_queue_delay`."""
        reached = bisect_right(self._preferred, pending)
        # A delay of 0 never counts as exceeded in Triton: preferred sizes go first under it.
        if reached and (not delayed or self.config.max_queue_delay == 0):
            return self._preferred[reached - 1]
        if not grows or delayed or drain:
            return pending
        return 0

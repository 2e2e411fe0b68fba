"""The queues of Triton's dynamic batcher: a FIFO for each priority level, with the policy that holds for it.

See `triton.py` for the rule and its source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from batchsim.base.ranges import Config, NonNegativeInt
from batchsim.base.units import Microseconds, format_duration
from batchsim.kernel.types import Event, Sequence


@dataclass(frozen=True)
class ModelQueuePolicy(Config):
    """The limits of one priority level's queue, by Triton's names."""

    timeout_action: Literal["REJECT", "DELAY"] = "REJECT"
    """What happens to a request that timed out: it is rejected, or waits behind all others."""
    default_timeout_microseconds: Microseconds = 0
    """How long a request may wait; 0: for ever."""
    allow_timeout_override: bool = False
    """Whether a request's own, shorter time-out counts."""
    max_queue_size: NonNegativeInt = 0
    """The most requests that wait; 0: no limit."""

    @property
    def forbids_prefetching(self) -> bool:
        """Whether the queue may refuse or lose requests other than to a batch, so that no payload is formed ahead."""
        return self.default_timeout_microseconds != 0 or self.allow_timeout_override or self.max_queue_size != 0


class PriorityQueues:
    """The waiting requests by level, 1 first. Within a level: requests in order, then those DELAYed by a timeout.

    Timeouts are looked at by `scan` only, and only as far as the scan gets.
    """

    def __init__(self, policies: list[ModelQueuePolicy]) -> None:
        self._levels = [_Level(policy, {}, {}) for policy in policies]
        self._level_of: dict[Sequence, _Level] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._level_of

    @property
    def first(self) -> Sequence | None:
        """The first request in the order of scanning."""
        return next((s for level in self._levels for s in (*islice(level.queue, 1), *islice(level.delayed, 1))), None)

    def put(self, seq: Sequence, number: int) -> Event | None:
        """Queues `seq` at level `number`, from 1; returns the rejection if that queue is full, else None."""
        level = self._levels[number - 1]
        most, timeout_us = level.policy.max_queue_size, level.policy.default_timeout_microseconds
        if most and len(level.queue) + len(level.delayed) >= most:
            return Event("rejected", seq, "queue_full", detail=f"max_queue_size {most} of level {number}")
        level.queue[seq] = seq.request.arrival_ns + 1000 * timeout_us if timeout_us else None
        self._level_of[seq] = level
        return None

    def remove(self, seq: Sequence) -> None:
        """Takes out `seq`, which waits."""
        level = self._level_of.pop(seq)
        if seq in level.queue:
            del level.queue[seq]
        else:
            del level.delayed[seq]

    def timeout_ns(self, seq: Sequence) -> int | None:
        """The time in ns at which `seq`, which waits, times out; None if never."""
        return self._level_of[seq].queue.get(seq)

    def scan(
        self, now_ns: int, accepts: Callable[[list[Sequence], Sequence], bool]
    ) -> tuple[list[Sequence], bool, list[Event]]:
        """(the requests from the first on that join a batch, whether the next one waits but may not join, rejections).

        `accepts(taken, seq)` says whether `seq` may join those taken before it. O(taken and timed-out ones + levels).
        """
        taken: list[Sequence] = []
        rejected: list[Event] = []
        for level in self._levels:
            expired: list[Sequence] = []
            is_cut = False
            for seq, due_ns in level.queue.items():
                if due_ns is not None and due_ns <= now_ns:
                    expired.append(seq)
                elif accepts(taken, seq):
                    taken.append(seq)
                else:
                    is_cut = True
                    break
            for seq in expired:
                rejected += self._time_out(level, seq, now_ns)
            if is_cut:
                return taken, True, rejected
            for seq in level.delayed:
                if not accepts(taken, seq):
                    return taken, True, rejected
                taken.append(seq)
        return taken, False, rejected

    def _time_out(self, level: _Level, seq: Sequence, now_ns: int) -> list[Event]:
        del level.queue[seq]
        if level.policy.timeout_action == "DELAY":
            level.delayed[seq] = None
            return []
        del self._level_of[seq]
        waited = format_duration(now_ns - seq.request.arrival_ns)
        detail = f"waited {waited}, default_timeout_microseconds {level.policy.default_timeout_microseconds}"
        return [Event("rejected", seq, "timeout", detail=detail)]


@dataclass(frozen=True, slots=True)
class _Level:
    """`queue`: each request with the time in ns at which it times out, None if never. `delayed`: timed-out ones."""

    policy: ModelQueuePolicy
    queue: dict[Sequence, int | None]
    delayed: dict[Sequence, None]

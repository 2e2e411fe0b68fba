"""The decode cohorts of vLLM's pipeline: one for each stage, never rebalanced.

A sequence that samples in one call of the scheduler decodes in the call that comes `stages` later, at the earliest. In
synchronous mode its token is not there before: the engine fills its queue of `stages` batches, then takes the oldest
result, so that this call is the first to see it. In asynchronous mode it is a rule (`next_decode_eligible_step`). So
sequences that ran together stay together, and the cohort of a call is all that may decode in it, except the
ones that sat out.
Source: vllm/v1/core/sched/scheduler.py and async_scheduler.py, vllm/v1/engine/core.py of the 0.33.0 wheel.
"""

from __future__ import annotations

from collections import deque

from batchsim.kernel.batch import Batch
from batchsim.kernel.types import DecodeGroup, Sequence


class Cohorts:
    """The decode groups of a pipeline, whose turns come one a call, and what the batches in flight hold.

    `stale` has the sequences that were preempted with results in flight, each with the last batch that holds one.
    """

    def __init__(self, stages: int, block_size: int) -> None:
        self._groups = deque(DecodeGroup(block_size) for _ in range(stages))
        self._caps: dict[tuple[DecodeGroup, int], dict[Sequence, None]] = {}  # at which step of a group
        self._cap_of: dict[Sequence, tuple[DecodeGroup, int]] = {}  # the key there
        self._in_flight: deque[Batch] = deque()
        self.stale: dict[Sequence, Batch] = {}

    @property
    def group(self) -> DecodeGroup:
        """The group of sequences that may decode in this call."""
        return self._groups[0]

    def next_groups(self) -> list[DecodeGroup]:
        """The decode groups of the next calls, in order, one for each stage."""
        first, *others = self._groups
        return [*others, first]

    def turn(self, calls: int = 1) -> DecodeGroup:
        """Advances by `calls` scheduler calls; returns the group that decodes now."""
        self._groups.rotate(-calls)
        return self._groups[0]

    def expect(self, seq: Sequence, group: DecodeGroup, tokens: int) -> None:
        """Notes that `seq`, which joins `group` now, reaches its output cap after `tokens` more tokens."""
        self._cap_of[seq] = key = group, group.step + tokens
        self._caps.setdefault(key, {})[seq] = None

    def left(self, seq: Sequence) -> None:
        """Takes note that `seq`, of which the cap was expected, leaves its group: before the cap, or at it."""
        key = self._cap_of.pop(seq)
        del self._caps[key][seq]
        if not self._caps[key]:
            del self._caps[key]

    def has_caps(self, group: DecodeGroup) -> bool:
        """Whether any member of `group` has reached its cap with the steps that the group has made."""
        return (group, group.step) in self._caps

    def at_their_caps(self) -> list[Sequence]:
        """The members of this call's group whose tokens in flight are the last that they may have."""
        group = self._groups[0]
        return list(self._caps.get((group, group.step), ()))

    def launched(self, batch: Batch) -> None:
        """Takes note that `batch` is in flight from now on."""
        self._in_flight.append(batch)

    def landed(self, batch: Batch) -> None:
        """Takes note that the results of `batch`, the oldest in flight, are processed."""
        self._in_flight.popleft()
        if self.stale:
            self.stale = {seq: last for seq, last in self.stale.items() if last is not batch}

    def in_flight(self, seq: Sequence) -> int:
        """How many tokens of `seq` the batches in flight compute."""
        tokens = 0
        for batch in self._in_flight:
            tokens += sum(n for chunked, n in batch.chunks if chunked is seq)
            group = batch.decodes
            if group is not None and group is seq.group:
                tokens += seq.joined_step < batch.group_step <= group.step
        return tokens

    def preempted(self, victim: Sequence) -> None:
        """Takes note that `victim` loses its place; before it leaves its group."""
        # A group has one batch in flight, in which all its members decode or end their prompts. Who left it with its
        # last token in flight needs no look: the call that found this out is the last before the results.
        for batch in reversed(self._in_flight):
            if batch.decodes is victim.group or any(seq is victim for seq, _ in batch.chunks):
                self.stale[victim] = batch
                return

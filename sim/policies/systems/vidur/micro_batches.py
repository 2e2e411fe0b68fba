"""The micro-batches of a pipeline as Vidur has them: a running request is in one that is in flight, or ready.

A sequence is not scheduled again, not even with the next chunk of its prompt, before the batch that holds it has left
the last stage. Then all members of the batch are ready, in its order, behind those already ready.
Source: vidur/scheduler/replica_scheduler/{base,orca,sarathi,vllm}_replica_scheduler.py of commit 7d47513a.
"""

from __future__ import annotations

from collections import deque

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch
from batchsim.kernel.types import DecodeGroup, Sequence


class MicroBatches:
    """The ready sequences, in the order in which Vidur takes them, and the batches in flight.

    A decode group for each stage: those of no batch in flight hold some of the ready decodes, from when they decoded
    together. `vain`: the last call found nothing to run, and nothing has happened since.
    """

    def __init__(self, stages: int, block_size: int) -> None:
        self.ready: deque[Sequence] = deque()
        self.vain = False
        self._idle = [DecodeGroup(block_size) for _ in range(stages)]
        self._in_flight: deque[tuple[list[Sequence], DecodeGroup | None]] = deque()
        self._num_rows = 0

    def by_arrival(self) -> None:
        """Puts the ready in order of arrival."""
        self.ready = deque(sorted(self.ready, key=lambda seq: seq.request.arrival_ns))

    def launch(self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]], preempted: list[Sequence]) -> Batch:
        """The batch of `decodes`, which have their blocks, and `chunks`, in this order; in flight if it has any."""
        group = self._group_of(decodes) if decodes else None
        rows = decodes + [seq for seq, _ in chunks]
        for seq in rows:
            seq.order = self._num_rows
            self._num_rows += 1
        if rows:
            self._in_flight.append((rows, group))
        return Batch(group, chunks, sum([n for _, n in chunks]), preempted=preempted)

    def land(self, running: dict[Sequence, None]) -> None:
        """Makes those members of the oldest batch in flight ready that are `running` still."""
        rows, group = self._in_flight.popleft()
        self.ready += [seq for seq in rows if seq in running]
        if group is not None:
            self._idle.append(group)

    def forget(self, seq: Sequence) -> None:
        """Drops `seq`, which does not run any more."""
        if seq in self.ready:
            self.ready.remove(seq)

    def _group_of(self, decodes: list[Sequence]) -> DecodeGroup:
        """An idle group, now of the `decodes` alone: the one where the first of them is, if it is in any."""
        group = decodes[0].group if decodes[0].group is not None else self._idle[0]
        chosen = set(decodes)
        for seq in [seq for seq in group.members if seq not in chosen]:
            group.leave(seq)  # what it holds is settled: no blocks grow with those of a whole group
        for seq in decodes:
            if seq.group is not group:
                if seq.group is not None:
                    seq.group.leave(seq)
                group.join(seq)
        self._idle.remove(group)
        return group


def micro_batch_size(policy: str, batch_size_cap: int, stages: int) -> int:
    """The most requests of a batch: their cap shared out among the stages. ScenarioError if that leaves none."""
    if batch_size_cap < stages:
        raise ScenarioError(
            f"{policy}: batch_size_cap {batch_size_cap} over {stages} stages leaves no request for a batch. Raise it."
        )
    return batch_size_cap // stages

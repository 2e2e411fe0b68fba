"""Strict queues of waiting sequences: only the head may be taken, and a preempted sequence is put back.

`entries` is one object for a queue's whole life, falsy when empty: schedulers test it at every step.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from batchsim.kernel.types import Sequence


class FcfsQueue:
    """First come, first served; the preempted return to the front."""

    def __init__(self) -> None:
        self.entries: deque[Sequence] = deque()

    def head(self) -> Sequence:
        return self.entries[0]

    def pop(self) -> Sequence:
        return self.entries.popleft()

    def push(self, seq: Sequence) -> None:
        self.entries.append(seq)

    def put_back(self, seq: Sequence, behind: int = 0) -> None:
        """Puts `seq` behind the first `behind` ones."""
        self.entries.insert(behind, seq)

    def remove(self, seq: Sequence) -> None:
        self.entries.remove(seq)


class PriorityQueue:
    """A heap by (priority, arrival, id); the preempted are pushed like any other."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, int, Sequence]] = []

    def head(self) -> Sequence:
        return self.entries[0][3]

    def pop(self) -> Sequence:
        return heappop(self.entries)[3]

    def push(self, seq: Sequence) -> None:
        request = seq.request
        heappush(self.entries, (request.priority, request.arrival_ns, request.id, seq))

    def put_back(self, seq: Sequence, behind: int = 0) -> None:
        """Puts `seq` in its place, whatever `behind` says."""
        self.push(seq)

    def remove(self, seq: Sequence) -> None:
        self.entries[:] = [entry for entry in self.entries if entry[3] is not seq]
        heapify(self.entries)

"""Strict queues of waiting sequences: only the head may be taken, and a preempted sequence is put back."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from batchsim.kernel.types import Sequence


class FcfsQueue:
    """First come, first served; the preempted return to the front."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def head(self) -> Sequence:
        return self._queue[0]

    def pop(self) -> Sequence:
        return self._queue.popleft()

    def push(self, seq: Sequence) -> None:
        self._queue.append(seq)

    def put_back(self, seq: Sequence, behind: int = 0) -> None:
        """Puts `seq` behind the first `behind` ones."""
        self._queue.insert(behind, seq)

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)


class PriorityQueue:
    """A heap by (priority, arrival, id); the preempted are pushed like any other."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def head(self) -> Sequence:
        return self._heap[0][3]

    def pop(self) -> Sequence:
        return heappop(self._heap)[3]

    def push(self, seq: Sequence) -> None:
        request = seq.request
        heappush(self._heap, (request.priority, request.arrival_ns, request.id, seq))

    def put_back(self, seq: Sequence, behind: int = 0) -> None:
        """Puts `seq` in its place, whatever `behind` says."""
        self.push(seq)

    def remove(self, seq: Sequence) -> None:
        self._heap = [entry for entry in self._heap if entry[3] is not seq]
        heapify(self._heap)

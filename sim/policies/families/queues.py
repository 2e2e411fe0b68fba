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

    def in_order(self) -> list[Sequence]:
        """All that wait, the head first."""
        return list(self.entries)

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

    def in_order(self) -> list[Sequence]:
        """All that wait, the head first."""
        return [entry[3] for entry in sorted(self.entries)]

    def put_back(self, seq: Sequence, behind: int = 0) -> None:
        """Puts `seq` in its place, whatever `behind` says."""
        self.push(seq)

    def remove(self, seq: Sequence) -> None:
        self.entries[:] = [entry for entry in self.entries if entry[3] is not seq]
        heapify(self.entries)


class TwoQueues:
    """A queue behind another one: the head is that of `first` until this is empty. New sequences, and those put back,
    go to `second`."""

    def __init__(self, first: FcfsQueue | PriorityQueue, second: FcfsQueue | PriorityQueue) -> None:
        self.first = first
        self.second = second
        self.entries = _Both(first, second)

    def head(self) -> Sequence:
        return (self.first if self.first.entries else self.second).head()

    def pop(self) -> Sequence:
        return (self.first if self.first.entries else self.second).pop()

    def push(self, seq: Sequence) -> None:
        self.second.push(seq)

    def put_back(self, seq: Sequence, behind: int = 0) -> None:
        """Puts `seq` behind the first `behind` ones of the second queue."""
        self.second.put_back(seq, behind)

    def remove(self, seq: Sequence) -> None:
        """Takes `seq` out of the second queue."""
        self.second.remove(seq)


class _Both:
    """The entries of two queues, of which there are `len`."""

    def __init__(self, first: FcfsQueue | PriorityQueue, second: FcfsQueue | PriorityQueue) -> None:
        self._entries = first.entries, second.entries

    def __bool__(self) -> bool:
        first, second = self._entries
        return bool(second or first)

    def __len__(self) -> int:
        first, second = self._entries
        return len(first) + len(second)

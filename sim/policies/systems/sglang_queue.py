"""The waiting requests of SGLang 0.5.23 in the order of its schedule policies.

Source: python/sglang/srt/managers/schedule_policy.py (SchedulePolicy) of the 0.5.23 wheel.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import Protocol

from sim.kv.radix_cache import RadixKV
from sim.kv.radix_tokens import Run, common_tokens, known_tokens
from sim.types import Sequence

PREFIX_MATCH_MAX = 128  # waiting requests beyond which lpm is fcfs
IN_BATCH_TOKENS = 32  # a request with at most so many cached tokens waits for one it shares at least as many with


class Waiting(Protocol):
    """A queue by first come or by some order; `arrange` sorts anew and is called before each prefill batch."""

    def __len__(self) -> int: ...

    def head(self) -> Sequence: ...

    def pop(self) -> Sequence: ...

    def push(self, seq: Sequence, entry: int) -> None:
        """Queues `seq` as the `entry`-th to enter."""
        ...

    def remove(self, seq: Sequence) -> None: ...

    def arrange(self) -> None: ...

    def reserved_for_shorter(self, remaining: int, budget: int, page: int) -> int:
        """Tokens of `budget` that a chunk with `remaining` tokens to go leaves to shorter waiting requests."""
        ...


class Fcfs:
    """In order of entering, the retracted at the end."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def head(self) -> Sequence:
        return self._queue[0]

    def pop(self) -> Sequence:
        return self._queue.popleft()

    def push(self, seq: Sequence, entry: int) -> None:
        self._queue.append(seq)

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)

    def arrange(self) -> None:
        """Nothing: it is in order."""

    def reserved_for_shorter(self, remaining: int, budget: int, page: int) -> int:
        return 0


class ByPriority:
    """By priority, the higher or the lower number first, then in order of entering."""

    def __init__(self, *, low_first: bool) -> None:
        self._sign = 1 if low_first else -1
        self._heap: list[tuple[int, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def head(self) -> Sequence:
        return self._heap[0][2]

    def pop(self) -> Sequence:
        return heappop(self._heap)[2]

    def push(self, seq: Sequence, entry: int) -> None:
        heappush(self._heap, (self._sign * seq.request.priority, entry, seq))

    def remove(self, seq: Sequence) -> None:
        self._heap = [item for item in self._heap if item[2] is not seq]
        heapify(self._heap)

    def arrange(self) -> None:
        """Nothing: it is in order."""

    def reserved_for_shorter(self, remaining: int, budget: int, page: int) -> int:
        return 0


class ByPrefix:
    """`lpm`: most cached tokens first. `shortest-prefill-first`: fewest uncached first, ties in order of entering.

    Both put last those that had better wait for another waiting one to compute their common prefix. O(queue) to
    arrange; lpm leaves a queue longer than PREFIX_MATCH_MAX as it is.
    """

    def __init__(self, cache: RadixKV, *, shortest: bool) -> None:
        self._cache = cache
        self._shortest = shortest
        self._queue: list[tuple[Sequence, int]] = []
        self._work: dict[Sequence, int] = {}  # uncached tokens when last arranged

    def __len__(self) -> int:
        return len(self._queue)

    def head(self) -> Sequence:
        return self._queue[0][0]

    def pop(self) -> Sequence:
        seq, _ = self._queue.pop(0)
        self._work.pop(seq, None)
        return seq

    def push(self, seq: Sequence, entry: int) -> None:
        self._queue.append((seq, entry))

    def remove(self, seq: Sequence) -> None:
        self._queue = [item for item in self._queue if item[0] is not seq]
        self._work.pop(seq, None)

    def arrange(self) -> None:
        if not self._shortest and len(self._queue) > PREFIX_MATCH_MAX:
            return
        matched: dict[Sequence, int] = {}
        first: dict[tuple[int, int], list[Run]] = {}  # by first token, those that need not wait for another
        later: set[Sequence] = set()
        for seq, _ in self._queue:
            tokens = seq.num_tokens
            hit = self._cache.match(seq, tokens)
            matched[seq] = min(hit, tokens - 1)
            if hit > IN_BATCH_TOKENS:
                continue
            run = known_tokens(seq, tokens)
            others = first.setdefault(run[0][:2], [])
            if any(common_tokens(run, other) >= IN_BATCH_TOKENS for other in others):
                later.add(seq)
            else:
                others.append(run)
        if self._shortest:
            self._work = work = {seq: max(seq.num_tokens - hit, 1) for seq, hit in matched.items()}
            self._queue.sort(key=lambda item: (item[0] in later, work[item[0]], item[1]))
        else:
            self._queue.sort(key=lambda item: (item[0] in later, -matched[item[0]] if item[0] not in later else 0))

    def reserved_for_shorter(self, remaining: int, budget: int, page: int) -> int:
        reserved = 0
        if not self._shortest or budget < 2 * page:
            return reserved
        for seq, _ in self._queue:
            work = self._work[seq]
            charge = -(-work // page) * page
            if work >= remaining or reserved + charge > budget - page:
                break
            reserved += charge
        return reserved

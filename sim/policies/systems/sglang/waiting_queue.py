"""The waiting requests of SGLang 0.5.23 in the order of its schedule policies.

Source: python/sglang/srt/managers/schedule_policy.py (SchedulePolicy) of the 0.5.23 wheel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice

from batchsim.kernel.types import Sequence
from batchsim.kv.radix_cache import RadixKV
from batchsim.kv.radix_tokens import TokenRun, common_tokens, known_tokens

PREFIX_MATCH_MAX = 128  # waiting requests beyond which lpm is fcfs
REFRESH_PASSES = 32
IN_BATCH_TOKENS = 32  # a request with at most this many cached tokens waits for one it shares at least as many with


class Waiting(ABC):
    """A queue by first come or by some order; `arrange` sorts anew and is called before each prefill batch.

    Where sorting does not look into the `cache` anyway, every REFRESH_PASSES-th time the cached prefixes of the first
    PREFIX_MATCH_MAX requests count as used, the head's last, so that they are evicted from the tail on.
    """

    def __init__(self, cache: RadixKV | None) -> None:
        self._cache = cache
        self._entries: dict[Sequence, int] = {}  # when each, still open, entered the queue last
        self._num_entries = 0
        self._passes = 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def head(self) -> Sequence: ...

    @abstractmethod
    def pop(self) -> Sequence: ...

    @abstractmethod
    def remove(self, seq: Sequence) -> None: ...

    @abstractmethod
    def first(self, num: int) -> list[Sequence]:
        """The first `num` requests, or all if there are fewer, in order."""

    def put_back(self, passed_over: list[Sequence]) -> None:
        """Puts the first requests, which were taken out in this order, back to the front."""
        for seq in reversed(passed_over):
            self._put_first(seq, self._entries[seq])

    @abstractmethod
    def _put_first(self, seq: Sequence, entry: int) -> None: ...

    @abstractmethod
    def _insert(self, seq: Sequence, entry: int) -> None: ...

    def push(self, seq: Sequence) -> None:
        """Queues `seq` as the last to enter."""
        self._num_entries += 1
        self._entries[seq] = self._num_entries
        self._insert(seq, self._num_entries)

    def entered(self, seq: Sequence) -> int:
        """The serial number of the last entry of `seq`, which may have left the queue since."""
        return self._entries[seq]

    def forget(self, seq: Sequence) -> None:
        """Drops what is kept of `seq`, which is not queued and has ended."""
        del self._entries[seq]

    def arrange(self) -> None:
        """Puts the queue in order."""
        if self._cache is None or not len(self):
            return
        if self._passes % REFRESH_PASSES == 0:
            for seq in reversed(self.first(PREFIX_MATCH_MAX)):
                self._cache.match(seq, seq.num_tokens)
        self._passes += 1

    def reserved_for_shorter(self, remaining: int, budget: int, page: int) -> int:
        """Tokens of `budget` that a chunk with `remaining` tokens to go leaves to shorter waiting requests."""
        return 0


class Fcfs(Waiting):
    """In order of entering, the retracted at the end."""

    def __init__(self, cache: RadixKV | None) -> None:
        super().__init__(cache)
        self._queue: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def head(self) -> Sequence:
        return self._queue[0]

    def pop(self) -> Sequence:
        return self._queue.popleft()

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)

    def first(self, num: int) -> list[Sequence]:
        return list(islice(self._queue, num))

    def _put_first(self, seq: Sequence, entry: int) -> None:
        self._queue.appendleft(seq)

    def _insert(self, seq: Sequence, entry: int) -> None:
        self._queue.append(seq)


class ByPriority(Waiting):
    """By priority, the higher or the lower number first, then in order of entering."""

    def __init__(self, cache: RadixKV | None, *, low_first: bool) -> None:
        super().__init__(cache)
        self._sign = 1 if low_first else -1
        self._heap: list[tuple[int, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def head(self) -> Sequence:
        return self._heap[0][2]

    def pop(self) -> Sequence:
        return heappop(self._heap)[2]

    def remove(self, seq: Sequence) -> None:
        self._heap = [item for item in self._heap if item[2] is not seq]
        heapify(self._heap)

    def first(self, num: int) -> list[Sequence]:
        return [seq for _, _, seq in nsmallest(num, self._heap)]

    def _put_first(self, seq: Sequence, entry: int) -> None:
        self._insert(seq, entry)

    def _insert(self, seq: Sequence, entry: int) -> None:
        heappush(self._heap, (self._sign * seq.request.priority, entry, seq))


class ByPrefix(Waiting):
    """`lpm`: most cached tokens first. `shortest-prefill-first`: fewest uncached first, ties in order of entering.

    Both put last the requests that had better wait for another waiting one to compute their common prefix. O(queue) to
    arrange; lpm leaves a queue longer than PREFIX_MATCH_MAX as it is.
    """

    def __init__(self, cache: RadixKV, *, shortest: bool) -> None:
        super().__init__(cache)
        self._match = cache.match_all
        self._shortest = shortest
        self._queue: list[tuple[Sequence, int]] = []
        self._work: dict[Sequence, int] = {}  # uncached tokens when last arranged

    def __len__(self) -> int:
        return len(self._queue)

    def head(self) -> Sequence:
        return self._queue[0][0]

    def pop(self) -> Sequence:
        return self._queue.pop(0)[0]

    def remove(self, seq: Sequence) -> None:
        self._queue = [item for item in self._queue if item[0] is not seq]

    def first(self, num: int) -> list[Sequence]:
        return [seq for seq, _ in self._queue[:num]]

    def _put_first(self, seq: Sequence, entry: int) -> None:
        self._queue.insert(0, (seq, entry))

    def _insert(self, seq: Sequence, entry: int) -> None:
        self._queue.append((seq, entry))

    def arrange(self) -> None:
        if not self._shortest and len(self._queue) > PREFIX_MATCH_MAX:
            super().arrange()
            return
        matched: dict[Sequence, int] = {}
        first: dict[tuple[int, int], list[TokenRun]] = {}  # by first token, the requests that need not wait for another
        later: set[Sequence] = set()
        for seq, _ in self._queue:
            tokens = seq.num_tokens
            hit, in_any_tier = self._match(seq, tokens)
            matched[seq] = min(in_any_tier, tokens - 1)
            if hit > IN_BATCH_TOKENS:
                continue
            run = known_tokens(seq, tokens)
            others = first.setdefault(run[0][:2], [])
            if any(common_tokens(run, other) >= IN_BATCH_TOKENS for other in others):
                later.add(seq)
            else:
                others.append(run)
        if self._shortest:
            self._work = work = {seq: seq.num_tokens - hit for seq, hit in matched.items()}
            self._queue.sort(key=lambda item: (item[0] in later, work[item[0]], item[1]))
        else:
            self._queue.sort(key=lambda item: (item[0] in later, -matched[item[0]] if item[0] not in later else 0))

    def reserved_for_shorter(self, remaining: int, budget: int, page: int) -> int:
        reserved = 0
        if not self._shortest:
            return reserved
        for seq, _ in self._queue:
            work = self._work[seq]
            charge = -(-work // page) * page
            if work >= remaining or reserved + charge > budget - page:
                break
            reserved += charge
        return reserved

"""In which order a tier of KV beyond the GPU gives up its chunks: by least recent use, or by ARC.

What a request does to chunks is one access: while it lives its chunks rank by when it began, its tail before its head;
as it ends they are ranked anew, tail first.
Source: vllm/v1/kv_offload/cpu/policies/lru.py and arc.py of the 0.33.0 wheel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from batchsim.kv.offload_chains import Chain, ChunkRun, Line, Part, Path

KeysOf = Callable[[Part], list[int]]
"""The keys of chunks, in order."""


class Access:
    """What one request, whose chunks are those of `path`, did to chunks. `seen`: the numbers of those it was seen with.
    `line`: of LRU, where its chunks stand, None before it has a place among the requests."""

    __slots__ = ("line", "path", "seen")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen = Numbers()
        self.line: Line | None = None


class Numbers:
    """A set of whole numbers, kept as `rows` of (first, end), in order and apart."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Adds `start` to `stop` - 1; returns the rows of the numbers that were new."""
        rows = self.rows
        if not rows or start > rows[-1][1]:
            rows.append((start, stop))
            return [(start, stop)]
        first, end = rows[-1]
        if start >= first:
            if stop <= end:
                return []
            rows[-1] = first, stop
            return [(end, stop)]
        before = [row for row in rows if row[1] < start]
        behind = [row for row in rows if row[0] > stop]
        fresh: list[tuple[int, int]] = []
        low, high = start, stop
        for first, end in rows[len(before) : len(rows) - len(behind)]:
            if first > start:
                fresh.append((start, first))
            start, low, high = max(start, end), min(low, first), max(high, end)
        if start < stop:
            fresh.append((start, stop))
        self.rows = [*before, (low, high), *behind]
        return fresh


class EvictionOrder(Protocol):
    """The order of the chunks of one tier."""

    def missed(self, access: Access, parts: list[Part]) -> None:
        """The request of `access` offers chunks that are not there."""
        ...

    def seen(self, access: Access, parts: list[Part]) -> None:
        """The request of `access` is seen for the first time with the chunks `parts`, which are there, or with others
        that are not."""
        ...

    def reused(self, access: Access, parts: list[Part]) -> None:
        """The request of `access` offers chunks that are there already, or loads them."""
        ...

    def insert(self, access: Access, run: ChunkRun) -> None:
        """The request of `access` puts the chunks of `run` in."""
        ...

    def evict(self, count: int, kept: list[Part]) -> list[Part] | None:
        """The next `count` chunks that are ready, not loaded and not of `kept`, which are to go; None if there are
        fewer."""
        ...

    def drop(self, run: ChunkRun) -> None:
        """The tier gives up `run`."""
        ...

    def ended(self, access: Access, runs: list[ChunkRun]) -> None:
        """The request of `access` has ended; of what it was seen with, `runs` are there, in order."""
        ...

    def check(self, accesses: list[Access], runs: list[ChunkRun]) -> None:
        """AssertionError unless the order is of `runs`, all that there are, and of the requests of `accesses`."""
        ...


class LruOrder:
    """The chunks of the line of the lowest rank go first, each line from its tail; O(runs) which may not go and rank
    lower."""

    def __init__(self) -> None:
        self._lines: dict[Line, None] = {}  # by rank
        self._last = 0

    def missed(self, access: Access, parts: list[Part]) -> None:
        pass

    def reused(self, access: Access, parts: list[Part]) -> None:
        pass

    def seen(self, access: Access, parts: list[Part]) -> None:
        line = self._line_of(access)
        for chain, start, stop in parts:
            for run in chain.overlapping(start, stop):
                if run.line is not None and run.line.rank >= line.rank:
                    continue
                if run.start < start:
                    run = run.cut(start)
                if run.stop > stop:
                    run.cut(stop)
                self.drop(run)
                line.add(run)

    def insert(self, access: Access, run: ChunkRun) -> None:
        self._line_of(access).add(run)

    def evict(self, count: int, kept: list[Part]) -> list[Part] | None:
        taken: list[Part] = []
        for line in self._lines:
            for run in reversed(line.runs):
                if run.loads:
                    continue
                for start, stop in _beyond(run, kept):
                    chunks = min(count, stop - start)
                    taken.append((run.chain, stop - chunks, stop))
                    count -= chunks
                    if not count:
                        return taken
        return None

    def drop(self, run: ChunkRun) -> None:
        line = run.line
        if line is not None:
            line.runs.remove(run)
            run.line = None
            if not line.runs and not line.is_open:
                del self._lines[line]

    def ended(self, access: Access, runs: list[ChunkRun]) -> None:
        line = self._new_line(is_open=False)
        for run in runs:
            self.drop(run)
            run.line = line
        line.runs = runs
        if not runs:
            del self._lines[line]
        if access.line is not None:
            del self._lines[access.line]  # what stood there was seen

    def check(self, accesses: list[Access], runs: list[ChunkRun]) -> None:
        lines = list(self._lines)
        assert [line.rank for line in lines] == sorted({line.rank for line in lines}), "lines out of order"
        placed = [run for line in lines for run in line.runs]
        assert len(placed) == len(runs) and set(placed) == set(runs), "a run has no place, or several"
        assert all(run.line is line for line in lines for run in line.runs), "a run is of another line"
        is_open = {line for line in lines if line.is_open}
        assert is_open == {access.line for access in accesses if access.line is not None}, "a line is open for nothing"
        assert all(line.runs for line in lines if not line.is_open), "an empty line is kept"
        for line in lines:
            starts = [run.start for run in line.runs]
            assert starts == sorted(starts), "a line's runs are out of order"

    def _line_of(self, access: Access) -> Line:
        if access.line is None:
            access.line = self._new_line(is_open=True)
        return access.line

    def _new_line(self, *, is_open: bool) -> Line:
        self._last += 1
        line = Line(self._last, is_open)
        self._lines[line] = None
        return line


def _beyond(run: ChunkRun, kept: list[Part]) -> list[tuple[int, int]]:
    """The numbers of the chunks of `run` that are not of `kept`, which are in order: rows of (first, end), the last one
    first."""
    rows, stop = list[tuple[int, int]](), run.stop
    for chain, low, high in reversed(kept):
        if chain is run.chain and low < stop and high > run.start:
            if high < stop:
                rows.append((high, stop))
            stop = low
    if stop > run.start:
        rows.append((run.start, stop))
    return rows


class _Use:
    """The keys of chunks that one request put in, found or loaded, and offered where they were not there."""

    __slots__ = ("inserted", "missed", "reused")

    def __init__(self) -> None:
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()


class ArcOrder:
    """Chunks used by one request (`once`) and by several (`often`), each oldest first, and the keys of those lately
    evicted of either. `target` is the size of `once` above which it is the one to give up chunks. O(chunks)."""

    def __init__(self, capacity: int, keys_of: KeysOf) -> None:
        self._capacity = capacity
        self._keys_of = keys_of
        self._uses: dict[Access, _Use] = {}
        self.target = 0.0
        self.once: dict[int, tuple[Chain, int]] = {}
        self.often: dict[int, tuple[Chain, int]] = {}
        self.gone_once: dict[int, None] = {}
        self.gone_often: dict[int, None] = {}

    def missed(self, access: Access, parts: list[Part]) -> None:
        use = self._use(access)
        missed = [key for part in parts for key in self._keys_of(part) if key not in use.missed]
        use.missed.update(missed)
        self.learn(missed)

    def _use(self, access: Access) -> _Use:
        use = self._uses.get(access)
        if use is None:
            use = self._uses[access] = _Use()
        return use

    def learn(self, keys: list[int]) -> None:
        """Lets the target follow the list in which what is missed now would still be, the last key first."""
        once, often = self.gone_once, self.gone_often
        for key in reversed(keys):
            if key in once:
                self.target = min(self.target + max(1.0, len(often) / len(once)), float(self._capacity))
                once[key] = once.pop(key)
            elif key in often:
                self.target = max(self.target - max(1.0, len(once) / len(often)), 0.0)
                often[key] = often.pop(key)

    def seen(self, access: Access, parts: list[Part]) -> None:
        pass

    def reused(self, access: Access, parts: list[Part]) -> None:
        use = self._use(access)
        use.reused.update([key for part in parts for key in self._keys_of(part) if key not in use.inserted])

    def insert(self, access: Access, run: ChunkRun) -> None:
        keys = self._keys_of((run.chain, run.start, run.stop))
        self._use(access).inserted.update(keys)
        for number, key in enumerate(keys, run.start):
            self.once[key] = run.chain, number
            self.gone_once.pop(key, None)
            self.gone_often.pop(key, None)

    def evict(self, count: int, kept: list[Part]) -> list[Part] | None:
        held = {key for part in kept for key in self._keys_of(part)}
        once, often = _may_go(self.once, held), _may_go(self.often, held)
        left = len(self.once)
        taken: list[tuple[int, Part]] = []
        for _ in range(count):
            chosen = next(once, None) if left >= int(self.target) else None
            left -= chosen is not None
            if chosen is None:
                chosen = next(often, None)
            if chosen is None:
                chosen = next(once, None)
            if chosen is None:
                return None
            taken.append(chosen)
        for key, _ in taken:
            of_once = key in self.once
            del (self.once if of_once else self.often)[key]
            (self.gone_once if of_once else self.gone_often)[key] = None
        for gone in (self.gone_once, self.gone_often):
            for _ in range(len(gone) - self._capacity):
                del gone[next(iter(gone))]
        return [part for _, part in taken]

    def drop(self, run: ChunkRun) -> None:
        pass

    def ended(self, access: Access, runs: list[ChunkRun]) -> None:
        once, often = self.once, self.often
        use = self._uses.pop(access, None)
        if use is None:
            return
        for run in reversed(runs):
            for key in reversed(self._keys_of((run.chain, run.start, run.stop))):
                if key in use.reused:
                    often[key] = once.pop(key) if key in once else often.pop(key)
                elif key in use.inserted:
                    order = once if key in once else often
                    order[key] = order.pop(key)

    def check(self, accesses: list[Access], runs: list[ChunkRun]) -> None:
        keys = sorted([key for run in runs for key in self._keys_of((run.chain, run.start, run.stop))])
        assert sorted([*self.once, *self.often]) == keys, "a chunk has no place, or several"
        gone = {*self.gone_once, *self.gone_often}
        assert len(gone) == len(self.gone_once) + len(self.gone_often), "a chunk is gone twice"
        assert gone.isdisjoint(keys), "a chunk that is there is among those gone"
        assert max(len(self.gone_once), len(self.gone_often)) <= self._capacity, "more are kept in mind than may be"
        assert 0 <= self.target <= self._capacity, "the target is out of its range"
        assert set(self._uses) <= set(accesses), "a request that has ended is kept in mind"


def _may_go(chunks: dict[int, tuple[Chain, int]], held: set[int]) -> Iterator[tuple[int, Part]]:
    """Those of `chunks` that are ready, not loaded and not `held`, in order."""
    for key, (chain, number) in chunks.items():
        if key not in held and not chain.overlapping(number, number + 1)[0].loads:
            yield key, (chain, number, number + 1)

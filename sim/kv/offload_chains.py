"""Chunks of KV one after another in prompts, kept as runs, so that a tier does its work a run at a time.

1. A chain is chunks that follow each other in the prompt which first had them, numbered from that prompt's first chunk.
   A chunk belongs to one chain. What a request asks for is a path: parts of chains, the later ones its own.
2. A run is chunks of a chain that the tier has, alike in all that it knows of them. It is cut where they begin to
   differ.
3. A chain is known while the tier has chunks of it, or a request is on a path along it, or a chain that branches off it
   is known: so a chunk has a chain if any behind it has one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from batchsim.kv.block_keys import MOST_BLOCKS, BlockKeys

STORING = -1
"""The count of loads of chunks that are not ready."""


class Line:
    """The runs of one place in an order of eviction, from the head of a prompt to its tail, of the `rank` at which
    others stand before or behind. `is_open`: runs may still come in."""

    __slots__ = ("is_open", "rank", "runs")

    def __init__(self, rank: int, is_open: bool) -> None:
        self.rank = rank
        self.runs: list[ChunkRun] = []
        self.is_open = is_open

    def add(self, run: ChunkRun) -> None:
        """Puts `run` where it belongs."""
        runs, at = self.runs, len(self.runs)
        while at and runs[at - 1].start > run.start:
            at -= 1
        runs.insert(at, run)
        run.line = self


class ChunkRun:
    """The chunks `start` to `stop` - 1 of `chain`, each loaded by as many requests as `loads` says, or STORING. `line`:
    where they stand in an order that keeps runs."""

    __slots__ = ("chain", "line", "loads", "start", "stop")

    def __init__(self, chain: Chain, start: int, stop: int, loads: int) -> None:
        self.chain = chain
        self.start = start
        self.stop = stop
        self.loads = loads
        self.line: Line | None = None

    def cut(self, at: int) -> ChunkRun:
        """Takes off the chunks from number `at` on, which stay in the chain and the line as a run of their own."""
        rest = ChunkRun(self.chain, at, self.stop, self.loads)
        runs, self.stop = self.chain.runs, at
        runs.insert(runs.index(self) + 1, rest)
        if (line := self.line) is not None:
            line.runs.insert(line.runs.index(self) + 1, rest)
            rest.line = line
        return rest


class Chain:
    """`runs`: what the tier has of its chunks, in order. `firsts`: the numbers of the chunks at which its keys begin to
    count up anew, `keys`: these keys; the last row has no end. `users`: paths along it, and chains that branch off it,
    as this does `from_` another one."""

    __slots__ = ("firsts", "from_", "keys", "runs", "users")

    def __init__(self, from_: Chain | None) -> None:
        self.runs: list[ChunkRun] = []
        self.firsts: list[int] = []
        self.keys: list[int] = []
        self.users = 0
        self.from_ = from_
        if from_ is not None:
            from_.users += 1

    def along(self, starts: list[int], firsts: list[int], i: int) -> tuple[int, int]:
        """How far a prompt is one with the chain, with which it shares the first chunk, of the prompt's row `i`. Its
        rows begin with the chunks `starts` and the keys `firsts`. Returns (the row with the first chunk that is
        another, or the number of rows; that chunk's number)."""
        # A key stands for all before it: rows are equal up to some row, and none is behind it.
        low, high = 0, min(len(firsts) - i, len(self.keys))
        while high - low > 1:
            middle = (low + high) // 2
            if firsts[i + middle] == self.keys[middle]:
                low = middle
            else:
                high = middle
        i += low
        next_first = self.firsts[low + 1] if low + 1 < len(self.firsts) else MOST_BLOCKS
        if i + 1 == len(starts):
            return (i + 1, MOST_BLOCKS) if next_first == MOST_BLOCKS else (i, next_first)
        return (i, next_first) if next_first < starts[i + 1] else (i + 1, starts[i + 1])

    def add(self, start: int, stop: int, loads: int) -> ChunkRun:
        """A run of chunks of which the tier has none yet."""
        run, runs = ChunkRun(self, start, stop, loads), self.runs
        at = len(runs)
        while at and runs[at - 1].start > start:
            at -= 1
        runs.insert(at, run)
        return run

    def overlapping(self, start: int, stop: int) -> list[ChunkRun]:
        """The runs with any of the chunks `start` to `stop` - 1, in order."""
        runs = self.runs
        if not runs or runs[-1].stop <= start:
            return []
        if len(runs) > 8:
            at = max(bisect_right(runs, start, key=_start_of) - 1, 0)
            runs = runs[at : bisect_right(runs, stop, at, key=_start_of)]
        return [run for run in runs if run.start < stop and run.stop > start]

    def within(self, start: int, stop: int) -> list[ChunkRun]:
        """The runs of the chunks `start` to `stop` - 1 alone, cut off others."""
        runs = self.overlapping(start, stop)
        if runs:
            if runs[0].start < start:
                runs[0] = runs[0].cut(start)
            if runs[-1].stop > stop:
                runs[-1].cut(stop)
        return runs


Part = tuple[Chain, int, int]
"""The chunks of a chain from one number up to before another."""


class Path:
    """All chunks of one request, as `parts` of chains in order."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts

    def between(self, first: int, stop: int) -> list[Part]:
        """The parts of the chunks `first` to `stop` - 1."""
        parts: list[Part] = []
        for chain, low, high in self.parts:
            if high > first:
                if low >= stop:
                    break
                parts.append((chain, max(low, first), min(high, stop)))
        return parts


class Chains:
    """The chains of one tier, whose chunks have `chunk_blocks` blocks each, found by the keys of their chunks: those of
    the chunks' last blocks."""

    def __init__(self, chunk_blocks: int) -> None:
        self._size = chunk_blocks
        self._index: dict[int, Chain] = {}  # by the key of its first chunk, where a path enters it

    def path(self, keys: BlockKeys) -> Path:
        """The path of a request whose blocks have `keys`; to be left once it has ended."""
        starts, firsts = self._rows(keys)
        parts: list[Part] = []
        i, start, key = 0, 0, firsts[0]  # the row at hand, and what is not on the path yet
        while (chain := self._index.get(key)) is not None:
            i, stop = chain.along(starts, firsts, i)
            chain.users += 1
            parts.append((chain, start, stop))
            if i == len(starts):
                return Path(parts)
            start, key = stop, firsts[i] + self._size * (stop - starts[i])
        # Whatever comes behind has no chain either, which would keep the one before it.
        own = Chain(parts[-1][0] if parts else None)
        own.firsts, own.keys = [start, *starts[i + 1 :]], [key, *firsts[i + 1 :]]
        own.users = 1
        self._index[key] = own
        parts.append((own, start, MOST_BLOCKS))
        return Path(parts)

    def _rows(self, keys: BlockKeys) -> tuple[list[int], list[int]]:
        """(The numbers of the chunks at which keys begin to count up anew, the keys of these)."""
        numbers, firsts = keys.rows()
        size = self._size
        if size == 1:
            return numbers, firsts
        at: dict[int, int] = {}  # the last row of blocks that has the last block of the chunk, or of a later one
        for i, number in enumerate(numbers):
            at[number // size] = i
        return list(at), [firsts[i] + size * (start + 1) - 1 - numbers[i] for start, i in at.items()]

    def leave(self, path: Path) -> None:
        """The request of `path` has ended."""
        for chain, _, _ in path.parts:
            chain.users -= 1
            if not chain.users:
                self.forget_if_unused(chain)

    def forget_if_unused(self, chain: Chain) -> None:
        """Forgets `chain` if nothing is left of it."""
        last: Chain | None = chain
        while last is not None and not last.users and not last.runs:
            del self._index[last.keys[0]]
            last = last.from_
            if last is not None:
                last.users -= 1

    def runs(self, paths: Iterable[Path]) -> list[ChunkRun]:
        """All runs. AssertionError unless those of each chain are in order and apart, and its users are of `paths`, all
        that were not left, and of chains that begin in it. O(runs)."""
        chains = list(self._index.values())
        users = Counter([chain.from_ for chain in chains] + [part[0] for path in paths for part in path.parts])
        for chain in chains:
            assert chain.runs or chain.users, "a chain of which nothing is left is known"
            assert chain.users == users[chain], "a user of a chain is lost or counted twice"
            for run, next_ in pairwise(chain.runs):
                assert run.stop <= next_.start, "two runs have the same chunk"
        return [run for chain in chains for run in chain.runs]

    def keys(self, part: Part) -> list[int]:
        """The keys of the chunks of `part`, in order."""
        chain, start, stop = part
        keys: list[int] = []
        at = bisect_right(chain.firsts, start) - 1
        while start < stop:
            end = chain.firsts[at + 1] if at + 1 < len(chain.firsts) else stop
            first = chain.keys[at] + self._size * (start - chain.firsts[at])
            count = min(end, stop) - start
            keys += range(first, first + self._size * count, self._size)
            start += count
            at += 1
        return keys


def num_chunks(parts: list[Part]) -> int:
    """The chunks of all `parts`."""
    return sum([stop - start for _, start, stop in parts])


def _start_of(run: ChunkRun) -> int:
    return run.start

"""Runs of cached KV blocks: found by their first key, and free ones in the order in which vLLM reuses them.

1. A run is blocks one after the other in a chain, with as many users each. It is cut where these begin to differ.
2. The runs of a span hold equal tokens and are equally long; the one published first is found. A span is cut with all
   its runs, so that whoever shares the tokens of a chain up to some block has spans that end there.
3. Of each chain the blocks that can be found are the first ones: a block leaves no later than those behind it, since a
   sequence has a copy of each and gives them back together, the last one first.
"""

from __future__ import annotations

from batchsim.kernel.types import Sequence
from batchsim.kv.block_keys import BlockKeys


class Run:
    """The cached `blocks`, of which the first is block `number` of its chain, and the `users` of each.

    `span`: None if they can no longer be found. `behind`: what was cut off its end last. `older`, `newer`: its
    neighbours in the queue of free blocks, while it has no users.
    """

    __slots__ = ("behind", "blocks", "newer", "number", "older", "span", "users")

    def __init__(self, blocks: list[int], number: int = 0, users: int = 0, span: Span | None = None) -> None:
        self.blocks = blocks
        self.number = number
        self.users = users
        self.span = span
        self.behind: Run | None = None
        self.older = self.newer = self


class Span:
    """The `runs` whose blocks have the keys from `key` on, each one more than that before it."""

    __slots__ = ("key", "runs")

    def __init__(self, key: int) -> None:
        self.key = key
        self.runs: list[Run] = []

    def add(self, blocks: list[int], number: int, users: int) -> Run:
        """A new run of `blocks`, published after the others."""
        run = Run(blocks, number, users, self)
        self.runs.append(run)
        return run


class Holding:
    """The block table of one sequence. The first `published` of its blocks are those of `runs` and of what was cut off
    these since.

    A sequence that shares no tokens has at least its first `full` blocks published when it gives them up.
    """

    __slots__ = ("full", "keys", "published", "runs", "sharing", "table")

    def __init__(self, sharing: bool) -> None:
        self.table: list[int] = []
        self.runs: list[Run] = []
        self.published = self.full = 0
        self.sharing = sharing
        self.keys: BlockKeys | None = None

    def note(self, run: Run) -> None:
        """Appends the blocks of `run`, which were found."""
        self.table += run.blocks
        self.runs.append(run)
        self.published = self.full = len(self.table)

    def extend(self, key: int, count: int) -> bool:
        """Whether the next `count` blocks of the table, of which the first has `key`, now belong to the last run."""
        if not self.runs:
            return False
        run = self.runs[-1]
        span, stop = run.span, self.published + count
        if span is None or len(span.runs) > 1 or run.users > 1 or run.number + len(run.blocks) != self.published:
            return False
        if span.key + len(run.blocks) != key:
            return False
        run.blocks += self.table[self.published : stop]
        self.published = stop
        return True

    def published_runs(self) -> list[Run]:
        """The runs of the published blocks, in the order of the table."""
        runs: list[Run] = []
        at = 0
        for run in self.runs:
            while at < run.number:
                at = self._append_behind(runs, at)
            runs.append(run)
            at += len(run.blocks)
        while at < self.published:
            at = self._append_behind(runs, at)
        return runs

    def _append_behind(self, runs: list[Run], at: int) -> int:
        behind = runs[-1].behind
        assert behind is not None and behind.number == at, "a run that was cut has lost its end"
        runs.append(behind)
        return at + len(behind.blocks)


class Search:
    """The runs that the last lookup hit, and whether a walk would hit the same again."""

    __slots__ = (
        "counted",
        "counts",
        "echoes",
        "hits",
        "keys",
        "limit",
        "missing",
        "num_hits",
        "seq",
        "settled",
        "unused",
    )

    def __init__(self, seq: Sequence, keys: BlockKeys, limit: int) -> None:
        self.seq = seq
        self.keys = keys
        self.limit = limit  # blocks that may be hit
        self.hits: list[Run] = []
        self.counts: list[int] = []  # blocks of each that were hit, the first ones
        self.num_hits = 0
        self.missing: int | None = None  # the key at which the walk stopped
        self.settled = False  # whether a walk would find the same
        self.counted: tuple[int, int] | None = None  # moves, hits: when `unused` was counted, and of how many
        self.unused = 0
        tokens = seq.request.tokens
        self.echoes = tokens is not None and any(stream % 2 for stream, _, _ in tokens.segments)

    def walk(self, spans: dict[int, Span]) -> None:
        """Looks up runs of blocks up to the first block missing or the limit."""
        hits: list[Run] = []
        counts: list[int] = []
        number, missing, keys, limit = 0, None, self.keys, self.limit
        while number < limit:
            key, length = keys.run(number, limit)
            span = spans.get(key)
            if span is None:
                missing = key
                break
            run = span.runs[0]
            count = min(len(run.blocks), length)
            hits.append(run)
            counts.append(count)
            number += count
        self.hits, self.counts, self.num_hits, self.missing = hits, counts, number, missing
        self.counted = None
        self.settled = True


class FreeRuns:
    """Free blocks in order of reuse: a stack of those never published, then runs, oldest first, each from its end."""

    __slots__ = ("_ends", "_never")

    def __init__(self, num_blocks: int) -> None:
        self._never = list(range(num_blocks - 1, -1, -1))  # taken from the end
        self._ends = Run([])  # newer than the newest, older than the oldest

    def put_first(self, blocks: list[int]) -> None:
        """Puts blocks never published at the head, so that the last of `blocks` is the next one taken."""
        self._never += blocks

    def put_last(self, run: Run) -> None:
        """Puts `run` at the tail."""
        self.put_before(self._ends, run)

    def put_before(self, newer: Run, run: Run) -> None:
        """Puts `run` between `newer` and what is older."""
        older = newer.older
        run.older, run.newer = older, newer
        older.newer = newer.older = run

    def remove(self, run: Run) -> None:
        """Takes `run` out of its place."""
        older, newer = run.older, run.newer
        older.newer, newer.older = newer, older

    def take_never(self, count: int) -> list[int]:
        """Takes up to `count` blocks that were never published."""
        never = self._never
        at = max(len(never) - count, 0)
        taken = never[at:]
        taken.reverse()
        del never[at:]
        return taken

    def oldest(self) -> Run:
        """The run whose end is reused next. There must be one."""
        run = self._ends.newer
        assert run is not self._ends, "no free block is left"
        return run

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        runs: list[Run] = []
        run = self._ends.newer
        while run is not self._ends:
            runs.append(run)
            run = run.newer
        return runs

    def blocks(self) -> list[int]:
        """All free blocks, in order of reuse."""
        return [*reversed(self._never), *(block for run in self.runs() for block in reversed(run.blocks))]

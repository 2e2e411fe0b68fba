"""Runs of KV blocks that can be found again, the blocks that a sequence holds, and free runs in order of reuse.

1. A run is blocks one after the other in a chain, with as many users each. It is cut where these begin to differ.
2. The runs of a span hold equal tokens and are equally long; the one published first is found. A span is cut with all
   its runs, so that whoever shares the tokens of a chain up to some block has spans that end there.
3. Of each chain the blocks that can be found are the first ones: a block leaves no later than those behind it, since a
   sequence has a copy of each and gives them back together, the last one first.
4. Blocks are counted. Where their ids are kept, lists of these are moved along; elsewhere all such lists are empty.
"""

from __future__ import annotations

from collections.abc import Iterator

from batchsim.kv.block_keys import BlockKeys


class Run:
    """`length` blocks, with `ids`, of which the first is block `number` of its chain, and the `users` of each.

    `span`: None if they can no longer be found. `behind`: what was cut off its end last. `older`, `newer`: its
    neighbours in the queue of free blocks, while it has no users.
    """

    __slots__ = ("behind", "ids", "length", "newer", "number", "older", "span", "users")

    def __init__(self, length: int, ids: list[int], number: int = 0, users: int = 0, span: Span | None = None) -> None:
        self.length = length
        self.ids = ids
        self.number = number
        self.users = users
        self.span = span
        self.behind: Run | None = None
        self.older = self.newer = self

    def shorten(self, count: int) -> list[int]:
        """Takes off the last `count` blocks and returns their ids, the last one first."""
        ids = self.ids[: -count - 1 : -1]
        del self.ids[-count:]
        self.length -= count
        return ids

    def cut(self, at: int, span: Span) -> Run:
        """Takes off all but the first `at` blocks, and adds them to `span` as a run."""
        rest = span.add(self.length - at, self.ids[at:], self.number + at, self.users)
        rest.behind, self.behind = self.behind, rest
        del self.ids[at:]
        self.length = at
        return rest


class Span:
    """The `runs` whose blocks have the keys from `key` on, each one more than that before it."""

    __slots__ = ("key", "runs")

    def __init__(self, key: int) -> None:
        self.key = key
        self.runs: list[Run] = []

    @property
    def length(self) -> int:
        """The blocks of each run."""
        return self.runs[0].length

    def add(self, length: int, ids: list[int], number: int, users: int) -> Run:
        """A new run, published after the others."""
        run = Run(length, ids, number, users, self)
        self.runs.append(run)
        return run


class Holding:
    """What one sequence holds. `table`: the ids of its blocks. The first `published` of them are those of `runs` and of
    what was cut off these since. `sharing`: whether its tokens can be those of others.

    A sequence that shares no tokens has at least its first `full` blocks published when it gives them up.
    """

    __slots__ = ("full", "keys", "published", "runs", "sharing", "table")

    def __init__(self, sharing: bool) -> None:
        self.table: list[int] = []
        self.runs: list[Run] = []
        self.published = self.full = 0
        self.sharing = sharing
        self.keys: BlockKeys | None = None

    def append(self, run: Run) -> None:
        """Appends the published blocks of `run`."""
        self.runs.append(run)
        self.published += run.length

    def extend(self, key: int, count: int) -> bool:
        """Whether the next `count` blocks, of which the first has `key`, now belong to the last run."""
        if not self.runs:
            return False
        run, at = self.runs[-1], self.published
        span = run.span
        if span is None or len(span.runs) > 1 or run.users > 1 or run.number + run.length != at:
            return False
        if span.key + run.length != key:
            return False
        run.length += count
        run.ids += self.table[at : at + count]
        self.published += count
        return True

    def published_runs(self) -> list[Run]:
        """The runs of the published blocks, in the order of the sequence's tokens."""
        runs: list[Run] = []
        at = 0
        for run in self.runs:
            while at < run.number:
                at = self._append_behind(runs, at)
            runs.append(run)
            at += run.length
        while at < self.published:
            at = self._append_behind(runs, at)
        return runs

    def _append_behind(self, runs: list[Run], at: int) -> int:
        behind = runs[-1].behind
        assert behind is not None and behind.number == at, "a run that was cut has lost its end"
        runs.append(behind)
        return at + behind.length


class FreeRuns:
    """Free runs in order of reuse: the oldest first, each from its end."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends = Run(0, [])  # newer than the newest, older than the oldest

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

    def oldest(self) -> Run:
        """The run whose end is reused next. There must be one."""
        run = self._ends.newer
        assert run is not self._ends, "no free block is left"
        return run

    def __iter__(self) -> Iterator[Run]:
        """All runs, oldest first."""
        run = self._ends.newer
        while run is not self._ends:
            yield run
            run = run.newer

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        return list(self)

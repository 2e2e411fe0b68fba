"""The KV blocks of one pool: the free ones in order of reuse, and an index of published ones by their keys.

A block is in one of four places: free and unpublished; in a free run; in a run with users; held by one sequence alone
and unpublished. Finding, sharing, taking and giving back cost a step for each run, not for each block.
"""

from __future__ import annotations

from itertools import pairwise

from batchsim.kv.block_keys import BlockKeys
from batchsim.kv.cached_runs import FreeRuns, Holding, Run, Span
from batchsim.kv.search import Search

Change = tuple[BlockKeys | None, int, int, int]
"""Blocks that were published: their keys, the number of the first, one behind the last, 0. Or, with None, some that can
be found no longer: the key of the first, how many, and how many others there still are of each."""


class BlockPool:
    """`num_blocks` blocks, at first all free. `spans`: the index, by the first key of each span. `search`: the last
    lookup in it, which hears of every change. `log`: the changes of the index, in order, where they are kept.

    Free blocks are reused in this order: the unpublished ones, the last one given back first; then those of free runs.
    """

    __slots__ = (
        "_free", "_num_unpublished", "_unpublished", "has_ids", "log", "num_blocks", "num_free", "search", "spans",
    )  # fmt: skip

    def __init__(self, num_blocks: int, *, ids: bool) -> None:
        self.num_blocks = self.num_free = self._num_unpublished = num_blocks
        self._unpublished = list(range(num_blocks - 1, -1, -1)) if ids else []  # their ids, taken from the end
        self._free = FreeRuns()
        self.spans: dict[int, Span] = {}
        self.search: Search | None = None
        self.has_ids = ids
        self.log: list[Change] | None = None

    def take(self, count: int) -> list[int]:
        """Takes the next `count` free blocks, which can be found no longer, and returns their ids, if these are kept.
        There must be as many."""
        self.num_free -= count
        lacking = count - self._num_unpublished
        self._num_unpublished = max(-lacking, 0)
        ids: list[int] = []
        if self.has_ids:
            ids = self._unpublished[self._num_unpublished :]
            ids.reverse()
            del self._unpublished[self._num_unpublished :]
        while lacking > 0:
            run = self._free.oldest()
            span = run.span
            if span is not None:
                if lacking < run.length and len(span.runs) > 1:
                    self._cut(span, run.length - lacking)
                    continue  # with what was cut off
                if self.search is not None:
                    self.search.changed(run)
            part = min(lacking, run.length)
            if span is not None and self.log is not None:
                self.log.append((None, span.key + run.length - part, part, len(span.runs) - 1))
            ids += run.shorten(part)
            lacking -= part
            if not run.length:
                self._drop(run)
        return ids

    def spares_hits(self, count: int) -> bool:
        """Whether none of the next `count` free blocks, or as many as there are, is of a run that the last lookup
        hit."""
        lacking, search = count - self._num_unpublished, self.search
        if lacking <= 0 or search is None:
            return True
        for run in self._free:
            if search.has_hit(run):
                return False
            lacking -= run.length
            if lacking <= 0:
                break
        return True

    def publish(self, holding: Holding, keys: BlockKeys, full: int) -> None:
        """Lets the first `full` blocks of `holding` be found."""
        spans, search = self.spans, self.search
        if self.log is not None and holding.published < full:
            self.log.append((keys, holding.published, full, 0))
        while (number := holding.published) < full:
            key, count = keys.run(number, full)
            if search is not None:
                search.published(key, count)
            span = spans.get(key)
            if span is not None:
                if span.length > count:
                    self._cut(span, count)
                count = span.length
            elif holding.extend(key, count):
                continue
            else:
                span = spans[key] = Span(key)
            holding.append(span.add(count, holding.table[number : number + count], number, 1))

    def share(self, holding: Holding, parts: list[tuple[Run, int]]) -> None:
        """Gives `holding`, which is empty, the first blocks of runs that were hit, of each as many as it says."""
        for run, count in parts:
            if count < run.length:
                assert run.span is not None, "a run was hit that cannot be found"
                self._cut(run.span, count)
            if not run.users:
                self._free.remove(run)
                self.num_free -= run.length
            run.users += 1
            holding.append(run)
            holding.table += run.ids

    def give_back(self, holding: Holding, num_blocks: int, full: int) -> None:
        """Takes back the `num_blocks` blocks of `holding`. Those behind the first `full` are reused first."""
        table, published = holding.table, holding.published
        self.num_free += num_blocks - full
        self._num_unpublished += num_blocks - full
        self._unpublished += table[full:]
        if not full:
            return
        runs = holding.published_runs()
        if full > published:
            runs.append(Run(full - published, table[published:full], users=1))
        for run in reversed(runs):
            run.users -= 1
            if not run.users:
                self._free.put_last(run)
                self.num_free += run.length
        if self.search is not None:
            self.search.given_back()

    def _cut(self, span: Span, at: int) -> None:
        """Cuts the runs of `span` behind their first `at` blocks."""
        rest = self.spans[span.key + at] = Span(span.key + at)
        if self.search is not None:
            self.search.changed(span.runs[0])
        for run in span.runs:
            behind = run.cut(at, rest)
            if not run.users:
                self._free.put_before(run, behind)

    def _drop(self, run: Run) -> None:
        """Takes a free run without blocks out of the queue and the index."""
        self._free.remove(run)
        span = run.span
        if span is not None:
            span.runs.remove(run)
            if not span.runs:
                del self.spans[span.key]

    def free_ids(self) -> list[int]:
        """The ids of all free blocks, in order of reuse."""
        return [*reversed(self._unpublished), *(id_ for run in self._free.runs() for id_ in reversed(run.ids))]

    def check(self, users: dict[Run, int], alone: list[int]) -> None:
        """AssertionError unless runs, index and queue agree, where `users` hold runs and the blocks `alone`, if ids are
        kept, are held unpublished. O(num_blocks)."""
        users = dict.fromkeys(self._free.runs(), 0) | users
        num_free = self._num_unpublished + sum([run.length for run in users if not run.users])
        assert num_free == self.num_free, f"{num_free} blocks in the queue, num_free {self.num_free}"
        assert all(run.users == count for run, count in users.items()), "wrong counts of users"
        cached = {run: span for span in self.spans.values() for run in span.runs}
        assert cached == {run: run.span for run in users if run.span is not None}, "spans and runs differ"
        for key, span in self.spans.items():
            assert span.key == key, "a span under another key"
            assert len({run.length for run in span.runs}) == 1 and span.length, "runs of a span differ"
        for span, next_ in pairwise(sorted(self.spans.values(), key=lambda span: span.key)):
            assert span.key + span.length <= next_.key, "two spans with the same key"
        if self.has_ids:
            ids = [*self.free_ids(), *alone, *(id_ for run in users if run.users for id_ in run.ids)]
            assert sorted(ids) == list(range(self.num_blocks)), "a block is lost or in two places"
            assert all(len(run.ids) == run.length for run in users), "a run without an id for each block"

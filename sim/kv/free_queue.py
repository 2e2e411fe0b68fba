"""The order in which free KV blocks are reused, some of which may be found again by their contents meanwhile."""

from __future__ import annotations


class FreeQueue:
    """Ids of free blocks in order of reuse: those never used, then those given back, oldest first.

    Blocks enter at the tail and leave at the head or, when found again, anywhere. Entries of blocks that left are
    dropped late, so that runs of blocks move as slices.
    """

    __slots__ = ("_first", "_gone", "_head", "_last", "_num_gone")

    def __init__(self, num_blocks: int) -> None:
        self._first = list(range(num_blocks - 1, -1, -1))  # taken from the end
        self._last: list[int] = []  # taken from `_head` on
        self._head = 0
        self._gone: dict[int, int] = {}  # block -> how many of its entries in `_last` are void, the foremost ones
        self._num_gone = 0

    def put_last(self, blocks: list[int]) -> None:
        """Puts `blocks` at the tail, in this order."""
        self._last += blocks

    def remove(self, block: int) -> None:
        """Takes a block that was given back out of its place, since it was found again. Amortised O(1)."""
        self._gone[block] = self._gone.get(block, 0) + 1
        self._num_gone += 1
        if self._num_gone > 1000 + len(self._last) // 2:
            self._last, self._head = self._drop_void(self._last[self._head :]), 0

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """Takes `count` blocks, which must be there, from the head: (those never used, those given back)."""
        first = self._first
        if not first and not self._gone:
            head, self._head = self._head, self._head + count
            taken = self._last[head : head + count]
            self._forget_taken()
            return [], taken
        at = max(len(first) - count, 0)
        unused = first[at:]
        unused.reverse()
        del first[at:]
        returned: list[int] = []
        while (lacking := count - len(unused) - len(returned)) > 0:
            entries = self._last[self._head : self._head + lacking]
            self._head += lacking
            returned += self._drop_void(entries) if self._gone else entries
        self._forget_taken()
        return unused, returned

    def next(self, count: int) -> list[int]:
        """The next `count` blocks that `take` would return, or all if there are fewer. O(count) and voids between."""
        blocks = self._first[: -count - 1 : -1]
        at, skipped = self._head, dict[int, int]()
        while len(blocks) < count and at < len(self._last):
            block = self._last[at]
            at += 1
            if (times := skipped.get(block, 0)) < self._gone.get(block, 0):
                skipped[block] = times + 1
            else:
                blocks.append(block)
        return blocks

    def _forget_taken(self) -> None:
        if self._head > 1000 and self._head > len(self._last) // 2:
            del self._last[: self._head]
            self._head = 0

    def blocks(self) -> list[int]:
        """All free blocks, in order of reuse."""
        gone, num_gone = dict(self._gone), self._num_gone
        returned = self._drop_void(self._last[self._head :])
        self._gone, self._num_gone = gone, num_gone
        return [*reversed(self._first), *returned]

    def _drop_void(self, entries: list[int]) -> list[int]:
        gone = self._gone
        kept: list[int] = []
        for block in entries:
            void = gone.get(block)
            if void is None:
                kept.append(block)
                continue
            self._num_gone -= 1
            if void == 1:
                del gone[block]
            else:
                gone[block] = void - 1
        return kept

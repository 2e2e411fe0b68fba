"""The block table of one sequence in one group of layers, in which None stands for a block that is not there any more.

Source: vllm/v1/core/single_type_kv_cache_manager.py of the 0.33.0 wheel.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.kv_groups import KvGroup
from batchsim.kv.group_pool import Block, GroupPool


@dataclass(frozen=True, slots=True)
class Step:
    """What a step computes of a sequence: tokens `start` to `end` - 1; `room`: the tokens for which it takes blocks,
    drafts among them; `prefill_end`: the tokens with which its prompt, or what is computed anew, is done."""

    start: int
    end: int
    room: int
    prefill_end: int


class Table:
    """The table of a group of full attention. `looked`: the number of blocks that were published, or passed over."""

    __slots__ = ("_first", "blocks", "group", "looked", "size")

    def __init__(self, group: KvGroup) -> None:
        self.group, self.size = group, group.block_size
        self.blocks: list[Block | None] = []
        self.looked = 0
        self._first = 0  # place before which there are no blocks

    def skipped(self, processed: int) -> int:
        """Places from the front whose blocks are not needed once `processed` tokens are there."""
        return 0

    def adopt(self, hits: list[Block | None], tokens: int) -> list[Block]:
        """Begins with `hits`, the blocks that were found of `tokens` tokens; returns the blocks that it needs."""
        self._first = gone = self.skipped(tokens)
        self.blocks = [*[None] * gone, *hits[gone:]]
        self.looked = len(self.blocks)
        return [block for block in hits[gone:] if block is not None]

    def let_go(self, processed: int) -> list[Block]:
        """Removes blocks that are not needed any more; returns them, the last one first."""
        gone = min(self.skipped(processed), len(self.blocks))
        blocks = [block for block in self.blocks[self._first : gone][::-1] if block is not None]
        if gone > self._first:
            self.blocks[self._first : gone] = [None] * (gone - self._first)
            self._first = gone
        return blocks

    def lacks(self, step: Step) -> int:
        """Blocks that `step` takes."""
        return max(-(-step.room // self.size) - len(self.blocks), 0)

    def lacks_at_most(self, step: Step) -> int:
        """As `lacks`, before blocks were let go."""
        return self.lacks(step)

    def lacks_first(self, step: Step, hits: list[Block | None], most: int | None = None) -> int:
        """Blocks that a first step takes besides `hits`, the free ones among which count: they are taken, too. No more
        than `most` in all."""
        gone, places = self.skipped(step.start), -(-step.room // self.size)
        if most is not None:
            places = min(places, most)
        free = sum(block is not None and not block.users for block in hits[gone:])
        return max(places - max(gone, len(hits)), 0) + free

    def grow(self, step: Step, pool: GroupPool) -> None:
        """Takes from `pool` what is lacking."""
        if (count := self.lacks(step)) > 0:
            self.blocks += pool.take(count)

    def tail(self) -> int | None:
        """How many blocks up to a place are needed to go on from there; None: all."""
        return None


class WindowTable(Table):
    """The table of a group of windows."""

    __slots__ = ("_window",)

    def __init__(self, group: KvGroup) -> None:
        super().__init__(group)
        assert group.window is not None, "a group of windows has one"
        self._window = group.window

    def skipped(self, processed: int) -> int:
        return max(processed - self._window + 1, 0) // self.size

    def tail(self) -> int | None:
        return -(-(self._window - 1) // self.size)


class StateTable(Table):
    """The table of a group of aligned states: the running one, and one for each draft token, are at its end."""

    __slots__ = ("_begun",)

    def __init__(self, group: KvGroup) -> None:
        super().__init__(group)
        self._begun = False  # whether its last blocks are the running state and those of draft tokens

    def skipped(self, processed: int) -> int:
        return max(processed - 1, 0) // self.size

    def lacks(self, step: Step) -> int:
        new = -(-step.end // self.size) + self.group.drafts - len(self.blocks)
        return max(min(new, self._most_new(step)), 0)

    def lacks_at_most(self, step: Step) -> int:
        new = -(-step.end // self.size) + self.group.drafts - len(self.blocks)
        return max(min(new, 2 + (0 if self._begun else self.group.drafts)), 0)

    def lacks_first(self, step: Step, hits: list[Block | None], most: int | None = None) -> int:
        new = -(-step.end // self.size) + self.group.drafts - len(hits)
        free = sum(block is not None and not block.users for block in hits)
        return max(min(new, self._most_new(step)), 0) + free

    def grow(self, step: Step, pool: GroupPool) -> None:
        blocks, drafts = self.blocks, self.group.drafts
        places, before, begun = -(-step.end // self.size) + drafts, len(self.blocks), self._begun
        keeps = self._keeps(step)
        self._begun = True
        if places <= before and not keeps:
            return
        last = places - drafts - 1 - keeps  # places before this one hold no state
        blocks += [None] * (last - before)
        for place in range(max(before - drafts, 0), min(before, last)) if begun else ():
            blocks.append(blocks[place])
            blocks[place] = None
        if (count := places - len(blocks)) > 0:
            blocks += pool.take(count)

    def tail(self) -> int | None:
        return 1

    def _most_new(self, step: Step) -> int:
        return 1 + self._keeps(step) + (0 if self._begun else self.group.drafts)

    def _keeps(self, step: Step) -> bool:
        """Whether `step` keeps, besides its last state, the one at the last end of a block before."""
        kept = (step.end - 1) // self.size * self.size
        if step.end < step.prefill_end or not keeps_within(self.group, step.start, step.end, kept):
            return False
        blocks, place = self.blocks, -(-step.end // self.size) - 2
        if place >= len(blocks) or blocks[place] is None:
            return True
        return self._begun and place >= len(blocks) - self.group.drafts


def keeps_within(group: KvGroup, start: int, end: int, kept: int) -> bool:
    """Whether an engine can keep the state after `kept` tokens, an end of a block, in a step of `start` to `end`."""
    size, grid = group.block_size, group.checkpoint
    if grid is None or start % size or not start + size <= kept < end:
        return False
    return -(-end // size) - 2 > (start - 1) // size and (kept - start) % grid == 0


def new_table(group: KvGroup) -> Table:
    """An empty table of a group whose states, if it has any, are aligned."""
    kinds = {"full": Table, "window": WindowTable, "state": StateTable}
    return kinds[group.kind](group)

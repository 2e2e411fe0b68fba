"""KV blocks of groups of layers that are found again by their contents, as vLLM 0.33.0 does it.

1. A full block of known tokens has a key in its group, of its tokens and all before them, if a prompt that begins like
   this one could go on from it: of full attention each block; of windows and states the blocks at two places alone, the
   last end of blocks of all groups before the prompt's last token, and its junction.
2. The junction of a prompt is the length that one kind of group found of it beyond what all kinds found.
3. What is found of a sequence ends where blocks of all groups end.
4. A state that a step keeps is found from the next step on.
Source: vllm/v1/core/kv_cache_coordinator.py, single_type_kv_cache_manager.py, kv_cache_manager.py of the 0.33.0 wheel,
with its `prefix_cache_retention_interval` of 0.
"""

from __future__ import annotations

from batchsim.base.kv_groups import KvLayout
from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.types import Sequence
from batchsim.kv.block_keys import BlockKeys
from batchsim.kv.group_hits import GroupHits, Hits
from batchsim.kv.group_pool import Block, GroupPool
from batchsim.kv.group_tables import Step, Table, new_table
from batchsim.kv.grouped import GroupedBlocks, most_blocks


class _Holding:
    """What one sequence holds: a table for each group, the `room` in tokens that they have, its junction."""

    __slots__ = ("junction", "keys", "room", "tables")

    def __init__(self, layout: KvLayout, keys: dict[int, BlockKeys], junction: int) -> None:
        self.tables = [new_table(group) for group in layout.groups]
        self.keys, self.junction, self.room = keys, junction, 0


class _Search:
    """The last lookup: of what, at which version of the pool, and what was found."""

    __slots__ = ("hits", "keys", "num_tokens", "seq", "version")

    def __init__(self, seq: Sequence, num_tokens: int, version: int, keys: dict[int, BlockKeys], hits: Hits) -> None:
        self.seq, self.num_tokens, self.version, self.keys, self.hits = seq, num_tokens, version, keys, hits


class GroupedHashKV(GroupedBlocks):
    """A `KVBlockManager` of groups, with what `BlockHashKV` offers an engine beyond that, and `begin_step`.

    Groups of states are aligned, and then blocks of all groups are of one size. `unknown` and `lookahead`: as there.
    """

    __slots__ = ("_align", "_held", "_hits", "_kept_now", "_most", "_pool", "_search", "lookahead", "unknown")

    is_shared = True

    def __init__(
        self, layout: KvLayout, num_blocks: int, max_model_len: int, in_flight_tokens: int, batches: int = 1
    ) -> None:
        super().__init__(layout, num_blocks, max_model_len, in_flight_tokens, batches)
        self._pool = GroupPool(num_blocks, len(layout.groups))
        self._hits = GroupHits(layout, self._pool)
        self._align = layout.alignment
        most = (most_blocks(group, max_model_len, in_flight_tokens, max_model_len) for group in layout.groups)
        self._most = [each if group.window else None for each, group in zip(most, layout.groups, strict=True)]
        self._held: dict[Sequence, _Holding] = {}
        self._search: _Search | None = None
        self._kept_now: set[Block] = set()  # states that this step keeps
        self.unknown = self.lookahead = 0

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def cached_blocks(self) -> int:
        """Blocks that have a key, in use or not. O(blocks)."""
        return self._pool.num_found

    def needs_at_most(self, num_tokens: int) -> int:
        # While chunks are in flight, the states at their ends are kept too.
        states = sum(group.kind == "state" for group in self.layout.groups)
        return super().needs_at_most(num_tokens) + (self.batches - 1) * states

    def held(self, seq: Sequence) -> int:
        holding = self._held.get(seq)
        return 0 if holding is None else sum(block is not None for each in holding.tables for block in each.blocks)

    def room(self, seq: Sequence) -> int:
        holding = self._held.get(seq)
        return 0 if holding is None else holding.room

    def junction(self, seq: Sequence) -> int:
        """The tokens of `seq` up to which one kind of group found it when it was last looked up, and all did not; 0
        where there are none."""
        holding, search = self._held.get(seq), self._search
        if holding is not None:
            return holding.junction
        return search.hits.junction if search is not None and search.seq is seq else 0

    def begin_step(self) -> None:
        """Takes note that a step is about to be scheduled: what the one before kept can be found."""
        self._kept_now.clear()

    # ---- admission

    def lookup(self, seq: Sequence) -> int:
        """How many of the known tokens of `seq` are found, never all of them. Changes nothing that could be seen."""
        search, pool = self._search, self._pool
        if search is not None and search.seq is seq:
            if (search.num_tokens, search.version) == (seq.num_tokens, pool.version):
                return search.hits.tokens
            keys = search.keys
        else:
            keys = {}
        hits = self._hits.find(
            max(seq.num_tokens - max(self.lookahead, 1), 0),
            lambda size, count: self._keys(keys, seq, size).up_to(count),
        )
        self._search = _Search(seq, seq.num_tokens, pool.version, keys, hits)
        return hits.tokens

    def admit(
        self,
        seq: Sequence,
        num_tokens: int,
        hit_tokens: int,
        spare_blocks: int = 0,
        must_fit_tokens: int = 0,
        ahead: int = 0,
    ) -> bool:
        """As that of `BlockHashKV`; False, too, if what was found ends in a state that this very step keeps."""
        if seq in self._held or self.lookup(seq) != hit_tokens:
            raise ValueError(f"cannot admit with {hit_tokens} cached tokens: {seq!r}")
        search, groups = self._search, self.layout.groups
        assert search is not None, "it was looked up just now"
        rows = search.hits.rows
        if any(row and row[-1] in self._kept_now for row, group in zip(rows, groups, strict=True) if group.states):
            return False
        done = max(seq.request.prompt_tokens, seq.num_tokens - 1)
        first = Step(hit_tokens, num_tokens - ahead, num_tokens, done)
        whole = Step(hit_tokens, must_fit_tokens, must_fit_tokens, done)
        holding = _Holding(self.layout, search.keys, search.hits.junction)
        tables = list(zip(holding.tables, rows, self._most, strict=True))
        lacking = sum(table.lacks_first(first, row) for table, row, _ in tables)
        if must_fit_tokens:
            lacking = max(lacking, sum(table.lacks_first(whole, row, most) for table, row, most in tables))
        if lacking + spare_blocks > self.num_free:
            return False
        self._held[seq] = holding
        for table, row, _ in tables:
            for block in table.adopt(row, hit_tokens) if hit_tokens else ():
                self._pool.share(block)
        self._take(seq, holding, first)
        self._publish(holding, seq, first.end, seq.num_tokens)
        self._search = None
        return True

    def settle(self, seq: Sequence) -> None:
        """Notes the blocks of `seq`, which is about to leave its group and keeps them; nothing is published."""
        seq.num_blocks = self.held(seq)

    # ---- the running

    def allocate(self, seq: Sequence, num_tokens: int, unknown: int = 0, ahead: int = 0) -> bool:
        """As that of `BlockHashKV`, but what slid out of windows goes back even where blocks are short."""
        holding = self._held.get(seq)
        if holding is None:
            return self.admit(seq, num_tokens, 0)
        if seq.group is not None and num_tokens <= seq.num_computed_tokens:
            self.settle(seq)
            return True
        self._fresh[seq] = None
        self._let_go(seq, holding)
        step = self._step(seq, num_tokens - ahead, num_tokens, seq.num_tokens - unknown)
        has_room = sum(table.lacks(step) for table in holding.tables) <= self.num_free
        if has_room:
            self._take(seq, holding, step)
            self._publish(holding, seq, step.end, seq.num_tokens - unknown)
        seq.num_blocks = self.held(seq)
        return has_room

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """As that of `BlockHashKV`."""
        self._publish(self._held[seq], seq, num_tokens, seq.num_tokens)

    def publish_group(self, group: DraftGroup, more: int) -> None:
        """As that of `BlockHashKV`; `more` is 0: what a step computes is published as it takes its blocks."""
        for seq, num_tokens in group.filled(min(more, 1 - self.lookahead)):
            self._publish(self._held[seq], seq, num_tokens, self._known(seq))

    def _turns(self, lag: int) -> set[int]:
        turns = {*super()._turns(lag), (self.unknown - 1) % self.block_size}
        turns.add((self.unknown + self.lookahead - 1) % self.block_size)
        if any(group.states for group in self.layout.groups):
            turns.add((1 + lag) % self.block_size)
        return turns

    def _known(self, seq: Sequence) -> int:
        """How many tokens of `seq` the engine knows: where it schedules ahead fewer than it counts."""
        group = seq.group
        if isinstance(group, DraftGroup):
            return seq.num_tokens - int(group.unknown[seq.phase])
        return seq.num_tokens - (self.unknown if group is not None else 0)

    def _step(self, seq: Sequence, end: int, room: int, known: int) -> Step:
        return Step(seq.num_computed_tokens, end, room, max(seq.request.prompt_tokens, known - 1))

    def _lacks_at_most(self, seq: Sequence, num_tokens: int, room: int) -> int:
        step = self._step(seq, num_tokens, room, self._known(seq))
        return sum(table.lacks_at_most(step) for table in self._held[seq].tables)

    def _grow(self, seq: Sequence, num_tokens: int, room: int) -> None:
        holding, known = self._held[seq], self._known(seq)
        self._let_go(seq, holding)
        self._take(seq, holding, self._step(seq, num_tokens, room, known))
        self._publish(holding, seq, num_tokens, known)

    def _let_go(self, seq: Sequence, holding: _Holding) -> None:
        processed = self._processed(seq)
        for table in holding.tables:
            self._pool.give_back(table.let_go(processed))

    def _take(self, seq: Sequence, holding: _Holding, step: Step) -> None:
        for table in holding.tables:
            table.grow(step, self._pool)
        holding.room = max(holding.room, step.room)
        self._fresh[seq] = None

    # ---- giving back

    def free(self, seq: Sequence, unknown: int = 0) -> None:
        """Gives back the blocks of `seq`, which can be found where they have a key. Before it leaves the group."""
        if self._pinned and self.is_kept(seq):
            return
        holding = self._held.pop(seq, None)
        self._fresh.pop(seq, None)
        seq.num_blocks = 0
        for table in () if holding is None else holding.tables:
            self._pool.give_back([block for block in reversed(table.blocks) if block is not None])

    def end(self, seq: Sequence, unknown: int = 0) -> None:
        """As `free`."""
        self.free(seq)

    # ---- the index

    def _keys(self, keys: dict[int, BlockKeys], seq: Sequence, size: int) -> BlockKeys:
        if size not in keys:
            keys[size] = BlockKeys(seq.request, size, self.lookahead)
        return keys[size]

    def _publish(self, holding: _Holding, seq: Sequence, num_tokens: int, known: int) -> None:
        """Lets blocks of the first `num_tokens` tokens of `seq`, of which `known` are known, be found."""
        num_tokens = min(num_tokens, known) // self._align * self._align
        for number, table in enumerate(holding.tables):
            full = min(num_tokens, known - self.lookahead) // table.size
            if full <= table.looked:
                continue
            keys = self._keys(holding.keys, seq, table.size)
            for first, stop in self._served(table, seq, holding.junction, full):
                place = first
                while place < stop:
                    key, count = keys.run(place, stop)
                    for offset, block in enumerate(table.blocks[place : place + count]):
                        if block is not None and block.key is None:
                            self._pool.publish(block, number, key + offset)
                            if table.group.states:
                                self._kept_now.add(block)
                    place += count
            table.looked = full

    def _served(self, table: Table, seq: Sequence, junction: int, full: int) -> list[tuple[int, int]]:
        """The places, from the first one not looked at up to `full`, whose blocks may serve another sequence: ranges of
        them, each from its first to the one behind its last."""
        tail = table.tail()
        if tail is None:
            return [(table.looked, full)]
        served = sorted((seq.request.prompt_tokens - 1, junction))
        ends = [tokens // self._align * self._align // table.size for tokens in served]
        return [(max(table.looked, end - tail), min(full, end)) for end in ends]

    def check(self) -> None:
        """AssertionError unless every block is in one place, and users and index agree. O(blocks)."""
        used: dict[Block, int] = {}
        for holding in self._held.values():
            for table in holding.tables:
                for block in table.blocks:
                    if block is not None:
                        used[block] = used.get(block, 0) + 1
        self._pool.check(used)

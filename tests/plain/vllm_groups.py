"""vLLM's KV blocks of several groups of layers written out plainly from its rules: a table of blocks for each group.

Slow, and made only to be compared with. None in a table stands for the null block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm
from typing import Any

from batchsim.base.kv_groups import KvGroup, KvLayout
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.plain.vllm import Call, Naive, NaiveVllm
from tests.plain.vllm_drafts import NaiveDrafts


@dataclass
class Hits:
    """What was found of a request: its tokens, and of each group the blocks up to them."""

    tokens: int
    tables: list[list[int | None]]
    junction: int = 0


@dataclass
class Tables:
    """The blocks of one request by group; how many of each were looked at for their keys; and of its states which
    checkpoint is to be kept within the step: its tokens, and the place of its block."""

    tables: list[list[int | None]]
    looked: list[int]
    begun: set[int] = field(default_factory=set[int])
    checkpoints: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    junction: int = 0


def ceil(tokens: int, size: int) -> int:
    return -(-tokens // size)


class NaiveGroups(NaiveVllm):
    """As NaiveVllm, with the groups of `layout`."""

    def __init__(
        self, config: VllmConfig, num_blocks: int, layout: KvLayout, max_model_len: int, stages: int = 1
    ) -> None:
        super().__init__(config, num_blocks, 1, max_model_len, stages)
        self.caches, self.groups = config.enable_prefix_caching, layout.groups
        self.most_in_flight = config.max_num_batched_tokens * config.traits.loop.over(stages).depth
        self.align = lcm(*(group.block_size for group in self.groups))
        self.held: dict[Naive, Tables] = {}
        self.junctions: dict[Naive, int] = {}
        self.cached_now: set[Any] = set()

    def schedule(self) -> Call:
        self.cached_now = set()
        return super().schedule()

    # ---- what is found

    def start_of(self, hits: Any) -> int:
        return hits.tokens if isinstance(hits, Hits) else 0

    def find(self, r: Naive, kind: KvGroup, members: list[int], place: int) -> list[int] | None:
        """The block of each of `members`, groups that are equal, at `place`; None unless all have one."""
        keys = [self.key_in(r, i, (place + 1) * kind.block_size) for i in members]
        same = [self.index.get(key) for key in keys]
        return [blocks[0] for blocks in same if blocks] if all(same) else None

    def key_in(self, r: Naive, group: int, end: int) -> Any:
        """The key of a block that ends with token `end`: its group and the tokens on which it depends, or None."""
        end += self.hash_ahead
        return (group, tuple(r.tokens[:end])) if end <= len(r.tokens) else None

    def lookup(self, r: Naive) -> Any:
        kinds = sorted(dict.fromkeys(self.groups), key=lambda kind: kind.kind != "full")
        members = {kind: [i for i, group in enumerate(self.groups) if group == kind] for kind in kinds}
        simple = len(kinds) == 2 and kinds[0].kind == "full"
        tables: list[list[int | None]] = [[] for _ in self.groups]
        lengths: dict[KvGroup, int] = {}
        length, longest = len(r.tokens) - 1, 0
        while True:
            now = length
            for kind in kinds:
                if kind.kind == "full" and kind in lengths:
                    now = min(now, lengths[kind])
                    continue
                now, rows = self.hit(r, kind, members[kind], now)
                lengths[kind] = now
                for i, row in zip(members[kind], rows, strict=True):
                    tables[i] = row
                longest = max(longest, now)
            if now >= length:
                break
            length = now
            if simple:
                break
        for kind in kinds:
            if kind.kind == "full":
                for i in members[kind]:
                    del tables[i][ceil(length, kind.block_size) :]
        self.junctions[r] = longest if longest > length else 0
        return Hits(length, tables) if length else []

    def hit(self, r: Naive, kind: KvGroup, members: list[int], most: int) -> tuple[int, list[list[int | None]]]:
        size, align = kind.block_size, self.align
        count = most // size
        if kind.kind == "full":
            rows: list[list[int | None]] = [[] for _ in members]
            for place in range(count):
                same = self.find(r, kind, members, place)
                if same is None:
                    break
                for row, block in zip(rows, same, strict=True):
                    row.append(block)
            length = len(rows[0]) * size // align * align
            return length, [row[: ceil(length, size)] for row in rows]
        if kind.kind == "state":
            for place in reversed(range(count)):
                same = self.find(r, kind, members, place)
                if same is not None and (place + 1) * size % align == 0:
                    return (place + 1) * size, [[*[None] * place, block] for block in same]
            return 0, [[] for _ in members]
        assert kind.window is not None
        need, run = ceil(kind.window - 1, size), 0
        rows = [[None] * count for _ in members]
        for place in reversed(range(count)):
            same = self.find(r, kind, members, place)
            if same is None:
                run = 0
                continue
            if run == 0 and (place + 1) * size % align:
                continue
            for row, block in zip(rows, same, strict=True):
                row[place] = block
            run += 1
            if run >= need:
                return (place + run) * size, [row[: place + run] for row in rows]
        while run * size % align:
            run -= 1
        return run * size, [row[:run] for row in rows]

    # ---- what is taken

    def allocate(self, r: Naive, base: int, n: int, hits: Any, admission: bool) -> bool:
        tables = hits.tables if isinstance(hits, Hits) else [[] for _ in self.groups]
        fresh = r not in self.held
        spare = self.watermark if admission and self.running else 0
        if admission and self.config.scheduler_reserve_full_isl:
            whole = min(len(r.tokens), self.max_model_len)
            if self.needs(r, tables, base, whole, whole, capped=True) + spare > len(self.queue):
                return False
        self.let_go(r, max(base - r.flying, 0))
        room = min(base + n + self.beyond, self.max_model_len)
        if self.needs(r, tables, base, base + n, room, capped=False) + spare > len(self.queue):
            return False
        if fresh:
            self.held[r] = Tables([[] for _ in self.groups], [0] * len(self.groups), junction=self.junctions.pop(r, 0))
            if base:
                self.share(r, tables, base)
        held = self.held[r]
        for i, group in enumerate(self.groups):
            if group.kind == "state":
                self.take_states(held, i, group, base, base + n, self.prefill_end(r))
            else:
                table = held.tables[i]
                table += [self.pop() for _ in range(ceil(room, group.block_size) - len(table))]
        self.publish(r, base + n)
        return True

    def held_of(self, r: Naive) -> int:
        return sum(block is not None for table in self.held[r].tables for block in table)

    @staticmethod
    def prefill_end(r: Naive) -> int:
        return max(r.request.prompt_tokens, len(r.tokens) - 1)

    def share(self, r: Naive, tables: list[list[int | None]], base: int) -> None:
        held = self.held[r]
        for i, group in enumerate(self.groups):
            gone = self.skipped(group, base)
            for block in tables[i][gone:]:
                if block is not None:
                    if self.users[block] == 0:
                        self.queue.remove(block)
                    self.users[block] += 1
            held.tables[i] = [*[None] * gone, *tables[i][gone:]]
            held.looked[i] = len(held.tables[i])

    @staticmethod
    def skipped(group: KvGroup, processed: int) -> int:
        """Blocks from the front that hold nothing that is needed once `processed` tokens are."""
        if group.kind == "window":
            assert group.window is not None
            return max(processed - group.window + 1, 0) // group.block_size
        return max(processed - 1, 0) // group.block_size if group.kind == "state" else 0

    def needs(self, r: Naive, hits: list[list[int | None]], base: int, tokens: int, room: int, capped: bool) -> int:
        total = 0
        held = self.held.get(r)
        for i, group in enumerate(self.groups):
            have = [] if held is None else held.tables[i]
            revived = sum(block is not None and self.users[block] == 0 for block in hits[i])
            if group.kind == "state":
                if hits[i] and self.key[hits[i][-1] or 0] in self.cached_now:
                    return 1 << 40
                if not self.caches:
                    total += 0 if have else 1 + group.drafts
                    continue
                new = ceil(tokens, group.block_size) + group.drafts - len(hits[i]) - len(have)
                more = self.checkpoint(held, i, group, base, tokens, self.prefill_end(r)) > 0
                begun = held is not None and i in held.begun
                total += max(min(new, 1 + more + (0 if begun else group.drafts)), 0) + revived
                continue
            required = ceil(room, group.block_size)
            if capped and group.window is not None:
                reach = min(group.window - 1 + self.most_in_flight, self.max_model_len)
                required = min(required, ceil(reach, group.block_size) + 1)
            if held is not None:
                total += max(required - len(have), 0)
                continue
            gone = self.skipped(group, base)
            total += max(required - max(gone, len(hits[i])), 0)
            total += sum(block is not None and self.users[block] == 0 for block in hits[i][gone:])
        return total

    def checkpoint(self, held: Tables | None, i: int, group: KvGroup, start: int, end: int, prefill_end: int) -> int:
        """The tokens of the state that the step from `start` to `end` keeps besides its last one; 0 if none."""
        size, at = group.block_size, (end - 1) // self.align * self.align
        place = ceil(end, size) - 2
        if group.checkpoint is None or end < prefill_end or not self.exports(group, start, end, at) or place < 0:
            return 0
        table = [] if held is None else held.tables[i]
        begun = held is not None and i in held.begun
        free = place >= len(table) or table[place] is None or (begun and place >= len(table) - group.drafts)
        return at if free else 0

    @staticmethod
    def exports(group: KvGroup, start: int, end: int, at: int) -> bool:
        size, grid = group.block_size, group.checkpoint
        if grid is None or start % size or not (start + size <= at and start < at < end):
            return False
        return ceil(end, size) - 2 > (start - 1) // size and (at - start) % grid == 0

    def take_states(self, held: Tables, i: int, group: KvGroup, start: int, end: int, prefill_end: int) -> None:
        table = held.tables[i]
        if not self.caches:
            table += [self.pop() for _ in range(1 + group.drafts - len(table))]
            return
        size, drafts = group.block_size, group.drafts
        held.checkpoints.pop(i, None)
        at = self.checkpoint(held, i, group, start, end, prefill_end)
        if at:
            held.checkpoints[i] = at, ceil(end, size) - 2
        more = int(at > 0)
        required = ceil(end, size) + drafts
        begun = i in held.begun
        held.begun.add(i)
        if required <= len(table) and not more:
            return
        before, last = len(table), required - drafts - 1
        table += [None] * (last - more - before)
        if begun:
            for place in range(before - drafts, before):
                if place >= last - more:
                    break
                table.append(table[place])
                table[place] = None
        table += [self.pop() for _ in range(required - len(table))]

    # ---- what goes back

    def let_go(self, r: Naive, processed: int) -> None:
        held = self.held.get(r)
        if held is None:
            return
        for i, group in enumerate(self.groups):
            if group.kind == "state" and not self.caches:
                continue
            table = held.tables[i]
            gone = min(self.skipped(group, processed), len(table))
            self.give_back([block for block in reversed(table[:gone]) if block is not None])
            table[:gone] = [None] * gone

    def free(self, r: Naive) -> None:
        held = self.held.pop(r, None)
        for table in [] if held is None else held.tables:
            self.give_back([block for block in reversed(table) if block is not None])

    # ---- what can be found

    def publish(self, r: Naive, tokens: int) -> None:
        held = self.held.get(r)
        if not self.caches or held is None:
            return
        tokens = min(tokens, len(r.tokens)) // self.align * self.align
        for i, group in enumerate(self.groups):
            size = group.block_size
            kept: set[int] | None = None
            if group.kind != "full":
                tail = 1 if group.window is None else ceil(group.window - 1, size)
                ends = [at // self.align * self.align // size for at in (r.request.prompt_tokens - 1, held.junction)]
                kept = {place for end in ends for place in range(end - tail, end)}
            full = min(tokens, len(r.tokens) - self.hash_ahead) // size
            for place in range(held.looked[i], full):
                block = held.tables[i][place]
                if block is None or (kept is not None and place not in kept):
                    continue
                key = self.key_in(r, i, (place + 1) * size)
                assert self.key[block] is None
                self.key[block] = key
                self.index.setdefault(key, []).append(block)
                if group.kind == "state":
                    self.cached_now.add(key)
            held.looked[i] = max(held.looked[i], full)

    # ---- chunks

    def clip(self, r: Naive, start: int, n: int) -> int:
        states = [group for group in self.groups if group.kind == "state"]
        prefill_end = self.prefill_end(r)
        if not states or not self.caches or start >= prefill_end:
            return n
        size, end = states[0].block_size, start + n
        last = (len(r.tokens) - 1) // size * size
        at = (prefill_end - 1) // size * size
        within = end >= prefill_end and all(self.exports(group, start, end, at) for group in states)
        if within:
            last = 0
        if end < prefill_end:
            limit = self.config.step_tokens
            if (threshold := self.config.long_prefill_token_threshold) > 0:
                limit = min(limit, threshold)
            floor = end // size * size
            if floor > start or size <= limit:
                end = floor
        stops = [last]
        if start % size and not within:
            stops.append((start // size + 1) * size)
        held = self.held.get(r)
        junction = self.junctions.get(r, 0) if held is None else held.junction
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        return max(min([stop for stop in stops if start < stop < end], default=end) - start, 0)


class NaiveDraftGroups(NaiveDrafts, NaiveGroups):
    """As NaiveDrafts, with the groups of a layout in the place of the size of a block."""

    def launch(self) -> tuple[Any, ...]:
        self.cached_now = set()
        return super().launch()

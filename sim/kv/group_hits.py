"""How much of a sequence is found in the blocks of several groups of layers.

Each kind of group says up to where it could go on: full attention as far as its blocks are found without a gap, windows
from the right where enough blocks before that place are found, states where one is. `find` begins with the longest
prefix there could be, asks each kind for the longest one within it from which that kind could go on, and repeats this
with the shortest answer until all kinds agree. The prefix ends where blocks of all groups do.
Source: vllm/v1/core/kv_cache_coordinator.py and single_type_kv_cache_manager.py of the 0.33.0 wheel.
"""

from __future__ import annotations

from collections.abc import Callable

from batchsim.base.kv_groups import KvGroup, KvLayout
from batchsim.kv.group_pool import Block, GroupPool

Row = list[Block | None]
Keys = Callable[[int, int], list[int]]
"""The keys of the first blocks of a sequence: of this size, and as many of them."""


class Hits:
    """What was found: `tokens`, and of each group the blocks up to them. `junction`: the tokens up to which one kind
    of group found more; 0 where none did."""

    __slots__ = ("junction", "rows", "tokens")

    def __init__(self, tokens: int, rows: list[Row], junction: int) -> None:
        self.tokens, self.rows, self.junction = tokens, rows, junction


class GroupHits:
    """Looks up sequences in `pool` by the groups of `layout`."""

    def __init__(self, layout: KvLayout, pool: GroupPool) -> None:
        self._pool, self._num_groups, self._align = pool, len(layout.groups), layout.alignment
        numbers: dict[KvGroup, list[int]] = {}
        for number, group in enumerate(layout.groups):
            numbers.setdefault(group, []).append(number)
        self._kinds = sorted(numbers.items(), key=lambda kind: kind[0].kind != "full")

    def find(self, most: int, keys: Keys) -> Hits:
        """What is found of a sequence, at most its first `most` tokens."""
        rows: list[Row] = [[] for _ in range(self._num_groups)]
        full: dict[KvGroup, int] = {}
        tokens, longest = most, 0
        while True:
            now = tokens
            for group, numbers in self._kinds:
                if group in full:
                    now = min(now, full[group])
                    continue
                now, hits = self._find(group, numbers, keys(group.block_size, now // group.block_size))
                for number, row in zip(numbers, hits, strict=True):
                    rows[number] = row
                if group.kind == "full":
                    full[group] = now
                longest = max(longest, now)
            if now >= tokens:
                break
            tokens = now
        for group, numbers in self._kinds:
            if group.kind == "full":
                for number in numbers:
                    del rows[number][-(-tokens // group.block_size) :]
        return Hits(tokens, rows, longest if longest > tokens else 0)

    def _find(self, group: KvGroup, numbers: list[int], keys: list[int]) -> tuple[int, list[Row]]:
        """(Tokens from where `group` could go on, the blocks up to them of each of `numbers`, groups like it)."""
        if group.kind == "full":
            return self._leading(group, numbers, keys)
        if group.kind == "state":
            return self._last_state(group, numbers, keys)
        return self._last_window(group, numbers, keys)

    def _leading(self, group: KvGroup, numbers: list[int], keys: list[int]) -> tuple[int, list[Row]]:
        rows: list[Row] = [[] for _ in numbers]
        for key in keys:
            if not self._add(rows, numbers, key):
                break
        tokens = len(rows[0]) * group.block_size // self._align * self._align
        return tokens, [row[: tokens // group.block_size] for row in rows]

    def _last_state(self, group: KvGroup, numbers: list[int], keys: list[int]) -> tuple[int, list[Row]]:
        for place in range(len(keys) - 1, -1, -1):
            tokens = (place + 1) * group.block_size
            rows: list[Row] = [[None] * place for _ in numbers]
            if tokens % self._align == 0 and self._add(rows, numbers, keys[place]):
                return tokens, rows
        return 0, [[] for _ in numbers]

    def _last_window(self, group: KvGroup, numbers: list[int], keys: list[int]) -> tuple[int, list[Row]]:
        assert group.window is not None, "a group of windows has one"
        size, need = group.block_size, -(-(group.window - 1) // group.block_size)
        runs: list[Row] = [[] for _ in numbers]  # from the right
        place = len(keys)
        while place:
            place -= 1
            if not runs[0] and (place + 1) * size % self._align:
                # No block that ends here is looked at, but what the engine finds without one goes on.
                continue
            if not self._add(runs, numbers, keys[place]):
                runs = [[] for _ in numbers]
            elif len(runs[0]) >= need:
                return (place + len(runs[0])) * size, [[*[None] * place, *run[::-1]] for run in runs]
        count = len(runs[0])
        while count * size % self._align:
            count -= 1
        return count * size, [run[::-1][:count] for run in runs]

    def _add(self, rows: list[Row], numbers: list[int], key: int) -> bool:
        """Adds to each row the block of its group found as `key`; False, and nothing changed, unless all are."""
        blocks = [self._pool.find(number, key) for number in numbers]
        if None in blocks:
            return False
        for row, block in zip(rows, blocks, strict=True):
            row.append(block)
        return True

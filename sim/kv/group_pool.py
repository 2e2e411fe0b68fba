"""One pool of KV blocks for several groups of layers, in which blocks are found again by their contents.

A block that has a key can be found under it until it is handed out again. Free blocks without a key are handed out
first, all alike; then those with one, in the order in which they came back.
Source: vllm/v1/core/block_pool.py of the 0.33.0 wheel.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Block:
    """A block in use, or one that can be found: the number of sequences that use it, and its `key` in group `group`;
    None: it cannot be found."""

    __slots__ = ("group", "key", "users")

    def __init__(self) -> None:
        self.users = 1
        self.group = 0
        self.key: int | None = None


class GroupPool:
    """The blocks of one pool; `version` changes with what can be found."""

    __slots__ = ("_blank", "_index", "_oldest", "num_blocks", "version")

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.num_blocks = self._blank = num_blocks
        self._oldest: OrderedDict[Block, None] = OrderedDict()  # free, with a key
        self._index: list[dict[int, dict[Block, None]]] = [{} for _ in range(num_groups)]
        self.version = 0

    @property
    def num_free(self) -> int:
        return self._blank + len(self._oldest)

    def take(self, count: int) -> list[Block]:
        """Hands out `count` free blocks, which must be there, to one user each."""
        blank = min(count, self._blank)
        self._blank -= blank
        taken = [Block() for _ in range(blank)]
        for _ in range(count - blank):
            block, _ = self._oldest.popitem(last=False)
            self._forget(block)
            block.users = 1
            taken.append(block)
        return taken

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Takes one user from each of `blocks`; without any they are free, in this order."""
        for block in blocks:
            block.users -= 1
            if block.users:
                continue
            if block.key is None:
                self._blank += 1
            else:
                self._oldest[block] = None

    def share(self, block: Block) -> None:
        """Adds a user to a block that was found."""
        if not block.users:
            del self._oldest[block]
        block.users += 1

    def publish(self, block: Block, group: int, key: int) -> None:
        """Lets `block`, which has no key, be found as `key` in `group`; of several the one published first is."""
        assert block.key is None, "a block is published twice"
        block.group, block.key = group, key
        self._index[group].setdefault(key, {})[block] = None
        self.version += 1

    def find(self, group: int, key: int) -> Block | None:
        """The block that is found as `key` in `group`."""
        same = self._index[group].get(key)
        return next(iter(same)) if same else None

    def _forget(self, block: Block) -> None:
        index, key = self._index[block.group], block.key
        assert key is not None, "a block without a key is found"
        same = index[key]
        del same[block]
        if not same:
            del index[key]
        block.key = None
        self.version += 1

    @property
    def num_found(self) -> int:
        """Blocks that have a key, in use or not. O(blocks)."""
        return sum(len(same) for index in self._index for same in index.values())

    def check(self, used: dict[Block, int]) -> None:
        """AssertionError unless blocks have the users of `used`, and all others are free. O(blocks)."""
        assert all(block.users == count for block, count in used.items()), "wrong counts of users"
        assert self.num_free + len(used) == self.num_blocks, "a block is lost or in two places"
        assert not used.keys() & self._oldest.keys(), "a block in use is free"
        indexed = {block for index in self._index for same in index.values() for block in same}
        assert all(block.users == 0 and block in indexed for block in self._oldest), (
            "a free block with a key is not found"
        )
        assert indexed == {block for block in (*used, *self._oldest) if block.key is not None}, "keys and index differ"

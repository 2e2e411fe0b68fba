"""The executor's own record of which sequence holds which KV blocks, as arrays, with a check on every write.

The scheduler's KV manager forgets a sequence's blocks the moment it takes them away; this record knows what was
computed in them, and refuses a write into a block that holds another sequence's tokens. Block ids here are the
device's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import PolicyError

Int64s = NDArray[np.int64]


class BlockMirror:
    """A row for each sequence with KV: `tables` [rows, W] are device blocks in token order, 0 beyond the row's `held`.

    `owner` [device blocks] is the row whose tokens lie in a block, plus one; 0: no row's. A row owns its first
    `claimed` blocks, but for shared ones. `users` counts the rows that have a block: under a prefix cache several read
    one. `content` [device blocks, block_size], kept with `shares`, are the ids of the tokens stored in each place, -1
    for none.
    """

    def __init__(self, num_blocks: int, block_size: int, max_blocks: int, *, shares: bool = False) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.tables = np.zeros((16, max_blocks), dtype=np.int32)
        self.held = np.zeros(16, dtype=np.int64)
        self.read_only = np.zeros(16, dtype=np.int64)  # tokens at a row's head that lie in shared blocks
        self.claimed = np.zeros(16, dtype=np.int64)
        self.owner = np.zeros(num_blocks + 1, dtype=np.int64)
        self.users = np.zeros(num_blocks + 1, dtype=np.int64)
        self.content = np.full((num_blocks + 1, block_size), -1, dtype=np.int64) if shares else None
        self._free = list(range(15, -1, -1))

    def new_row(self) -> int:
        """The index of a row that holds no block."""
        if not self._free:
            rows = len(self.held)
            self.tables = np.concatenate([self.tables, np.zeros_like(self.tables)])
            self.held = np.concatenate([self.held, np.zeros_like(self.held)])
            self.read_only = np.concatenate([self.read_only, np.zeros_like(self.read_only)])
            self.claimed = np.concatenate([self.claimed, np.zeros_like(self.claimed)])
            self._free = list(range(2 * rows - 1, rows - 1, -1))
        return self._free.pop()

    def drop_row(self, row: int) -> None:
        """Frees `row`; its blocks have no owner."""
        self.clear(row)
        self._free.append(row)

    def blocks(self, row: int) -> list[int]:
        """The device blocks of `row`, in token order."""
        return self.tables[row, : self.held[row]].tolist()

    def clear(self, row: int) -> None:
        """Takes all blocks from `row`, as after a preemption; they have no owner."""
        blocks = self.tables[row, : self.held[row]]
        self.owner[blocks[self.owner[blocks] == row + 1]] = 0
        self.users[blocks] -= 1
        blocks[:] = 0
        self.held[row] = self.read_only[row] = self.claimed[row] = 0

    def extend(self, row: int, table: list[int], need: int, who: str, *, shared: int = 0) -> None:
        """Adds to the row the blocks by which the manager's `table` is longer; PolicyError if it has fewer than `need`.

        Where blocks are shared at all, only the first `shared` of the table may be held by other rows too.
        """
        held = int(self.held[row])
        new = np.array(table[held : self.max_blocks], dtype=np.int32) + 1
        own = new[max(shared - held, 0) :]
        if self.content is not None and self.users[own].any():
            block = int(own[np.flatnonzero(self.users[own])[0]]) - 1
            raise PolicyError(f"{who} is given KV block {block}, which others have. Correct the KV manager.")
        self.tables[row, held : held + len(new)] = new
        self.held[row] = held + len(new)
        self.read_only[row] = max(self.read_only[row], shared * self.block_size)
        self.users[new] += 1
        if held + len(new) < need:
            raise PolicyError(
                f"{who} writes into KV block {need} of its table, which has {held + len(new)}. Correct the policy."
            )

    def follow(self, row: int, table: list[int]) -> None:
        """Puts blocks of the manager's `table` in place of the row's where they differ: others, of the same content."""
        blocks = self.tables[row, : self.held[row]]
        now = np.array(table[: len(blocks)], dtype=np.int32) + 1
        moved = now != blocks
        if moved.any():
            gone = blocks[moved]
            self.owner[gone[self.owner[gone] == row + 1]] = 0
            self.users[gone] -= 1
            self.users[now[moved]] += 1
            blocks[:] = now

    def take(self, row: int, num_blocks: int) -> None:
        """Makes `row` the owner of its first `num_blocks` blocks, whose tokens were just swapped in."""
        self._own(self.tables[row, :num_blocks], np.full(num_blocks, row + 1))
        self.claimed[row] = num_blocks

    def claim(self, row: int, need: int) -> None:
        """Makes `row` the owner of its first `need` blocks, for tokens that may be stored anew where drafts were not
        accepted; PolicyError as by `slots`."""
        first = int(self.claimed[row])
        if need > first:
            self._own(self.tables[row, first:need], np.full(need - first, row + 1))
            self.claimed[row] = need

    def adopt(self, row: int, number: int) -> None:
        """Makes `row` the owner of its block `number` with its tokens: others began it, and it has no owner now."""
        block = int(self.tables[row, number])
        if self.owner[block]:
            self._refuse(block, row + 1)
        self.owner[block] = row + 1
        self.claimed[row] = number + 1

    def note(self, slots: Int64s, ids: Int64s) -> None:
        """Records the token `ids` stored at `slots`, for `check_shared`."""
        if self.content is not None:
            stored = slots >= 0
            self.content.reshape(-1)[slots[stored]] = ids[stored]

    def check_shared(self, row: int, known: Int64s, who: str) -> None:
        """PolicyError unless the row's first blocks, given by a prefix cache, hold the tokens `known`."""
        assert self.content is not None, "asked of a mirror that shares"
        blocks = self.tables[row, : -(-len(known) // self.block_size)]
        wrong = np.flatnonzero(self.content[blocks].reshape(-1)[: len(known)] != known)
        if len(wrong):
            block, offset = blocks[wrong[0] // self.block_size], wrong[0] % self.block_size
            there = self.content[block, offset]
            held = "was never computed there" if there < 0 else f"is another than token {there} there"
            raise PolicyError(
                f"{who} takes KV block {block - 1} from the prefix cache, but its token {wrong[0]} {held}. Under"
                " priority the real engine shares such blocks too; otherwise correct the KV manager."
            )

    def slots(self, rows: Int64s, positions: Int64s) -> Int64s:
        """The slot of each token at `positions` of `rows`; PolicyError if it is not the row's, or asked for twice.

        A block without owner becomes the writer's with its first token; later tokens must find it so. -1 for a token
        that is there already, in a shared block.
        """
        there = positions < self.read_only[rows]
        if there.any():
            slots = np.full(len(rows), -1, dtype=np.int64)
            slots[~there] = self.slots(rows[~there], positions[~there])
            return slots
        blocks = self.tables[rows, positions // self.block_size]
        offsets = positions % self.block_size
        firsts = offsets == 0
        if firsts.any():
            self._own(blocks[firsts], rows[firsts] + 1)
            np.maximum.at(self.claimed, rows[firsts], positions[firsts] // self.block_size + 1)
        foreign = np.flatnonzero(self.owner[blocks] != rows + 1)
        if len(foreign):
            self._refuse(int(blocks[foreign[0]]), int(rows[foreign[0]]) + 1)
        return blocks.astype(np.int64) * self.block_size + offsets

    def _own(self, blocks: NDArray[np.int32], owners: Int64s) -> None:
        ids, counts = np.unique(blocks, return_counts=True)
        if len(ids) != len(blocks):
            twice = int(ids[counts > 1][0]) - 1
            raise PolicyError(f"KV block {twice} is given to several tokens of one step. Correct the KV manager.")
        taken = np.flatnonzero((self.owner[blocks] != 0) | (blocks == 0))
        if len(taken):
            self._refuse(int(blocks[taken[0]]), int(owners[taken[0]]))
        self.owner[blocks] = owners
        if self.content is not None:
            self.content[blocks] = -1

    def _refuse(self, block: int, writer: int) -> None:
        owner = int(self.owner[block])
        holder = f"holds tokens of executor row {owner - 1}" if owner else "was never given to it"
        raise PolicyError(
            f"executor row {writer - 1} writes into KV block {block - 1}, which {holder}."
            " Correct the policy or the KV manager."
        )

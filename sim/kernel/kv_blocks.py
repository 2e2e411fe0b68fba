"""KV-cache blocks: one protocol, and the two managers without prefix caching.

`CountingKV` keeps counts and is what simulation uses. `TableKV` keeps the ids of every block and swap slot and is what
a live executor reads. With prefix caching off both answer alike, which the conformance tests prove for every policy.
A sequence in the decode group holds ceil(computed / block_size) blocks, or more where more was reserved.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from batchsim.kernel.types import DecodeGroup, Event, Sequence


class KVBlockManager(Protocol):
    """What a policy may ask of KV memory. Counts are blocks of `block_size` tokens."""

    block_size: int
    num_blocks: int
    num_swap_blocks: int

    @property
    def num_free(self) -> int: ...

    @property
    def num_swap_free(self) -> int: ...

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        ...

    def needs_at_most(self, num_tokens: int) -> int:
        """Blocks without which a sequence could not get to `num_tokens` tokens, even alone."""
        ...

    def held(self, seq: Sequence) -> int:
        """Blocks `seq` holds on the GPU."""
        ...

    def room(self, seq: Sequence) -> int:
        """Tokens for which `seq` has blocks on the GPU."""
        ...

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Grows `seq` to room for `num_tokens` tokens in all; False, and nothing changed, if blocks are short.

        Before a member leaves the group and keeps its blocks, this settles its count: `allocate(seq, computed)`.
        """
        ...

    def grow_group(self, group: DecodeGroup) -> bool:
        """Takes blocks for one more token of every member; False, and nothing changed, if blocks are short."""
        ...

    def free(self, seq: Sequence) -> None:
        """Gives back all blocks of `seq`, on the GPU and in swap. Before it leaves the group."""
        ...

    def pin(self, seq: Sequence) -> None:
        """Keeps all blocks of `seq` taken, through `free` and leaving the group, until `unpin`."""
        ...

    def unpin(self, seq: Sequence) -> None:
        """Gives back what `free` would have given back since `pin`, or leaves it to a `free` to come."""
        ...

    def swap_out(self, seq: Sequence) -> int | None:
        """Moves `seq` to swap and returns the blocks moved; None, and nothing changed, if swap is full."""
        ...

    def swap_in(self, seq: Sequence) -> int | None:
        """Moves `seq` back to the GPU and returns the blocks moved; None, and nothing changed, if blocks are short."""
        ...


class Rewinds(KVBlockManager, Protocol):
    """A manager for engines that free the KV of rejected drafts at once."""

    def give_back(self, seq: Sequence, count: int) -> None:
        """Frees the last `count` blocks of `seq`. If it is in a decode group, the group decides when that is
        allowed."""
        ...


class BlockTables(KVBlockManager, Protocol):
    """A manager that knows which blocks hold what, as a live executor needs it."""

    def table(self, seq: Sequence) -> list[int]:
        """The block ids of `seq` in token order; the list is not to be changed."""
        ...

    def swap_table(self, seq: Sequence) -> list[int]:
        """The swap slots of `seq` in token order."""
        ...


class Pins:  # no ABC: where compiled, all classes below one would share what it remembers of isinstance
    """What all managers have in common: sequences whose blocks another engine has yet to read."""

    __slots__ = ("_pinned",)
    block_size: int

    def __init__(self) -> None:
        self._pinned: dict[Sequence, bool] = {}  # whether `free` was asked for since

    def pin(self, seq: Sequence) -> None:
        self._pinned[seq] = False

    def unpin(self, seq: Sequence) -> None:
        if self._pinned.pop(seq):
            self.end(seq)

    def is_kept(self, seq: Sequence) -> bool:
        """Whether `seq`, to be freed now, is pinned; then that is put off."""
        if seq not in self._pinned:
            return False
        self._pinned[seq] = True
        seq.num_blocks = self.held(seq)  # by which it grew in its group, too
        return True

    @abstractmethod
    def blocks_for(self, num_tokens: int) -> int: ...

    def needs_at_most(self, num_tokens: int) -> int:
        """Blocks without which a sequence could not get to `num_tokens` tokens, even alone."""
        return self.blocks_for(num_tokens)

    @abstractmethod
    def held(self, seq: Sequence) -> int: ...

    def room(self, seq: Sequence) -> int:
        """Tokens for which `seq` has blocks on the GPU."""
        return self.held(seq) * self.block_size

    def end(self, seq: Sequence) -> None:
        """As `free`, for a sequence that will not come back."""
        self.free(seq)

    @abstractmethod
    def free(self, seq: Sequence) -> None: ...


class CountingKV(Pins):
    """Counts blocks. O(1) for a step of the whole group."""

    __slots__ = ("_swapped", "block_size", "num_blocks", "num_free", "num_swap_blocks", "num_swap_free")

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0) -> None:
        super().__init__()
        check_pool(num_blocks, block_size, num_swap_blocks)
        self.block_size = block_size
        self.num_blocks = self.num_free = num_blocks
        self.num_swap_blocks = self.num_swap_free = num_swap_blocks
        self._swapped: dict[Sequence, int] = {}

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held(self, seq: Sequence) -> int:
        return seq.num_blocks if seq.group is None else seq.group.blocks_held(seq)

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        held = self.held(seq)
        need = -(-num_tokens // self.block_size) - held
        if need > self.num_free:
            return False
        if need > 0:
            self.num_free -= need
            held += need
        seq.num_blocks = held
        return True

    def grow_group(self, group: DecodeGroup) -> bool:
        need = group.blocks_due()
        if need > self.num_free:
            return False
        self.num_free -= need
        return True

    def grow_by(self, due: list[Sequence]) -> None:
        """Takes a block for each of `due`, members of the group: as `grow_group` before each of several steps for which
        there are blocks."""
        self.num_free -= len(due)

    def give_back(self, seq: Sequence, count: int) -> None:
        self.num_free += count
        if seq.group is None:
            seq.num_blocks -= count

    def free(self, seq: Sequence) -> None:
        if self._pinned and self.is_kept(seq):
            return
        self.num_free += self.held(seq)
        seq.num_blocks = 0
        self.num_swap_free += self._swapped.pop(seq, 0)

    def swap_out(self, seq: Sequence) -> int | None:
        count = self.held(seq)
        if count > self.num_swap_free:
            return None
        self.num_free += count
        seq.num_blocks = 0
        self.num_swap_free -= count
        self._swapped[seq] = count
        return count

    def swap_in(self, seq: Sequence) -> int | None:
        count = self._swapped[seq]
        if count > self.num_free:
            return None
        del self._swapped[seq]
        self.num_swap_free += count
        self.num_free -= count
        seq.num_blocks = count
        return count


class TableKV(Pins):
    """Keeps the block table of every sequence: ids 0 .. num_blocks-1 on the GPU, swap slots likewise.

    Freed blocks are reused last in, first out. O(members that need a block) for a step of the group.
    """

    __slots__ = ("_free", "_swap", "_swap_free", "_tables", "block_size", "num_blocks", "num_swap_blocks")

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0) -> None:
        super().__init__()
        check_pool(num_blocks, block_size, num_swap_blocks)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_swap_blocks = num_swap_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._swap_free = list(range(num_swap_blocks - 1, -1, -1))
        self._tables: dict[Sequence, list[int]] = {}
        self._swap: dict[Sequence, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_swap_free(self) -> int:
        return len(self._swap_free)

    def table(self, seq: Sequence) -> list[int]:
        """The block ids of `seq` in token order; the executor reads it and must not change it."""
        return self._tables.get(seq, [])

    def swap_table(self, seq: Sequence) -> list[int]:
        """The swap slots of `seq` in token order."""
        return self._swap.get(seq, [])

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held(self, seq: Sequence) -> int:
        return len(self._tables.get(seq, ()))

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        table = self._tables.get(seq, [])
        need = -(-num_tokens // self.block_size) - len(table)
        if need > len(self._free):
            return False
        table.extend(self._free.pop() for _ in range(need))
        self._tables[seq] = table
        seq.num_blocks = len(table)
        return True

    def grow_group(self, group: DecodeGroup) -> bool:
        due = group.members_due()
        if len(due) > len(self._free):
            return False
        for seq in due:
            self._tables[seq].append(self._free.pop())
        return True

    def grow_by(self, due: list[Sequence]) -> None:
        for seq in due:
            self._tables[seq].append(self._free.pop())

    def give_back(self, seq: Sequence, count: int) -> None:
        table = self._tables[seq]
        self._free += table[: -count - 1 : -1]
        del table[-count:]
        seq.num_blocks = len(table)

    def free(self, seq: Sequence) -> None:
        if self._pinned and self.is_kept(seq):
            return
        self._free.extend(reversed(self._tables.pop(seq, ())))
        self._swap_free.extend(reversed(self._swap.pop(seq, ())))
        seq.num_blocks = 0

    def swap_out(self, seq: Sequence) -> int | None:
        table = self._tables[seq]
        if len(table) > len(self._swap_free):
            return None
        self._swap[seq] = [self._swap_free.pop() for _ in table]
        self._free.extend(reversed(self._tables.pop(seq)))
        seq.num_blocks = 0
        return len(self._swap[seq])

    def swap_in(self, seq: Sequence) -> int | None:
        slots = self._swap[seq]
        if len(slots) > len(self._free):
            return None
        self._tables[seq] = [self._free.pop() for _ in slots]
        self._swap_free.extend(reversed(self._swap.pop(seq)))
        seq.num_blocks = len(slots)
        return len(slots)


def never_fits(kv: KVBlockManager, seq: Sequence, max_model_len: int, drafts: int = 0) -> Event | None:
    """The rejection of a sequence that could not end even alone in the pool; None if it could.

    The last output token is never computed, so prompt + output - 1 tokens need room; of `drafts`, tokens beyond these
    for which a step may take blocks, there may be as many as the model's length leaves.
    """
    request = seq.request
    tokens = min(request.prompt_tokens + request.max_output_tokens + drafts, max_model_len) - (not drafts)
    need = kv.needs_at_most(tokens)
    if need <= kv.num_blocks:
        return None
    what = f"{tokens} tokens" + (" with drafts" if drafts else "")
    detail = f"{need} KV blocks needed for {what}, {kv.num_blocks} in the pool"
    return Event("rejected", seq, "never_fits", detail=detail)


def check_pool(num_blocks: int, block_size: int, num_swap_blocks: int) -> None:
    """ValueError unless the pool has at least one block of at least one token, and no negative swap."""
    if num_blocks < 1 or block_size < 1 or num_swap_blocks < 0:
        raise ValueError(
            f"{num_blocks} KV blocks of {block_size} tokens with {num_swap_blocks} swap blocks:"
            " needs at least 1 block of at least 1 token and no negative swap"
        )

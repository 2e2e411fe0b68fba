"""KV blocks of a model whose layers are of several kinds: groups of them that draw from one pool, as vLLM 0.33.0 does.

A sequence of n tokens holds in each group of full attention ceil(n / block size) blocks; in a group of windows the same
without the blocks wholly below the tokens processed, less the window, plus one, which go back before each growth of the
sequence; in a group of states one block a state. The tokens of a sequence that steps in flight compute are not
processed. Growth is looked for where it can be: a member of a decode group is visited only in the steps with which its
tokens or their window may reach the end of a block. Blocks are lacking where all visited members take more
than were free before any was given back: then the engine goes through its sequences one by one.
Source: vllm/v1/core/single_type_kv_cache_manager.py, kv_cache_coordinator.py, kv_cache_manager.py of the 0.33.0 wheel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable

from batchsim.base.kv_groups import KvGroup, KvLayout
from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.kv_blocks import Pins, check_pool
from batchsim.kernel.types import DecodeGroup, Sequence, by_order

Growth = tuple[Sequence, int, int]
"""A sequence, the tokens that are computed of it after the next step, and those for which it needs room then."""


def most_blocks(group: KvGroup, num_tokens: int, in_flight_tokens: int, max_model_len: int) -> int:
    """Blocks of one group of layers that a sequence of up to `num_tokens` tokens holds at most at a time.

    `in_flight_tokens`: the tokens of a sequence that steps compute and have not delivered, at most.
    """
    if group.kind == "state":
        return group.states if num_tokens else 0
    blocks = -(-num_tokens // group.block_size)
    if group.window is None:
        return blocks
    reach = min(group.window - 1 + in_flight_tokens, max_model_len)
    return min(blocks, -(-reach // group.block_size) + 1)


class GroupedBlocks(Pins):
    """What the managers of groups have in common. `block_size` is the tokens that divide the blocks of all groups.

    `lag`: the tokens in flight of a sequence that goes on decoding when its next step is scheduled; None where that is
    not the same for all, and `in_flight` is asked, as it is for any sequence that was not decoding in the last step.
    `in_flight_tokens`: those of one sequence in all of the `batches` that there are at a time, at most.
    `draft_room`: the tokens beyond those computed for which a step of drafts takes blocks.
    """

    __slots__ = (
        "_fresh", "batches", "block_size", "draft_room", "in_flight", "in_flight_tokens", "lag", "layout",
        "max_model_len", "num_blocks", "num_swap_blocks", "num_swap_free",
    )  # fmt: skip

    def __init__(
        self, layout: KvLayout, num_blocks: int, max_model_len: int, in_flight_tokens: int, batches: int = 1
    ) -> None:
        super().__init__()
        check_pool(num_blocks, layout.unit, 0)
        self.layout, self.block_size = layout, layout.unit
        self.num_blocks = num_blocks
        self.num_swap_blocks = self.num_swap_free = 0
        self.max_model_len, self.in_flight_tokens, self.batches = max_model_len, in_flight_tokens, batches
        self.lag: int | None = 0
        self.in_flight: Callable[[Sequence], int] = _nothing
        self.draft_room = 0
        self._fresh: dict[Sequence, None] = {}  # grew outside a group since they were last visited in one

    @property
    @abstractmethod
    def num_free(self) -> int: ...

    @abstractmethod
    def allocate(self, seq: Sequence, num_tokens: int) -> bool: ...

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that an engine asks for before it admits a sequence of `num_tokens` tokens: as many as it needs at a
        time, but for the tokens that drafts write ahead."""
        most = (most_blocks(each, num_tokens, self.in_flight_tokens, self.max_model_len) for each in self.layout.groups)
        return sum(most)

    def needs_at_most(self, num_tokens: int) -> int:
        windows = (group.block_size for group in self.layout.groups if group.window is not None)
        return self.blocks_for(num_tokens) + sum(-(-self.draft_room // size) for size in windows)

    def most_due(self, num_sequences: int) -> int:
        """Blocks that a step may take in which each of `num_sequences` sequences computes a token."""
        return num_sequences * len(self.layout.groups)

    def grow_group(self, group: DecodeGroup) -> bool:
        return self.extend(group, ())

    def extend(self, decodes: DecodeGroup, chunks: Iterable[Growth]) -> bool:
        """Takes blocks for the next step: of one more token, or the rows asked for, of every member of `decodes`, and
        of `chunks` of other sequences; False, and nothing changed, if blocks might be short."""
        growths = [*self._visits(decodes), *chunks]
        if sum(self._lacks_at_most(*each) for each in growths) > self.num_free:
            return False
        for each in sorted(growths, key=lambda growth: by_order(growth[0])):
            self._grow(*each)
        fresh = self._fresh
        for seq in [seq for seq in fresh if seq.group is decodes and decodes.gained(seq)]:
            del fresh[seq]
        return True

    def _visits(self, decodes: DecodeGroup) -> list[Growth]:
        """The members of `decodes` that may take or give back blocks with its next step."""
        if isinstance(decodes, DraftGroup):
            rows = zip(decodes.sequences, decodes.computed.tolist(), decodes.rows.tolist(), strict=True)
            return [
                (seq, computed + n, min(computed + n + self.draft_room, self.max_model_len))
                for seq, computed, n in rows
            ]
        visited = decodes.members
        if self.lag is not None:
            visited = {seq: None for seq in self._fresh if seq.group is decodes}
            for tokens in self._turns(self.lag):
                visited.update(dict.fromkeys(decodes.members_due(-tokens % self.block_size)))
        return [(seq, tokens, tokens) for seq in visited for tokens in (seq.num_computed_tokens + 1,)]

    def _turns(self, lag: int) -> set[int]:
        """The numbers of computed tokens, within a block of `block_size`, at which a member is to be visited."""
        windows = (group.window - 1 for group in self.layout.groups if group.window is not None)
        return {0, *((window + lag) % self.block_size for window in windows)}

    @abstractmethod
    def _lacks_at_most(self, seq: Sequence, num_tokens: int, room: int) -> int:
        """Blocks that `seq` takes at most as it grows, if none is given back."""

    @abstractmethod
    def _grow(self, seq: Sequence, num_tokens: int, room: int) -> None:
        """Gives back what slid out of windows, then takes what is lacking, for which there is room."""

    @abstractmethod
    def check(self) -> None:
        """AssertionError unless every block is in one place."""

    def _processed(self, seq: Sequence) -> int:
        """Tokens of `seq` of which no step in flight computes any."""
        return max(seq.num_computed_tokens - self.in_flight(seq), 0)

    def swap_out(self, seq: Sequence) -> int | None:
        """None: nothing is ever swapped."""
        return None

    def swap_in(self, seq: Sequence) -> int | None:
        """None: nothing is ever swapped."""
        return None


class _Holding:
    """What one sequence holds: `blocks`, in which there is `room` for its tokens, those of window number i from block
    `starts[i]` on."""

    __slots__ = ("blocks", "room", "starts")

    def __init__(self, windows: int) -> None:
        self.blocks = self.room = 0
        self.starts = [0] * windows


class GroupedKV(GroupedBlocks):
    """Counts the blocks of groups, of which none is found again by its contents: a `KVBlockManager`.

    A state is one block, as are those of draft tokens, whether or not `aligned`, which takes a prefix cache. A sequence
    that takes room for more tokens than can be in flight holds of windows as many blocks as it may need at a time.
    """

    __slots__ = ("_fulls", "_held", "_num_free", "_states", "_windows")

    def __init__(
        self, layout: KvLayout, num_blocks: int, max_model_len: int, in_flight_tokens: int, batches: int = 1
    ) -> None:
        super().__init__(layout, num_blocks, max_model_len, in_flight_tokens, batches)
        self._num_free = num_blocks
        self._held: dict[Sequence, _Holding] = {}
        kinds = Counter(layout.groups)
        self._fulls = [(group.block_size, count) for group, count in kinds.items() if group.kind == "full"]
        self._windows: list[tuple[int, int, int, int]] = []  # block size, window, most blocks of a group, groups
        for group, count in kinds.items():
            if group.window is not None:
                most = most_blocks(group, max_model_len, in_flight_tokens, max_model_len)
                self._windows.append((group.block_size, group.window, most, count))
        self._states = sum(1 + group.drafts for group in layout.groups if group.kind == "state")

    @property
    def num_free(self) -> int:
        return self._num_free

    def blocks_for(self, num_tokens: int) -> int:
        blocks = sum(count * -(-num_tokens // size) for size, count in self._fulls)
        blocks += sum(count * min(-(-num_tokens // size), most) for size, _, most, count in self._windows)
        return blocks + (self._states if num_tokens else 0)

    def held(self, seq: Sequence) -> int:
        holding = self._held.get(seq)
        return 0 if holding is None else holding.blocks

    def room(self, seq: Sequence) -> int:
        holding = self._held.get(seq)
        return 0 if holding is None else holding.room

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """As `KVBlockManager.allocate`, but what slid out of windows goes back even where blocks are short."""
        holding = self._held.get(seq)
        if holding is None:
            holding = self._held[seq] = _Holding(len(self._windows))
        elif seq.group is not None and num_tokens <= seq.num_computed_tokens:
            seq.num_blocks = holding.blocks  # settles its count
            return True
        self._fresh[seq] = None
        self._slide(holding, self._processed(seq))
        room = max(num_tokens, holding.room)
        need = self._blocks(holding, room) - holding.blocks
        if need > self._num_free:
            if not holding.blocks:
                self._forget(seq)
            seq.num_blocks = holding.blocks
            return False
        self._num_free -= need
        holding.blocks += need
        holding.room = room
        seq.num_blocks = holding.blocks
        return True

    def free(self, seq: Sequence) -> None:
        if self._pinned and self.is_kept(seq):
            return
        self._num_free += self.held(seq)
        seq.num_blocks = 0
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        self._held.pop(seq, None)
        self._fresh.pop(seq, None)

    def _blocks(self, holding: _Holding, room: int) -> int:
        """Blocks in which there is room for `room` tokens of a sequence, whose windows begin where `holding` says."""
        blocks = self._states if room else 0
        for size, count in self._fulls:
            blocks += count * -(-room // size)
        for (size, _, most, count), start in zip(self._windows, holding.starts, strict=True):
            blocks += count * min(max(-(-room // size) - start, 0), most + -(-self.draft_room // size))
        return blocks

    def _slide(self, holding: _Holding, processed: int) -> None:
        starts = holding.starts
        for i, (size, window, _, _) in enumerate(self._windows):
            starts[i] = max(starts[i], (processed - window + 1) // size)
        if starts:
            blocks = self._blocks(holding, holding.room)
            self._num_free += holding.blocks - blocks
            holding.blocks = blocks

    def _lacks_at_most(self, seq: Sequence, num_tokens: int, room: int) -> int:
        holding = self._held[seq]
        return self._blocks(holding, max(room, holding.room)) - holding.blocks

    def _grow(self, seq: Sequence, num_tokens: int, room: int) -> None:
        holding = self._held[seq]
        self._slide(holding, self._processed(seq))
        holding.room = max(holding.room, room)
        blocks = self._blocks(holding, holding.room)
        self._num_free -= blocks - holding.blocks
        seq.num_blocks = holding.blocks = blocks

    def check(self) -> None:
        """AssertionError unless every block is free or held, and holdings are as their sequences' room says."""
        for holding in self._held.values():
            assert holding.blocks == self._blocks(holding, holding.room), "a holding is not what its room takes"
        held = sum(holding.blocks for holding in self._held.values())
        assert self._num_free + held == self.num_blocks, "a block is lost or counted twice"


def _nothing(seq: Sequence) -> int:
    return 0

"""KV blocks with block reuse as TensorRT-LLM has it with `host_cache_size`: a second pool of blocks, in host memory.

1. A block that holds KV of the tree is on the GPU or on the host, never in both places.
2. One that is free on the GPU and about to be handed out goes to the block at the head of the host's queue, and from
   there to its tail. What that held leaves the tree, and all that is below it. With no block of the host at hand
   it leaves the tree itself.
3. A prompt's blocks are taken one after the other, as far as they are found then: one on the GPU leaves its queue; for
   one on the host a free block of the GPU is handed out, which may send another to the host (2), the KV comes back,
   and the host's block goes to the tail of its queue, empty.
4. So a prompt may lose its last blocks, which are the host's oldest, to the room for its first ones.

Source: getFreeBlock, onboardBlock and loadOrAllocateBlocks in cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp, 2025.
Simplifies: what `reuse_tree` does; and of blocks whose tokens are not in the tree, such as a second copy of equal ones,
none goes to the host. No priorities: secondary_offload_min_priority is below that of all blocks.
"""

from __future__ import annotations

from batchsim.kernel.host_link import OffloadLink
from batchsim.kernel.types import Sequence
from batchsim.kv.free_queue import FreeQueue
from batchsim.kv.reuse_tree import ROOT, ReuseTreeKV


class HostReuseKV(ReuseTreeKV):
    """A ReuseTreeKV with `num_host_blocks` more blocks on the host.

    `num_stored` and `num_loaded` count the blocks that went there and came back, `loaded_tokens` what the latter held.
    `found_tokens` is what the latest admission found. `loading` and `storing`: the links over which blocks are copied.
    In the tree, blocks from `num_blocks` on are the host's.
    """

    __slots__ = (
        "_host", "_num_host_free", "found_tokens", "loaded_tokens", "loading", "num_host_blocks", "num_loaded",
        "num_stored", "storing",
    )  # fmt: skip

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int, loading: OffloadLink, storing: OffloadLink
    ) -> None:
        super().__init__(num_blocks, block_size)
        if num_host_blocks < 1:
            raise ValueError(f"a tier of {num_host_blocks} blocks holds nothing: give it at least 1")
        self.num_host_blocks = self._num_host_free = num_host_blocks
        self.loading, self.storing = loading, storing
        self._host = FreeQueue(num_host_blocks)
        self._users.extend([0] * num_host_blocks)
        self._key.extend([None] * num_host_blocks)
        self._parent.extend([ROOT] * num_host_blocks)
        self.num_stored = self.num_loaded = self.loaded_tokens = self.found_tokens = 0

    def admit(self, seq: Sequence, num_tokens: int, hit_tokens: int) -> bool:
        """As that of ReuseTreeKV, but that fewer than `hit_tokens` may be found (rule 4): `found_tokens`."""
        have, begun = divmod(hit_tokens, self.block_size)
        known = seq not in self._held and hit_tokens <= self.lookup(seq)
        if not known or (begun and self._begun(seq, hit_tokens, have) is None):
            raise ValueError(f"cannot admit with {hit_tokens} cached tokens: {seq!r}")
        keys = self._known[seq].keys
        blocks = keys.up_to(have)
        shared = sum([self._users[self._index[key]] > 0 for key in blocks])
        if self.blocks_for(num_tokens) - shared > self.num_free:
            return False
        table: list[int] = []
        for key in blocks:
            place = self._index.get(key)
            if place is None:
                break
            block = self._claim(place, self.block_size)
            self._users[block] += 1
            table.append(block)
        self.found_tokens = len(table) * self.block_size
        if begun and len(table) == have:
            place = self._index.get(keys.begun(hit_tokens))
            if place is not None:
                table.append(self._claim(place, begun))
                self._drop(table[-1])
                self.found_tokens = hit_tokens
        table += self._take(self.blocks_for(num_tokens) - len(table))
        self._held[seq] = table
        seq.num_blocks = len(table)
        return True

    def deal(self) -> None:
        """Hands out now the blocks by which the decode group grew."""
        self._deal()

    def grows_in_place(self, count: int) -> bool:
        """Whether the next `count` blocks that are handed out hold nothing that would go to the host. O(count)."""
        self._deal()
        return all(self._key[block] is None for block in self._queue.next(count))

    def check(self) -> None:
        """As that of ReuseTreeKV; also that each block of the host is free, and its own."""
        super().check()
        free = self._host.blocks()
        assert sorted(free) == list(range(self.num_host_blocks)), "a block of the host is lost"
        assert self._num_host_free == self.num_host_blocks, "a block of the host is still claimed"
        assert not any(self._users[self.num_blocks :]), "a block of the host has users"

    # ---- within

    def _claim(self, place: int, num_tokens: int) -> int:
        """Takes the block at `place`, whose `num_tokens` tokens are in the tree, for a sequence; returns its id on the
        GPU."""
        if place >= self.num_blocks:
            return self._load(place, num_tokens)
        if not self._users[place]:
            self._queue.remove(place)
            self.num_free -= 1
        return place

    def _load(self, place: int, num_tokens: int) -> int:
        """Brings the block at `place` back to the GPU; returns its id there."""
        slot = place - self.num_blocks
        self._host.remove(slot)
        self._num_host_free -= 1
        (block,) = self._take(1)
        self._move(place, block)
        self._host.put_last([slot])
        self._num_host_free += 1
        self.num_loaded += 1
        self.loaded_tokens += num_tokens
        return block

    def _stores(self, seq: Sequence) -> bool:
        """True: what no other prompt will find goes to the host, too."""
        return True

    def _hand_out(self, block: int) -> None:
        if not self._num_host_free:
            self._drop(block)
            return
        unused, freed = self._host.take(1)
        (slot,) = unused or freed
        place = self.num_blocks + slot
        if self._key[place] is not None:
            self._drop(place)
        if self._key[block] is not None:  # it may have been below what was dropped
            self._move(block, place)
        self._host.put_last([slot])
        self.num_stored += 1

    def _move(self, source: int, target: int) -> None:
        """Puts `target` into the place of `source` in the tree."""
        key, parent = self._key[source], self._parent[source]
        assert key is not None, f"block {source} is not in the tree"
        self._index[key] = target
        self._key[target], self._parent[target] = key, parent
        self._key[source], self._parent[source] = None, ROOT
        if parent != ROOT:
            siblings = self._children[parent]
            del siblings[source]
            siblings[target] = None
        children = self._children.pop(source, None)
        if children is not None:
            self._children[target] = children
            for child in children:
                self._parent[child] = target

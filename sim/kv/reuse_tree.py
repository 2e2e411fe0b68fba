"""KV blocks with block reuse as TensorRT-LLM of 2025 does it, in GPU memory (`kv/reuse_host.py` adds that of the host).

The full blocks of a prompt enter a tree when the policy says so. When a sequence gives its blocks up, those of all its
known tokens but the last enter too, a partial last block and those of a prompt half computed included. A block's parent
holds the tokens before its own. Of several blocks with equal tokens only the first is in the tree. A
full block is found by its tokens; a partial one by a sequence whose tokens but the last end exactly there, which takes
it for itself and out of the tree. Freed blocks go to the tail of one queue, each sequence's last block first, in the
tree or not; new ones come from its head. A block handed out anew leaves the tree with all blocks below it, which the
sequences that hold them keep.
Source: cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp (002ba6a7), evictionPolicy.cpp (fc07e755).
Simplifies: what is below a block leaves the tree only, as in later versions: 002ba6a7 takes it from the queue as well
and never gives it back. Later versions store an output's blocks as they fill, which are not looked up before its
request has ended. A block is found by all tokens that it holds, never by a part (enable_partial_reuse off); no
retention priorities. A live executor refuses a block found that was never computed, where the engine reads it.
"""

from __future__ import annotations

from batchsim.kernel.kv_blocks import Pins, check_pool
from batchsim.kernel.types import DecodeGroup, Sequence
from batchsim.kv.block_keys import BlockKeys
from batchsim.kv.free_queue import FreeQueue

ROOT = -1


class ReuseTreeKV(Pins):
    """A `KVBlockManager` whose blocks are found again by their tokens. Keeps block ids, so both drivers can use it.

    Keys of a sequence are kept from its first lookup to `end`. Blocks of a sequence that shares no tokens
    (`Request.tokens` None) cannot be found by others, so they enter the tree only when it will come back: at `free`.
    Blocks by which the decode group grew leave the queue only when ids, queue or tree are next looked at. There is no
    swap: `swap_out` never finds room.
    """

    __slots__ = (
        "_children", "_due", "_held", "_index", "_key", "_known", "_parent", "_queue", "_users", "_version",
        "block_size", "num_blocks", "num_free", "num_swap_blocks", "num_swap_free",
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0) -> None:
        super().__init__()
        check_pool(num_blocks, block_size, num_swap_blocks)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_free: int = num_blocks
        self.num_swap_blocks = self.num_swap_free = num_swap_blocks
        self._queue = FreeQueue(num_blocks)
        self._held: dict[Sequence, list[int]] = {}
        # Sequences that hold a block of the tree; any other block has one holder at most.
        self._users: list[int] = [0] * num_blocks
        self._due: list[Sequence] = []  # have one more block each than their tables say
        self._index: dict[int, int] = {}  # the tree: a block by the key of all tokens up to its end
        self._key: list[int | None] = [None] * num_blocks  # of the blocks in the tree
        self._parent: list[int] = [ROOT] * num_blocks
        self._children: dict[int, dict[int, None]] = {}
        self._known: dict[Sequence, _Known] = {}
        self._version = 0  # counts changes of the tree

    @property
    def cached_blocks(self) -> int:
        """Blocks in the tree, in use or not."""
        self._deal()
        return len(self._index)

    def table(self, seq: Sequence) -> list[int]:
        """The block ids of `seq` in token order; the executor reads it and must not change it."""
        self._deal()
        return self._held.get(seq, [])

    def swap_table(self, seq: Sequence) -> list[int]:
        """Empty: nothing is ever swapped."""
        return []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held(self, seq: Sequence) -> int:
        return seq.num_blocks if seq.group is None else seq.group.blocks_held(seq)

    # ---- the tree

    def lookup(self, seq: Sequence) -> int:
        """How many of the known tokens of `seq` are cached: full blocks from the front, and a partial one that holds
        all the rest but the last token, which is never cached.
        """
        most = seq.num_tokens - 1
        hits = min(self._hits(seq), most // self.block_size)
        return most if self._begun(seq, most, hits) is not None else hits * self.block_size

    def first_missing(self, seq: Sequence) -> int | None:
        """The key of the first full block of the known tokens of `seq` that is not in the tree; None if all are.

        Equal keys stand for equal tokens from the first on. O(1) while the tree is as it was.
        """
        hits = self._hits(seq)
        return None if hits == seq.num_tokens // self.block_size else self._known[seq].keys.key(hits)

    def store(self, seq: Sequence, num_tokens: int) -> None:
        """Puts the full blocks of the first `num_tokens` tokens of `seq` into the tree, where it has none for them."""
        self._deal()
        if self._stores(seq):
            self._store(seq, num_tokens // self.block_size * self.block_size)

    def admit(self, seq: Sequence, num_tokens: int, hit_tokens: int) -> bool:
        """Gives `seq` its hit blocks and new ones for `num_tokens` tokens in all; False, and nothing changed, if short.

        `hit_tokens` is at most what `lookup` says now. A hit block without holders counts as taken.
        """
        have = hit_tokens // self.block_size
        known = seq not in self._held and hit_tokens <= self.lookup(seq)
        begun = self._begun(seq, hit_tokens, have)
        if not known or (begun is None and hit_tokens % self.block_size):
            raise ValueError(f"cannot admit with {hit_tokens} cached tokens: {seq!r}")
        table = [self._index[key] for key in self._known[seq].keys.up_to(have)]
        unused = [block for block in table if not self._users[block]]
        if begun is not None:
            unused.append(begun)
        new = self.blocks_for(num_tokens) - self.blocks_for(hit_tokens)
        if len(unused) + new > self.num_free:
            return False
        self.num_free -= len(unused)
        for block in unused:
            self._queue.remove(block)
        for block in table:
            self._users[block] += 1
        if begun is not None:
            self._drop(begun)
            table.append(begun)
        table += self._take(new)
        self._held[seq] = table
        seq.num_blocks = len(table)
        return True

    # ---- the manager as every policy sees it

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        self._deal()
        table = self._held.get(seq)
        if table is None:
            return self.admit(seq, num_tokens, 0)
        need = self.blocks_for(num_tokens) - len(table)
        if need > self.num_free:
            return False
        table += self._take(need)
        seq.num_blocks = len(table)
        return True

    def grow_group(self, group: DecodeGroup) -> bool:
        need = group.blocks_due()
        if need > self.num_free:
            return False
        if need:
            self.num_free -= need
            self._due += group.members_due()
        return True

    def give_back(self, seq: Sequence, count: int) -> None:
        """Frees the last `count` blocks of `seq`, which hold rejected drafts and are not in the tree."""
        self._deal()
        table = self._held[seq]
        self._queue.put_last(table[: -count - 1 : -1])
        del table[-count:]
        self.num_free += count
        seq.num_blocks = len(table)

    def free(self, seq: Sequence, unknown: int = 0) -> None:
        """Gives back the blocks of `seq`, which may come back and find them. Before it leaves the group.

        The last `unknown` of its tokens are not known yet, or come after its end.
        """
        if self._pinned and self.is_kept(seq):
            return
        self._deal()
        if seq in self._held:
            self._store(seq, seq.num_tokens - unknown - 1)
            self._give_back(seq)

    def end(self, seq: Sequence, unknown: int = 0) -> None:
        """As `free`, for a sequence that will not come back and may hold nothing: its keys are forgotten."""
        if self._pinned and self.is_kept(seq):
            return
        self._deal()
        if seq in self._held:
            if self._stores(seq):
                self._store(seq, seq.num_tokens - unknown - 1)
            self._give_back(seq)
        self._known.pop(seq, None)

    def swap_out(self, seq: Sequence) -> int | None:
        return None

    def swap_in(self, seq: Sequence) -> int | None:
        return None

    def check(self) -> None:
        """AssertionError unless each block is free or held, as often as counted, and the tree is one. O(num_blocks)."""
        self._deal()
        users = [0] * len(self._key)
        for table in self._held.values():
            for block in table:
                users[block] += 1
        for block, key in enumerate(self._key):
            assert self._users[block] == (users[block] if key is not None else 0), "wrong counts of users"
            assert key is not None or users[block] < 2, "shared outside the tree"
        free = self._queue.blocks()
        assert sorted(free) == [block for block in range(self.num_blocks) if not users[block]], "a block is lost"
        assert len(free) == self.num_free, f"{len(free)} blocks in the queue, num_free {self.num_free}"
        assert {block: key for key, block in self._index.items()} == {
            block: key for block, key in enumerate(self._key) if key is not None
        }, "index and keys differ"
        below = {child: parent for parent, children in self._children.items() for child in children}
        for block in self._index.values():
            parent = self._parent[block]
            assert below.pop(block, ROOT) == parent, "parents and children differ"
            assert parent == ROOT or self._key[parent] is not None, "a block without its parent"
        assert not below, "a child outside the tree"

    # ---- within

    def _stores(self, seq: Sequence) -> bool:
        """Whether blocks of `seq` enter the tree though it may not come back."""
        return seq.request.tokens is not None

    def _hits(self, seq: Sequence) -> int:
        """How many full blocks of the known tokens of `seq` are in the tree, one after the other from the front."""
        self._deal()
        known = self._known.get(seq)
        if known is None:
            known = self._known[seq] = _Known(seq, self.block_size)
        limit = seq.num_tokens // self.block_size
        if known.seen != (self._version, limit):
            hits, missing, index = 0, False, self._index
            while hits < limit and not missing:
                key, count = known.keys.run(hits, limit)  # most often the first key of all is missing
                run = next((number for number in range(count) if key + number not in index), count)
                hits, missing = hits + run, run < count
            known.hits, known.seen = hits, (self._version, limit)
        return known.hits

    def _begun(self, seq: Sequence, num_tokens: int, hits: int) -> int | None:
        """The partial block, not held by a sequence, that ends with token `num_tokens` of `seq`; None if the tree has
        none, or has not all full blocks before it but `hits` of them.
        """
        if hits != num_tokens // self.block_size or num_tokens % self.block_size == 0:
            return None
        return self._index.get(self._known[seq].keys.begun(num_tokens))

    def _store(self, seq: Sequence, num_tokens: int) -> None:
        """Puts the blocks of the first `num_tokens` tokens of `seq` into the tree, a partial last one too."""
        known, table, full = self._known[seq], self._held[seq], num_tokens // self.block_size
        keys = known.keys.up_to(full)
        if num_tokens % self.block_size:
            keys.append(known.keys.begun(num_tokens))
        index, parent = self._index, ROOT
        for key, block in zip(keys, table, strict=False):
            stored = index.get(key)
            if stored is None:
                stored = index[key] = block
                self._key[block] = key
                self._parent[block] = parent
                self._users[block] = 1
                if parent != ROOT:
                    self._children.setdefault(parent, {})[block] = None
                self._version += 1
            parent = stored

    def _drop(self, block: int) -> None:
        """Takes `block` and all below it out of the tree."""
        parent = self._parent[block]
        if parent != ROOT:
            siblings = self._children[parent]
            del siblings[block]
            if not siblings:
                del self._children[parent]
        self._version += 1
        below = [block]
        for one in below:
            key = self._key[one]
            assert key is not None, f"block {one} is not in the tree"
            del self._index[key]
            self._key[one], self._parent[one], self._users[one] = None, ROOT, 0
            below += self._children.pop(one, ())

    def _deal(self) -> None:
        """Takes the blocks that are due from the queue; to be called before tables, queue or tree are read."""
        if self._due:
            due, self._due = self._due, []
            self.num_free += len(due)
            for seq, block in zip(due, self._take(len(due)), strict=True):
                self._held[seq].append(block)

    def _take(self, count: int) -> list[int]:
        """Takes the next `count` blocks from the queue, and out of the tree, and returns them."""
        if count <= 0:
            return []
        self.num_free -= count
        never, freed = self._queue.take(count)
        if self._index:
            for block in freed:
                if self._key[block] is not None:
                    self._hand_out(block)
        return never + freed if never else freed

    def _hand_out(self, block: int) -> None:
        """`block` of the tree is free, and is about to hold other tokens."""
        self._drop(block)

    def _give_back(self, seq: Sequence) -> None:
        seq.num_blocks = 0
        unused = self._held.pop(seq)[::-1]
        if self._stores(seq) or self._key[unused[-1]] is not None:
            users, keys = self._users, self._key
            held, unused = unused, list[int]()
            for block in held:
                if keys[block] is not None:
                    users[block] -= 1
                    if users[block]:
                        continue
                unused.append(block)
        self._queue.put_last(unused)
        self.num_free += len(unused)


class _Known:
    """The keys of a sequence's blocks, and how many of them were in the tree when last `seen`: version, limit."""

    __slots__ = ("hits", "keys", "seen")

    def __init__(self, seq: Sequence, block_size: int) -> None:
        self.keys = BlockKeys(seq.request, block_size)
        self.hits = 0
        self.seen: tuple[int, int] | None = None

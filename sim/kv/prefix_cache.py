"""KV blocks with prefix caching by block hashes, as vLLM 0.33.0 does it for one full-attention group.

A full block has a key: a hash of its tokens and of the key before it. It is published, that is: can be found under its
key, from the moment its last token is scheduled until the block is handed out again. Freed blocks go back to one queue:
those never published to its head, the published ones to its tail, each sequence's last block first. So unpublished
blocks are reused first, then what lay unused longest. Two blocks may have one key; the older one is found.
Source: vllm/v1/core/block_pool.py, kv_cache_manager.py, single_type_kv_cache_manager.py and kv_cache_utils.py.
"""

from __future__ import annotations

from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.kv_blocks import Pins, check_pool
from batchsim.kernel.types import DecodeGroup, Sequence
from batchsim.kv.block_keys import ChainKeys, keys_of, own_key
from batchsim.kv.free_queue import FreeQueue


class BlockHashKV(Pins):
    """A `KVBlockManager` whose blocks are found again by their contents. Keeps block ids, so both drivers can use it.

    Blocks of a sequence that shares no tokens (`Request.tokens` None) cannot be found by others, so they are published
    only when it gives them up and will come back: `free`, and not `end`. Blocks by which the decode group grew leave
    the queue only when ids or queue are next looked at. There is no swap in vLLM V1: `swap_out` never finds room.
    `unknown`: the number of a decode's newest tokens that its engine does not know yet when it schedules the next one;
    a block is published once all its tokens are known. `lookahead`: the number of tokens after those of a block that
    its key covers too, since its contents depend on them.
    """

    __slots__ = (
        "_due", "_held", "_index", "_key", "_later", "_moves", "_num_sharing", "_queue", "_search", "_users",
        "block_size", "lookahead", "num_blocks", "num_free", "num_swap_blocks", "num_swap_free", "unknown",
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0) -> None:
        super().__init__()
        check_pool(num_blocks, block_size, num_swap_blocks)
        self.block_size = block_size
        self.num_blocks = self.num_free = num_blocks
        self.num_swap_blocks = self.num_swap_free = num_swap_blocks
        self._queue = FreeQueue(num_blocks)
        self._held: dict[Sequence, _Holding] = {}
        self._due: list[Sequence] = []  # have one more block each than their tables say
        self._index: dict[int, int] = {}  # key -> block, of several the one published first
        self._later: dict[int, dict[int, None]] = {}  # key -> the others, in order of publication
        self._key: list[int | None] = [None] * num_blocks  # of published blocks
        self._users = [0] * num_blocks  # sequences that hold a published block
        self._search: _Search | None = None  # the last lookup, kept up to date
        self._moves = 0  # counts the times blocks were given back
        self.unknown = self.lookahead = 0
        self._num_sharing = 0  # holdings of sequences whose tokens have identity

    @property
    def cached_blocks(self) -> int:
        """Blocks that a lookup can find, in use or not. O(num_blocks)."""
        self._deal()
        return sum(key is not None for key in self._key)

    def table(self, seq: Sequence) -> list[int]:
        """The block ids of `seq` in token order; the executor reads it and must not change it."""
        self._deal()
        holding = self._held.get(seq)
        return holding.table if holding is not None else []

    def swap_table(self, seq: Sequence) -> list[int]:
        """Empty: nothing is ever swapped."""
        return []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held(self, seq: Sequence) -> int:
        return len(self.table(seq))

    # ---- admission

    def lookup(self, seq: Sequence) -> int:
        """How many of the known tokens of `seq` are cached: whole blocks from the front, never all tokens.

        Changes nothing that could be seen. Asked again for the same sequence, only what changed meanwhile is walked.
        """
        self._deal()
        request = seq.request
        if request.tokens is None and own_key(request) not in self._index:
            return 0
        limit = (seq.num_tokens - max(self.lookahead, 1)) // self.block_size
        search = self._search
        if search is None or search.seq is not seq or search.limit != limit:
            search = self._search = _Search(seq, keys_of(request, self.block_size, self.lookahead), limit)
        if not search.settled:
            search.walk(self._index)
        return search.num_hits * self.block_size

    def admit(
        self,
        seq: Sequence,
        num_tokens: int,
        hit_tokens: int,
        spare_blocks: int = 0,
        must_fit_tokens: int = 0,
        ahead: int = 0,
    ) -> bool:
        """Gives `seq` its hit blocks and new ones for `num_tokens` tokens in all; False, and nothing changed, if short.

        `hit_tokens` is at most what `lookup` says now. `spare_blocks` must stay free; `must_fit_tokens` in all would
        have to fit too, though nothing is kept for them. A hit block without users counts as taken. The last `ahead`
        tokens are for drafts, which are never published.
        """
        if seq in self._held or self.lookup(seq) < hit_tokens or hit_tokens % self.block_size:
            raise ValueError(f"cannot admit with {hit_tokens} cached tokens: {seq!r}")
        have = hit_tokens // self.block_size
        need = -(-num_tokens // self.block_size)
        lacking = max(need, -(-must_fit_tokens // self.block_size)) - have
        spare = self.num_free - spare_blocks - lacking
        if spare < 0:
            return False
        hits, keys = [], None
        search = self._search
        if search is not None and search.seq is seq:
            keys = search.keys
            if have:
                if self._unused(search, have) > spare:
                    return False
                hits = search.hits[:have]
                self._touch(hits)
            self._search = None
        holding = _Holding(hits, keys if keys is not None else keys_of(seq.request, self.block_size, self.lookahead))
        self._held[seq] = holding
        self._num_sharing += holding.sharing
        holding.table += self._take(need - have)
        self._publish_to(holding, seq, num_tokens - ahead)
        seq.num_blocks = len(holding.table)
        return True

    def _unused(self, search: _Search, have: int) -> int:
        """How many of the first `have` hit blocks no sequence holds; recounted only after blocks were given back."""
        if search.counted != (self._moves, have):
            users = self._users
            search.unused = sum([not users[block] for block in search.hits[:have]])
            search.counted = (self._moves, have)
        return search.unused

    def _touch(self, hits: list[int]) -> None:
        users, queue = self._users, self._queue
        for block in hits:
            if not users[block]:
                queue.remove(block)
                self.num_free -= 1
            users[block] += 1

    # ---- the running

    def allocate(self, seq: Sequence, num_tokens: int, unknown: int = 0, ahead: int = 0) -> bool:
        """As `KVBlockManager.allocate`; full blocks of known tokens, all but the last `unknown`, become published.

        The last `ahead` of `num_tokens` are for drafts, of which nothing is published.
        """
        self._deal()
        holding = self._held.get(seq)
        if holding is None:
            return self.admit(seq, num_tokens, 0)
        need = -(-num_tokens // self.block_size) - len(holding.table)
        if need > self.num_free:
            return False
        holding.table += self._take(need)
        self._publish_to(holding, seq, min(num_tokens - ahead, seq.num_tokens - unknown), unknown)
        seq.num_blocks = len(holding.table)
        return True

    def publish(self, seq: Sequence, num_tokens: int, unknown: int = 0) -> None:
        """Publishes the full blocks of the first `num_tokens` tokens of `seq`: their last ones have become known.

        The last `unknown` of all its tokens are not. Sequences without shared tokens are published when freed.
        """
        if not self._num_sharing:
            return
        self._deal()
        self._publish_to(self._held[seq], seq, num_tokens, unknown)

    def publish_group(self, group: DraftGroup, more: int) -> None:
        """Publishes the full blocks of all computed tokens of the members that are known, and `more` ones."""
        if not self._num_sharing:
            return
        self._deal()
        for seq, num_tokens in group.filled(min(more, 1 - self.lookahead)):
            holding = self._held[seq]
            if holding.sharing and num_tokens // self.block_size > holding.published:
                self._publish(holding, holding.published, num_tokens // self.block_size, users=1)
                holding.published = num_tokens // self.block_size

    def grow_group(self, group: DecodeGroup) -> bool:
        need = group.blocks_due()
        if need > self.num_free:
            return False
        if need:
            self.num_free -= need
            self._due += group.members_due()
        if not self._num_sharing:
            return True
        if isinstance(group, DraftGroup):
            self.publish_group(group, 1)
            return True
        self._deal()
        unknown = self.unknown
        for seq in group.members_due(ahead=1 - unknown):
            holding = self._held[seq]
            if holding.sharing:
                self._publish_to(holding, seq, seq.num_tokens - unknown)
        return True

    def grow_by(self, due: list[Sequence]) -> None:
        """As that of `CountingKV`; only while not `is_shared`."""
        self.num_free -= len(due)
        self._due += due

    @property
    def is_shared(self) -> bool:
        """Whether a block of any sequence that holds some could be found by others as it fills."""
        return self._num_sharing > 0

    def _deal(self) -> None:
        """Takes the blocks that are due from the queue; to be called before tables, queue or index are read."""
        if self._due:
            due, self._due = self._due, []
            self.num_free += len(due)
            for seq, block in zip(due, self._take(len(due)), strict=True):
                self._held[seq].table.append(block)

    def growth_is_awaited(self, group: DecodeGroup) -> bool:
        """Whether the next growth of `group` publishes the very block that the last lookup did not find."""
        search = self._search
        if search is None or search.missing is None or not search.echoes:
            return False
        for seq in group.members_due(ahead=1 - self.unknown):
            holding = self._held[seq]
            full = (seq.num_tokens - self.unknown) // self.block_size
            if holding.sharing and holding.key(full - 1) == search.missing:
                return True
        return False

    # ---- giving back

    def free(self, seq: Sequence, unknown: int = 0) -> None:
        """Gives back the blocks of `seq`, which may come back and find them. Before it leaves the group.

        The last `unknown` of its tokens are not known yet.
        """
        self._give_back(seq, unknown, returns=True)

    def end(self, seq: Sequence, unknown: int = 0) -> None:
        """As `free`, for a sequence that will not come back: cheaper where it shares no tokens."""
        self._give_back(seq, unknown, returns=False)

    def _give_back(self, seq: Sequence, unknown: int, *, returns: bool) -> None:
        if self._pinned and self.is_kept(seq):
            return
        self._deal()
        seq.num_blocks = 0
        holding = self._held.pop(seq, None)
        if holding is None:
            return
        table, users, published = holding.table, self._users, holding.published
        self._num_sharing -= holding.sharing
        computed = seq.num_computed_tokens - unknown
        known = min(computed, seq.num_tokens - unknown - self.lookahead)
        full = published if holding.sharing else max(holding.full, known // self.block_size)
        if returns:
            self._publish(holding, published, full, users=0)
        unused = table[published:full][::-1]
        for block in reversed(table[:published]):
            users[block] -= 1
            if not users[block]:
                unused.append(block)
        self._queue.put_first(table[full:])
        self._queue.put_last(unused)
        self.num_free += len(unused) + len(table) - full
        self._moves += 1

    def swap_out(self, seq: Sequence) -> int | None:
        return None

    def swap_in(self, seq: Sequence) -> int | None:
        return None

    # ---- the index

    def _publish_to(self, holding: _Holding, seq: Sequence, num_tokens: int, unknown: int = 0) -> None:
        full = max(min(num_tokens, seq.num_tokens - unknown - self.lookahead), 0) // self.block_size
        if not holding.sharing:
            holding.full = max(holding.full, full)
        elif full > holding.published:
            self._publish(holding, holding.published, full, users=1)
            holding.published = full

    def _publish(self, holding: _Holding, first: int, stop: int, users: int) -> None:
        index, key_of, users_of = self._index, self._key, self._users
        keys, blocks = holding.some_keys(first, stop), holding.table[first:stop]
        for key, block in zip(keys, blocks, strict=True):
            if index.setdefault(key, block) != block:
                self._later.setdefault(key, {})[block] = None
            key_of[block] = key
            users_of[block] = users
        search = self._search
        if search is not None and search.missing in keys:
            search.settled = False

    def _take(self, count: int) -> list[int]:
        """Takes the next `count` blocks of the free queue, no longer to be found under their keys, and returns them."""
        if count <= 0:
            return []
        self.num_free -= count
        never, published = self._queue.take(count)
        if self._index:
            self._evict(published)
        return never + published if never else published

    def _evict(self, blocks: list[int]) -> None:
        """Lets no lookup find `blocks`, which may have no key, any more."""
        index, key_of, later = self._index, self._key, self._later
        for block in blocks:
            key = key_of[block]
            if key is None:
                continue
            key_of[block] = None
            if later and key in later:
                self._evict_one_of_several(block, key)
            else:
                del index[key]
        if self._search is not None:
            self._search.lost(blocks)

    def _evict_one_of_several(self, block: int, key: int) -> None:
        others = self._later[key]
        if self._index[key] == block:
            block = self._index[key] = next(iter(others))
        del others[block]
        if not others:
            del self._later[key]

    def check(self) -> None:
        """AssertionError unless every block is in one place and counts, keys and index agree. O(num_blocks)."""
        self._deal()
        free = self._queue.blocks()
        holdings = list(self._held.values())
        users = [0] * self.num_blocks
        for holding in holdings:
            for block in holding.table[: holding.published]:
                users[block] += 1
        alone = [block for holding in holdings for block in holding.table[holding.published :]]
        used = {block for block in range(self.num_blocks) if users[block]}
        assert sorted([*free, *alone, *used]) == list(range(self.num_blocks)), "a block is lost or in two places"
        assert len(free) == self.num_free, f"{len(free)} blocks in the queue, num_free {self.num_free}"
        assert all(users[block] == self._users[block] for block in used), "wrong counts of users"
        found = [(b, key) for key, b in self._index.items()]
        found += [(b, key) for key, others in self._later.items() for b in others]
        assert dict(found) == {b: key for b, key in enumerate(self._key) if key is not None}, "index and keys differ"
        assert len(found) == len(dict(found)), "a block under two keys"
        assert not any(self._users[block] for block, _ in found if block not in used), "a free block has users"


class _Holding:
    """The block table of one sequence. The first `published` of its blocks are in the index.

    A sequence that shares no tokens has at least its first `full` blocks put there when it gives them up.
    """

    __slots__ = ("full", "keys", "published", "sharing", "table")

    def __init__(self, hits: list[int], keys: ChainKeys | range) -> None:
        self.table = hits
        self.keys = keys
        self.published = self.full = len(hits)
        self.sharing = not isinstance(keys, range)

    def some_keys(self, first: int, stop: int) -> list[int] | range:
        return self.keys[first:stop] if isinstance(self.keys, range) else self.keys.up_to(stop)[first:stop]

    def key(self, number: int) -> int:
        return self.some_keys(number, number + 1)[0]


class _Search:
    """The blocks that the last lookup hit, and how many of them still hold."""

    __slots__ = ("_at", "_valid", "counted", "echoes", "hits", "keys", "limit", "missing", "seq", "settled", "unused")

    def __init__(self, seq: Sequence, keys: ChainKeys | range, limit: int) -> None:
        self.seq = seq
        self.keys = keys
        self.limit = limit  # blocks that may be hit
        self.hits: list[int] = []
        self.missing: int | None = None  # the key at which the walk stopped
        self.settled = False  # whether a walk would find the same
        self.counted: tuple[int, int] | None = None  # moves, hits: when `unused` was counted, and of how many
        self.unused = 0
        tokens = seq.request.tokens
        self.echoes = tokens is not None and any(stream % 2 for stream, _, _ in tokens.segments)
        self._at: dict[int, int] = {}  # block -> its place in hits
        self._valid = 0  # hits up to here hold

    @property
    def num_hits(self) -> int:
        return len(self.hits)

    def walk(self, index: dict[int, int]) -> None:
        """Looks up the blocks behind the hits that still hold, up to the first one missing or the limit."""
        hits, at = self.hits, self._at
        for block in hits[self._valid :]:
            del at[block]
        del hits[self._valid :]
        keys = self.keys[: self.limit] if isinstance(self.keys, range) else self.keys.up_to(self.limit)
        self.missing = None
        for number in range(self._valid, self.limit):
            hit = index.get(keys[number])
            if hit is None:
                self.missing = keys[number]
                break
            at[hit] = number
            hits.append(hit)
        self._valid = len(hits)
        self.counted = None
        self.settled = True

    def lost(self, blocks: list[int]) -> None:
        """Notes that `blocks` can no longer be found: from the first hit among them on the hits no longer hold."""
        if self._at.keys().isdisjoint(blocks):
            return
        for block in blocks:
            number = self._at.get(block)
            if number is not None and number < self._valid:
                self._valid = number
                self.settled = False

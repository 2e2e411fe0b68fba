"""KV blocks with prefix caching by block hashes, as vLLM 0.33.0 does it for one full-attention group.

1. A full block has a key: a hash of its tokens and of the key before it. It is published, that is: can be found under
   its key, from the moment its last token is known (with no steps in flight: is scheduled) until the block is handed
   out again. Two blocks may have one key; the older one is found.
2. Freed blocks go back to one queue: those never published to its head, the published ones to its tail, each sequence's
   last block first. So unpublished blocks are reused first, then what lay unused longest.
3. Blocks of a sequence that shares no tokens (`Request.tokens` None) cannot be found by others, so they are published
   only when it gives them up and will come back: `free`, and not `end`.
4. There is no swap in vLLM V1: `swap_out` never finds room.

Where the blocks are is the pool's affair (`block_pool`); here is what a sequence gets, and when its blocks are full.
Source: vllm/v1/core/block_pool.py, kv_cache_manager.py, single_type_kv_cache_manager.py and kv_cache_utils.py.
"""

from __future__ import annotations

from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.kv_blocks import Pins, check_pool
from batchsim.kernel.types import DecodeGroup, Sequence
from batchsim.kv.block_keys import BlockKeys, own_key
from batchsim.kv.block_pool import BlockPool, Change
from batchsim.kv.cached_runs import Holding, Run
from batchsim.kv.search import Search


class BlockHashKV(Pins):
    """A `KVBlockManager` whose blocks are found again by their contents. Without `ids` blocks are counted, and every
    `table` is empty; a live executor needs them.

    `unknown`: the number of a decode's newest tokens that its engine does not know yet when it schedules the next one;
    a block is published once all its tokens are known. `lookahead`: the number of tokens after those of a block that
    its key covers too, since its contents depend on them.
    """

    __slots__ = (
        "_held", "_num_sharing", "_pool", "block_size", "lookahead", "num_blocks", "num_swap_blocks",
        "num_swap_free", "unknown",
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0, *, ids: bool = True) -> None:
        super().__init__()
        check_pool(num_blocks, block_size, num_swap_blocks)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_swap_blocks = self.num_swap_free = num_swap_blocks
        self.unknown = self.lookahead = 0
        self._pool = BlockPool(num_blocks, ids=ids)
        self._held: dict[Sequence, Holding] = {}
        self._num_sharing = 0  # holdings of sequences whose tokens have identity

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def cached_blocks(self) -> int:
        """Blocks that have a key, in use or not. O(runs)."""
        return sum(run.length for span in self._pool.spans.values() for run in span.runs)

    def changes(self) -> list[Change]:
        """The changes of what can be found since this was called last, in order; kept from the first call on."""
        log, self._pool.log = self._pool.log, []
        return log or []

    @property
    def is_shared(self) -> bool:
        """Whether a block of any sequence that holds some could be found by others as it fills."""
        return self._num_sharing > 0

    def table(self, seq: Sequence) -> list[int]:
        """The block ids of `seq` in token order; the executor reads it and must not change it."""
        holding = self._held.get(seq)
        return holding.table if holding is not None else []

    def swap_table(self, seq: Sequence) -> list[int]:
        """Empty: nothing is ever swapped."""
        return []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held(self, seq: Sequence) -> int:
        return seq.num_blocks if seq.group is None else seq.group.blocks_held(seq)

    def keys(self, seq: Sequence) -> BlockKeys:
        """The keys of all blocks of `seq`, which are under way already where it was looked up last or holds blocks."""
        search, holding = self._pool.search, self._held.get(seq)
        if search is not None and search.seq is seq:
            return search.keys
        return BlockKeys(seq.request, self.block_size, self.lookahead) if holding is None else self._keys(holding, seq)

    # ---- admission

    def lookup(self, seq: Sequence) -> int:
        """How many of the known tokens of `seq` are cached: whole blocks from the front, never all tokens.

        Changes nothing that could be seen. Asked again for the same sequence, only what changed meanwhile is walked.
        """
        pool, request = self._pool, seq.request
        if request.tokens is None and not (pool.spans and own_key(request) in pool.spans):
            return 0
        limit = (seq.num_tokens - max(self.lookahead, 1)) // self.block_size
        search = pool.search
        if search is None or search.seq is not seq or search.limit != limit:
            search = pool.search = Search(seq, BlockKeys(request, self.block_size, self.lookahead), limit)
        search.walk(pool.spans)
        return search.num_hits * self.block_size

    def admit(
        self, seq: Sequence, num_tokens: int, hit_tokens: int, spare_blocks: int = 0, must_fit_tokens: int = 0,
        ahead: int = 0,
    ) -> bool:  # fmt: skip
        """Gives `seq` its hit blocks and new ones for `num_tokens` tokens in all; False, and nothing changed, if short.

        `hit_tokens` is at most what `lookup` says now. `spare_blocks` must stay free; `must_fit_tokens` in all would
        have to fit too, though nothing is kept for them. A hit block without users counts as taken. The last `ahead`
        tokens are for drafts, which are never published.
        """
        if seq in self._held or self.lookup(seq) < hit_tokens or hit_tokens % self.block_size:
            raise ValueError(f"cannot admit with {hit_tokens} cached tokens: {seq!r}")
        pool, have = self._pool, hit_tokens // self.block_size
        need = max(-(-num_tokens // self.block_size), have)
        lacking = max(need, -(-must_fit_tokens // self.block_size)) - have
        spare = pool.num_free - spare_blocks - lacking
        if spare < 0:
            return False
        holding, search = Holding(seq.request.tokens is not None), pool.search
        if search is not None and search.seq is seq:
            holding.keys = search.keys
            if have:
                if search.num_unused(have) > spare:
                    return False
                pool.share(holding, search.first(have))
            pool.search = None
        self._held[seq] = holding
        self._num_sharing += holding.sharing
        holding.table += pool.take(need - have)
        self._publish_to(holding, seq, num_tokens - ahead)
        seq.num_blocks = need
        return True

    # ---- the running

    def allocate(self, seq: Sequence, num_tokens: int, unknown: int = 0, ahead: int = 0) -> bool:
        """As `KVBlockManager.allocate`; full blocks of known tokens, all but the last `unknown`, become published.

        The last `ahead` of `num_tokens` are for draft tokens, whose blocks are not published.
        """
        holding = self._held.get(seq)
        if holding is None:
            return self.admit(seq, num_tokens, 0)
        held = self.held(seq)
        need = -(-num_tokens // self.block_size) - held
        if need > 0:
            if need > self._pool.num_free:
                return False
            holding.table += self._pool.take(need)
            held += need
        self._publish_to(holding, seq, min(num_tokens - ahead, seq.num_tokens - unknown), unknown)
        seq.num_blocks = held
        return True

    def settle(self, seq: Sequence) -> None:
        """Notes the blocks of `seq`, which is about to leave its group and keeps them; nothing is published."""
        seq.num_blocks = self.held(seq)

    def grow_group(self, group: DecodeGroup) -> bool:
        need = group.blocks_due()
        if need > self._pool.num_free:
            return False
        if need:
            taken = self._pool.take(need)
            if self._pool.has_ids:
                self._append(taken, group.members_due())
        if not self._num_sharing:
            return True
        if isinstance(group, DraftGroup):
            self.publish_group(group, 1)
            return True
        unknown = self.unknown
        for seq in group.members_due(ahead=1 - unknown):
            holding = self._held[seq]
            if holding.sharing:
                self._publish_to(holding, seq, seq.num_tokens - unknown)
        return True

    def grow_by(self, due: list[Sequence]) -> None:
        """As that of `CountingKV`; only while not `is_shared`."""
        if due:
            taken = self._pool.take(len(due))
            if self._pool.has_ids:
                self._append(taken, due)

    def _append(self, ids: list[int], due: list[Sequence]) -> None:
        """Appends one block to the table of each of `due`."""
        for seq, id_ in zip(due, ids, strict=True):
            self._held[seq].table.append(id_)

    def growth_is_awaited(self, group: DecodeGroup) -> bool:
        """Whether the next growth of `group` publishes the very block that the last lookup did not find."""
        search = self._pool.search
        if search is None or search.missing is None or not search.echoes:
            return False
        for seq in group.members_due(ahead=1 - self.unknown):
            holding = self._held[seq]
            full = (seq.num_tokens - self.unknown) // self.block_size
            if holding.sharing and self._keys(holding, seq).key(full - 1) == search.missing:
                return True
        return False

    def growth_spares_hits(self, group: DecodeGroup) -> bool:
        """Whether the next growth of `group` takes no block that the last lookup found."""
        return self._pool.spares_hits(group.blocks_due())

    # ---- publishing

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Publishes the full blocks of the first `num_tokens` tokens of `seq`: their last ones have become known.

        Sequences without shared tokens are published when freed.
        """
        if self._num_sharing:
            self._publish_to(self._held[seq], seq, num_tokens)

    def publish_group(self, group: DraftGroup, more: int) -> None:
        """Publishes the full blocks of all computed tokens of the members that are known, and `more` ones."""
        if not self._num_sharing:
            return
        for seq, num_tokens in group.filled(min(more, 1 - self.lookahead)):
            holding = self._held[seq]
            if holding.sharing:
                self._pool.publish(holding, self._keys(holding, seq), num_tokens // self.block_size)

    def _publish_to(self, holding: Holding, seq: Sequence, num_tokens: int, unknown: int = 0) -> None:
        """Publishes the full blocks of the first `num_tokens` tokens, or notes them for when `holding` is given up."""
        full = max(min(num_tokens, seq.num_tokens - unknown - self.lookahead), 0) // self.block_size
        if not holding.sharing:
            holding.full = max(holding.full, full)
        elif full > holding.published:
            self._pool.publish(holding, self._keys(holding, seq), full)

    def _keys(self, holding: Holding, seq: Sequence) -> BlockKeys:
        if holding.keys is None:
            holding.keys = BlockKeys(seq.request, self.block_size, self.lookahead)
        return holding.keys

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
        held = self.held(seq)
        seq.num_blocks = 0
        holding = self._held.pop(seq, None)
        if holding is None:
            return
        pool, full = self._pool, holding.published
        if holding.sharing:
            self._num_sharing -= 1
        elif returns or pool.has_ids or pool.spans:  # else all free blocks are alike, in whatever order they lie
            computed = seq.num_computed_tokens - unknown
            known = min(computed, seq.num_tokens - unknown - self.lookahead)
            full = max(holding.full, known // self.block_size)
            if returns:
                pool.publish(holding, self._keys(holding, seq), full)
        pool.give_back(holding, held, full)

    def swap_out(self, seq: Sequence) -> int | None:
        return None

    def swap_in(self, seq: Sequence) -> int | None:
        return None

    def check(self) -> None:
        """AssertionError unless every block is in one place and counts, keys and index agree. O(num_blocks)."""
        users: dict[Run, int] = {}
        alone: list[int] = []
        num_alone = 0
        for seq, holding in self._held.items():
            runs, published = holding.published_runs(), holding.published
            for run in runs:
                users[run] = users.get(run, 0) + 1
            assert sum([run.length for run in runs]) == published, "runs and counts differ"
            if self._pool.has_ids:
                assert [id_ for run in runs for id_ in run.ids] == holding.table[:published], "runs and table differ"
            alone += holding.table[published:]
            num_alone += self.held(seq) - published
        self._pool.check(users, alone)
        lost = self.num_blocks - self.num_free - sum([run.length for run in users]) - num_alone
        groups = {seq.group for seq in self._held if seq.group is not None}
        grown = {group.blocks_due() for group in groups}  # its members hold these once their step is launched
        assert lost in {0} | grown, "a block is lost or counted twice"

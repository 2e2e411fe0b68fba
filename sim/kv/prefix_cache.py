"""KV blocks with prefix caching by block hashes, as vLLM 0.33.0 does it for one full-attention group.

A full block has a key: a hash of its tokens and of the key before it. It is published, that is: can be found under its
key, from the moment its last token is scheduled until the block is handed out again. Freed blocks go back to one queue:
those never published to its head, the published ones to its tail, each sequence's last block first. So unpublished
blocks are reused first, then what lay unused longest. Two blocks may have one key; the older one is found. Blocks are
kept as runs (`cached_runs`): finding, sharing and giving back cost a step for each run, not for each block.
Source: vllm/v1/core/block_pool.py, kv_cache_manager.py, single_type_kv_cache_manager.py and kv_cache_utils.py.
"""

from __future__ import annotations

from itertools import pairwise

from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.kv_blocks import Pins, check_pool
from batchsim.kernel.types import DecodeGroup, Sequence
from batchsim.kv.block_keys import BlockKeys, own_key
from batchsim.kv.cached_runs import FreeRuns, Holding, Run, Search, Span


class BlockHashKV(Pins):
    """A `KVBlockManager` whose blocks are found again by their contents. With `ids` it keeps block ids, so that both
    drivers can use it; without, blocks are only counted up to the first that could be found: which ones are free does
    not matter before.

    Blocks of a sequence that shares no tokens (`Request.tokens` None) cannot be found by others, so they are published
    only when it gives them up and will come back: `free`, and not `end`. Blocks by which the decode group grew leave
    the queue only when ids or queue are next looked at. There is no swap in vLLM V1: `swap_out` never finds room.
    `unknown`: the number of a decode's newest tokens that its engine does not know yet when it schedules the next one;
    a block is published once all its tokens are known. `lookahead`: the number of tokens after those of a block that
    its key covers too, since its contents depend on them.
    """

    __slots__ = (
        "_counts", "_due", "_free", "_held", "_moves", "_num_sharing", "_search", "_spans", "block_size", "lookahead",
        "num_blocks", "num_free", "num_swap_blocks", "num_swap_free", "unknown",
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0, *, ids: bool = True) -> None:
        super().__init__()
        check_pool(num_blocks, block_size, num_swap_blocks)
        self.block_size = block_size
        self.num_blocks = self.num_free = num_blocks
        self.num_swap_blocks = self.num_swap_free = num_swap_blocks
        self._counts = not ids  # whether blocks are only counted: tables are empty, and all blocks in the queue
        self._free = FreeRuns(num_blocks)
        self._held: dict[Sequence, Holding] = {}
        self._due: list[Sequence] = []  # have one more block each than their tables say
        self._spans: dict[int, Span] = {}  # by their first keys
        self._search: Search | None = None  # the last lookup, kept up to date
        self._moves = 0  # counts the times blocks were given back
        self.unknown = self.lookahead = 0
        self._num_sharing = 0  # holdings of sequences whose tokens have identity

    @property
    def cached_blocks(self) -> int:
        """Blocks that have a key, in use or not. O(runs)."""
        self._deal()
        return sum(len(run.blocks) for span in self._spans.values() for run in span.runs)

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
        if self._counts:
            return seq.num_blocks if seq.group is None else seq.group.blocks_held(seq)
        return len(self.table(seq))

    # ---- admission

    def lookup(self, seq: Sequence) -> int:
        """How many of the known tokens of `seq` are cached: whole blocks from the front, never all tokens.

        Changes nothing that could be seen. Asked again for the same sequence, only what changed meanwhile is walked.
        """
        self._deal()
        request = seq.request
        if request.tokens is None and own_key(request) not in self._spans:
            return 0
        limit = (seq.num_tokens - max(self.lookahead, 1)) // self.block_size
        search = self._search
        if search is None or search.seq is not seq or search.limit != limit:
            search = self._search = Search(seq, BlockKeys(request, self.block_size, self.lookahead), limit)
        if not search.settled:
            search.walk(self._spans)
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
        holding, search = Holding(seq.request.tokens is not None), self._search
        if self._counts:
            if not holding.sharing:
                self._held[seq] = holding
                self.num_free -= need
                self._publish_to(holding, seq, num_tokens - ahead)
                seq.num_blocks = need
                return True
            self.name_blocks()
        if search is not None and search.seq is seq:
            holding.keys = search.keys
            if have:
                if self._unused(search, have) > spare:
                    return False
                self._share(holding, search, have)
            self._search = None
        self._held[seq] = holding
        self._num_sharing += holding.sharing
        holding.table += self._take(need - have)
        self._publish_to(holding, seq, num_tokens - ahead)
        seq.num_blocks = len(holding.table)
        return True

    def name_blocks(self) -> None:
        """From now on keeps the ids of blocks: one is about to be found, or steps in flight hold some beyond what their
        sequences have computed."""
        for seq, holding in self._held.items():
            holding.table = self._free.take_never(self.held(seq))
        self._counts = False

    def _unused(self, search: Search, have: int) -> int:
        """How many of the first `have` hit blocks no sequence holds; recounted only after blocks were given back."""
        if search.counted != (self._moves, have):
            unused, left = 0, have
            for run, count in zip(search.hits, search.counts, strict=True):
                if not run.users:
                    unused += min(count, left)
                left -= count
                if left <= 0:
                    break
            search.unused, search.counted = unused, (self._moves, have)
        return search.unused

    def _share(self, holding: Holding, search: Search, have: int) -> None:
        """Gives `holding` the first `have` blocks that `search` hit."""
        for run, count in zip(search.hits, search.counts, strict=True):
            count = min(count, have - holding.published)
            if not count:
                return
            if count < len(run.blocks):
                assert run.span is not None, "a run was hit that cannot be found"
                self._cut(run.span, count)
            if not run.users:
                self._free.remove(run)
                self.num_free -= len(run.blocks)
            run.users += 1
            holding.note(run)

    # ---- the running

    def allocate(self, seq: Sequence, num_tokens: int, unknown: int = 0, ahead: int = 0) -> bool:
        """As `KVBlockManager.allocate`; full blocks of known tokens, all but the last `unknown`, become published.

        The last `ahead` of `num_tokens` are for drafts, of which nothing is published.
        """
        self._deal()
        holding = self._held.get(seq)
        if holding is None:
            return self.admit(seq, num_tokens, 0)
        held = self.held(seq) if self._counts else len(holding.table)
        need = max(-(-num_tokens // self.block_size) - held, 0)
        if need > self.num_free:
            return False
        if self._counts:
            self.num_free -= need
        else:
            holding.table += self._take(need)
        self._publish_to(holding, seq, min(num_tokens - ahead, seq.num_tokens - unknown), unknown)
        seq.num_blocks = held + need
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
                self._publish(holding, seq, num_tokens // self.block_size)

    def grow_group(self, group: DecodeGroup) -> bool:
        need = group.blocks_due()
        if need > self.num_free:
            return False
        if need:
            self.num_free -= need
            if not self._counts:
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
        if not self._counts:
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
            if holding.sharing and self._keys(holding, seq).key(full - 1) == search.missing:
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
        if self._counts:
            if not returns:
                if self._held.pop(seq, None) is not None:
                    self.num_free += self.held(seq)
                seq.num_blocks = 0
                return
            self.name_blocks()
        self._deal()
        seq.num_blocks = 0
        holding = self._held.pop(seq, None)
        if holding is None:
            return
        self._num_sharing -= holding.sharing
        table, free = holding.table, self._free
        computed = seq.num_computed_tokens - unknown
        known = min(computed, seq.num_tokens - unknown - self.lookahead)
        full = holding.published if holding.sharing else max(holding.full, known // self.block_size)
        unpublished = table[full:]
        free.put_first(unpublished)
        self.num_free += len(unpublished)
        if returns:
            self._publish(holding, seq, full)
        runs = holding.published_runs()
        if full > holding.published:
            runs.append(Run(table[holding.published : full], users=1))
        for run in reversed(runs):
            run.users -= 1
            if not run.users:
                free.put_last(run)
                self.num_free += len(run.blocks)
        self._moves += 1

    def swap_out(self, seq: Sequence) -> int | None:
        return None

    def swap_in(self, seq: Sequence) -> int | None:
        return None

    # ---- the index

    def _publish_to(self, holding: Holding, seq: Sequence, num_tokens: int, unknown: int = 0) -> None:
        full = max(min(num_tokens, seq.num_tokens - unknown - self.lookahead), 0) // self.block_size
        if not holding.sharing:
            holding.full = max(holding.full, full)
        elif full > holding.published:
            self._publish(holding, seq, full)

    def _keys(self, holding: Holding, seq: Sequence) -> BlockKeys:
        if holding.keys is None:
            holding.keys = BlockKeys(seq.request, self.block_size, self.lookahead)
        return holding.keys

    def _publish(self, holding: Holding, seq: Sequence, full: int) -> None:
        """Lets the blocks of `holding` up to `full` be found."""
        spans, table, search, keys = self._spans, holding.table, self._search, self._keys(holding, seq)
        while (number := holding.published) < full:
            key, count = keys.run(number, full)
            if search is not None and search.missing is not None and 0 <= search.missing - key < count:
                search.settled = False
            span = spans.get(key)
            if span is not None:
                if (there := len(span.runs[0].blocks)) > count:
                    self._cut(span, count)
                else:
                    count = there
            elif holding.extend(key, count):
                continue
            else:
                span = spans[key] = Span(key)
            holding.runs.append(span.add(table[number : number + count], number, 1))
            holding.published += count

    def _cut(self, span: Span, at: int) -> None:
        """Cuts the runs of `span` behind their first `at` blocks."""
        rest = self._spans[span.key + at] = Span(span.key + at)
        self._unsettle(span.runs[0])
        for run in span.runs:
            behind = rest.add(run.blocks[at:], run.number + at, run.users)
            behind.behind, run.behind = run.behind, behind
            del run.blocks[at:]
            if not run.users:
                self._free.put_before(run, behind)

    def _unsettle(self, run: Run) -> None:
        """Has the last lookup walked anew if it hit `run`, which changes."""
        search = self._search
        if search is not None and run in search.hits:
            search.settled = False

    def _take(self, count: int) -> list[int]:
        """Takes the next `count` blocks that are free, no longer to be found under their keys, and returns them."""
        if count <= 0:
            return []
        self.num_free -= count
        taken = self._free.take_never(count)
        while (lacking := count - len(taken)) > 0:
            run = self._free.oldest()
            blocks, span = run.blocks, run.span
            if span is not None:
                if lacking < len(blocks) and len(span.runs) > 1:
                    self._cut(span, len(blocks) - lacking)
                    continue  # with what was cut off
                self._unsettle(run)
            if lacking < len(blocks):
                taken += blocks[: -lacking - 1 : -1]
                del blocks[-lacking:]
                break
            taken += blocks[::-1]
            self._free.remove(run)
            if span is not None:
                span.runs.remove(run)
                if not span.runs:
                    del self._spans[span.key]
        return taken

    def check(self) -> None:
        """AssertionError unless every block is in one place and counts, keys and index agree. O(num_blocks)."""
        self._deal()
        if self._counts:
            assert self.num_free + sum(map(self.held, self._held)) == self.num_blocks, (
                "a block is lost or counted twice"
            )
            return
        free, users = self._free.blocks(), dict.fromkeys(self._free.runs(), 0)
        alone: list[int] = []
        for holding in self._held.values():
            runs = holding.published_runs()
            for run in runs:
                users[run] = users.get(run, 0) + 1
            assert [b for run in runs for b in run.blocks] == holding.table[: holding.published], (
                "runs and table differ"
            )
            alone += holding.table[holding.published :]
        used = [block for run in users if run.users for block in run.blocks]
        assert sorted([*free, *alone, *used]) == list(range(self.num_blocks)), "a block is lost or in two places"
        assert len(free) == self.num_free, f"{len(free)} blocks in the queue, num_free {self.num_free}"
        assert all(run.users == count for run, count in users.items()), "wrong counts of users"
        cached = {run: span for span in self._spans.values() for run in span.runs}
        assert cached == {run: run.span for run in users if run.span is not None}, "spans and runs differ"
        for key, span in self._spans.items():
            assert span.key == key, "a span under another key"
            assert len({len(run.blocks) for run in span.runs}) == 1 and span.runs[0].blocks, "runs of a span differ"
        for span, next_ in pairwise(sorted(self._spans.values(), key=lambda span: span.key)):
            assert span.key + len(span.runs[0].blocks) <= next_.key, "two spans with the same key"

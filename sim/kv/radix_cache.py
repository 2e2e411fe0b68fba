"""KV blocks with prefix caching in a radix tree, as SGLang 0.5.23 does it; TGI's cache is of this kind too.

A page is a block. A sequence locks the pages it shares with the tree. `insert` adds what it has computed and gives back
its own copies of pages that the tree has already; what is never inserted is never found. Short of free pages, the tree
evicts. Unlocked pages count as free.
Source: python/sglang/srt/mem_cache/unified_radix_cache.py and common.py of the 0.5.23 wheel.
Simplifies: no salt keys. Only the pages needed are made free; `make_room` frees more.
"""

from __future__ import annotations

from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.kv_blocks import Pins, check_pool
from batchsim.kernel.types import DecodeGroup, Sequence
from batchsim.kv.radix_tokens import tail
from batchsim.kv.radix_tree import Node, RadixTree


class Holding:
    """The block table of one sequence; its first `shared` pages are the tree's, locked from the root to `node`."""

    __slots__ = ("inserted", "node", "shared", "table")

    def __init__(self, node: Node, table: list[int]) -> None:
        self.node = node
        self.table = table
        self.shared = len(table)
        self.inserted = 0  # pages that the sequence has put into the tree, or found there as it did


class RadixKV(Pins):
    """A `KVBlockManager` with block ids, given out when asked for: a decode step is O(1) while pages last.

    `num_free` counts pages that are free or in the tree without a lock. There is no swap: `swap_out` never finds room.
    """

    __slots__ = (
        "_free", "_held", "_last_match", "_owed", "_room_step", "_tree",
        "block_size", "num_blocks", "num_swap_blocks", "num_swap_free",
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0) -> None:
        super().__init__()
        check_pool(num_blocks, block_size, num_swap_blocks)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_swap_blocks = self.num_swap_free = num_swap_blocks
        self._tree = RadixTree(block_size)
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._held: dict[Sequence, Holding] = {}
        self._owed = 0  # pages the group grew by whose ids were not looked up yet; they are among the free
        self._room_step: int | None = None  # the group step that `grow_group` last made room for
        self._last_match: tuple[Sequence, int, int, Node, int] | None = None  # sequence, limit, now, node, hit

    @property
    def num_free(self) -> int:
        return self.num_unused + self._tree.num_evictable

    @property
    def num_unused(self) -> int:
        """Pages that hold nothing."""
        return len(self._free) - self._owed

    @property
    def lookahead(self) -> int:
        """The number of tokens after those of a page on which its contents depend; to be set before the first use."""
        return self._tree.lookahead

    @lookahead.setter
    def lookahead(self, num_tokens: int) -> None:
        self._tree.lookahead = num_tokens

    @property
    def cached_blocks(self) -> int:
        """Pages in the tree, in use or not."""
        return self._tree.cached_blocks

    def table(self, seq: Sequence) -> list[int]:
        """The block ids of `seq` in token order; the executor reads it and must not change it."""
        holding = self._held.get(seq)
        if holding is None:
            return []
        if seq.group is not None:
            self._fill(holding, self._room(seq))
        return holding.table

    def swap_table(self, seq: Sequence) -> list[int]:
        """Empty: nothing is ever swapped."""
        return []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held(self, seq: Sequence) -> int:
        holding = self._held.get(seq)
        if holding is None:
            return 0
        return max(len(holding.table), self.blocks_for(self._grown(seq)))

    # ---- the cache

    def lookup(self, seq: Sequence) -> int:
        """Cached tokens of `seq`: whole pages from the front, never all known ones. Changes nothing, nor recency."""
        return self._tree.find(self._tree.known_pages(seq, seq.num_tokens - 1))

    def match(self, seq: Sequence, limit: int) -> int:
        """As `lookup`, but of the first `limit` known tokens, and counted as a use of their pages: SGLang's match.

        While nothing else was walked over, asking again costs nothing.
        """
        last, tree = self._last_match, self._tree
        if last is not None and last[:3] == (seq, limit, tree.now):
            return last[4]
        node, hit = tree.descend(tree.known_pages(seq, limit))
        self._last_match = (seq, limit, tree.now, node, hit)
        return hit

    def match_all(self, seq: Sequence, limit: int) -> tuple[int, int]:
        """(`match`, the tokens found in any tier of memory)."""
        hit = self.match(seq, limit)
        return hit, hit

    def take(self, seq: Sequence, hit_tokens: int) -> None:
        """Gives `seq`, which holds nothing, its first `hit_tokens` cached tokens and locks them. Allocates nothing.

        ValueError if these are not whole pages that are cached.
        """
        last, tree = self._last_match, self._tree
        if last is not None and last[0] is seq and last[2] == tree.now and last[4] == hit_tokens:
            node, hit = last[3], hit_tokens
        else:
            node, hit = tree.descend(tree.known_pages(seq, hit_tokens + tree.lookahead))
        if seq in self._held or hit != hit_tokens:
            raise ValueError(f"cannot take {hit_tokens} cached tokens, {hit} are found: {seq!r}")
        tree.lock(node)
        self._held[seq] = Holding(node, node.path_blocks())
        seq.num_blocks = hit_tokens // self.block_size

    def insert(self, seq: Sequence, limit: int | None = None) -> None:
        """Puts the whole pages that `seq` has computed into the tree; it goes on sharing them, locked.

        `limit`: only those of its first `limit` tokens; None: of all its computed tokens. With a lookahead these are at
        least as many more than it took from the tree.

        Of pages that the tree has already, its own copies are freed and its table names the tree's: read it anew. What
        is inserted beyond the prompt becomes a node of its own, so that it can be evicted without the prompt.
        """
        holding, tree, page = self._held[seq], self._tree, self.block_size
        self._fill(holding, self._grown(seq))
        limit = seq.num_computed_tokens if limit is None else limit
        run, size = tree.known_pages(seq, limit), tree.num_pages(limit) * page
        node, matched = tree.descend(run)
        copied = self._adopt(holding, node, matched // page)
        if matched < size:
            node = tree.add_leaf(node, tail(run, matched), holding.table[matched // page : size // page])
        self._inserted(seq, holding, node, size // page)
        if tree.num_pages(seq.request.prompt_tokens) * page < size:
            tree.descend(tree.known_pages(seq, seq.request.prompt_tokens))
        copies = holding.table[holding.shared : copied]
        tree.lock(node)
        tree.unlock(holding.node)
        holding.node, holding.shared = node, size // page
        if copies:
            holding.table[: holding.shared] = node.path_blocks()
            self._free += reversed(copies)

    def _adopt(self, holding: Holding, node: Node, num_pages: int) -> int:
        """Of the first `num_pages` pages of `holding`, which the tree has down to the end of `node`: how many it has on
        the GPU. Those behind become the tree's."""
        return num_pages

    def _inserted(self, seq: Sequence, holding: Holding, node: Node, num_pages: int) -> None:
        """The first `num_pages` pages of `seq` are in the tree, down to the end of `node`."""
        holding.inserted = num_pages

    def make_room(self, num_blocks: int) -> None:
        """Evicts until `num_blocks` pages are free, or nothing more can be evicted."""
        lacking = num_blocks - self.num_unused
        if lacking > 0:
            self._free += self._tree.evict(lacking)

    # ---- the manager as every policy sees it

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        holding = self._held.get(seq)
        if holding is None:
            holding = Holding(self._tree.root, [])
        elif seq.group is not None:
            self._fill(holding, self._grown(seq))
        table = holding.table
        need = -(-num_tokens // self.block_size) - len(table)
        if need > self.num_free:
            return False
        if need > 0:
            self.make_room(need)
            table += self._pop(need)
        self._held[seq] = holding
        seq.num_blocks = len(table)
        return True

    def grow_group(self, group: DecodeGroup) -> bool:
        need = group.blocks_due()
        if need > self.num_free:
            return False
        self.make_room(need)
        self._owed += need
        self._room_step = group.step
        return True

    def free(self, seq: Sequence) -> None:
        holding = self._held.get(seq)
        if holding is not None and seq.group is not None:
            self._fill(holding, self._grown(seq))
        if self._pinned and self.is_kept(seq):
            return
        seq.num_blocks = 0
        if holding is None:
            return
        del self._held[seq]
        self._free += reversed(holding.table[holding.shared :])
        self._tree.unlock(holding.node)

    def swap_out(self, seq: Sequence) -> int | None:
        return None

    def swap_in(self, seq: Sequence) -> int | None:
        return None

    def check(self) -> None:
        """AssertionError unless tables, tree and free list share out all pages and locks are those of the holders."""
        nodes = self._tree.nodes()
        locks = dict.fromkeys(nodes, 0)
        assert all(holding.table[: holding.shared] == holding.node.path_blocks() for holding in self._held.values())
        for node in self._locked():
            while node.parent is not None:
                locks[node] += 1
                node = node.parent
        assert all(node.locks == locks[node] for node in nodes)
        self._tree.check_queued()
        cached = [block for node in nodes for block in node.blocks]
        own = [block for holding in self._held.values() for block in holding.table[holding.shared :]]
        assert sorted([*self._free, *cached, *own]) == list(range(self.num_blocks))
        assert len(cached) == self._tree.cached_blocks
        assert self._tree.num_evictable == sum(len(node.blocks) for node in nodes if not node.locks)
        members = [(seq, holding) for seq, holding in self._held.items() if seq.group is not None]
        owed = sum(max(self.blocks_for(self._room(seq)) - len(holding.table), 0) for seq, holding in members)
        assert owed == self._owed <= len(self._free)

    def _locked(self) -> list[Node]:
        """The ends of all locked paths, as often as they are."""
        return [holding.node for holding in self._held.values()]

    def _room(self, seq: Sequence) -> int:
        """Tokens that the pages of `seq`, which decodes, hold: one more than `_grown` once the group grew in a step."""
        group = seq.group
        assert group is not None
        return self._grown(seq) + (group.step == self._room_step and not isinstance(group, DraftGroup))

    def _grown(self, seq: Sequence) -> int:
        """Tokens for which `seq` has pages by the last step, whether or not their ids were given out. With drafts these
        are more than the computed ones, and those of a step to come among them."""
        group = seq.group
        if isinstance(group, DraftGroup):
            return group.blocks_held(seq) * self.block_size
        return seq.num_computed_tokens

    def _fill(self, holding: Holding, num_tokens: int) -> None:
        """Gives out the ids of pages the group grew by, up to `num_tokens` tokens."""
        lacking = -(-num_tokens // self.block_size) - len(holding.table)
        if lacking > 0:
            holding.table += self._pop(lacking)
            self._owed -= lacking

    def _pop(self, num_blocks: int) -> list[int]:
        """Takes free pages, at least one; the last given back first."""
        taken = self._free[: -num_blocks - 1 : -1]
        del self._free[-num_blocks:]
        return taken

"""A radix tree whose nodes may have lost what layers with a window, or with states, keep of them, as SGLang's.

A node is *live* while that is there: in the *side pool* it takes as many slots as `_slots` says. A prefix can be used
up to the end of a node by a rule of the side pool. Short of slots, of the nodes without a lock on theirs the least
recently used lose them; a leaf without any lock is taken out whole.
Source: python/sglang/srt/mem_cache/unified_cache/unified_tree_core.py of the 0.5.23 wheel.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import cast

from batchsim.kv.radix_tokens import TokenRun, common_tokens, tail
from batchsim.kv.radix_tree import Node, RadixTree


class SidePool:
    """Slots of a side pool: `num_free` of `num_blocks`, and `num_evictable` of a tree that have no lock."""

    __slots__ = ("num_blocks", "num_evictable", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free: int = num_blocks
        self.num_evictable = 0

    @property
    def available(self) -> int:
        """Slots that are free or can be evicted."""
        return self.num_free + self.num_evictable


class SideNode(Node):
    """A node that ends `end` tokens from the root. `side_locks` sequences need its slots, which were last used at
    `side_used`."""

    __slots__ = ("end", "is_offered", "live", "side_locks", "side_used")

    def __init__(self, key: TokenRun, blocks: list[int], parent: Node | None, used: int, end: int) -> None:
        super().__init__(key, blocks, parent, used)
        self.end = end
        self.live = False
        self.side_locks = self.side_used = 0
        self.is_offered = False  # has an entry among those that can lose their slots


class SideTree(RadixTree):
    """A tree beside a side pool. `needs`: what `_cover` must come to where a prefix can be used."""

    __slots__ = ("_offers", "needs", "side")

    def __init__(self, block_size: int, side: SidePool, needs: int) -> None:
        super().__init__(block_size)
        self.side = side
        self.needs = needs
        self._offers: list[tuple[int, int, int, SideNode]] = []  # heap by a past use, then by `end`; one entry a node

    def find(self, run: TokenRun) -> int:
        node, walked, hit, page, covered = self.root, 0, 0, self.block_size, self.needs
        while run and (child := node.children.get(self._first(run))) is not None:
            n = self.whole_pages(common_tokens(child.key, run))
            walked += n
            is_part = n < len(child.blocks) * page
            covered = self._cover(covered, cast(SideNode, child), n, is_part=is_part)
            if covered >= self.needs:
                hit = walked
            if is_part:
                break
            node, run = child, tail(run, n)
        return hit

    def match(self, run: TokenRun) -> tuple[SideNode, int, int]:
        """(The node at whose end the usable part of `run` ends, that part's length, the length of all that layers
        that keep all tokens have of it); `run` and the lengths in whole pages' tokens. Counts as a use of that part."""
        self.now += 1
        node, walked, page, covered = self.root, 0, self.block_size, self.needs
        best, hit = cast(SideNode, node), 0
        while run and (child := node.children.get(self._first(run))) is not None:
            n = self.whole_pages(common_tokens(child.key, run))
            walked += n
            is_part = n < len(child.blocks) * page
            if is_part:
                child.used = self.now
                child = self._split(child, n)
            covered = self._cover(covered, cast(SideNode, child), n, is_part=False)
            if covered >= self.needs:
                best, hit = cast(SideNode, child), walked
            if is_part:
                break
            node, run = child, tail(run, n)
        self._use(best)
        above: Node | None = best
        while above is not None:
            above.used = self.now
            above = above.parent
        return best, hit, walked

    def evict_side(self, num_slots: int) -> list[int]:
        """Frees at least `num_slots` slots, or all without locks; returns the ids of the pages of layers that keep all
        tokens that are free with them."""
        target, freed = self.side.num_free + num_slots, list[int]()
        while self.side.num_free < target and self._offers:
            used, _, _, node = heappop(self._offers)
            node.is_offered = False
            if node.parent is None or not node.live or node.side_locks:
                continue
            if used < node.side_used:
                self._offer_side(node)
            elif node.evictable:
                freed += self._remove(node)
            else:
                self.now += 1
                self._let_go(node)
        return freed

    # ---- the rule of the side pool

    def _slots(self, node: SideNode) -> int:
        """Slots that `node` takes while it is live; here one for each of its pages."""
        return len(node.blocks)

    def _cover(self, covered: int, node: SideNode, num_tokens: int, *, is_part: bool) -> int:
        """What is covered behind `num_tokens` of `node`, `covered` being what is before it; `is_part`: these are less
        than all of it."""
        raise NotImplementedError

    def _use(self, node: SideNode) -> None:
        """Counts as a use of what a sequence needs that goes on behind `node`."""
        raise NotImplementedError

    # ---- parts

    def _node(self, key: TokenRun, blocks: list[int], parent: Node | None, used: int) -> Node:
        start = 0 if parent is None else cast(SideNode, parent).end
        return SideNode(key, blocks, parent, used, start + len(blocks) * self.block_size)

    def _remove(self, node: Node) -> list[int]:
        if cast(SideNode, node).live:
            self._let_go(cast(SideNode, node))
        return super()._remove(node)

    def _make_live(self, node: SideNode) -> None:
        node.live, node.side_used = True, self.now
        if not node.side_locks:
            self.side.num_evictable += self._slots(node)
            self._offer_side(node)

    def _let_go(self, node: SideNode) -> None:
        """Frees the slots of `node`, on which there is no lock."""
        node.live = False
        self.side.num_free += self._slots(node)
        self.side.num_evictable -= self._slots(node)

    def _lock_one(self, node: SideNode) -> None:
        if node.live and not node.side_locks:
            self.side.num_evictable -= self._slots(node)
        node.side_locks += 1

    def _unlock_one(self, node: SideNode) -> None:
        node.side_locks -= 1
        if node.live and not node.side_locks:
            self.side.num_evictable += self._slots(node)
            self._offer_side(node)

    def _offer_side(self, node: SideNode) -> None:
        if node.live and not node.side_locks and not node.is_offered:
            node.is_offered = True
            heappush(self._offers, (node.side_used, node.end, next(self._serial), node))

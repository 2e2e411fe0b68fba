"""A radix tree whose nodes may have lost what layers with a window keep of them, as in SGLang 0.5.23.

A node keeps pages of layers that keep all tokens, and unless its window was let go as many of layers with a window. A
prefix can be used up to the end of a node before which a whole window is there, or everything from the root on. A user
locks the path to its prefix, and of windows the nodes at its end that cover one. Short of pages of windows, of the
nodes without such a lock the least recently used ones lose theirs; a leaf without any lock is taken out whole.
Recently used are the nodes at the end of a match, or of what was put in, that cover a window and a page.
Source: python/sglang/srt/mem_cache/unified_cache/ (unified_tree_core.py, components/swa.py) of the 0.5.23 wheel.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import cast

from batchsim.kv.radix_tokens import TokenRun, common_tokens, tail
from batchsim.kv.radix_tree import Node, RadixTree
from batchsim.kv.windows import Windows


class WindowNode(Node):
    """A node that ends `end` tokens from the root. `live`: its window is there, `window_locks` sequences need it, it
    was last used at `window_used`."""

    __slots__ = ("end", "is_offered", "live", "window_locks", "window_used")

    def __init__(self, key: TokenRun, blocks: list[int], parent: Node | None, used: int, end: int) -> None:
        super().__init__(key, blocks, parent, used)
        self.end = end
        self.live = False
        self.window_locks = self.window_used = 0
        self.is_offered = False  # has an entry among those whose window can be let go


class WindowTree(RadixTree):
    """The tree; of the pages in `windows` those of its live nodes are its own."""

    __slots__ = ("_offers", "windows")

    def __init__(self, block_size: int, windows: Windows) -> None:
        super().__init__(block_size)
        self.windows = windows
        self._offers: list[tuple[int, int, int, WindowNode]] = []  # heap by a past use, then by `end`; one entry a node

    def find(self, run: TokenRun) -> int:
        node, walked, hit, page = self.root, 0, 0, self.block_size
        reach, covered = self.windows.reach, self.windows.reach  # from the root on everything is there
        while run and (child := node.children.get(self._first(run))) is not None:
            n = self.whole_pages(common_tokens(child.key, run))
            walked += n
            covered = covered + n if cast(WindowNode, child).live else 0
            if covered >= reach and cast(WindowNode, child).live:
                hit = walked
            if n < len(child.blocks) * page:
                break
            node, run = child, tail(run, n)
        return hit

    def match(self, run: TokenRun) -> tuple[WindowNode, int, int]:
        """(The node at whose end the usable part of `run` ends, that part's length, the length of all that layers
        that keep all tokens have of it); `run` and the lengths in whole pages' tokens. Counts as a use of that part."""
        self.now += 1
        node, walked, page = self.root, 0, self.block_size
        best, hit = cast(WindowNode, node), 0
        reach, covered = self.windows.reach, self.windows.reach
        while run and (child := node.children.get(self._first(run))) is not None:
            n = self.whole_pages(common_tokens(child.key, run))
            walked += n
            is_part = n < len(child.blocks) * page
            if is_part:
                child.used = self.now
                child = self._split(child, n)
            covered = covered + n if cast(WindowNode, child).live else 0
            if covered >= reach and cast(WindowNode, child).live:
                best, hit = cast(WindowNode, child), walked
            if is_part:
                break
            node, run = child, tail(run, n)
        self._use_window(best)
        above: Node | None = best
        while above is not None:
            above.used = self.now
            above = above.parent
        return best, hit, walked

    def insert(self, run: TokenRun, kept: int, live_from: int, blocks: list[int]) -> tuple[WindowNode, int, int]:
        """Puts in `run`, whole pages with the ids `blocks`, of which a sequence has the windows from `live_from` on;
        the first `kept` tokens are the tree's already. Returns (the node at its end, how many of its tokens the tree
        had, how many pages of the sequence's windows are the tree's now)."""
        self.now += 1
        node, at, adopted, page, size = self.root, 0, 0, self.block_size, len(blocks) * self.block_size
        while run and (below := node.children.get(self._first(run))) is not None:
            below.used = self.now
            n = self.whole_pages(common_tokens(below.key, run))
            child = cast(WindowNode, below if n == len(below.blocks) * page else self._split(below, n))
            if not child.live and kept < at + n and live_from < at + n:
                adopted += self._revive(child, live_from - at)
            node, at, run = child, at + n, tail(run, n)
        matched = at
        if at < size:
            node = self.add_leaf(node, run, blocks[at // page :])
            if live_from < size:
                adopted += self._revive(cast(WindowNode, node), live_from - at, capped=True)
        self.now += 1
        self._use_window(cast(WindowNode, node))
        return cast(WindowNode, node), matched, adopted

    def lock_window(self, node: WindowNode) -> int:
        """Locks the window that ends with `node`; returns how many tokens from the root the locked nodes begin."""
        covered, start, each = 0, node.end, node
        while each.parent is not None and covered < self.windows.reach:
            if each.live and not each.window_locks:
                self.windows.num_evictable -= len(each.blocks)
            each.window_locks += 1
            covered += len(each.blocks) * self.block_size
            each = cast(WindowNode, each.parent)
            start = each.end
        return start

    def unlock_window(self, node: WindowNode, start: int) -> None:
        """Takes back a `lock_window` of `node`, which returned `start`."""
        each = node
        while each.parent is not None and each.end > start:
            each.window_locks -= 1
            if each.live and not each.window_locks:
                self.windows.num_evictable += len(each.blocks)
                self._offer_window(each)
            each = cast(WindowNode, each.parent)

    def evict_windows(self, num_blocks: int) -> list[int]:
        """Lets go of windows of at least `num_blocks` pages, or all without locks; returns the ids of the pages of
        layers that keep all tokens that are free with them."""
        target, freed = self.windows.num_free + num_blocks, list[int]()
        while self.windows.num_free < target and self._offers:
            used, _, _, node = heappop(self._offers)
            node.is_offered = False
            if node.parent is None or not node.live or node.window_locks:
                continue
            if used < node.window_used:
                self._offer_window(node)
            elif node.evictable:
                freed += self._remove(node)
            else:
                self.now += 1
                self._let_go(node)
        return freed

    # ---- parts

    def _node(self, key: TokenRun, blocks: list[int], parent: Node | None, used: int) -> Node:
        start = 0 if parent is None else cast(WindowNode, parent).end
        return WindowNode(key, blocks, parent, used, start + len(blocks) * self.block_size)

    def _split(self, node: Node, num_tokens: int) -> Node:
        upper, lower = cast(WindowNode, super()._split(node, num_tokens)), cast(WindowNode, node)
        upper.live, upper.window_locks, upper.window_used = lower.live, lower.window_locks, lower.window_used
        self._offer_window(upper)
        return upper

    def _remove(self, node: Node) -> list[int]:
        if cast(WindowNode, node).live:
            self._let_go(cast(WindowNode, node))
        return super()._remove(node)

    def _revive(self, node: WindowNode, num_dead: int, *, capped: bool = False) -> int:
        """Gives `node` its window, but for its first `num_dead` tokens, which become a node of their own; returns the
        pages. `capped`: no more than the window is below, what is before that is another node."""
        if num_dead > 0:
            self._split(node, num_dead)
        num_blocks, page = len(node.blocks), self.block_size
        if capped and (more := num_blocks - -(-self.windows.reach // page)) > 0:
            self._make_live(cast(WindowNode, self._split(node, more * page)))
        self._make_live(node)
        return num_blocks

    def _make_live(self, node: WindowNode) -> None:
        node.live, node.window_used = True, self.now
        if not node.window_locks:
            self.windows.num_evictable += len(node.blocks)
            self._offer_window(node)

    def _let_go(self, node: WindowNode) -> None:
        """Frees the window of `node`, which has no lock on it."""
        node.live = False
        self.windows.num_free += len(node.blocks)
        self.windows.num_evictable -= len(node.blocks)

    def _use_window(self, node: WindowNode) -> None:
        """Counts as a use of the windows of the nodes that cover a window and a page before the end of `node`."""
        covered, each = 0, node
        while each.parent is not None and covered < self.windows.reach + self.block_size:
            if each.live:
                each.window_used = self.now
            covered += len(each.blocks) * self.block_size
            each = cast(WindowNode, each.parent)

    def _offer_window(self, node: WindowNode) -> None:
        if node.live and not node.window_locks and not node.is_offered:
            node.is_offered = True
            heappush(self._offers, (node.window_used, node.end, next(self._serial), node))

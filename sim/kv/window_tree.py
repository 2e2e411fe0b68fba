"""A radix tree beside a pool of windows, as in SGLang 0.5.23.

A prefix can be used up to the end of a node before which a whole window is there, or everything from the root on. A
user locks the path to its prefix, and of windows the nodes at its end that cover one. Recently used are the nodes at
the end of a match, or of what was put in, that cover a window and a page.
Source: python/sglang/srt/mem_cache/unified_cache/components/swa.py of the 0.5.23 wheel.
"""

from __future__ import annotations

from typing import cast

from batchsim.kv.radix_tokens import TokenRun, common_tokens, tail
from batchsim.kv.radix_tree import Node
from batchsim.kv.side_tree import SideNode, SideTree
from batchsim.kv.windows import Windows


class WindowTree(SideTree):
    """The tree; of the pages of `windows` those of its live nodes are its own. A layer attends to `needs` tokens before
    its own."""

    __slots__ = ()

    def __init__(self, block_size: int, windows: Windows) -> None:
        super().__init__(block_size, windows, windows.reach)

    def insert(self, run: TokenRun, kept: int, live_from: int, blocks: list[int]) -> tuple[SideNode, int, int]:
        """Puts in `run`, whole pages with the ids `blocks`, of which a sequence has the windows from `live_from` on;
        the first `kept` tokens are the tree's already. Returns (the node at its end, how many of its tokens the tree
        had, how many pages of the sequence's windows are the tree's now)."""
        self.now += 1
        node, at, adopted, page, size = self.root, 0, 0, self.block_size, len(blocks) * self.block_size
        while run and (below := node.children.get(self._first(run))) is not None:
            below.used = self.now
            n = self.whole_pages(common_tokens(below.key, run))
            child = cast(SideNode, below if n == len(below.blocks) * page else self._split(below, n))
            if not child.live and kept < at + n and live_from < at + n:
                adopted += self._revive(child, live_from - at)
            node, at, run = child, at + n, tail(run, n)
        matched = at
        if at < size:
            node = self.add_leaf(node, run, blocks[at // page :])
            if live_from < size:
                adopted += self._revive(cast(SideNode, node), live_from - at, capped=True)
        self.now += 1
        self._use(cast(SideNode, node))
        return cast(SideNode, node), matched, adopted

    def lock_window(self, node: SideNode) -> int:
        """Locks the window that ends with `node`; returns how many tokens from the root the locked nodes begin."""
        covered, start, each = 0, node.end, node
        while each.parent is not None and covered < self.needs:
            self._lock_one(each)
            covered += len(each.blocks) * self.block_size
            each = cast(SideNode, each.parent)
            start = each.end
        return start

    def unlock_window(self, node: SideNode, start: int) -> None:
        """Takes back a `lock_window` of `node`, which returned `start`."""
        each = node
        while each.parent is not None and each.end > start:
            self._unlock_one(each)
            each = cast(SideNode, each.parent)

    def _cover(self, covered: int, node: SideNode, num_tokens: int, *, is_part: bool) -> int:
        return covered + num_tokens if node.live else 0

    def _use(self, node: SideNode) -> None:
        covered, each = 0, node
        while each.parent is not None and covered < self.needs + self.block_size:
            if each.live:
                each.side_used = self.now
            covered += len(each.blocks) * self.block_size
            each = cast(SideNode, each.parent)

    def _split(self, node: Node, num_tokens: int) -> Node:
        upper, lower = cast(SideNode, super()._split(node, num_tokens)), cast(SideNode, node)
        upper.live, upper.side_locks, upper.side_used = lower.live, lower.side_locks, lower.side_used
        self._offer_side(upper)
        return upper

    def _revive(self, node: SideNode, num_dead: int, *, capped: bool = False) -> int:
        """Gives `node` its window, but for its first `num_dead` tokens, which become a node of their own; returns the
        pages. `capped`: a node of a window at its end, and another of what is before that."""
        if num_dead > 0:
            self._split(node, num_dead)
        num_blocks, page = len(node.blocks), self.block_size
        if capped and (more := num_blocks - -(-self.needs // page)) > 0:
            self._make_live(cast(SideNode, self._split(node, more * page)))
        self._make_live(node)
        return num_blocks

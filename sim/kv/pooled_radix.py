"""KV blocks in two pools with one radix tree over both, as SGLang 0.5.23 keeps models with windows.

As `RadixKV`, but a prefix is used as far as its last window is there. What a running sequence puts in ends at its
*junction*, if it is short of one: there its prefix was found in layers that keep all tokens, and not the window, so
that the next one that shares as much goes on there. A prompt and what was generated after it are one node.
Source: python/sglang/srt/mem_cache/unified_radix_cache.py (checkpoint_into_tree) and unified_cache/components/swa.py of
the 0.5.23 wheel.
"""

from __future__ import annotations

from typing import cast

from batchsim.base.kv_pools import KvPools
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.types import DecodeGroup, Sequence
from batchsim.kv.radix_cache import Holding
from batchsim.kv.side_radix import SideRadixKV
from batchsim.kv.side_tree import SideNode
from batchsim.kv.window_tree import WindowTree
from batchsim.kv.windows import PooledKV, Span, Windows


class PooledRadixKV(SideRadixKV):
    """A `RadixKV` of layers that keep all tokens, with `windows` beside."""

    __slots__ = ("_windowed", "windows")

    def __init__(self, num_blocks: int, block_size: int, pools: KvPools) -> None:
        super().__init__(num_blocks, block_size)
        self.windows = Windows(pools, block_size, caches=True)
        self._tree = self._side = self._windowed = WindowTree(block_size, self.windows)

    def take(self, seq: Sequence, hit_tokens: int) -> None:
        node, walked = self._matched(seq, hit_tokens)
        span, tree = Span(hit_tokens), self._windowed
        tree.lock(node)
        span.locked_from = tree.lock_window(node)
        span.junction = walked if walked > hit_tokens else None
        self.windows.spans[seq] = span
        self._held[seq] = Holding(node, node.path_blocks())
        seq.num_blocks = hit_tokens // self.block_size

    def insert(self, seq: Sequence, limit: int | None = None) -> None:
        self._put(seq, seq.num_computed_tokens if limit is None else limit, ended=False)

    def insert_ended(self, seq: Sequence, limit: int) -> None:
        """As `insert`, of a sequence that has ended."""
        self._put(seq, limit, ended=True)

    def make_room(self, num_blocks: int) -> None:
        super().make_room(num_blocks)
        lacking = num_blocks - self.windows.num_free
        if lacking > 0:
            self._free.extend(self._windowed.evict_side(lacking))

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        need = self.blocks_for(num_tokens) - self.held(seq)
        if need > self.windows.available or not super().allocate(seq, num_tokens):
            return False
        if seq not in self.windows.spans:
            self.windows.spans[seq] = Span()
        self.windows.num_free -= max(need, 0)
        return True

    def grow_group(self, group: DecodeGroup) -> bool:
        need = group.blocks_due()
        if need > self.windows.available or not super().grow_group(group):
            return False
        self.windows.num_free -= need
        return True

    def free(self, seq: Sequence) -> None:
        if self._pinned and self.is_kept(seq):
            return
        holding, windows = self._held.get(seq), self.windows
        if holding is not None:
            self._windowed.unlock_window(cast(SideNode, holding.node), windows.spans[seq].locked_from)
            windows.leave(seq, self.held(seq))
        super().free(seq)

    def check(self) -> None:
        super().check()
        windows, nodes = self.windows, [cast(SideNode, node) for node in self._tree.nodes()]
        locks = dict.fromkeys(nodes, 0)
        for seq, holding in self._held.items():
            node = cast(SideNode, holding.node)
            while node.parent is not None and node.end > windows.spans[seq].locked_from:
                locks[node] += 1
                node = cast(SideNode, node.parent)
        assert all(node.side_locks == locks[node] <= node.locks for node in nodes)
        live = [node for node in nodes if node.live]
        assert all(node.is_offered for node in live if not node.side_locks)
        own = sum(windows.own(seq, self._taken(seq)) for seq in windows.spans)
        assert windows.num_free + sum(len(node.blocks) for node in live) + own == windows.num_blocks
        assert windows.num_evictable == sum(len(node.blocks) for node in live if not node.side_locks)

    def _taken(self, seq: Sequence) -> int:
        """Pages that `seq` has, those of a step to come among them."""
        return self.held(seq) if seq.group is None else max(self.held(seq), self.blocks_for(self._room(seq)))

    def _put(self, seq: Sequence, limit: int, *, ended: bool) -> None:
        holding, tree, page, windows = self._held[seq], self._windowed, self.block_size, self.windows
        span, length = windows.spans[seq], limit
        self._fill(holding, self._grown(seq))
        if span.junction is not None and span.kept < span.junction <= limit:
            length = span.junction
        if not ended:
            windows.slide(seq, length - 1)
        num_blocks = length // page
        before = windows.own(seq, len(holding.table))
        run, blocks = tree.known_pages(seq, length), holding.table[:num_blocks]
        node, matched, adopted = tree.insert(run, span.kept, span.cursor, blocks)
        tree.lock(node)
        locked_from = tree.lock_window(node)
        tree.unlock_window(cast(SideNode, holding.node), span.locked_from)
        self._share(holding, node, num_blocks, matched)
        span.kept, span.locked_from = num_blocks * page, locked_from
        windows.num_free += before - windows.own(seq, len(holding.table)) - adopted
        if span.junction is not None and span.kept >= span.junction:
            span.junction = None
            if not ended:
                windows.slide(seq, limit - 1)


def windows_of(kv: KVBlockManager) -> Windows | None:
    """The pool of layers with a window of `kv`; None where it has one pool for all layers."""
    return kv.windows if isinstance(kv, PooledKV | PooledRadixKV) else None

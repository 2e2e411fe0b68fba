"""KV blocks in a radix tree with a tier in the memory of the host, as SGLang 0.5.23 keeps them with HiCache.

1. `write_through`: a node is copied to the host when a first request has inserted it, or passed it as it did;
   `write_through_selective`: a second one. Each request counts once. Its parents are copied before it; the first one
   for which there is no room ends that. A node is locked until its copy is made. `write_back`: a node is copied as it
   is evicted from the GPU.
2. Of a request's prefix a first part is on the GPU, and a second one only on the host. The second is loaded as a whole
   if it has at least LOAD_BACK_TOKENS tokens; its pages are locked until it is there, and others find it at once.
3. An insertion of what is only on the host gives the tree the request's own pages.

Source: python/sglang/srt/mem_cache/unified_radix_cache.py of the 0.5.23 wheel; the tree's rules are `kv/host_tree.py`.
"""

from __future__ import annotations

from batchsim.kernel.types import MISSING, Sequence
from batchsim.kv import WritePolicy
from batchsim.kv.host_tree import HostTree
from batchsim.kv.radix_cache import Holding, RadixKV
from batchsim.kv.radix_tree import Node

LOAD_BACK_TOKENS = 10
_THRESHOLDS = {"write_through": 1, "write_through_selective": 2}


class HiCacheKV(RadixKV):
    """A RadixKV with `num_host_pages` pages on the `host`. `to_store` gathers nodes to be copied there, each with the
    id of the request for which it is; until `stored` says that this is done they are locked. `lookup` counts what
    either place has."""

    __slots__ = ("_beyond", "_copied", "_end", "_loads", "_threshold", "host", "to_store")

    def __init__(self, num_blocks: int, block_size: int, num_host_pages: int, write_policy: WritePolicy) -> None:
        super().__init__(num_blocks, block_size)
        if num_host_pages < 1:
            raise ValueError(f"a tier of {num_host_pages} pages holds nothing: give it at least 1")
        self.host = HostTree(block_size, num_host_pages, writes_back=write_policy == "write_back")
        self._tree = self.host
        self._threshold = _THRESHOLDS.get(write_policy, 0)
        self.to_store: list[tuple[Node, int]] = []
        self._copied: dict[Node, int] = {}  # nodes locked for copies, and for how many
        self._end = self.host.root  # where the latest match ended on the host
        self._beyond = 0  # its tokens there that are not on the GPU
        self._loads = 0

    def match(self, seq: Sequence, limit: int) -> int:
        """As that of RadixKV: the tokens on the GPU. Counts as a use of what is only on the host, too."""
        last, tree = self._last_match, self._tree
        if last is not None and last[:3] == (seq, limit, tree.now):
            return last[4]
        node, hit = tree.descend(tree.known_pages(seq, limit))
        self._end, pages = node, 0
        while node.parent is not None and not node.blocks:
            pages += node.host_pages
            node = node.parent
        self._beyond = pages * self.block_size
        self._last_match = (seq, limit, tree.now, node, hit - self._beyond)
        return hit - self._beyond

    def match_all(self, seq: Sequence, limit: int) -> tuple[int, int]:
        hit = self.match(seq, limit)
        return hit, hit + self._beyond

    def beyond(self, seq: Sequence, limit: int) -> int:
        """The number of the first `limit` known tokens of `seq` that only the host has, behind what `match` finds."""
        hit, in_all = self.match_all(seq, limit)
        return in_all - hit

    def load(self, seq: Sequence, limit: int) -> int:
        """Takes pages for what is `beyond` what `seq` has just taken; returns the number of that load. 0, and no pages
        taken, if it has fewer than LOAD_BACK_TOKENS tokens, or pages are short."""
        num_pages = self.beyond(seq, limit) // self.block_size
        end, holding = self._end, self._held[seq]
        if num_pages * self.block_size < LOAD_BACK_TOKENS:
            return 0
        self._lock(end)
        self.make_room(num_pages)
        if self.num_unused < num_pages:
            self._unlock(end)
            return 0
        self._loads += 1
        blocks, rest = self._pop(num_pages), num_pages
        node = end
        while node is not holding.node:
            first = rest - node.host_pages
            self.host.restore(node, blocks[first:rest], self._loads)
            assert node.parent is not None
            node, rest = node.parent, first
        self._tree.lock(end)
        self._tree.unlock(holding.node)
        holding.node = end
        holding.table += blocks
        holding.shared = seq.num_blocks = len(holding.table)
        return self._loads

    def loading(self, seq: Sequence) -> Node:
        """The node with which the load for `seq` ends, just begun; for `loaded`."""
        return self._held[seq].node

    def loaded(self, node: Node, number: int) -> None:
        """Load `number`, which ends with `node`, is over."""
        self.host.loaded(node, number)
        self._unlock(node)

    def stored(self, node: Node) -> None:
        """The copy of `node`, which `to_store` had, is made."""
        self._unlock(node)

    def _lock(self, node: Node) -> None:
        self._tree.lock(node)
        self._copied[node] = self._copied.get(node, 0) + 1

    def _unlock(self, node: Node) -> None:
        self._tree.unlock(node)
        self._copied[node] -= 1
        if not self._copied[node]:
            del self._copied[node]

    def _locked(self) -> list[Node]:
        return [*super()._locked(), *[node for node, times in self._copied.items() for _ in range(times)]]

    def _adopt(self, holding: Holding, node: Node, num_pages: int) -> int:
        while node.parent is not None and not node.blocks:
            first = num_pages - node.host_pages
            self.host.restore(node, holding.table[first:num_pages])
            node, num_pages = node.parent, first
        return num_pages

    def _inserted(self, seq: Sequence, holding: Holding, node: Node, num_pages: int) -> None:
        path: list[Node] = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        end = 0
        for each in reversed(path):
            end += each.num_pages
            if each.owner == MISSING:
                each.owner = seq.request.id
            if not self._threshold or end <= holding.inserted:
                continue
            each.hits += 1
            if each.hits >= self._threshold and not each.host_pages:
                self._back_up(each, seq.request.id)
        holding.inserted = max(holding.inserted, num_pages)

    def _back_up(self, node: Node, request_id: int) -> None:
        """Has `node` copied, and the nodes above it that have no copy, from the root on until there is no room."""
        chain: list[Node] = []
        while node.parent is not None and not node.host_pages:
            chain.append(node)
            node = node.parent
        for each in reversed(chain):
            if not self.host.back_up(each):
                return
            self._lock(each)
            self.to_store.append((each, request_id))

"""A radix tree of KV pages of which some have copies in the memory of the host, or are only there, as SGLang's HiCache.

1. What has pages on the GPU is a part of the tree that begins at the root, and so is what has copies on the host, but
   where pages are written back: then copies come from the leaves.
2. Evicted from the GPU is the unlocked node without children there that was walked over longest ago. With a copy it
   stays in the tree. Without one it leaves it; where pages are written back, it gets its copy then.
3. Evicted from the host is the unlocked node that is only there, without children, that was walked over longest ago.
   Where pages are written back, copies of nodes that are on the GPU as well go first, in the order in which they came
   to be in both, those of the next to leave the GPU last.
4. A copy for which there is no room is not made. A node that is to be written back then leaves the tree, and all below.

Source: python/sglang/srt/mem_cache/unified_cache/unified_tree_core.py and components/full.py of the 0.5.23 wheel.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

from batchsim.kv.radix_tokens import TokenRun
from batchsim.kv.radix_tree import Node, RadixTree


class HostTree(RadixTree):
    """`num_host_pages` pages on the host, of which `num_host_free` hold nothing. `writes_back`: nodes are copied to the
    host as they are evicted; `written_back` gathers their owners and numbers of pages."""

    __slots__ = (
        "_host_leaves", "_host_serial", "_twice", "num_host_free", "num_host_pages", "writes_back", "written_back",
    )  # fmt: skip

    def __init__(self, block_size: int, num_host_pages: int, *, writes_back: bool) -> None:
        super().__init__(block_size)
        self.num_host_pages = self.num_host_free = num_host_pages
        self.writes_back = writes_back
        self.written_back: list[tuple[int, int]] = []
        self._host_leaves: list[tuple[int, int, Node]] = []  # as `_leaves`
        self._host_serial = count()
        self._twice: dict[Node, None] = {}  # on the GPU and the host, since when; some have left either by now

    def add_leaf(self, parent: Node, key: TokenRun, blocks: list[int]) -> Node:
        leaf = super().add_leaf(parent, key, blocks)
        parent.num_on_device += 1
        return leaf

    def back_up(self, node: Node) -> bool:
        """Takes pages on the host for `node`, which has none; False if there is no room, though others made some."""
        lacking = len(node.blocks) - self.num_host_free
        if lacking > 0 and self._evict_from_host(lacking) < lacking:
            return False
        node.host_pages = len(node.blocks)
        self.num_host_free -= node.host_pages
        return True

    def restore(self, node: Node, blocks: list[int], loading: int = 0) -> None:
        """Gives `node`, which is only on the host, the pages `blocks` on the GPU, which load number `loading` fills."""
        parent = node.parent
        assert parent is not None, "the root has no pages"
        self.now += 1
        node.blocks, node.loading = blocks, loading
        parent.num_on_device += 1
        self.cached_blocks += len(blocks)
        if not node.locks:
            self.num_evictable += len(blocks)
        if not loading:
            self._note_twice(node)

    def loaded(self, node: Node, loading: int) -> None:
        """Load number `loading`, whose path ends with `node`, is over."""
        while node.parent is not None:
            if node.loading == loading:
                node.loading = 0
                self._note_twice(node)
            node = node.parent

    def _is_leaf(self, node: Node) -> bool:
        """Whether `node` can be evicted from the GPU: it is there, no child is, and no sequence locks it."""
        return bool(node.blocks) and not node.locks and not node.num_on_device and node.parent is not None

    def _remove(self, node: Node) -> list[int]:
        parent = node.parent
        assert parent is not None
        if self.writes_back and not node.host_pages and self.back_up(node):
            self.written_back.append((node.owner, node.host_pages))
            self._twice.setdefault(node)
        self.now += 1
        freed = node.blocks[::-1]
        self.cached_blocks -= len(freed)
        self.num_evictable -= len(freed)
        parent.num_on_device -= 1
        if node.host_pages:
            node.blocks = []
            self._offer(node)
        else:
            self._drop(node)
        self._offer(parent)
        return freed

    def _drop(self, node: Node) -> None:
        """Takes `node` out of the tree, with all below it, which is on the host alone."""
        for child in list(node.children.values()):
            self._drop(child)
        parent = node.parent
        assert parent is not None and not node.locks
        del parent.children[self._first(node.key)]
        node.parent, node.blocks = None, []
        self._twice.pop(node, None)
        self.num_host_free += node.host_pages
        node.host_pages = 0

    def _evict_from_host(self, num_pages: int) -> int:
        """Frees at least `num_pages` pages on the host, or all that can be; returns how many."""
        freed = self._drop_copies(num_pages) if self.writes_back else 0
        while freed < num_pages and self._host_leaves:
            used, _, node = heappop(self._host_leaves)
            node.queued_on_host = False
            if not _is_host_leaf(node):
                continue
            if used < node.used:
                self._offer(node)
                continue
            parent = node.parent
            assert parent is not None
            self.now += 1
            freed += node.host_pages
            self._drop(node)
            self._offer(parent)
        return freed

    def _drop_copies(self, num_pages: int) -> int:
        """As `_evict_from_host`, of nodes that are on the GPU too."""
        freed, gone = 0, list[Node]()
        for spares_next in (True, False):
            for node in self._twice:
                if freed >= num_pages:
                    break
                if not node.blocks or not node.host_pages:
                    gone.append(node)
                elif not node.loading and not (spares_next and self._is_leaf(node)):
                    freed += node.host_pages
                    self.num_host_free += node.host_pages
                    node.host_pages = 0
                    gone.append(node)
        for node in gone:
            self._twice.pop(node, None)
        return freed

    def _note_twice(self, node: Node) -> None:
        if not self.writes_back:
            return
        if node.blocks and node.host_pages and not node.loading:
            self._twice.setdefault(node)
        else:
            self._twice.pop(node, None)

    def _split(self, node: Node, num_tokens: int) -> Node:
        upper = super()._split(node, num_tokens)
        if node.host_pages:
            upper.host_pages = num_tokens // self.block_size
            node.host_pages -= upper.host_pages
        upper.hits, upper.owner, upper.loading = node.hits, node.owner, node.loading
        upper.num_on_device = int(bool(node.blocks))
        self._note_twice(upper)
        return upper

    def _offer(self, node: Node) -> None:
        super()._offer(node)
        if _is_host_leaf(node) and not node.queued_on_host:
            node.queued_on_host = True
            heappush(self._host_leaves, (node.used, next(self._host_serial), node))

    def check_queued(self) -> None:
        super().check_queued()
        nodes = self.nodes()
        assert all(node.queued_on_host for node in nodes if _is_host_leaf(node))
        for node in nodes:
            assert node.num_on_device == sum(bool(child.blocks) for child in node.children.values())
            assert node.num_pages or node.parent is None, "a node that is nowhere"
            assert not node.host_pages or node.host_pages == node.num_pages
            if node.parent is not None and node.parent.parent is not None:
                assert node.parent.blocks or not node.blocks, "on the GPU behind one that is not"
                assert self.writes_back or node.parent.host_pages or not node.host_pages
        used = sum(node.host_pages for node in nodes)
        assert used + self.num_host_free == self.num_host_pages


def _is_host_leaf(node: Node) -> bool:
    """Whether `node` can be evicted from the host: it is only there, and has no children."""
    return node.parent is not None and not node.blocks and not node.locks and not node.children

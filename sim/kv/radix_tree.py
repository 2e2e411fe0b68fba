"""A radix tree of KV pages by the tokens they were computed from, with locks and eviction, as in SGLang 0.5.23.

A node is a run of whole pages and is split where other tokens part from it. A user of pages locks the path to them.
Evicted is the leaf without locks that was walked over longest ago, the whole node at a time. Time is a count of walks.
Source: python/sglang/srt/mem_cache/unified_cache/ of the 0.5.23 wheel.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

from batchsim.kernel.types import MISSING, Sequence
from batchsim.kv.radix_tokens import TokenRun, common_tokens, head, known_tokens, tail


class Node:
    """A run of pages below `parent`; `children` by the tokens of their first page.

    `locks` counts the sequences that hold this node or one below it, `used` is the last walk over it. The others are of
    trees whose pages have copies on the host (`kv/host_tree.py`): `host_pages` of this node are there, `hits` requests
    inserted it, first that of `owner`, `num_on_device` children have pages on the GPU, into which load number `loading`
    copies its own, if not 0.
    """

    __slots__ = (
        "blocks", "children", "hits", "host_pages", "key", "loading", "locks", "num_on_device", "owner", "parent",
        "queued", "queued_on_host", "used",
    )  # fmt: skip

    def __init__(self, key: TokenRun, blocks: list[int], parent: Node | None, used: int) -> None:
        self.key = key
        self.blocks = blocks
        self.parent = parent
        self.children: dict[TokenRun, Node] = {}
        self.locks = 0
        self.used = used
        self.queued = False  # has an entry in the queue of leaves
        self.queued_on_host = False
        self.hits = self.host_pages = self.loading = self.num_on_device = 0
        self.owner = MISSING

    @property
    def num_pages(self) -> int:
        """The pages of the run, on the GPU or only on the host."""
        return len(self.blocks) or self.host_pages

    @property
    def evictable(self) -> bool:
        """Whether the node is a leaf, not the root, that no sequence locks."""
        return not self.locks and not self.children and self.parent is not None

    def path_blocks(self) -> list[int]:
        """The ids of the pages from the root to this node's last, in token order."""
        node, parts = self, list[list[int]]()
        while node.parent is not None:
            parts.append(node.blocks)
            node = node.parent
        return [block for part in reversed(parts) for block in part]


class RadixTree:
    """The pages that can be found by their tokens. `root` holds none and is never locked or evicted.

    `lookahead`: the number of tokens after those of a page on which its contents depend. Keys end with them, so that a
    node's begins with the last ones of its parent's; wherever a run has whole pages it has `lookahead` tokens more.
    """

    __slots__ = ("_leaves", "_serial", "block_size", "cached_blocks", "lookahead", "now", "num_evictable", "root")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.lookahead = 0
        self.root = self._node((), [], None, 0)
        self.cached_blocks = 0
        self.num_evictable = 0  # pages of nodes without locks
        self.now: int = 0  # counts walks and changes: while it stands still, what `descend` returned is still so
        self._leaves: list[tuple[int, int, Node]] = []  # heap by a past `used`; at most one entry a node
        self._serial = count()

    def nodes(self) -> list[Node]:
        """All nodes, parents first."""
        nodes = [self.root]
        for node in nodes:
            nodes += node.children.values()
        return nodes

    def whole_pages(self, num_tokens: int) -> int:
        """`num_tokens` rounded down to whole pages, in tokens."""
        return num_tokens // self.block_size * self.block_size

    def known_pages(self, seq: Sequence, num_tokens: int) -> TokenRun:
        """The run of the whole pages among the first `num_tokens` known tokens of `seq`; empty without any."""
        num_pages = self.num_pages(num_tokens)
        return known_tokens(seq, num_pages * self.block_size + self.lookahead) if num_pages else ()

    def num_pages(self, num_tokens: int) -> int:
        """How many whole pages there are among `num_tokens` known tokens."""
        return max(num_tokens - self.lookahead, 0) // self.block_size

    def find(self, run: TokenRun) -> int:
        """How many tokens of `run`, whole pages, are cached. Changes nothing."""
        node, hit, page = self.root, 0, self.block_size
        while run and (child := node.children.get(self._first(run))) is not None:
            n = self.whole_pages(common_tokens(child.key, run) - self.lookahead)
            hit += n
            if n < child.num_pages * page:
                break
            node, run = child, tail(run, n)
        return hit

    def descend(self, run: TokenRun) -> tuple[Node, int]:
        """The node at whose end the cached part of `run` ends, and that part's length in whole pages' tokens.

        `run` has whole pages. A node that goes on otherwise is split. Counts as a use of the path.
        """
        self.now += 1
        node, hit, page = self.root, 0, self.block_size
        while run and (child := node.children.get(self._first(run))) is not None:
            child.used = self.now
            n = self.whole_pages(common_tokens(child.key, run) - self.lookahead)
            hit += n
            if n < child.num_pages * page:
                return self._split(child, n), hit
            node, run = child, tail(run, n)
        return node, hit

    def add_leaf(self, parent: Node, key: TokenRun, blocks: list[int]) -> Node:
        """A new leaf without locks below `parent`, used later than all nodes walked over so far."""
        self.now += 1
        leaf = self._node(key, blocks, parent, self.now)
        parent.children[self._first(key)] = leaf
        self.cached_blocks += len(blocks)
        self.num_evictable += len(blocks)
        self._offer(leaf)
        return leaf

    def lock(self, node: Node) -> None:
        """Keeps the path to `node` from eviction until as many `unlock`."""
        while node.parent is not None:
            if not node.locks:
                self.num_evictable -= len(node.blocks)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Takes back one `lock`."""
        while node.parent is not None:
            node.locks -= 1
            if not node.locks:
                self.num_evictable += len(node.blocks)
                self._offer(node)
            node = node.parent

    def evict(self, num_blocks: int) -> list[int]:
        """Takes out nodes of at least `num_blocks` pages, or all without locks; returns the ids of their pages."""
        freed: list[int] = []
        while len(freed) < num_blocks and self._leaves:
            used, _, node = heappop(self._leaves)
            node.queued = False
            if not self._is_leaf(node):
                continue
            if used < node.used:  # walked over since it was queued
                self._offer(node)
                continue
            freed += self._remove(node)
        return freed

    def _node(self, key: TokenRun, blocks: list[int], parent: Node | None, used: int) -> Node:
        """A new node of the tree's kind."""
        return Node(key, blocks, parent, used)

    def _is_leaf(self, node: Node) -> bool:
        """Whether `node` can be evicted."""
        return node.evictable

    def _remove(self, node: Node) -> list[int]:
        """Evicts `node`, a leaf without locks; returns the ids of its pages, the last one first."""
        parent = node.parent
        assert parent is not None
        del parent.children[self._first(node.key)]
        node.parent = None
        self.cached_blocks -= len(node.blocks)
        self.num_evictable -= len(node.blocks)
        self.now += 1
        self._offer(parent)
        return node.blocks[::-1]

    def _split(self, node: Node, num_tokens: int) -> Node:
        """Makes the first `num_tokens` of `node` a node of their own above the rest, and returns it."""
        assert node.parent is not None
        at = num_tokens // self.block_size
        upper = self._node(head(node.key, num_tokens + self.lookahead), node.blocks[:at], node.parent, self.now)
        upper.locks = node.locks
        node.parent.children[self._first(node.key)] = upper
        node.key, node.blocks, node.parent = tail(node.key, num_tokens), node.blocks[at:], upper
        upper.children[self._first(node.key)] = node
        return upper

    def _first(self, run: TokenRun) -> TokenRun:
        """What a node is found by: the tokens of its first page, and those on which it depends."""
        return head(run, self.block_size + self.lookahead)

    def check_queued(self) -> None:
        """AssertionError unless all nodes that can be evicted are in the queue."""
        assert all(node.queued for node in self.nodes() if self._is_leaf(node))

    def _offer(self, node: Node) -> None:
        """Queues `node` for eviction if it can be evicted."""
        if self._is_leaf(node) and not node.queued:
            node.queued = True
            heappush(self._leaves, (node.used, next(self._serial), node))

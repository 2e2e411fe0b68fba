"""What the managers have in common whose radix tree is over a side pool too, as SGLang 0.5.23 keeps such models."""

from __future__ import annotations

from typing import cast

from batchsim.kernel.types import Sequence
from batchsim.kv.radix_cache import Holding, RadixKV
from batchsim.kv.side_tree import SideNode, SidePool, SideTree


class SideRadixKV(RadixKV):
    """A `RadixKV` whose prefixes are used as far as the side pool has what they need."""

    __slots__ = ("_last_walked", "_side")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._side = SideTree(block_size, SidePool(0), 0)  # in its place a derived class has a tree of its own
        self._last_walked = 0  # tokens that layers that keep all tokens had of the last match

    def match(self, seq: Sequence, limit: int) -> int:
        last, tree = self._last_match, self._side
        if last is None or last[:3] != (seq, limit, tree.now):
            node, hit, walked = tree.match(tree.known_pages(seq, limit))
            self._last_match = last = (seq, limit, tree.now, node, hit)
            self._last_walked = walked
        return last[4]

    def _matched(self, seq: Sequence, hit_tokens: int) -> tuple[SideNode, int]:
        """(The node at whose end the prefix of `seq` ends, which it just matched, the tokens of all that layers that
        keep all tokens have of it). ValueError if it did not just match `hit_tokens`."""
        last = self._last_match
        if (
            last is None
            or last[0] is not seq
            or last[2] != self._side.now
            or last[4] != hit_tokens
            or seq in self._held
        ):
            raise ValueError(f"cannot take {hit_tokens} cached tokens that were not just matched: {seq!r}")
        return cast(SideNode, last[3]), self._last_walked

    def _share(self, holding: Holding, node: SideNode, num_blocks: int, matched: int) -> None:
        """Lets `holding` go on with `num_blocks` pages of the tree up to `node`, locked, of which the tree had
        `matched` tokens: gives back its copies, and its lock on what it shared so far."""
        copies = holding.table[holding.shared : matched // self.block_size]
        self._side.unlock(holding.node)
        holding.node, holding.shared = node, num_blocks
        if copies:
            holding.table[:num_blocks] = node.path_blocks()
            self._free += reversed(copies)

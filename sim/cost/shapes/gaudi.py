"""The bucket tables of vLLM on Intel Gaudi: prompts and decodes, filtered, and what a step gets that fits none.

Source: vllm-gaudi @ 091bbadd, vllm_gaudi/extension/bucketing (`common.py`, `exponential.py`, `linear.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from batchsim.cost.shapes.lists import Bucket, exp, lin

LONG_MODEL = 8192
"""From this max_model_len on the largest context bucket of a prompt is what its query leaves of the length."""


@dataclass(frozen=True)
class GaudiEngine:
    """What the tables depend on. `max_num_prefill_seqs`: prompts in one program at most; `num_blocks`: KV blocks of
    the device; `contiguous_pa`: decodes read the pool up to their highest block, not block by block."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int = 128
    max_num_prefill_seqs: int = 1
    strategy: Literal["exp", "lin"] = "exp"
    contiguous_pa: bool = False

    @property
    def blocks_of_one(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def most_blocks(self) -> int:
        """The most blocks that the decodes of a step have together."""
        every = self.blocks_of_one * self.max_num_seqs
        return min(every, self.num_blocks if self.contiguous_pa else 3 * self.num_blocks)

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """The sizes of a prompt program: its batch, its query, its context in blocks."""
        most, block, longest = self.max_num_batched_tokens, self.block_size, self.max_model_len
        is_exp = self.strategy == "exp"
        context = max(1, (longest - (most if is_exp and longest >= LONG_MODEL else block)) // block)
        if is_exp:
            batches = exp(1, 2, self.max_num_prefill_seqs, _count(self.max_num_prefill_seqs) + 1)
            queries = exp(block, block, most, _count(most))
            contexts = exp(0, 1, context, 2 if context == 1 else _count(context) + 1)
        else:
            batches, queries = lin(1, 1, self.max_num_prefill_seqs), lin(block, block, most)
            contexts = lin(0, 1, context)
        return batches, queries, contexts

    def prompts(self) -> list[Bucket]:
        """The buckets (batch, query, context blocks) of prompts, sorted: the lists' combinations that can occur."""
        batches, queries, contexts = self.lists()
        most, block, longest, largest = (
            self.max_num_batched_tokens,
            self.block_size,
            self.max_model_len,
            max(contexts),
        )
        buckets: set[Bucket] = set()
        for batch in batches:
            for query in queries:
                for blocks in contexts:
                    if longest >= LONG_MODEL and blocks == largest:
                        blocks = max(0, (longest - query) // block)
                    if blocks <= ceil((longest - 1) / block) and query <= longest and batch * query <= most:
                        buckets.add((batch, query, blocks))
        return sorted(buckets)

    def decodes(self) -> list[Bucket]:
        """The buckets (batch, blocks) of decodes, sorted."""
        seqs, most, block = self.max_num_seqs, self.most_blocks, self.block_size
        if self.strategy == "exp":
            batches, every = exp(1, 2, seqs, _count(seqs) + 1), exp(1, seqs, most, _count(most) + 1)
        else:
            batches, every = lin(1, 32, seqs), lin(1, block, most)
        if self.contiguous_pa:
            every = sorted({*every, self.num_blocks})
            return sorted({(batch, blocks) for batch in batches for blocks in every})
        pairs = {(batch, min(blocks, batch * self.blocks_of_one)) for batch in batches for blocks in every}
        return sorted(pair for pair in pairs if pair[0] <= pair[1])

    def prompt_beyond(self, batch: int, query: int, context: int) -> Bucket:
        """The prompt bucket that is compiled at run time where none of the table fits."""
        return (
            min(fallback(batch, 2), self.max_num_seqs),
            min(fallback(query, 32), self.max_num_batched_tokens),
            min(fallback(context, 32), self.blocks_of_one),
        )

    def decode_beyond(self, batch: int, blocks: int) -> Bucket:
        """The decode bucket that is compiled at run time where none of the table fits."""
        return min(fallback(batch, 2), self.max_num_seqs), fallback(blocks, 32)


def fallback(size: int, base: int) -> int:
    """The size that is compiled at run time for one beyond the lists: a multiple of `base` times the rounded-up cube
    root of `size`; 0 and 1 stay."""
    if size <= 1:
        return size
    step = ceil(size ** (1 / 3)) * base
    return -(-size // step) * step


def _count(most: int) -> int:
    return ceil(log2(most)) if most > 1 else 0

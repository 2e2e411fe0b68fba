"""The inputs of one step as arrays on the host: decode rows first, then chunks.

Device block ids are the scheduler's plus one: device block 0 is never written, stays zero and is what padding reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import CalibrationError

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


def _nothing() -> Int32s:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class StepInputs:
    """One step of T tokens: `num_decode` rows of one token each, padding rows included, then C chunks.

    `slots` [T] is device block · block_size + offset, -1 for a token that is not stored (padding). `chunk_lens` [C] are
    the query tokens of each chunk, padding included. `seq_lens` [num_decode + C] is the context with this step's
    tokens, `block_tables` [num_decode + C, W] the device blocks that hold it, unused entries 0. Each row of `seq_lens`
    has one row of logits: that of its last stored token, or of its last token if none is stored. `pad_reads` [G] are
    lengths of further contexts of zeros that decode attention reads, as padded batches do; W covers them too.
    The first `num_drafted` chunks are decodes with their draft tokens, all of whose tokens have a row of logits.
    """

    ids: Int64s
    positions: Int64s
    slots: Int64s
    num_decode: int
    chunk_lens: Int32s
    seq_lens: Int32s
    block_tables: Int32s
    pad_reads: Int32s = field(default_factory=_nothing)
    num_drafted: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of logits: one for each sequence of the step, padding rows included, and for each draft token."""
        return len(self.seq_lens) + self.num_drafted_tokens - self.num_drafted

    @property
    def num_drafted_tokens(self) -> int:
        """Tokens of the chunks that are decodes with their draft tokens."""
        return int(self.chunk_lens[: self.num_drafted].sum())

    @property
    def logit_rows(self) -> Int64s:
        """Index, among the step's tokens, of those whose logits are computed: [num_rows]."""
        ends = self.num_decode + np.cumsum(self.chunk_lens, dtype=np.int64)
        stored = self.slots >= 0
        if not stored[self.num_decode :].all():
            starts = ends - self.chunk_lens
            kept = np.add.reduceat(stored, starts, dtype=np.int64)  # the real tokens of a chunk come first
            ends = np.where(kept > 0, starts + kept, ends)
        all_of = self.num_decode + self.num_drafted_tokens
        return np.concatenate([np.arange(all_of, dtype=np.int64), ends[self.num_drafted :] - 1])

    @classmethod
    def padding(cls, num_decode: int, chunk_lens: Sequence[int], *, block_size: int) -> StepInputs:
        """A step of `num_decode` decodes and these chunks that stores nothing; every sequence reads zeros."""
        lens = np.array([1] * num_decode + list(chunk_lens), dtype=np.int32)
        positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lens])
        return cls(
            ids=np.zeros_like(positions),
            positions=positions,
            slots=np.full_like(positions, -1),
            num_decode=num_decode,
            chunk_lens=lens[num_decode:],
            seq_lens=lens,
            block_tables=np.zeros((len(lens), -(-int(lens.max()) // block_size)), dtype=np.int32),
        )

    @classmethod
    def synthetic(
        cls,
        decode_contexts: Sequence[int],
        chunks: Sequence[tuple[int, int]],
        *,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        seed: int,
    ) -> StepInputs:
        """A step of random token ids over scattered, disjoint blocks; the same for the same arguments.

        `decode_contexts` are the computed tokens of each decode before the step; a chunk is (prefix, tokens).
        CalibrationError if the pool of `num_blocks` is too small.
        """
        rng = np.random.default_rng(seed)
        starts = np.array([*decode_contexts, *(prefix for prefix, _ in chunks)], dtype=np.int64)
        lens = np.array([*(1 for _ in decode_contexts), *(n for _, n in chunks)], dtype=np.int64)
        seq_lens = (starts + lens).astype(np.int32)
        held = -(-seq_lens // block_size)
        if held.sum() > num_blocks:
            raise CalibrationError(
                f"a step of {len(decode_contexts)} decodes and {len(chunks)} chunks needs {held.sum()} KV blocks,"
                f" {num_blocks} in the pool. Give the runner more blocks or take a smaller step."
            )
        tables = np.zeros((len(lens), int(held.max(initial=0))), dtype=np.int32)
        blocks = rng.permutation(num_blocks).astype(np.int32) + 1
        tables[np.arange(tables.shape[1]) < held[:, None]] = blocks[: held.sum()]
        rows = np.repeat(np.arange(len(lens)), lens)
        first = lens.cumsum() - lens  # each sequence's first token of the step
        positions = np.arange(len(rows)) - np.repeat(first - starts, lens)
        slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        return cls(
            ids=rng.integers(0, vocab_size, len(rows)),
            positions=positions,
            slots=slots,
            num_decode=len(decode_contexts),
            chunk_lens=np.array([n for _, n in chunks], dtype=np.int32),
            seq_lens=seq_lens,
            block_tables=tables,
        )

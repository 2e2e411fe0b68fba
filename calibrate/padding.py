"""The work a batch does for nothing, added to a step: rows and tokens that are computed, stored nowhere and dropped.

What there is of it, `sim.cost.work.padded_work` counts in the same way.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from calibrate.inputs import StepInputs
from sim.errors import PolicyError
from sim.types import Batch

Int32s = NDArray[np.int32]


def spread(total: int, parts: int) -> Int32s:
    """`total` in `parts` whole numbers that differ by at most 1."""
    return np.diff(np.arange(parts + 1) * total // max(parts, 1)).astype(np.int32)


def padded_chunks(step: StepInputs, batch: Batch) -> StepInputs:
    """`step` with every chunk as long as the longest: `pad_prefill_tokens` more, behind the chunks' own tokens.

    PolicyError if those tokens do not fill the chunks up to one length.
    """
    if not batch.pad_prefill_tokens:
        return step
    count, first = len(step.chunk_lens), step.num_decode
    length, rest = divmod(batch.num_prefill_tokens + batch.pad_prefill_tokens, max(count, 1))
    if not count or rest or length < step.chunk_lens.max():
        raise PolicyError(
            f"pad_prefill_tokens {batch.pad_prefill_tokens} beside {batch.num_prefill_tokens} tokens do not fill"
            f" {count} chunks up to one length. Correct the policy."
        )
    own = np.arange(length) < step.chunk_lens[:, None]
    starts = step.seq_lens[first:] - step.chunk_lens
    ids, slots = np.zeros(own.shape, dtype=np.int64), np.full(own.shape, -1, dtype=np.int64)
    ids[own], slots[own] = step.ids[first:], step.slots[first:]
    positions = (starts[:, None] + np.arange(length)).astype(np.int64)
    return replace(
        step,
        ids=np.concatenate([step.ids[:first], ids.ravel()]),
        positions=np.concatenate([step.positions[:first], positions.ravel()]),
        slots=np.concatenate([step.slots[:first], slots.ravel()]),
        chunk_lens=np.full(count, length, dtype=np.int32),
        seq_lens=np.concatenate([step.seq_lens[:first], (starts + length).astype(np.int32)]),
    )


def padded_decodes(step: StepInputs, batch: Batch, max_model_len: int) -> StepInputs:
    """`step` with `pad_decode_rows` more decode rows and `pad_context_tokens` more context to read, all zeros.

    A padding row reads about what a row of the batch does, padding included. What is left over is the padding inside
    rows that still decode: it must not reach their outcome, so attention reads it by itself (`pad_reads`).
    """
    rows, context = batch.pad_decode_rows, batch.pad_context_tokens
    if not (rows or context):
        return step
    total_rows = batch.num_decode + rows
    if not total_rows:
        raise PolicyError(f"pad_context_tokens {context} without any decode row. Correct the policy.")
    width = min(-(-(batch.context_tokens + context) // total_rows), max_model_len - 1)
    in_rows = min(context, rows * width)
    left = context - in_rows
    at, zeros = step.num_decode, np.zeros(rows, dtype=np.int64)
    return replace(
        step,
        ids=np.insert(step.ids, at, zeros),
        positions=np.insert(step.positions, at, zeros),
        slots=np.insert(step.slots, at, zeros - 1),
        num_decode=at + rows,
        seq_lens=np.insert(step.seq_lens, at, spread(in_rows, rows) + 1),
        block_tables=np.insert(step.block_tables, [at] * rows, 0, axis=0),
        pad_reads=spread(left, -(-left // max(width, 1))),
    )


def widened(step: StepInputs, block_size: int) -> StepInputs:
    """`step` with tables wide enough for what its padding reads: further entries are the block of zeros."""
    longest = max(int(step.seq_lens.max(initial=0)), int(step.pad_reads.max(initial=0)))
    more = -(-longest // block_size) - step.block_tables.shape[1]
    return step if more <= 0 else replace(step, block_tables=np.pad(step.block_tables, ((0, 0), (0, more))))

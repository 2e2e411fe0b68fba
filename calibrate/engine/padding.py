"""A batch's padding, added to the inputs of a step: rows and tokens that are computed, stored nowhere and dropped.

`padded_work` and `attention_rows` of `batchsim.cost.work` count the same padding.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import PolicyError
from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.kernel.batch import Batch

Int32s = NDArray[np.int32]
_NONE = np.empty(0, dtype=np.int32)


def spread(total: int, parts: int) -> Int32s:
    """`total` split into `parts` whole numbers that differ by at most 1."""
    return np.diff(np.arange(parts + 1) * total // max(parts, 1)).astype(np.int32)


def padded_chunks(step: StepInputs, batch: Batch, block_size: int) -> StepInputs:
    """`step` with every chunk padded to one length, and `pad_prefill_rows` chunks of zeros as long added.

    That is `pad_prefill_tokens` more. PolicyError if those tokens do not fill all rows to one length.
    """
    if not (batch.pad_prefill_tokens or batch.pad_prefill_rows):
        return step
    count, first, more_rows = len(step.chunk_lens), step.num_decode, batch.pad_prefill_rows
    length, rest = divmod(batch.num_prefill_tokens + batch.pad_prefill_tokens, max(count + more_rows, 1))
    if not count or rest or length < step.chunk_lens.max():
        raise PolicyError(
            f"pad_prefill_tokens {batch.pad_prefill_tokens} beside {batch.num_prefill_tokens} tokens do not fill"
            f" {count} chunks and {more_rows} rows of padding up to one length. Correct the policy."
        )
    lens = np.pad(step.chunk_lens, (0, more_rows))
    starts = np.pad(step.seq_lens[first:], (0, more_rows)) - lens
    own = np.arange(length) < lens[:, None]
    ids, slots = np.zeros(own.shape, dtype=np.int64), np.full(own.shape, -1, dtype=np.int64)
    ids[own], slots[own] = step.ids[first:], step.slots[first:]
    positions = (starts[:, None] + np.arange(length)).astype(np.int64)
    width = step.block_tables.shape[1]
    more = max(-(-int(starts.max() + length) // block_size) - width, 0)  # columns of the block of zeros
    return replace(
        step,
        ids=np.concatenate([step.ids[:first], ids.ravel()]),
        positions=np.concatenate([step.positions[:first], positions.ravel()]),
        slots=np.concatenate([step.slots[:first], slots.ravel()]),
        chunk_lens=np.full(len(lens), length, dtype=np.int32),
        seq_lens=np.concatenate([step.seq_lens[:first], (starts + length).astype(np.int32)]),
        block_tables=np.pad(step.block_tables, ((0, more_rows), (0, more))),
    )


def padded_decodes(batch: Batch, max_model_len: int) -> tuple[Int32s, Int32s]:
    """Context lengths of the batch's padding rows, with their own token, and of contexts that attention alone reads.

    Together they hold `pad_context_tokens`, as `batchsim.cost.work.attention_rows` says: padding inside rows that still
    decode must not change their results, so rows of zeros read it.
    """
    rows, context = batch.pad_decode_rows, batch.pad_context_tokens
    if not (rows or context):
        return _NONE, _NONE
    if context and not (batch.num_decode + rows):
        raise PolicyError(f"pad_context_tokens {context} without any decode row. Correct the policy.")
    parts = spread(context, max(rows, -(-context // max(max_model_len - 1, 1))))
    return parts[:rows] + np.int32(1), parts[rows:]

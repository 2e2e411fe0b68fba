"""How a step's inputs reach the device: one host buffer, pinned where there is CUDA, and one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.transformer import DeviceInputs, Reads

ALIGN_WORDS = 2  # words of 8 bytes: compiled kernels differ by whether 16 divides a pointer
TABLE_MULTIPLE = 16  # also for widths of tables; a width of 1 is a case of its own

_TORCH = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


def table_width(num_blocks: int) -> int:
    """`num_blocks` rounded up, so that kernels are not compiled anew for each width of block tables."""
    return -(-max(num_blocks, 1) // TABLE_MULTIPLE) * TABLE_MULTIPLE


class Staging:
    """A host buffer and its twin on the device; on the CPU they are one.

    The tensors of a step lie in the buffer until the next step is put there, which must wait until this one has run.
    Equal shapes lie at equal addresses, which is what a CUDA graph needs.
    """

    def __init__(self, max_num_tokens: int, max_num_rows: int, max_num_blocks: int, device: torch.device) -> None:
        rows = 3 * max_num_rows  # where padding makes rows longer than a sequence may be, others help to read it
        words = 3 * max_num_tokens + 4 * rows + rows * table_width(max_num_blocks) // 2 + 64
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(words, dtype=torch.int64, pin_memory=on_cuda)
        self._device = torch.zeros(words, dtype=torch.int64, device=device) if on_cuda else self._host
        self._words: NDArray[np.int64] = self._host.numpy()

    def put(self, inputs: StepInputs) -> DeviceInputs:
        """`inputs` as tensors of the device; their copy is enqueued, so later work on its stream finds them there."""
        rows, chunked = inputs.num_decode, len(inputs.chunk_lens) > 0
        width = table_width(inputs.block_tables.shape[1])
        arrays: list[NDArray[Any]] = [inputs.ids, inputs.positions, inputs.slots]
        reads = inputs.seq_lens[:rows]
        if len(inputs.pad_reads):
            reads = np.concatenate([reads, inputs.pad_reads])
        arrays += [reads, _widened(inputs.block_tables[:rows], len(reads), width)]
        if chunked:
            arrays += [inputs.seq_lens[rows:], _widened(inputs.block_tables[rows:], len(inputs.chunk_lens), width)]
            arrays += [_bounds(inputs.chunk_lens), inputs.logit_rows]
        tensors = iter(self._copy(arrays))
        ids, positions, slots = next(tensors), next(tensors), next(tensors)
        decodes = _reads(next(tensors), next(tensors))
        chunks = _reads(next(tensors), next(tensors)) if chunked else None
        return DeviceInputs(
            ids=ids,
            positions=positions,
            slots=slots,
            num_decode=rows,
            decodes=decodes if rows else None,
            chunks=chunks,
            cu_seqlens=next(tensors) if chunked else None,
            max_query_len=int(inputs.chunk_lens.max(initial=0)),
            logit_rows=next(tensors) if chunked else None,
        )

    def _copy(self, arrays: list[NDArray[Any]]) -> list[Tensor]:
        """`arrays` one behind the other in the buffer, as tensors of the device."""
        starts, ends, at = [], [], 0
        for array in arrays:
            end = at - (-array.nbytes // 8)
            if end > len(self._words):
                raise AssertionError(
                    f"staging of {len(self._words)} words is too small for {[a.shape for a in arrays]}"
                )
            self._words[at:end].view(array.dtype)[: array.size] = array.ravel()
            starts.append(at)
            ends.append(end)
            at = -(-end // ALIGN_WORDS) * ALIGN_WORDS
        if self._device is not self._host:
            self._device[:at].copy_(self._host[:at], non_blocking=True)
        return [
            self._device[start:end].view(_TORCH[array.dtype])[: array.size].view(array.shape)
            for start, end, array in zip(starts, ends, arrays, strict=True)
        ]


def _reads(seq_lens: Tensor, tables: Tensor) -> Reads:
    return Reads(tables, seq_lens)


def _bounds(lens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Running sum of `lens` from 0 on: [len + 1]."""
    return np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(lens, dtype=np.int32)])


def _widened(tables: NDArray[np.int32], rows: int, width: int) -> NDArray[np.int32]:
    """`tables` padded with zeros to `rows` and `width`."""
    widened = np.zeros((rows, width), dtype=np.int32)
    widened[: tables.shape[0], : tables.shape[1]] = tables
    return widened

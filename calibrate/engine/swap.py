"""Host memory for the KV blocks of swapped-out sequences, and the copies there and back."""

from __future__ import annotations

import time

import torch
from torch import Tensor

Moves = list[tuple[int, int]]

STAGE_BYTES = 64 * 2**20
"""Bytes of device memory through which blocks pass, gathered from all layers: enough for copies at link speed."""


class SwapPool:
    """`num_slots` slots of host memory, pinned where there is CUDA; a slot holds one block of all layers in one piece.

    `kv` is [layers, 2, device blocks, block_size, kv heads, head_dim].
    """

    def __init__(self, kv: Tensor, num_slots: int) -> None:
        self._blocks = kv.movedim(2, 0)
        shape = self._blocks.shape[1:]
        block_bytes = shape.numel() * kv.element_size()
        self._at_once = max(1, min(num_slots, STAGE_BYTES // block_bytes))
        self._stage = torch.empty(self._at_once, *shape, dtype=kv.dtype, device=kv.device)
        self._slots = torch.empty(num_slots, *shape, dtype=kv.dtype, pin_memory=kv.is_cuda)

    def move(self, out: Moves, into: Moves) -> int:
        """Copies `out`, (device block, slot), to the host and `into`, (slot, device block), back; returns ns.

        All is read before any of it is overwritten: a block given up may be one taken, and so may a slot.
        """
        start_ns = time.perf_counter_ns()
        overwritten = {slot for _, slot in out}
        saved = {slot: self._slots[slot].clone() for slot, _ in into if slot in overwritten}
        for i in range(0, len(out), self._at_once):
            self._out(out[i : i + self._at_once])
        for i in range(0, len(into), self._at_once):
            self._into(into[i : i + self._at_once], saved)
        if self._stage.is_cuda:
            torch.cuda.synchronize(self._stage.device)
        return time.perf_counter_ns() - start_ns

    def _out(self, moves: Moves) -> None:
        stage = self._stage[: len(moves)]
        stage.copy_(self._blocks[self._ids([block for block, _ in moves])])
        for i, (_, slot) in enumerate(moves):
            self._slots[slot].copy_(stage[i], non_blocking=True)

    def _into(self, moves: Moves, saved: dict[int, Tensor]) -> None:
        stage = self._stage[: len(moves)]
        for i, (slot, _) in enumerate(moves):
            stage[i].copy_(saved[slot] if slot in saved else self._slots[slot], non_blocking=True)
        self._blocks[self._ids([block for _, block in moves])] = stage

    def _ids(self, blocks: list[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._stage.device)

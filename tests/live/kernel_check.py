"""Compares the kernels of one backend with another's on a step of random numbers, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchsim.calibrate.engine.backend import SdpaBackend
from batchsim.calibrate.engine.inputs import StepInputs

EPS = 1e-5


@dataclass(frozen=True)
class Heads:
    """The attention shape of a layer: query heads, key and value heads, numbers a head; and tokens a KV block."""

    q: int
    kv: int
    dim: int
    block_size: int


def disagreement(
    backend: SdpaBackend,
    reference: SdpaBackend,
    inputs: StepInputs,
    heads: Heads,
    *,
    device: str,
    dtype: torch.dtype,
    head_norms: bool = False,
) -> dict[str, float]:
    """By kernel, the largest relative error of a row, |difference| / |reference|, for one layer's work on `inputs`.

    Nothing but block 0 (zeros) and what the step's own sequences hold may be read: all else is NaN, and a kernel that
    reads it gets an error of NaN. q, k and v are views of one fused tensor.
    """
    step = _Layer(inputs, heads, device=device, dtype=dtype, head_norms=head_norms)
    ours, theirs = step.without_sequences(backend), step.without_sequences(reference)
    errors = {name: _worst_row(ours[name], theirs[name]) for name in ours}
    errors |= {
        name: _worst_row(step.attention(backend, name), step.attention(reference, name))
        for name, rows in (("decode", inputs.num_decode), ("prefill", len(inputs.chunk_lens)))
        if rows
    }
    return errors


class _Layer:
    """Random weights, activations and caches of one layer, the same for every backend."""

    def __init__(self, inputs: StepInputs, heads: Heads, *, device: str, dtype: torch.dtype, head_norms: bool) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        tokens, dim = len(inputs.ids), heads.dim
        fused = normal(tokens, (heads.q + 2 * heads.kv) * dim)
        parts = fused.split([heads.q * dim, heads.kv * dim, heads.kv * dim], dim=1)
        self.q, self.k, self.v = (part.unflatten(1, (-1, dim)) for part in parts)
        self.x, self.residual = fused[:, : heads.q * dim], normal(tokens, heads.q * dim)
        self.gate_up, self.weight = fused, normal(heads.q * dim)
        self.q_norm, self.k_norm = (1 + normal(dim) / 4 if head_norms else None for _ in range(2))
        angles = torch.randn((int(inputs.positions.max()) + 1, dim // 2), generator=generator).to(device)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.positions, self.slots, self.seq_lens, self.tables = (
            torch.as_tensor(a, device=device)
            for a in (inputs.positions, inputs.slots, inputs.seq_lens, inputs.block_tables)
        )
        self.decodes, self.chunk_lens = inputs.num_decode, inputs.chunk_lens
        ends = torch.as_tensor(self.chunk_lens, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        self.cu_seqlens = torch.nn.functional.pad(ends, (1, 0))
        shape = (int(inputs.block_tables.max()) + 2, heads.block_size, heads.kv, dim)
        held = self._held(heads.block_size)[..., None, None]
        self.k_cache, self.v_cache = (torch.where(held, normal(*shape), torch.nan) for _ in range(2))
        self.k_cache[0] = self.v_cache[0] = 0

    def _held(self, block_size: int) -> Tensor:
        """bool [blocks, block_size]: the slots that hold a token of the step's sequences."""
        width = self.tables.shape[1]
        tokens = torch.arange(width * block_size, device=self.tables.device)
        mine = (tokens < self.seq_lens[:, None]).unflatten(1, (width, block_size))
        held = torch.zeros((int(self.tables.max()) + 2, block_size), dtype=torch.bool, device=self.tables.device)
        held[self.tables[mine.any(2)].long()] |= mine[mine.any(2)]
        return held

    def without_sequences(self, backend: SdpaBackend) -> dict[str, Tensor]:
        """Results of the kernels that work token by token, by name; both caches with zeros in place of NaN.

        The last block, where a backend may store padding, is left out.
        """
        norm, total = backend.add_rms_norm(self.x, self.residual, self.weight, EPS)
        keys, values = self.k_cache.clone(), self.v_cache.clone()
        rope = backend.rope_store(
            self.q,
            self.k,
            self.v,
            self.cos,
            self.sin,
            self.positions,
            keys,
            values,
            self.slots,
            self.q_norm,
            self.k_norm,
            EPS,
        )
        return {
            "rms_norm": backend.rms_norm(self.x, self.weight, EPS),
            "add_rms_norm": norm,
            "add": total,
            "silu_mul": backend.silu_mul(self.gate_up),
            "rope": rope,
            "keys": keys[:-1].nan_to_num(nan=0.0),
            "values": values[:-1].nan_to_num(nan=0.0),
        }

    def attention(self, backend: SdpaBackend, name: str) -> Tensor:
        """Attention of the decode rows or of the chunks, as `name` says."""
        q, n, scale = self.q.contiguous(), self.decodes, self.q.shape[-1] ** -0.5
        if name == "decode":
            return backend.decode(q[:n], self.k_cache, self.v_cache, self.tables[:n], self.seq_lens[:n], scale)
        longest = int(self.chunk_lens.max())
        return backend.prefill(
            q[n:], self.k_cache, self.v_cache, self.tables[n:], self.cu_seqlens, self.seq_lens[n:], longest, scale
        )  # fmt: skip


def _worst_row(found: Tensor, expected: Tensor) -> float:
    """Largest |found - expected| / |expected| over the first dimension; NaN if any is NaN."""
    difference = (found.double() - expected.double()).flatten(1).norm(dim=1)
    return float((difference / expected.double().flatten(1).norm(dim=1).clamp_min(1e-30)).max())

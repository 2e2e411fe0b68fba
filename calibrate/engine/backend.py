"""The kernels of a layer in plain torch: what other backends override, and are checked against."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

SPARE_BLOCKS = 2
"""Blocks of a cache besides the scheduler's: the first, of zeros, which padding reads, and the last,
which is never read and where a backend may store padding.
"""


class SdpaBackend:
    """The operations of a layer in plain torch, on any device: a loop over sequences, so cost is linear in the sum of
    contexts. It waits for the device, so no CUDA graph can hold it. A faster backend derives from it and overrides all.

    Tensors are on the device; positions and slots int64, tables and lengths int32. q, k and v may be views with a row
    stride; their last two dimensions are contiguous. Caches are [num_blocks + SPARE_BLOCKS, block_size, kv heads,
    head_dim].
    """

    name = "sdpa"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of `x` [T, H] times `weight`, computed in fp32, returned in the dtype of `x`."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(RMSNorm of x + residual, x + residual), both [T, H]."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Rotates q [T, hq, d] and k [T, hk, d], stores k and v at `slots` [T], returns q, contiguous.

        A slot of -1 is padding's: stored in the cache's last slot or nowhere. `cos` and `sin` are fp32 [positions,
        d/2]; halves are rotated, as in transformers. `q_norm` and `k_norm`, if given, are applied before.
        """
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        cos, sin = cos[positions][:, None], sin[positions][:, None]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k_cache.flatten(0, 1).index_put_((slots,), k)
        v_cache.flatten(0, 1).index_put_((slots,), v)
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu of the first half of each row of `gate_up` [T, 2I] times the second half: [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
    ) -> Tensor:
        """Attention of one query a sequence, q [B, hq, d], over its `seq_lens` [B] tokens of cache: [B, hq, d]."""
        out = torch.empty_like(q)  # the query heads of a KV head are its rows, so that nothing is repeated
        kv_heads, head_dim = k_cache.shape[2:]
        grouped = q.view(len(q), 1, kv_heads, -1, head_dim)
        for row, seq_len in enumerate(seq_lens.tolist()):
            k, v = _gather(k_cache, v_cache, block_tables[row], seq_len)
            out[row] = F.scaled_dot_product_attention(grouped[row], k, v, scale=scale).reshape(q[row].shape)
        return out

    def prefill(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens: Tensor,
        seq_lens: Tensor,
        max_query_len: int,
        scale: float,
    ) -> Tensor:
        """Causal attention of chunks, q [T, hq, d]: query i of a chunk of n stands at position seq_len - n + i."""
        out = torch.empty_like(q)
        bounds = cu_seqlens.tolist()
        for chunk, seq_len in enumerate(seq_lens.tolist()):
            first, end = bounds[chunk], bounds[chunk + 1]
            k, v = _gather(k_cache, v_cache, block_tables[chunk], seq_len)
            computed = seq_len - (end - first)
            mask = None
            if computed:
                mask = torch.ones(end - first, seq_len, dtype=torch.bool, device=q.device).tril(computed)
            heads = q[first:end].transpose(0, 1)[None]
            attended = F.scaled_dot_product_attention(
                heads, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
            out[first:end] = attended[0].transpose(0, 1)
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [T, heads, d] with its halves rotated against each other in fp32, returned in the dtype of `x`."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _gather(k_cache: Tensor, v_cache: Tensor, table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence, [1, kv heads, seq_len, d] each."""
    blocks = table[: -(-seq_len // k_cache.shape[1])]
    k, v = (cache[blocks].flatten(0, 1)[:seq_len].transpose(0, 1)[None] for cache in (k_cache, v_cache))
    return k, v

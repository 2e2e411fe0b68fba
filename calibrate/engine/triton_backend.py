"""The executor's kernels on a GPU: `TritonBackend`, with the shapes they are launched in and why.

The shapes were chosen by the compiler's report for sm_90 (registers, shared memory, no spills) and by counting bytes
and programs; `TritonBackend(shapes=...)` takes others, to be compared where there is a GPU.
"""

# The launcher, not the kernel, takes num_warps and num_stages:
# pyright: reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
import triton
from torch import Tensor

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.engine import kernels
from batchsim.calibrate.engine.backend import SdpaBackend

LOG2_E = log2(e)
FP_FUSION = True  # a multiply and an add in one instruction; from Triton 3.10 on only where it is asked for
MIN_DOT_ROWS = 16  # least rows of a tensor core tile
NORM_WARPS = 8  # 16 numbers a thread at a hidden size of 4096: one row is latency, so use many threads
SILU_BLOCK = 1024  # 8 numbers a thread (a 16-byte load) at 4 warps; 14 programs for one row of 14336
MIN_ROW_CLASS = 32  # decode is compiled for this many rows and each power of two above it
COMBINE_STEP = 32  # parts read at once: 16 KiB at a head_dim of 128


@dataclass(frozen=True)
class Shapes:
    """How the attention kernels are cut. Key tiles are halved for fp32, whose rows are twice as long.

    With 5 stages the compiler (Triton 3.6 and 3.9) keeps two tiles of keys and two of values, so that one is read
    while the other is used: the look-up of the block is a stage of its own; with 3 or 4 it keeps one of each.
    - prefill_rows: query tokens × padded query heads of a tile. 128 rows are two warpgroups of 64, the height of
      wgmma, one warpgroup a half; 192 registers a thread and 132 KB, one program an SM. 64 rows would read each key
      tile from L2 twice as often, 6 TB/s at 400 TFLOP/s; 128 keys take 250 registers and leave no second buffer.
    - decode: 64 keys are 32 KB of keys and values; 72 KB and 166 registers a thread let three programs share an SM,
      which have 96 KB or more in flight: 4.3 TB/s at 1 us of latency ask for 33 KB of each of 132 SMs.
    On sm_80 to sm_89 the same tiles take 97 KB, with some 50 bytes of spills in prefill: they fit, untuned.
    """

    prefill_rows: int = 128
    prefill_keys: int = 64
    prefill_warps: int = 8
    prefill_stages: int = 5
    decode_keys: int = 64
    decode_warps: int = 4
    decode_stages: int = 5
    decode_programs_per_sm: int = 3


class TritonBackend(SdpaBackend):
    """The operations of a transformer on CUDA tensors, as `batchsim.calibrate.engine.backend.SdpaBackend` states them.

    A decode launches the same programs for the same number of rows whatever the contexts, and waits for nothing, so a
    CUDA graph can hold it; call it once before the capture, since kernels are compiled at their first call. Scratch
    memory is kept between calls: use one backend on one stream. `num_programs` of a decode: SMs × programs an SM.
    """

    name = "triton"

    def __init__(self, shapes: Shapes = Shapes(), *, num_programs: int | None = None) -> None:
        self.shapes = shapes
        self._num_programs = num_programs
        self._scratch: dict[tuple[torch.device, int, int], tuple[Tensor, Tensor]] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The normalised rows of x [T, H], times weight."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._norm(x, None, weight, out, None, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the sum is rounded to the dtype before its norm is taken."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = torch.empty_like(out)
        self._norm(x, residual, weight, out, total, eps)
        return out, total

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float
    ) -> None:
        rows, hidden = x.shape
        stride = 0 if residual is None else residual.stride(0)
        block = triton.next_power_of_2(hidden)
        kernels.rms_norm[(rows,)](
            x, residual, weight, out, total, x.stride(0), stride, eps, hidden, block,
            num_warps=NORM_WARPS, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of each row, [T, I] of [T, 2I]."""
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
        grid = (rows, triton.cdiv(inner, SILU_BLOCK))
        kernels.silu_mul[grid](
            gate_up, out, gate_up.stride(0), inner, SILU_BLOCK, num_warps=4, enable_fp_fusion=FP_FUSION
        )
        return out

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
        """The rotated queries [T, hq, d]; keys (rotated) and values are written to their slots, those of -1 nowhere."""
        heads, dim = k.shape[1:]
        group = _group(q, k_cache)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kernels.rope_store[(q.shape[0], heads)](
            q, k, v, cos, sin, positions, k_cache, v_cache, slots, q_norm, k_norm, out,
            q.stride(0), k.stride(0), v.stride(0), eps, heads, group, triton.next_power_of_2(group), dim,
            num_warps=1, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
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
        """Causal attention of chunks of prompts over their cached keys, [Tc, hq, d]. `max_query_len` is not used."""
        del max_query_len
        block_size, heads, dim = k_cache.shape[1:]
        group, chunks, shapes = _group(q, k_cache), seq_lens.shape[0], self.shapes
        padded = triton.next_power_of_2(group)
        queries = max(1, shapes.prefill_rows // padded)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kernels.prefill[(heads, q.shape[0] // queries + chunks)](
            q, k_cache, v_cache, out, block_tables, cu_seqlens, seq_lens, scale * LOG2_E, chunks,
            q.stride(0), block_tables.stride(0), heads, group, padded, dim, block_size, queries,
            _keys(shapes.prefill_keys, q),
            num_warps=shapes.prefill_warps, num_stages=shapes.prefill_stages, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
        return out

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
    ) -> Tensor:
        """Attention of one token of each sequence over its cached keys, [B, hq, d]."""
        block_size, heads, dim = k_cache.shape[1:]
        group, rows, shapes = _group(q, k_cache), q.shape[0], self.shapes
        row_class = triton.next_power_of_2(max(rows, MIN_ROW_CLASS))
        keys = _keys(shapes.decode_keys, q)
        programs = self.num_programs(q.device)
        parts, logs = self._parts(q.device, programs, group, dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kernels.decode[(programs,)](
            q, k_cache, v_cache, out, parts, logs, block_tables, seq_lens, scale * LOG2_E, rows,
            q.stride(0), block_tables.stride(0), heads, group, max(MIN_DOT_ROWS, triton.next_power_of_2(group)), dim,
            block_size, keys, row_class,
            num_warps=shapes.decode_warps, num_stages=shapes.decode_stages, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
        if programs > 1:
            kernels.combine[(rows, heads * group)](
                out, parts, logs, seq_lens, rows, programs, heads, group, dim, keys, row_class, COMBINE_STEP,
                num_warps=4, enable_fp_fusion=FP_FUSION,
            )  # fmt: skip
        return out

    def num_programs(self, device: torch.device) -> int:
        """Number of programs that every decode launches."""
        if self._num_programs is None:
            sms = torch.cuda.get_device_properties(device).multi_processor_count
            self._num_programs = sms * self.shapes.decode_programs_per_sm
        return self._num_programs

    def _parts(self, device: torch.device, programs: int, group: int, dim: int) -> tuple[Tensor, Tensor]:
        """Scratch tensors of a decode, allocated once: a captured graph holds their address."""
        key = (device, group, dim)
        if key not in self._scratch:
            parts = torch.empty((programs, 2, group, dim), dtype=torch.float32, device=device)
            self._scratch[key] = parts, torch.empty((programs, 2, group), dtype=torch.float32, device=device)
        return self._scratch[key]


def _keys(keys: int, q: Tensor) -> int:
    return keys * 2 // q.element_size()


def _group(q: Tensor, k_cache: Tensor) -> int:
    """Query heads of each kv head. CalibrationError for a head size that the kernels have no tile for."""
    heads, dim = k_cache.shape[2:]
    if dim < MIN_DOT_ROWS or dim & (dim - 1):
        raise CalibrationError(
            f"triton backend: head_dim {dim} is not a power of two of at least {MIN_DOT_ROWS}. Use backend sdpa."
        )
    return q.shape[1] // heads

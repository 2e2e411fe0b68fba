"""The kernels compile for an H200 on a machine without a GPU: in bf16, at the shapes of real models.

What is compiled is what the backend launches, so a changed tile is checked by itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the live executor needs torch")
triton = pytest.importorskip("triton", reason="the kernels are written in Triton")

from batchsim.calibrate.engine.triton_backend import Shapes, TritonBackend
from tests.live.kernel_launches import Launch, launches, resources

MAX_SHARED_BYTES = 227 * 1024  # of one program on sm_90
SM_SHARED_BYTES = 228 * 1024  # of one SM; each program takes 1 KiB besides its own
SM_REGISTERS = 65536
TOKENS = 300

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Layer:
    """A model's layer, as its config.json names it."""

    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    head_norms: bool = False
    dtype: Any = torch.bfloat16

    def run(self, backend: TritonBackend, rows: int = 256, chunks: int = 3) -> None:
        """One layer of a step with `rows` decodes and so many chunks, on meta tensors."""

        def empty(*shape: int, dtype: Any = self.dtype) -> Any:
            return torch.empty(shape, dtype=dtype, device="meta")

        d = self.head_dim
        x, cache = empty(TOKENS, self.hidden), empty(1000, 16, self.kv_heads, d)
        backend.rms_norm(x, empty(self.hidden), 1e-5)
        backend.add_rms_norm(x, x, empty(self.hidden), 1e-5)
        fused = empty(TOKENS, (self.q_heads + 2 * self.kv_heads) * d)
        parts = fused.split([self.q_heads * d, self.kv_heads * d, self.kv_heads * d], dim=1)
        q, k, v = (part.unflatten(1, (-1, d)) for part in parts)
        angles, norm = empty(8192, d // 2, dtype=torch.float32), empty(d) if self.head_norms else None
        places = empty(TOKENS, dtype=torch.int64)
        backend.rope_store(q, k, v, angles, angles, places, cache, cache, places, norm, norm, 1e-5)
        backend.silu_mul(empty(TOKENS, 2 * self.inner))
        q = empty(TOKENS, self.q_heads, d)
        starts, lens, tables = (empty(*shape, dtype=torch.int32) for shape in ((chunks + 1,), (chunks,), (chunks, 512)))
        backend.prefill(q, cache, cache, tables, starts, lens, 200, 0.1)
        lens, tables = (empty(*shape, dtype=torch.int32) for shape in ((rows,), (rows, 512)))
        backend.decode(q[:rows], cache, cache, tables, lens, 0.1)


LAYERS = {
    "Llama-3.1-8B": Layer(32, 8, 128, 4096, 14336),
    "Qwen2.5-7B": Layer(28, 4, 128, 3584, 18944),
    "Qwen3-8B": Layer(32, 8, 128, 4096, 12288, head_norms=True),
}
KERNELS = ["rms_norm", "rms_norm", "rope_store", "silu_mul", "prefill", "decode", "combine"]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_compiles_without_spills(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every kernel of a layer assembles for sm_90 with all its numbers in registers."""
    found = launches(LAYERS[name].run, monkeypatch)
    assert [launch.name for launch in found] == KERNELS
    for launch in found:
        compiled = launch.compile()
        used = resources(compiled.asm["cubin"], tmp_path)
        assert compiled.metadata.shared <= MAX_SHARED_BYTES, launch.name
        assert (used["STACK"], used["LOCAL"]) == (0, 0), f"{launch.name} spills: {used}"


@pytest.mark.parametrize("name", LAYERS)
def test_prefill_multiplies_by_warpgroup(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill uses Hopper's wgmma, and reads the next tile while it multiplies: not every wait is for all loads."""
    ptx = _named(launches(LAYERS[name].run, monkeypatch), "prefill").compile().asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert _waits(ptx) - {0}


@pytest.mark.parametrize("name", LAYERS)
def test_the_programs_of_a_decode_fit_their_sm(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As many programs as `Shapes` counts on share an SM, each with the next tile on its way."""
    launch = _named(launches(LAYERS[name].run, monkeypatch), "decode")
    compiled = launch.compile()
    programs = Shapes().decode_programs_per_sm
    used = resources(compiled.asm["cubin"], tmp_path)
    assert programs * (compiled.metadata.shared + 1024) <= SM_SHARED_BYTES
    assert programs * 32 * launch.options["num_warps"] * -(-used["REG"] // 8) * 8 <= SM_REGISTERS
    assert _waits(compiled.asm["ptx"]) - {0}


def test_one_decode_and_one_chunk_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of 1, which Triton likes to make a constant, compiles as any other."""
    found = launches(partial(LAYERS["Llama-3.1-8B"].run, rows=1, chunks=1), monkeypatch)
    for name in ("prefill", "decode", "combine"):
        assert _named(found, name).compile().asm["cubin"]


@pytest.mark.parametrize("capability", [80, 89])
def test_attention_fits_smaller_gpus(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an A100 or a GPU of a workstation, the same tiles compile and fit the 99 KiB that the latter has."""
    for launch in launches(LAYERS["Llama-3.1-8B"].run, monkeypatch):
        if launch.name in ("prefill", "decode"):
            assert launch.compile(capability).metadata.shared <= 99 * 1024


def test_full_precision_compiles_into_an_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, which the GPU's own tests use, attention at a head_dim of 128 still fits the shared memory."""
    layer = replace(LAYERS["Llama-3.1-8B"], dtype=torch.float32)
    for launch in launches(layer.run, monkeypatch):
        if launch.name in ("prefill", "decode"):
            assert launch.compile().metadata.shared <= MAX_SHARED_BYTES


def _named(found: list[Launch], name: str) -> Launch:
    return next(launch for launch in found if launch.name == name)


def _waits(ptx: str) -> set[int]:
    """How many groups of loads may still be under way where the kernel waits for some."""
    return {int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)}

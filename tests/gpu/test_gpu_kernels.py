"""The Triton kernels on a GPU: against SDPA in fp32 and bf16, and inside a CUDA graph."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the live executor needs torch")
triton = pytest.importorskip("triton", reason="the kernels are written in Triton")

from batchsim.calibrate.engine.backend import SdpaBackend
from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.triton_backend import TritonBackend
from tests.live.kernel_cases import CASES
from tests.live.kernel_check import Heads, disagreement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FP32_TOLERANCE = 1e-4
BF16_TOLERANCE = 2e-2  # a few roundings of 2^-9 each
MODELS = {
    "Llama-3.1-8B": Heads(32, 8, 128, 16),
    "Qwen2.5-7B": Heads(28, 4, 128, 16),
    "Qwen2.5-14B": Heads(40, 8, 128, 16),
    "Qwen2.5-0.5B": Heads(14, 2, 64, 16),
}


@pytest.mark.parametrize("name", CASES)
def test_the_interpreter_s_cases_hold_on_the_device(name: str) -> None:
    """Compiled, the kernels equal SDPA in fp32 on the cases that the interpreter passed."""
    errors = CASES[name].errors("cuda", torch.float32)
    assert not {kernel: error for kernel, error in errors.items() if not error <= FP32_TOLERANCE}


@pytest.mark.parametrize("name", MODELS)
def test_real_heads_in_bf16(name: str) -> None:
    """At the head counts of real models, long ragged contexts and chunks stay within bf16's rounding of SDPA."""
    heads = MODELS[name]
    inputs = StepInputs.synthetic(
        (0, 63, 64, 1000, 8000, *range(100, 2100, 40)), ((0, 1500), (4000, 33), (700, 1), (0, 128)),
        block_size=heads.block_size, num_blocks=20_000, vocab_size=100, seed=0,
    )  # fmt: skip
    errors = disagreement(
        TritonBackend(), SdpaBackend(), inputs, heads, device="cuda", dtype=torch.bfloat16, head_norms=True
    )
    assert not {kernel: error for kernel, error in errors.items() if not error <= BF16_TOLERANCE}


def test_a_graph_follows_growing_contexts() -> None:
    """A decode captured at contexts of one block gives the eager answer, bit for bit, when replayed at long ones."""
    rows, width, block_size = 8, 256, 16
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (rows * width + 1, block_size, 8, 128)
    k_cache, v_cache = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2)
    )  # fmt: skip
    q = torch.randn((rows, 32, 128), device="cuda", dtype=torch.bfloat16, generator=generator)
    tables = (torch.randperm(rows * width, device="cuda", generator=generator).int() + 1).view(rows, width)
    lens = torch.full((rows,), 5, dtype=torch.int32, device="cuda")
    backend = TritonBackend()
    backend.decode(q, k_cache, v_cache, tables, lens, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.decode(q, k_cache, v_cache, tables, lens, 0.1)
    for longest in (40, 1000, width * block_size):
        lens.copy_(torch.linspace(1, longest, rows).int())
        graph.replay()
        eager = backend.decode(q, k_cache, v_cache, tables, lens, 0.1)
        assert torch.equal(out, eager)

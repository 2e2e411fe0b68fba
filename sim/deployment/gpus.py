"""GPUs and other accelerators known by name, and those of a sheet of the user's own. Every figure has a source."""

from __future__ import annotations

from dataclasses import replace
from math import log

from batchsim.base.errors import ScenarioError, nearest
from batchsim.deployment.model import Efficiencies, GpuSpec
from batchsim.deployment.models import MODELS

_TABLES = "AIConfigurator kernel tables (github.com/ai-dynamo/aiconfigurator @ 095f58a)"
_MEMORY = "memory as NVML reports it (thundergolfer.com/blog/nvidia-gpu-memory-capacity)"
_TORCH_MEMORY = "memory as torch reports it (github.com/casys-kaist/LLMServingSim @ 5daddb2, bench/examples/RTX4090)"
_SHEET = "its system sheet in aiconfigurator-core 0.12.0, memory included"
_PEER_LATENCY_NS = (
    10_000  # Source: p2p_latency of the system sheets of AIConfigurator @ 095f58a, marked unofficial there.
)

_FITTED_ON = "llama-3.1-8b and qwen3-14b"
_HELD_OUT = "qwen3-8b and mistral-7b (whose layers are those of llama-3.1-8b)"
_COMPARED = tuple(MODELS[name] for name in ("llama-3.1-8b", "qwen3-14b", "qwen3-8b", "mistral-7b"))

# Fitted numbers and errors: `python -m tools.fit_roofline` on the tables' folder prints them.
_FITS: dict[str, tuple[float, float, float, float, float, float, float, float, float, str]] = {
    # GPU: matmul, weights, attention, kv; gemm_ns, attention_ns, sequence_ns; error_p50, error_p95; release of vLLM
    "h200": (0.777, 0.754, 0.569, 0.928, 4_010, 13_440, 133, 0.032, 0.057, "0.24"),
    "h100": (0.804, 0.846, 0.579, 0.950, 15_350, 13_380, 128, 0.029, 0.086, "0.24"),
    "a100": (0.852, 0.714, 0.543, 0.772, 4_570, 23_210, 0, 0.018, 0.091, "0.14"),
    "l40s": (0.732, 0.756, 0.543, 0.772, 0, 23_210, 0, 0.035, 0.070, "0.14"),
}
_FITTED_LIKE = {
    "rtx4090": "l40s",
    "h100_pcie": "h100",
    "b200_sxm": "h200",
    "b300_sxm": "h200",
    "gb200": "h200",
    "gb300": "h200",
    "a100_pcie": "a100",
    "a30": "a100",
    "l4": "l40s",
    "rtx_pro_6000_server": "l40s",
    "b60": "l40s",
    "trainium2": "h100",
    "inferentia2": "a100",
    "tpu_v5e": "a100",
    "tpu_v6e": "h100",
    "gaudi3": "h200",
}
"""Boards that no roofline was fitted to, and the one whose shares it is taken to reach: one of their architecture, or
the nearest before it; of accelerators that are no GPUs, a board of about their age, which says nothing of them."""
_ASSUMED = "matmuls only; attention not fitted, assumed to reach the same shares as on a100"
_BOARDS: dict[str, tuple[int, float, float, float, float, str]] = {
    # GPU: MiB as its source reports them; bytes/s of memory; FLOP/s in bf16; bytes/s of host and peer link; datasheet
    "h200": (143_771, 4.8e12, 989e12, 64e9, 450e9, "H200 SXM datasheet: HBM3e, PCIe 5.0 x16, NVLink 4"),
    "h100": (81_559, 3.35e12, 989e12, 64e9, 450e9, "H100 SXM 80 GB datasheet: HBM3, PCIe 5.0 x16, NVLink 4"),
    "a100": (81_920, 2.039e12, 312e12, 32e9, 300e9, "A100 SXM 80 GB datasheet: HBM2e, PCIe 4.0 x16, NVLink 3"),
    "l40s": (46_068, 864e9, 362e12, 32e9, 32e9,
             "L40S 48 GB datasheet: GDDR6, PCIe 4.0 x16, no NVLink, so peers share PCIe"),
    "rtx4090": (24_080, 1.008e12, 165.2e12, 32e9, 32e9,
                "Ada GPU architecture whitepaper, GeForce RTX 4090 24 GB: GDDR6X, bf16 with FP32 accumulation, PCIe 4.0"
                " x16, no NVLink, so peers share PCIe"),
    "h100_pcie": (81_920, 2.0e12, 756.5e12, 64e9, 64e9, _SHEET),
    "b200_sxm": (184_320, 7.7e12, 2.25e15, 128e9, 900e9, _SHEET),
    "b300_sxm": (275_040, 7.75e12, 2.25e15, 128e9, 900e9, _SHEET),
    "gb200": (189_471, 8.0e12, 2.5e15, 64e9, 900e9, _SHEET),
    "gb300": (284_208, 8.0e12, 2.5e15, 64e9, 900e9, _SHEET),
    "a100_pcie": (81_920, 1.935e12, 312e12, 32e9, 32e9, _SHEET),
    "a30": (24_576, 933e9, 165e12, 32e9, 32e9, _SHEET),
    "l4": (24_576, 300e9, 121e12, 32e9, 32e9, _SHEET),
    "rtx_pro_6000_server": (97_887, 1.792e12, 467.8e12, 64e9, 64e9, _SHEET),
    "b60": (24_576, 456e9, 98.3e12, 32e9, 28.4e9, _SHEET),
}  # fmt: skip
ACCELERATORS: dict[str, str] = {
    "trainium2": "AWS Neuron documentation, Trainium2 Architecture (one chip of eight NeuronCores): HBM, NeuronLink-v3"
    " of 1.28 TB/s both ways; host link not in it, assumed as PCIe 5.0 x16",
    "inferentia2": "AWS Neuron documentation, Inferentia2 Architecture and Inf2 (one chip of two NeuronCores): HBM,"
    " NeuronLink-v2 of 192 GB/s both ways; host link not in it, assumed as PCIe 4.0 x16",
    "tpu_v5e": "Google Cloud documentation, TPU v5e: HBM2, interconnect of 400 GB/s both ways; host link not in it,"
    " assumed as PCIe 4.0 x16",
    "tpu_v6e": "Google Cloud documentation, TPU v6e: HBM, interconnect of 800 GB/s both ways, PCIe Gen5",
    "gaudi3": "Intel, Gaudi 3 AI Accelerator, Hot Chips 2024: HBM2e, 24 ports of 200 GbE, PCIe 5.0 x16",
}
"""Accelerators that are no GPUs, with the sources of their figures. They run compiled shapes, and have no kernel
tables."""
_BOARDS |= {
    name: (*figures, ACCELERATORS[name])
    for name, figures in {
        "trainium2": (98_304, 2.9e12, 667e12, 64e9, 640e9),
        "inferentia2": (32_768, 820e9, 190e12, 32e9, 96e9),
        "tpu_v5e": (15_258, 819e9, 197e12, 32e9, 200e9),
        "tpu_v6e": (30_517, 1.638e12, 918e12, 64e9, 400e9),
        "gaudi3": (122_070, 3.67e12, 1835e12, 64e9, 600e9),
    }.items()
}
_FP8_FLOPS = {
    "h200": 1979e12,
    "h100": 1979e12,
    "l40s": 733e12,
    "rtx4090": 330.3e12,
    "h100_pcie": 1513e12,
    "b200_sxm": 4.5e15,
    "b300_sxm": 4.5e15,
    "gb200": 5e15,
    "gb300": 5e15,
    "l4": 242e12,
    "rtx_pro_6000_server": 935.6e12,
    "trainium2": 1299e12,
    "inferentia2": 190e12,
    "gaudi3": 1835e12,
}
"""FLOP/s in FP8, dense, of the boards that multiply it, from the same sheets."""
_FP4_FLOPS = {"b200_sxm": 9e15, "b300_sxm": 14e15, "gb200": 10e15, "gb300": 15e15, "rtx_pro_6000_server": 1871.2e12}
"""The same in FP4."""
_LINKS = {
    "h200": "NVLink 4",
    "h100": "NVLink 4",
    "a100": "NVLink 3",
    "l40s": "PCIe 4.0 x16",
    "rtx4090": "PCIe 4.0 x16",
    "h100_pcie": "PCIe 5.0 x16",
    "b200_sxm": "NVLink 5",
    "b300_sxm": "NVLink 5",
    "gb200": "NVLink 5",
    "gb300": "NVLink 5",
    "a100_pcie": "PCIe 4.0 x16",
    "a30": "PCIe 4.0 x16",
    "l4": "PCIe 4.0 x16",
    "rtx_pro_6000_server": "PCIe 5.0 x16",
    "b60": "PCIe 5.0 x8",
    "trainium2": "NeuronLink-v3",
    "inferentia2": "NeuronLink-v2",
    "tpu_v5e": "ICI",
    "tpu_v6e": "ICI",
    "gaudi3": "RoCE 24 x 200 GbE",
}
"""The link between GPUs of one machine whose bytes/s `_BOARDS` has, by the same sheets."""
_CUDA_MIB = {"h200": 143_156, "h100": 81_091, "a100": 81_050, "l40s": 45_589, "rtx4090": 24_080, "b200_sxm": 182_630}
"""MiB that CUDA gives a program, as PyTorch reports them: less than the board has. Sources: H100 79.19 GiB, start-ups
of vLLM (github.com/llm-d-incubation/llm-d-planner pull request 205); B200 178.35, github.com/pytorch/ao pull request
4002; the others, published lines of `torch.cuda.get_device_properties` and of out-of-memory errors."""
_MULTIPROCESSORS = {"a100": 108, "a100_pcie": 108, "l40s": 142, "rtx4090": 128, "b200_sxm": 148, "h100_pcie": 114}
"""Multiprocessors of boards that have others than the 132 of H100 SXM and H200, where that is known."""
_SECOND_NAMES = {"h100_sxm": "h100", "h200_sxm": "h200", "a100_sxm": "a100"}  # as the kernel tables call them


def _efficiencies(gpu: str) -> Efficiencies:
    if gpu in _FITTED_LIKE:
        return _unfitted(gpu, _FITTED_LIKE[gpu])
    matmul, weights, attention, kv, gemm_ns, call_ns, sequence_ns, p50, p95, release = _FITS[gpu]
    compared, fitted_on = ("matmuls", f"{_FITTED_ON}, {_ASSUMED}") if gpu == "l40s" else ("kernel part", _FITTED_ON)
    constants, source = (gemm_ns, call_ns, sequence_ns), f"{_TABLES}, vLLM {release}"
    held_out = (_HELD_OUT, _COMPARED)
    return Efficiencies(
        matmul, weights, attention, kv, *constants, p50, p95, compared, fitted_on, *held_out, source=source
    )


def _unfitted(gpu: str, like: str) -> Efficiencies:
    """The shares of the board `like`; no step of `gpu` was compared with them."""
    unmeasured = f"nothing of {gpu}, assumed to reach the same shares as {like}"
    assumed = replace(_efficiencies(like), fitted_on=unmeasured, compared="", held_out="", models=())
    return replace(assumed, error_p50=None, error_p95=None)


def _gpu(name: str) -> GpuSpec:
    mebibytes, bandwidth, flops, host, peer, sheet = _BOARDS[name]
    source = sheet
    if sheet is not _SHEET and name not in ACCELERATORS:
        source = f"NVIDIA {sheet}; {_TORCH_MEMORY if name == 'rtx4090' else _MEMORY}"
    memory = mebibytes * 2**20
    links = (host, peer, _PEER_LATENCY_NS)
    rates = (_FP8_FLOPS.get(name), _FP4_FLOPS.get(name))
    cuda = _CUDA_MIB[name] * 2**20 if name in _CUDA_MIB else None
    figures = (name, memory, bandwidth, flops, *links, _efficiencies(name), source, *rates, _LINKS[name])
    return GpuSpec(*figures, cuda_bytes=cuda, multiprocessors=_MULTIPROCESSORS.get(name, 132))


GPUS: dict[str, GpuSpec] = {name: _gpu(name) for name in _BOARDS}
"""The GPUs of the catalog by name; one that has two names stands under both, as the spec of its first."""
GPUS |= {second: GPUS[name] for second, name in _SECOND_NAMES.items()}


def load_gpu(name: str) -> GpuSpec:
    """The GPU of that catalog name; ScenarioError if there is none."""
    if name not in GPUS:
        advice = nearest(name.lower(), GPUS)
        raise ScenarioError(
            f"GPU {name} is not in the catalog. {advice} Another one: deployment: {{gpu: {{kind: sheet, ...}}}}."
        )
    return GPUS[name]


def sheet_gpu(
    name: str,
    *,
    memory_bytes: int,
    memory_bandwidth: float,
    peak_flops: float,
    host_link: float,
    peer_link: float,
    fp8_flops: float | None = None,
) -> GpuSpec:
    """A GPU by figures of the user's own, in the units of `GpuSpec`; taken to reach the shares of that fitted board
    whose bandwidth and FLOP/s are nearest, by their ratios."""

    def distance(board: str) -> float:
        _, bandwidth, flops, *_ = _BOARDS[board]
        return abs(log(memory_bandwidth / bandwidth)) + abs(log(peak_flops / flops))

    efficiencies = _unfitted(name, min(_FITS, key=distance))
    links = (host_link, peer_link, _PEER_LATENCY_NS)
    source = "as stated in the scenario"
    return GpuSpec(name, memory_bytes, memory_bandwidth, peak_flops, *links, efficiencies, source, fp8_flops)

"""Models and GPUs known by name. Every figure has a source; any other model is named by the path of its config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from batchsim.base.errors import ScenarioError, nearest
from batchsim.base.files import read_json, reason_text
from batchsim.deployment.model import Efficiencies, GpuSpec, ModelSpec

# Source: config.json of the Hugging Face repository named beside each model; the fields that differ between them.
_SHAPES: dict[str, tuple[str, str, int, int, int, int, int, int, int, int]] = {
    # name: repository, type, hidden, layers, heads, kv heads, head_dim, intermediate, vocabulary, longest context
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "llama", 4096, 32, 32, 8, 128, 14336, 128256, 131072),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", "llama", 8192, 80, 64, 8, 128, 28672, 128256, 131072),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", "qwen2", 3584, 28, 28, 4, 128, 18944, 152064, 32768),
    "qwen3-8b": ("Qwen/Qwen3-8B", "qwen3", 4096, 36, 32, 8, 128, 12288, 151936, 40960),
    "qwen3-14b": ("Qwen/Qwen3-14B", "qwen3", 5120, 40, 40, 8, 128, 17408, 151936, 40960),
    "mistral-7b": ("mistralai/Mistral-7B-Instruct-v0.3", "mistral", 4096, 32, 32, 8, 128, 14336, 32768, 32768),
}

MODELS: dict[str, ModelSpec] = {name: ModelSpec(name, *shape[1:]) for name, shape in _SHAPES.items()}
"""The models of the catalog by name: all in bf16, none with tied embeddings."""

MODEL_SOURCES: dict[str, str] = {name: f"huggingface.co/{shape[0]} config.json" for name, shape in _SHAPES.items()}

_TABLES = "AIConfigurator kernel tables (github.com/ai-dynamo/aiconfigurator @ 095f58a)"
_MEMORY = "memory as NVML reports it (thundergolfer.com/blog/nvidia-gpu-memory-capacity)"
_TORCH_MEMORY = "memory as torch reports it (github.com/casys-kaist/LLMServingSim @ 5daddb2, bench/examples/RTX4090)"
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
_FITTED_LIKE = {"rtx4090": "l40s"}  # not in the tables: taken to reach the shares of another board of its architecture
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
}  # fmt: skip


def _efficiencies(gpu: str) -> Efficiencies:
    if gpu in _FITTED_LIKE:
        like = _FITTED_LIKE[gpu]
        unmeasured = f"nothing of {gpu}, assumed to reach the same shares as {like}"
        its = replace(_efficiencies(like), fitted_on=unmeasured, compared="", held_out="", models=())
        return replace(its, error_p50=None, error_p95=None)
    matmul, weights, attention, kv, gemm_ns, call_ns, sequence_ns, p50, p95, release = _FITS[gpu]
    compared, fitted_on = ("matmuls", f"{_FITTED_ON}, {_ASSUMED}") if gpu == "l40s" else ("kernel part", _FITTED_ON)
    constants, source = (gemm_ns, call_ns, sequence_ns), f"{_TABLES}, vLLM {release}"
    held_out = (_HELD_OUT, _COMPARED)
    return Efficiencies(
        matmul, weights, attention, kv, *constants, p50, p95, compared, fitted_on, *held_out, source=source
    )


def _gpu(name: str) -> GpuSpec:
    mebibytes, bandwidth, flops, host, peer, sheet = _BOARDS[name]
    source = f"NVIDIA {sheet}; {_TORCH_MEMORY if name == 'rtx4090' else _MEMORY}"
    memory = mebibytes * 2**20
    return GpuSpec(name, memory, bandwidth, flops, host, peer, _PEER_LATENCY_NS, _efficiencies(name), source)


GPUS: dict[str, GpuSpec] = {name: _gpu(name) for name in _BOARDS}
"""The GPUs of the catalog by name."""


def load_model(name_or_path: str) -> ModelSpec:
    """The model of that name or path, as by `read_model`; ScenarioError too if no cost model can time its steps."""
    model = read_model(name_or_path)
    model.check_timed()
    return model


def read_model(name_or_path: str) -> ModelSpec:
    """The model of that catalog name, or of the config.json at that path (a file, or the folder that holds it).

    A file's model is named after the file; after its folder where it is called config.json.

    ScenarioError if there is neither, or if the file is not understood.
    """
    if name_or_path in MODELS:
        return MODELS[name_or_path]
    path = Path(name_or_path)
    try:
        if path.is_dir():
            path /= "config.json"
            if not path.is_file():
                raise ScenarioError(f"model: {path}: no such file. Give the folder of a Hugging Face model, or a name.")
        keys = _read_object(path)
    except FileNotFoundError:
        raise ScenarioError(
            f"model: {name_or_path} is neither in the catalog nor a file. {nearest(name_or_path.lower(), MODELS)}"
        ) from None
    beside = path.with_name("hf_quant_config.json")  # of modelopt checkpoints
    if "quantization_config" not in keys and beside.is_file():
        keys["hf_quant_config"] = _read_object(beside)
    spec = ModelSpec.from_config(keys, str(path))
    return replace(spec, name=path.resolve().parent.name if path.name == "config.json" else path.stem)


def _read_object(path: Path) -> dict[str, object]:
    """The JSON object in that file. ScenarioError if it holds none; FileNotFoundError if there is no file."""
    try:
        value: object = read_json(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path}: cannot be read: {reason_text(error)}. Give a Hugging Face config.json.") from None
    if not isinstance(value, dict):
        raise ScenarioError(f"{path}: holds no JSON object. Give a Hugging Face config.json.")
    return cast("dict[str, object]", value)


def load_gpu(name: str) -> GpuSpec:
    """The GPU of that catalog name; ScenarioError if there is none."""
    if name not in GPUS:
        raise ScenarioError(f"cost: GPU {name} is not in the catalog. {nearest(name.lower(), GPUS)}")
    return GPUS[name]

"""The flags of `vllm serve`.

Source: EngineArgs and the parser of the API server as docs.vllm.ai lists them for 0.8 to 0.16 (`vllm serve --help`); a
hyphen may be an underscore in all of them.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.base.units import parse_bytes
from batchsim.scenario.command_lines.flags import (
    CHECKPOINTS,
    Engine,
    Flag,
    Keys,
    as_share,
    one_of,
    settle_loras,
    share,
    unsettle_loras,
    with_suffix,
    words,
)

TOKENS = with_suffix({"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30})
KV = one_of(auto=None, fp8="fp8", fp8_e4m3="fp8", fp8_e5m2="fp8", bfloat16="bfloat16", float16="float16")
_OF_CHECKPOINT = (
    "awq awq_marlin gptq gptq_marlin compressed_tensors modelopt modelopt_fp4 fbgemm_fp8 mxfp4 gpt_oss_mxfp4 auto_round"
)
QUANTISED = one_of(fp8="fp8", **dict.fromkeys(_OF_CHECKPOINT.split(), CHECKPOINTS))
SIXTEEN = one_of(auto=None, half=None, float16=None, bfloat16=None)


def _memory(text: str) -> str:
    """A number of bytes as the size that a scenario writes."""
    return f"{TOKENS(text)}B"


def _bytes(size: str) -> str:
    """A scenario's size as the number of bytes that the flag takes."""
    return str(parse_bytes(size))


_FLAGS = (
    Flag("deployment.tp", "--tensor-parallel-size", ("-tp",)),
    Flag("deployment.pp", "--pipeline-parallel-size", ("-pp",)),
    Flag("deployment.dp_attention", "--data-parallel-size", ("-dp",)),
    Flag("all_experts", "--enable-expert-parallel", ("-ep",), read=None),
    Flag("all_experts", "--no-enable-expert-parallel", read=None, value=False),
    Flag("deployment.weights", "--quantization", ("-q",), read=QUANTISED),
    Flag("deployment.weights", "--dtype", read=SIXTEEN),
    Flag("deployment.kv", "--kv-cache-dtype", read=KV),
    Flag("max_model_len", "--max-model-len", read=TOKENS),
    Flag("kv.utilisation", "--gpu-memory-utilization", read=share, show=as_share),
    Flag("kv.block_size", "--block-size"),
    Flag("blocks", "--num-gpu-blocks-override"),
    Flag("kv.memory", "--kv-cache-memory-bytes", read=_memory, show=_bytes),
    Flag("policy.max_num_seqs", "--max-num-seqs", read=TOKENS),
    Flag("policy.max_num_batched_tokens", "--max-num-batched-tokens", read=TOKENS),
    Flag("policy.long_prefill_token_threshold", "--long-prefill-token-threshold"),
    Flag("policy.policy", "--scheduling-policy", read=words("fcfs", "priority")),
    Flag("policy.enable_chunked_prefill", "--enable-chunked-prefill", read=None),
    Flag("policy.enable_chunked_prefill", "--no-enable-chunked-prefill", read=None, value=False),
    Flag("policy.enable_prefix_caching", "--enable-prefix-caching", read=None),
    Flag("policy.enable_prefix_caching", "--no-enable-prefix-caching", read=None, value=False),
    Flag("enable_lora", "--enable-lora", read=None),
    Flag("policy.max_loras", "--max-loras"),
    Flag("policy.max_cpu_loras", "--max-cpu-loras"),
    Flag("policy.max_lora_rank", "--max-lora-rank"),
    Flag("policy.async_scheduling", "--async-scheduling", read=None),
    Flag("policy.async_scheduling", "--no-async-scheduling", read=None, value=False),
)


def _spell(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def _settle(keys: Keys) -> None:
    """Expert parallelism is over all GPUs, or over none."""
    gpus = keys.get("deployment.tp", 1) * keys.get("deployment.dp_attention", 1)
    if keys.pop("all_experts", False):
        keys["deployment.ep"] = gpus
    if (blocks := keys.pop("blocks", None)) is not None:
        keys["kv.tokens"] = blocks * keys.get("kv.block_size", 16)
    settle_loras(keys, "vLLM", "policy.max_loras", 1)


def _unsettle(keys: Keys) -> None:
    gpus, ep = keys.get("deployment.tp", 1) * keys.get("deployment.dp_attention", 1), keys.get("deployment.ep", 1)
    if ep not in (1, gpus):
        raise ScenarioError(f"vLLM divides whole experts over all {gpus} GPUs of a stage or none, not over {ep}.")
    if keys.pop("deployment.ep", 1) > 1:
        keys["all_experts"] = True
    if (size := keys.get("kv.memory")) is not None:
        keys["kv.memory"] = f"{parse_bytes(size)}B"
    unsettle_loras(keys)
    block = keys.get("kv.block_size", 16)
    if (tokens := keys.pop("kv.tokens", None)) is not None:
        keys["blocks"] = tokens // block


VLLM = Engine(
    "vllm",
    "vllm serve",
    (
        ("vllm", "serve"),
        ("python", "-m", "vllm.entrypoints.openai.api_server"),
        ("python3", "-m", "vllm.entrypoints.openai.api_server"),
    ),
    _FLAGS,
    ("--model",),
    _spell,
    _settle,
    _unsettle,
)

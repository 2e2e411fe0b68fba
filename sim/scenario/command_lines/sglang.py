"""The flags of `python -m sglang.launch_server`.

Source: python/sglang/srt/arg_groups/fields of the 0.5.23 wheel.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.policies.systems.sglang.sglang_config import SIMULATED
from batchsim.scenario.command_lines.flags import (
    CHECKPOINTS,
    Engine,
    Flag,
    Keys,
    as_share,
    number,
    one_of,
    settle_loras,
    share,
    unsettle_loras,
    with_suffix,
    words,
)

_TOKENS = with_suffix({"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30})
_OF_CHECKPOINT = (
    "awq awq_marlin gptq gptq_marlin compressed_tensors modelopt modelopt_fp8 modelopt_fp4 mxfp4 auto_round"
)
_QUANTISED = one_of(fp8="fp8", w8a8_fp8="fp8", w8a8_int8="int8", **dict.fromkeys(_OF_CHECKPOINT.split(), CHECKPOINTS))
_KV = one_of(auto=None, fp8_e4m3="fp8", fp8_e5m2="fp8", bf16="bfloat16", bfloat16="bfloat16")


def _kv_text(dtype: str) -> str:
    return "fp8_e4m3" if dtype == "fp8" else dtype


_SIXTEEN = one_of(auto=None, half=None, float16=None, bfloat16=None)

_FLAGS = (
    Flag("deployment.tp", "--tp-size", ("--tp", "--tensor-parallel-size")),
    Flag("deployment.pp", "--pp-size", ("--pp", "--pipeline-parallel-size")),
    Flag("deployment.dp_attention", "--dp-size", ("--dp", "--data-parallel-size")),
    Flag("dp_attention", "--enable-dp-attention", read=None),
    Flag("deployment.ep", "--ep-size", ("--ep", "--expert-parallel-size")),
    Flag("deployment.weights", "--quantization", read=_QUANTISED),
    Flag("deployment.weights", "--dtype", read=_SIXTEEN),
    Flag("deployment.kv", "--kv-cache-dtype", read=_KV, show=_kv_text),
    Flag("max_model_len", "--context-length"),
    Flag("kv.utilisation", "--mem-fraction-static", read=share, show=as_share),
    Flag("kv.block_size", "--page-size"),
    Flag("kv.tokens", "--max-total-tokens", read=_TOKENS),
    Flag("max_waiting", "--max-queued-requests"),
    Flag("policy.max_running_requests", "--max-running-requests"),
    Flag("policy.max_prefill_tokens", "--max-prefill-tokens"),
    Flag("policy.chunked_prefill_size", "--chunked-prefill-size"),
    Flag("policy.prefill_max_requests", "--prefill-max-requests"),
    Flag("policy.schedule_policy", "--schedule-policy", read=words(*SIMULATED)),
    Flag("policy.schedule_conservativeness", "--schedule-conservativeness", read=number),
    Flag("policy.enable_mixed_chunk", "--enable-mixed-chunk", read=None),
    Flag("policy.disable_radix_cache", "--disable-radix-cache", read=None),
    Flag("policy.disable_overlap_schedule", "--disable-overlap-schedule", read=None),
    Flag("policy.enable_priority_scheduling", "--enable-priority-scheduling", read=None),
    Flag("policy.disable_priority_preemption", "--disable-priority-preemption", read=None),
    Flag("policy.schedule_low_priority_values_first", "--schedule-low-priority-values-first", read=None),
    Flag("policy.priority_scheduling_preemption_threshold", "--priority-scheduling-preemption-threshold"),
    Flag("enable_lora", "--enable-lora", read=None),
    Flag("policy.max_loras_per_batch", "--max-loras-per-batch"),
    Flag("policy.max_loaded_loras", "--max-loaded-loras"),
    Flag("policy.lora_eviction_policy", "--lora-eviction-policy", read=words("lru", "fifo")),
    Flag("policy.enable_lora_overlap_loading", "--enable-lora-overlap-loading", read=None),
    Flag("policy.lora_drain_wait_threshold", "--lora-drain-wait-threshold", read=number),
    Flag("policy.scheduler_recv_interval", "--scheduler-recv-interval"),
    Flag("policy.retraction_policy", "--retraction-policy", read=words("length", "priority")),
)


def _settle(keys: Keys) -> None:
    """SGLang's tp is of all GPUs of a stage, of which attention groups have each a part."""
    groups, tp = keys.get("deployment.dp_attention", 1), keys.get("deployment.tp", 1)
    if keys.pop("dp_attention", False):
        if tp % groups:
            raise ScenarioError(f"SGLang: tp {tp} is no multiple of the {groups} groups of dp. Use another dp.")
        keys["deployment.tp"] = tp // groups
    elif groups > 1:
        raise ScenarioError(
            f"SGLang: dp {groups} without --enable-dp-attention is {groups} engines behind a router. Leave it out here,"
            f" and write replicas: {{count: {groups}, router: round_robin}} in the scenario."
        )
    settle_loras(keys, "SGLang", "policy.max_loras_per_batch", 8)


def _unsettle(keys: Keys) -> None:
    unsettle_loras(keys)
    groups = keys.get("deployment.dp_attention", 1)
    if groups > 1:
        keys["deployment.tp"] = keys.get("deployment.tp", 1) * groups
        keys["dp_attention"] = True


SGLANG = Engine(
    "sglang",
    "SGLang",
    (
        ("python", "-m", "sglang.launch_server"),
        ("python3", "-m", "sglang.launch_server"),
        ("sglang", "serve"),
    ),
    _FLAGS,
    ("--model-path", "--model"),
    lambda name: name.replace("_", "-") if name.startswith("--") else name,
    _settle,
    _unsettle,
    model_first=False,
)

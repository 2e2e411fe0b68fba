"""The flags of `python -m sglang.launch_server`.

Source: python/sglang/srt/arg_groups/fields of the 0.5.23 wheel.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.policies.systems.sglang.sglang_config import SIMULATED
from batchsim.scenario.command_lines.flags import (
    CHECKPOINTS,
    EAGER,
    FLOAT32,
    SAME,
    UNTOLD,
    Engine,
    Flag,
    Keys,
    as_share,
    number,
    one_of,
    share,
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
    Flag("policy.scheduler_recv_interval", "--scheduler-recv-interval"),
    Flag("policy.retraction_policy", "--retraction-policy", read=words("length", "priority")),
)
_SAME_SWITCHES = """
--trust-remote-code --skip-server-warmup --enable-metrics --enable-metrics-for-all-schedulers --log-requests
--show-time-cost --enable-cache-report --enable-p2p-check --skip-tokenizer-init --sleep-on-idle --enable-mfu-metrics
--enable-trace --enable-request-time-stats-logging --enable-http2 --enable-ssl-refresh --disable-fast-image-processor
--enable-multimodal --language-only --language-model-only --enable-tokenizer-batch-encode
--disable-tokenizer-batch-decode --disable-outlines-disk-cache --enable-custom-logit-processor
--weight-loader-disable-mmap --enable-memory-saver --use-ray
"""
_SAME_VALUES = """
--host --port --api-key --admin-api-key --served-model-name --chat-template --completion-template --tokenizer-path
--tokenizer-mode --tokenizer-backend --tokenizer-worker-num --detokenizer-worker-num --revision --download-dir
--load-format --model-loader-extra-config --log-level --log-level-http --log-requests-level --log-requests-format
--random-seed --reasoning-parser --tool-call-parser --tool-server --sampling-defaults --preferred-sampling-params
--watchdog-timeout --dist-init-addr --dist-timeout --nccl-port --nccl-init-addr --warmups --decode-log-interval
--crash-dump-folder --file-storage-path --weight-version --device --base-gpu-id --gpu-id-step --fastapi-root-path
--hf-chat-template-name --grammar-backend --ssl-keyfile --ssl-certfile --ssl-ca-certs --limit-mm-data-per-request
--mm-attention-backend --constrained-json-whitespace-pattern --default-chat-template-kwargs --bucket-time-to-first-token
--bucket-inter-token-latency --bucket-e2e-request-latency --otlp-traces-endpoint --export-metrics-to-file-dir
--model-impl --numa-node --gc-threshold
"""
_UNTOLD_SWITCHES = """
--enable-flashinfer-allreduce-fusion --disable-custom-all-reduce --enable-mscclpp --enable-symm-mem
--enable-torch-symm-mem --enable-nccl-nvls --enable-dp-lm-head --disable-shared-experts-fusion
--flashinfer-mla-disable-ragged --disable-cuda-graph-padding --disable-chunked-prefix-cache
--triton-attention-reduce-in-fp32 --enable-fused-qk-norm-rope --disable-flashinfer-autotune
--disable-flashinfer-cutlass-moe-fp4-allgather --disable-prefill-cuda-graph --enable-aiter-allreduce-fusion
"""
_UNTOLD_VALUES = """
--attention-backend --prefill-attention-backend --decode-attention-backend --sampling-backend --moe-runner-backend
--moe-a2a-backend --fp8-gemm-backend --fp4-gemm-backend --bf16-gemm-backend --deepep-mode --deepep-config
--cuda-graph-max-bs --cuda-graph-max-bs-decode --cuda-graph-max-bs-prefill --cuda-graph-bs --cuda-graph-bs-decode
--cuda-graph-bs-prefill --cuda-graph-config --triton-attention-num-kv-splits --triton-attention-split-tile-size
--stream-interval --dsa-prefill-backend --dsa-decode-backend --moe-dense-tp-size
--flashinfer-mxfp4-moe-precision --linear-attn-backend --mamba-ssm-dtype --dp-load-balance-method
--load-balance-method --swa-full-tokens-ratio
"""
_DRAFTS = (
    "no flag says how many drafts the model accepts. Leave it out here, and write the speculative knobs of"
    " policies.sglang with their acceptance in the scenario"
)
_REFUSED = {
    "--disable-cuda-graph": EAGER,
    "--disable-decode-cuda-graph": EAGER,
    "--enable-torch-compile": "no tables time compiled steps",
    "--cpu-offload-gb": "weights in host memory are not timed",
    "--enable-lora": "adapters are not timed",
    "--lora-paths": "adapters are not timed",
    "--enable-hierarchical-cache": "a prefix cache in host memory is not simulated",
    "--enable-hicache": "a prefix cache in host memory is not simulated",
    "--disaggregation-mode": "engines that pass KV to each other are not simulated",
    "--enable-two-batch-overlap": "no tables time steps in two overlapping halves",
    "--enable-single-batch-overlap": "no tables time steps in two overlapping halves",
    "--enable-eplb": "no tables time experts that move",
    "--ep-num-redundant-experts": "no tables time experts that move",
    "--nnodes": "the tables are of GPUs of one machine. Leave it out if tp is within one",
    "--node-rank": "the tables are of GPUs of one machine. Leave it out if tp is within one",
    "--num-continuous-decode-steps": "decodes in a row without a look at the queue are not simulated",
    "--enable-dynamic-chunking": "chunks whose size depends on the context are not simulated",
    "--config": "options in a file are not read. Write them as flags",
    **dict.fromkeys(
        (
            "--speculative-algorithm",
            "--speculative-draft-model-path",
            "--speculative-num-steps",
            "--speculative-eagle-topk",
            "--speculative-num-draft-tokens",
        ),
        _DRAFTS,
    ),
}
_ENVIRONMENT = {
    r"(CUDA_VISIBLE_DEVICES|HF_\w+|HUGGING\w+|TRANSFORMERS_\w+|OMP_NUM_THREADS|SAFETENSORS_\w+|NCCL_DEBUG"
    r"|PYTORCH_\w+)=": SAME,
    r"(NCCL|CUDA|TORCH|SGL|SGLANG|FLASHINFER)_\w+=": UNTOLD,
}


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


def _unsettle(keys: Keys) -> None:
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
    frozenset(_SAME_SWITCHES.split()),
    frozenset(_SAME_VALUES.split()),
    frozenset(_UNTOLD_SWITCHES.split()),
    frozenset(_UNTOLD_VALUES.split()),
    _REFUSED,
    lambda name: name.replace("_", "-") if name.startswith("--") else name,
    _settle,
    _unsettle,
    _ENVIRONMENT,
    refused_values={r"--dtype float(32)?\Z": FLOAT32},
    model_first=False,
)

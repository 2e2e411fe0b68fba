"""The flags of `vllm serve`.

Source: EngineArgs and the parser of the API server as docs.vllm.ai lists them for 0.8 to 0.16 (`vllm serve --help`); a
hyphen may be an underscore in all of them.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
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
    one_of,
    share,
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
    Flag("policy.max_num_seqs", "--max-num-seqs", read=TOKENS),
    Flag("policy.max_num_batched_tokens", "--max-num-batched-tokens", read=TOKENS),
    Flag("policy.long_prefill_token_threshold", "--long-prefill-token-threshold"),
    Flag("policy.policy", "--scheduling-policy", read=words("fcfs", "priority")),
    Flag("policy.enable_chunked_prefill", "--enable-chunked-prefill", read=None),
    Flag("policy.enable_chunked_prefill", "--no-enable-chunked-prefill", read=None, value=False),
    Flag("policy.enable_prefix_caching", "--enable-prefix-caching", read=None),
    Flag("policy.enable_prefix_caching", "--no-enable-prefix-caching", read=None, value=False),
    Flag("policy.async_scheduling", "--async-scheduling", read=None),
    Flag("policy.async_scheduling", "--no-async-scheduling", read=None, value=False),
)
_SAME_SWITCHES = """
--trust-remote-code --enable-auto-tool-choice --disable-log-requests --enable-log-requests --no-enable-log-requests
--disable-log-stats --disable-uvicorn-access-log --disable-fastapi-docs --return-tokens-as-token-ids
--skip-tokenizer-init --enable-server-load-tracking --enable-prompt-tokens-details --enable-force-include-usage
--enable-request-id-headers
--enable-log-outputs --enable-log-deltas --enable-ssl-refresh --allow-credentials --use-tqdm-on-load
--no-use-tqdm-on-load --enable-sleep-mode --enable-reasoning --language-model-only --disable-frontend-multiprocessing
--trust-request-chat-template --exclude-tools-when-tool-choice-none --skip-mm-profiling --enable-tokenizer-info-endpoint
--disable-mm-preprocessor-cache
"""
_SAME_VALUES = """
--host --port --uds --api-key --served-model-name --chat-template --chat-template-content-format --tokenizer
--tokenizer-mode --tokenizer-revision --revision --code-revision --download-dir --load-format --hf-token
--hf-config-path --config-format --generation-config --override-generation-config --tool-call-parser
--tool-parser-plugin
--reasoning-parser --reasoning-parser-plugin --uvicorn-log-level --log-config-file --max-log-len --allowed-origins
--allowed-methods --allowed-headers --ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --root-path --middleware
--response-role --seed --max-logprobs --logprobs-mode --limit-mm-per-prompt --mm-processor-kwargs --mm-encoder-tp-mode
--mm-processor-cache-gb --mm-processor-cache-type --media-io-kwargs --interleave-mm-strings --allowed-local-media-path
--safetensors-load-strategy --model-loader-extra-config --show-hidden-metrics-for-version --otlp-traces-endpoint
--collect-detailed-traces --guided-decoding-backend --structured-outputs-config --default-chat-template-kwargs --task
--runner --convert --model-impl --api-server-count --distributed-executor-backend --ignore-patterns
--data-parallel-backend --data-parallel-address --data-parallel-rpc-port --swap-space --logits-processor-pattern
--max-parallel-loading-workers --additional-config --h11-max-incomplete-event-size --h11-max-header-count
"""
_UNTOLD_SWITCHES = """
--disable-custom-all-reduce --no-disable-custom-all-reduce --calculate-kv-scales --disable-cascade-attn
--no-disable-cascade-attn --enable-flashinfer-autotune
"""
_UNTOLD_VALUES = """
--compilation-config -O -cc -O1 -O2 -O3 --attention-backend --attention-config --moe-backend --all2all-backend
--kernel-config --cuda-graph-sizes --cudagraph-capture-sizes --max-cudagraph-capture-size --max-seq-len-to-capture
--optimization-level --linear-backend --mamba-ssm-cache-dtype --expert-placement-strategy
"""
_REFUSED = {
    "--enforce-eager": EAGER,
    "-O0": EAGER,
    "--hf-overrides": "it may change the model's shape. Write it into a copy of config.json and name that by --model",
    "--speculative-config": "no flag says how many drafts the model accepts. Leave it out here, and write"
    " policies.vllm.speculative_config with its acceptance in the scenario",
    "--cpu-offload-gb": "weights in host memory are not timed",
    "--kv-offloading-size": "KV in host memory is not simulated",
    "--kv-transfer-config": "engines that pass KV to each other are not simulated",
    "--enable-lora": "adapters are not timed",
    "--lora-modules": "adapters are not timed",
    "--max-loras": "adapters are not timed",
    "--max-lora-rank": "adapters are not timed",
    "--decode-context-parallel-size": "no deployment divides contexts",
    "--prefill-context-parallel-size": "no deployment divides contexts",
    "--enable-dbo": "no tables time steps in two overlapping halves",
    "--enable-eplb": "no tables time experts that move",
    "--max-num-partial-prefills": "vLLM's V1 engine, which is simulated, has no such limit",
    "--max-long-partial-prefills": "vLLM's V1 engine, which is simulated, has no such limit",
    "--headless": "that is a part of an engine on a further machine. Give the command of the first one",
    "--config": "options in a file are not read. Write them as flags",
}
_REFUSED_VALUES = {
    r"--dtype float(32)?\Z": FLOAT32,
    r"(-O|--optimization-level) 0\Z": EAGER,
    r"(-O|-cc|--compilation-config) (0\Z|.*[\"']?cudagraph_mode[\"']?\s*:\s*[\"']?(NONE|0)\b)": EAGER,
}
_ENVIRONMENT = {
    r"(CUDA_VISIBLE_DEVICES|HF_\w+|HUGGING\w+|TRANSFORMERS_\w+|OMP_NUM_THREADS|SAFETENSORS_\w+|VLLM_LOGGING_\w+"
    r"|VLLM_NO_USAGE_STATS|VLLM_DO_NOT_TRACK|VLLM_API_KEY|VLLM_WORKER_MULTIPROC_METHOD|NCCL_DEBUG|PYTORCH_\w+)=": SAME,
    r"VLLM_USE_V1=1\Z": SAME,
    r"(NCCL|CUDA|TORCH)_\w+=|VLLM_(USE_(?!V1=)|ATTENTION|FLASHINFER|ALL2ALL|MOE|MXFP4|ALLREDUCE)\w*=": UNTOLD,
}


def _spell(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def _settle(keys: Keys) -> None:
    """Expert parallelism is over all GPUs, or over none."""
    gpus = keys.get("deployment.tp", 1) * keys.get("deployment.dp_attention", 1)
    if keys.pop("all_experts", False):
        keys["deployment.ep"] = gpus
    if (blocks := keys.pop("blocks", None)) is not None:
        keys["kv.tokens"] = blocks * keys.get("kv.block_size", 16)


def _unsettle(keys: Keys) -> None:
    gpus, ep = keys.get("deployment.tp", 1) * keys.get("deployment.dp_attention", 1), keys.get("deployment.ep", 1)
    if ep not in (1, gpus):
        raise ScenarioError(f"vLLM divides whole experts over all {gpus} GPUs of a stage or none, not over {ep}.")
    if keys.pop("deployment.ep", 1) > 1:
        keys["all_experts"] = True
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
    frozenset(_SAME_SWITCHES.split()),
    frozenset(_SAME_VALUES.split()),
    frozenset(_UNTOLD_SWITCHES.split()),
    frozenset(_UNTOLD_VALUES.split()),
    _REFUSED,
    _spell,
    _settle,
    _unsettle,
    _ENVIRONMENT,
    refused_values=_REFUSED_VALUES,
)

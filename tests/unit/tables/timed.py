"""Which models of the kernel tables can be timed: on two GPUs under two engines, and what a step takes, or why not.

    python -m tests.unit.tables.timed > tests/data/tables/timed.csv        (needs pip install 'batchsim[gpus]')

A tab-separated line a deployment: model, tp, KV type ("": the checkpoint's), GPU, engine; then the version of the
tables, ms of 64 decodes with 4,096 tokens each and of a prompt of 8,192; or in their place the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from batchsim.deployment.catalog import GPUS
from batchsim.deployment.deployment import Deployment
from batchsim.tables.handle import Tables
from batchsim.tables.models import model_spec
from batchsim.tables.modes import NoTablesError, has_experts

MODELS = (
    ("Qwen/Qwen3.5-27B", 2, ""),
    ("Qwen/Qwen3.5-35B-A3B", 1, ""),
    ("Qwen/Qwen3.5-397B-A17B", 8, ""),
    ("nvidia/Qwen3.6-27B-NVFP4", 1, ""),
    ("nvidia/Qwen3.6-35B-A3B-NVFP4", 1, ""),
    ("moonshotai/Kimi-K3", 8, ""),
    ("moonshotai/Kimi-K2.5", 8, ""),
    ("deepseek-ai/DeepSeek-V3", 8, ""),
    ("deepseek-ai/DeepSeek-V3.2", 8, ""),
    ("deepseek-ai/DeepSeek-V3.2", 8, "fp8"),
    ("deepseek-ai/DeepSeek-V4-Flash", 4, ""),
    ("deepseek-ai/DeepSeek-V4-Flash", 4, "fp8"),
    ("deepseek-ai/DeepSeek-V4-Pro", 8, "fp8"),
    ("sgl-project/DeepSeek-V4-Flash-FP8", 8, "fp8"),
    ("zai-org/GLM-5-FP8", 8, "fp8"),
    ("zai-org/GLM-5.1-FP8", 8, "fp8"),
    ("zai-org/GLM-5.2-FP8", 8, "fp8"),
    ("zai-org/GLM-5.3-FP8", 8, "fp8"),
    ("MiniMaxAI/MiniMax-M2.5", 4, ""),
    ("MiniMaxAI/MiniMax-M3", 8, ""),
    ("google/gemma-4-26B-A4B", 1, ""),
    ("nvidia/Gemma-4-31B-IT-NVFP4", 1, ""),
    ("nvidia/Gemma-4-31B-IT-NVFP4", 2, "bfloat16"),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 1, ""),
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 4, ""),
    ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8", 8, ""),
    ("nvidia/Nemotron-H-56B-Base-8K", 4, ""),
    ("XiaomiMiMo/MiMo-V2-Flash", 8, "fp8"),
    ("stepfun-ai/Step-3.7-Flash", 8, ""),
    ("stepfun-ai/Step-3.7-Flash-FP8", 8, ""),
    ("Qwen/Qwen3-VL-8B-Instruct", 1, ""),
    ("openai/gpt-oss-120b", 1, ""),
)


def lines() -> Iterator[str]:
    """One line of each deployment, asked now."""
    for name, tp, kv in MODELS:
        model = model_spec(name)
        ep = tp if has_experts(model) else 1
        for gpu in ("h200", "b200_sxm"):
            for engine in ("vllm", "sglang"):
                row = [name, str(tp), kv, gpu, engine]
                try:
                    tables = Tables(Deployment(model, GPUS[gpu], engine=engine, tp=tp, ep=ep, kv_dtype=kv))
                    times = (tables.decode_step(64, 4_096), tables.prefill_step(1, 8_192, 0))
                    row += [tables.backend, *(f"{ms:.4g}" for ms in times)]
                except NoTablesError as error:
                    row.append(error.reason)
                yield "\t".join(row)


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)

"""Makes the profiles of popular deployments that come with batchsim, of the installed kernel tables, in OUT
(`sim/tables/profiles` by default), and prints how far each is from 200 direct queries of the tables.

    python -m tools.ship_deployments [OUT]            (needs pip install 'batchsim[gpus]')

The same tables give the same bytes. A profile that is no longer in the list is removed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from batchsim.base.errors import BatchsimError
from batchsim.base.files import write_text
from batchsim.deployment.catalog import load_gpu
from batchsim.deployment.deployment import Deployment
from batchsim.tables.compare import HEAD, line, within
from batchsim.tables.find import build
from batchsim.tables.models import model_spec

LLAMA_8B, LLAMA_70B, LLAMA_405B = (f"meta-llama/Meta-Llama-3.1-{size}" for size in ("8B", "70B", "405B"))
QWEN_8B, QWEN_32B, QWEN_30B, QWEN_235B = (f"Qwen/Qwen3-{size}" for size in ("8B", "32B", "30B-A3B", "235B-A22B"))
CODER, MIXTRAL, MIXTRAL_22B = (
    "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    *(f"mistralai/Mixtral-8x{size}-v0.1" for size in ("7B", "22B")),
)
GPT_120B, GPT_20B = "openai/gpt-oss-120b", "openai/gpt-oss-20b"
DEEPSEEK, KIMI, MINIMAX = "deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2-Instruct", "MiniMaxAI/MiniMax-M2.5"
SCOUT = "meta-llama/Llama-4-Scout-17B-16E-Instruct"

FP8, FP8_KV, BLOCK, NVFP4 = "fp8", "fp8 kv:fp8", "fp8_block", "nvfp4"
MXFP4 = "bfloat16 moe:mxfp4"

DEPLOYMENTS = [
    # engine, GPUs, model, degrees, types
    ("vllm", "h100 h200 a100 l40s b200_sxm rtx_pro_6000_server", LLAMA_8B, "", ""),
    ("vllm", "h100 h200 l40s b200_sxm rtx_pro_6000_server", LLAMA_8B, "", FP8),
    ("sglang", "h100 h200", LLAMA_8B, "", ""),
    ("tensorrt_llm", "h100", LLAMA_8B, "", FP8_KV),
    ("vllm", "h100 h200 a100", LLAMA_70B, "tp:4", ""),
    ("vllm", "h100 h200", LLAMA_70B, "tp:4", FP8),
    ("vllm", "h100", LLAMA_70B, "tp:4", FP8_KV),
    ("vllm", "h100 h200", LLAMA_70B, "tp:2", FP8),
    ("vllm", "h100 a100", LLAMA_70B, "tp:8", ""),
    ("vllm", "l40s", LLAMA_70B, "tp:4", FP8),
    ("vllm", "b200_sxm", LLAMA_70B, "", FP8),
    ("vllm", "b200_sxm", LLAMA_70B, "tp:2", ""),
    ("vllm", "b200_sxm", LLAMA_70B, "", NVFP4),
    ("sglang", "h100 h200", LLAMA_70B, "tp:4", FP8),
    ("tensorrt_llm", "h100 h200 b200_sxm", LLAMA_70B, "tp:4", FP8_KV),
    ("vllm", "h100 h200 b200_sxm", LLAMA_405B, "tp:8", FP8),
    ("vllm", "h100 a100 l40s", QWEN_8B, "", ""),
    ("vllm", "l40s h100 a100", QWEN_32B, "tp:2", ""),
    ("vllm", "h100 h200 b200_sxm rtx_pro_6000_server", QWEN_32B, "", FP8),
    ("vllm", "h200 b200_sxm", QWEN_32B, "", ""),
    ("sglang", "h100", QWEN_32B, "tp:2", ""),
    ("tensorrt_llm", "h100", QWEN_32B, "tp:2", FP8_KV),
    ("vllm", "h100 h200 b200_sxm", QWEN_30B, "", ""),
    ("vllm", "h100", QWEN_30B, "", BLOCK),
    ("vllm sglang tensorrt_llm", "h200", QWEN_235B, "tp:4", BLOCK),
    ("vllm tensorrt_llm", "h200", QWEN_235B, "tp:4", FP8),
    ("vllm", "h200 b200_sxm", QWEN_235B, "tp:8 ep:8", BLOCK),
    ("vllm", "h200", CODER, "tp:8 ep:8", BLOCK),
    ("vllm", "h100 a100", MIXTRAL, "tp:2", ""),
    ("vllm", "h100 h200", MIXTRAL_22B, "tp:8", ""),
    ("vllm", "h100 h200 b200_sxm", GPT_120B, "", MXFP4),
    ("vllm", "h100", GPT_120B, "tp:2", MXFP4),
    ("vllm", "b200_sxm", GPT_120B, "tp:4", MXFP4),
    ("sglang tensorrt_llm", "b200_sxm", GPT_120B, "", MXFP4),
    ("vllm", "h100 h200", GPT_20B, "", MXFP4),
    ("sglang vllm tensorrt_llm", "h200 b200_sxm", DEEPSEEK, "tp:8 ep:8", BLOCK),
    ("sglang tensorrt_llm", "b200_sxm gb200", DEEPSEEK, "tp:4 ep:4", NVFP4),
    ("sglang", "b200_sxm", KIMI, "tp:8 ep:8", BLOCK),
    ("vllm", "h200", SCOUT, "tp:8", ""),
    ("vllm", "h200", MINIMAX, "tp:4", BLOCK),
]
"""What comes with batchsim: each engine on each GPU. Types are of weights, then of what differs from them."""


def deployments() -> list[Deployment]:
    """All of `DEPLOYMENTS`."""
    found: list[Deployment] = []
    for engines, gpus, model, degrees, types in DEPLOYMENTS:
        first, *others = types.split() or [""]
        pairs = [pair.split(":") for pair in (*degrees.split(), *others)]
        names = {"moe": "moe_dtype", "kv": "kv_dtype"}
        keys: dict[str, Any] = {names.get(key, key): value if key in names else int(value) for key, value in pairs}
        spec = model_spec(model)
        for engine in engines.split():
            found += [Deployment(spec, load_gpu(gpu), engine, weight_dtype=first, **keys) for gpu in gpus.split()]
    return found


def main() -> int:
    """Writes the profiles and prints a line of each; returns 1 if one is refused or further off than it may be."""
    if len(sys.argv) > 2:
        print("usage: python -m tools.ship_deployments [OUT]", file=sys.stderr)
        return 2
    out = Path(sys.argv[1]) if len(sys.argv) == 2 else Path(__file__).parents[1] / "sim" / "tables" / "profiles"
    written, failed = set[str](), 0
    print(HEAD)
    for deployment in deployments():
        try:
            profile = build(deployment)
        except BatchsimError as error:
            print(error, file=sys.stderr)
            failed += 1
            continue
        write_text(out / f"{profile.name}.json", profile.to_json())
        written.add(profile.name)
        failed += not within(profile)
        print(line(profile), flush=True)
    for path in out.glob("*.json"):
        if path.stem not in written:
            path.unlink()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

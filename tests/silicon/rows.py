"""The measured points: which there are, which half may be looked at, and what their clients did.

They are those of `systems/silicon_sample.csv` in `aiconfigurator-core` (Apache-2.0, NVIDIA), measured by others.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from math import ceil

MODELS = {
    "deepseek-ai/DeepSeek-V3": "deepseek-ai/DeepSeek-R1",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Llama-3.1-8B-Instruct",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B",
}
"""The model that checkpoints of other names, or of fewer bits, count as."""
DENSE = ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B")
"""Those without experts, of which the points state a type nevertheless."""
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
"""Our names of the engines."""
MAX_CONCURRENCY, MAX_TP, MAX_TTFT_MS = 256, 8, 20_000
"""Points beyond these are left out: of other set-ups, or of a client that waited for something else."""


@dataclass(frozen=True)
class Row:
    """One measured point. `gap`: its client is not known, and its lengths are exact; `concurrency` requests at a time
    with prompts of `isl` and answers of `osl` tokens at most; TTFT and TPOT in ms. Types are as the file has them.
    `ranks` is its `attention_dp_size`: with several, its `tp` GPUs are as many ranks of one GPU, whatever the file
    makes of `ep`, which is how InferenceX starts vLLM with attention data parallelism.
    """

    id: str
    gap: bool
    engine: str
    version: str
    model: str
    gpu: str
    precision: str
    gemm: str
    moe: str
    tp: int
    ep: int
    moe_tp: int
    concurrency: int
    isl: int
    osl: int
    ttft_ms: float
    tpot_ms: float
    ranks: int = 1

    @property
    def backend(self) -> str:
        """The engine as the file has it."""
        return next(theirs for theirs, ours in ENGINES.items() if ours == self.engine)

    @property
    def deployment(self) -> str:
        """What halves are made of: repeats and loads of one deployment are never in both."""
        ranks = f"|dp{self.ranks}" if self.ranks > 1 else ""
        return f"{self.model}|{self.gpu}|{self.backend}|{self.precision}|tp{self.tp}{ranks}"

    @property
    def kv(self) -> str:
        """The type of the KV cache: recipes of checkpoints of 8 and 4 bits keep it in 8."""
        return "fp8" if self.precision in ("fp8", "fp4") else ""

    @property
    def types(self) -> tuple[str, str]:
        """Types of weights and experts; "": none, or the checkpoint's own, as of gpt-oss, of which there is one."""
        own = self.model.startswith("openai/")
        blocks = self.gemm == "fp8" and self.moe == "fp8_block"  # of one checkpoint, with scales of blocks throughout
        weights = self.moe if blocks else self.gemm
        return "" if own else weights, "" if own or self.model in DENSE else self.moe


def is_given(deployment: str) -> bool:
    """Whether a deployment is of the half that may be looked at, fitted to and chosen by: its SHA-256 is even."""
    return int(hashlib.sha256(deployment.encode()).hexdigest(), 16) % 2 == 0


def given_rows(*, ranks: bool = False) -> list[Row]:
    """The points of the GIVEN half that are not left out, each once: of one scheduler, or of vLLM's `ranks`.
    FileNotFoundError without the package."""
    rows: dict[tuple[object, ...], Row] = {}
    for row in _rows():
        if is_given(row.deployment) and (row.ranks > 1) == ranks:
            rows.setdefault((row.deployment, row.ep, row.isl, row.osl, row.concurrency, row.ttft_ms, row.tpot_ms), row)
    return list(rows.values())


def measured_rows() -> str:
    """The file of the points. FileNotFoundError without the package."""
    try:
        return (resources.files("aiconfigurator_core") / "systems" / "silicon_sample.csv").read_text()
    except ModuleNotFoundError:
        raise FileNotFoundError(
            "aiconfigurator-core, which has the points, is not installed. See docs/deployments.md."
        ) from None


def _rows() -> Iterator[Row]:
    """Points of one engine that serves prompts and answers alike, but for those that are left out."""
    for plain in csv.DictReader(measured_rows().splitlines()):
        if plain["mode"] != "agg" or (plain["backend"], plain["model_path"]) == ("trtllm", "openai/gpt-oss-120b"):
            continue  # gpt-oss ran there with experts of another type than the row says
        row = row_of(plain)
        within = row.concurrency <= MAX_CONCURRENCY and row.tp <= MAX_TP and row.ttft_ms <= MAX_TTFT_MS
        if within and (row.ranks == 1 or (row.engine == "vllm" and row.ranks == row.tp)):
            yield row


def row_of(plain: dict[str, str]) -> Row:
    """A point as the file has it."""
    source = plain["silicon_data_source"]
    stated = re.search(r"silicon_concurrency=(\d+)", source)
    tp, ep = int(plain["tp_size"]), int(plain["moe_ep_size"] or 1) or 1
    return Row(
        id=plain["id"],
        gap="gap" in source,
        engine=ENGINES[plain["backend"]],
        version=plain["backend_version"],
        model=MODELS.get(plain["model_path"], plain["model_path"]),
        gpu=plain["system"],
        precision=plain["precision"],
        gemm=plain["gemm_quant_mode"],
        moe=plain["moe_quant_mode"],
        tp=tp,
        ep=ep,
        moe_tp=int(plain["moe_tp_size"] or 0) or tp // ep,
        concurrency=int(stated[1]) if stated else int(plain["batch_size"] or 0),
        isl=int(plain["isl"]),
        osl=int(plain["osl"]),
        ttft_ms=float(plain["silicon_ttft_ms"]),
        tpot_ms=float(plain["silicon_tpot_ms"]),
        ranks=int(float(plain["attention_dp_size"] or 1)),
    )


def scenario_text(row: Row, *, kv: str | None = None) -> str:
    """The scenario of a point: what its client did, and its engine under the engine's own policy.

    Ten requests a client, all clients at once, lengths uniform in 0.8 to 1 of the greatest (exact for `gap`), no prefix
    caching. `kv` is another type of the KV cache.
    """
    weights, moe = row.types
    types = {"weights": weights, "moe": moe, "kv": row.kv if kv is None else kv}
    stated = "".join(f", {name}: {dtype}" for name, dtype in types.items() if dtype)
    degrees = f"tp: {row.tp}, ep: {row.ep}" if row.ranks == 1 else f"dp_attention: {row.ranks}, ep: {row.ranks}"
    policy = {
        "vllm": f"max_num_seqs: {row.concurrency}, max_num_batched_tokens: 8192, enable_prefix_caching: false",
        "sglang": _sglang(row),
        "tensorrt_llm": f"max_batch_size: {row.concurrency}, max_num_tokens: {max(8192, row.isl + 256)},"
        " enable_block_reuse: false",
    }[row.engine]
    return f"""
model: {CHECKPOINTS[row.model]}
deployment: {{engine: {row.engine}, gpu: {row.gpu}, {degrees}{stated}}}
workload:
  arrivals: {{kind: closed_loop, users: {row.concurrency}, think_time: 0s, shared_list: true, ramp: 0s}}
  lengths: {{prompt: {law(row.isl, row.gap)}, output: {law(row.osl, row.gap)}}}
  output_cap: exact
  requests: {10 * row.concurrency}
  frontend: {row.engine}
policies: {{{row.engine}: {{{policy}}}}}
max_model_len: {row.isl + row.osl + 256}
slo: ttft<1s @ 99%
seeds: 1
"""


def _sglang(row: Row) -> str:
    """The knobs of the recipes: on Blackwell arrivals are taken in after 10 steps of decodes, 30 from 16 clients on.

    Source: github.com/SemiAnalysisAI/InferenceX, benchmarks/dsr1_fp4_b200.sh and dsr1_fp8_h200.sh @ 1fc5d73, and
    benchmarks/single_node/dsr1_fp8_b300.sh @ 5632483.
    """
    tokens = 16384 if row.precision == "fp4" else 32768
    knobs = f"disable_radix_cache: true, chunked_prefill_size: {tokens}, max_prefill_tokens: {max(tokens, 16384)}"
    if row.gpu in ("b200_sxm", "b300_sxm"):
        knobs += f", scheduler_recv_interval: {30 if row.concurrency >= 16 else 10}"
    return knobs


def law(tokens: int, exact: bool) -> str:
    """The lengths of a client whose greatest is `tokens`, as a scenario has them."""
    if exact:
        return f"{{kind: fixed, tokens: {tokens}}}"
    return f"{{kind: uniform, min: {ceil(0.8 * tokens)}, max: {tokens}}}"


CHECKPOINTS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-R1",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Llama-3.1-70B",
    "MiniMaxAI/MiniMax-M2.5": "MiniMaxAI/MiniMax-M2.5",
    "moonshotai/Kimi-K2.5": "moonshotai/Kimi-K2.5",
    "openai/gpt-oss-120b": "openai/gpt-oss-120b",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
    "Qwen/Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3.5-397B-A17B": "Qwen/Qwen3.5-397B-A17B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
"""The models of the points by the names of the catalog."""

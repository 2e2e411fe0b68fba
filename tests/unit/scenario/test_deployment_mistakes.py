"""Whatever a user gets wrong in a deployment: one line, which says where, what and what to do."""

from __future__ import annotations

import re

import pytest

from batchsim.base.errors import BatchsimError
from batchsim.tables import find
from tests.support.scenarios import setup_of

TEXT = """\
model: meta-llama/Llama-3.1-70B
deployment:
  engine: vllm
  gpu: h100_sxm
  tp: 4
  weights: fp8
workload:
  arrivals: {kind: poisson, mean_rate: 8/s}
  lengths: {prompt: {kind: fixed, tokens: 10}, output: {kind: fixed, tokens: 10}}
  output_cap: 10
  requests: 10
slo: ttft<1s @ 90%
"""
GPU = "gpu: h100_sxm"
SHEET = "gpu: {kind: sheet, memory: 24GB, bandwidth: 1008GB/s, bf16: 165TFLOP/s, peer_link: 32GB/s}"
FP8, TP = "weights: fp8", "tp: 4"
BLOCK = TEXT[TEXT.index("deployment") : TEXT.index("workload")]
WORKLOAD = "workload:"
GROUP = "replicas: {router: round_robin, groups: {a: {count: 1, %s}}}\nworkload:"
PLAN = "plan: {target: {rate: 60/s}, currency: $, router: round_robin, max_replicas: 9, gpus: {x: {%s}}}\nworkload:"

MISTAKES = {
    # what is replaced, by what; where the line says it is, what it says
    "engine_missing": ("  engine: vllm\n", "", "mine.yaml:2: deployment.engine is missing. Add it."),
    "engine_misspelt": ("vllm", "vlm", "mine.yaml:3: deployment.engine is \"vlm\". Write 'vllm', 'sglang' or"),
    "engine_of_another_name": ("vllm", "trtllm", "mine.yaml:3: deployment.engine is \"trtllm\". Write 'vllm'"),
    "engine_is_a_list": ("vllm", "[vllm]", "mine.yaml:3: deployment.engine is"),
    "gpu_missing": ("  gpu: h100_sxm\n", "", "mine.yaml:2: deployment.gpu is missing. Add it."),
    "gpu_misspelt": ("h100_sxm", "h100_smx", "mine.yaml:2: GPU h100_smx is not in the catalog. Did you mean h100_sxm?"),
    "gpu_in_capitals": ("h100_sxm", "H100_SXM", "Did you mean h100_sxm? Another one: deployment: {gpu: {kind: sheet"),
    "gpu_is_a_number": ("h100_sxm", "100", "mine.yaml:4: deployment.gpu is 100. Write the name of a GPU, or its sheet"),
    "sheet_with_a_part": (GPU, "gpu: {kind: sheet, memory: 24GB}", "mine.yaml:4: deployment.gpu.bandwidth is missing."),
    "sheet_of_another_kind": (GPU, SHEET.replace("sheet", "sheat"), "gpu.kind is \"sheat\". Write 'sheet'."),
    "sheet_key_misspelt": (GPU, SHEET.replace("width", "with"), "bandwith is not a field of deployment.gpu. Did you"),
    "sheet_unit_of_a_size": (GPU, SHEET.replace("1008GB/s", "1008GB"), "'1008GB' has no known unit of a bandwidth."),
    "sheet_without_unit": (GPU, SHEET.replace("165TFLOP/s", "165"), "165 is not a speed of arithmetic. Write a number"),
    "sheet_in_another_unit": (GPU, SHEET.replace("TFLOP/s", "TFLOPS"), "Write one of GFLOP/s, TFLOP/s, PFLOP/s"),
    "sheet_without_speed": (GPU, SHEET.replace("1008GB/s", "0GB/s"), "'0GB/s' is not above 0."),
    "sheet_of_8_bits": (f"{GPU}\n  tp: 4\n  {FP8}", f"{SHEET}\n  moe: fp8", "moe fp8 has no step times on a GPU of a"),
    "sheet_without_a_link": (GPU, SHEET.replace(", peer_link: 32GB/s", ""), "gpu.peer_link is missing: 4 GPUs"),
    "sheet_almost_large_enough": (GPU, SHEET, "GB short of one KV block: 24.0 GB"),
    "sheet_beyond_reach": (f"{GPU}\n  tp: 4\n  {FP8}", f"{SHEET}\n  extrapolate: true", "extrapolate has no effect"),
    "sheet_of_a_version": (f"{GPU}\n  tp: 4\n  {FP8}", f"{SHEET}\n  version: 0.24", "a GPU of a sheet has none"),
    "sheet_too_small": (f"{GPU}\n  tp: 4\n  {FP8}", SHEET, "GB short of one KV block"),
    "tp_zero": (TP, "tp: 0", "mine.yaml:5: deployment: tp is 0. It must be from 1 to 1024."),
    "tp_in_words": (TP, "tp: four", 'mine.yaml:5: deployment.tp is "four". Write a whole number.'),
    "tp_of_a_half": (TP, "tp: 4.5", "mine.yaml:5: deployment.tp is 4.5. Write a whole number."),
    "tp_that_cuts_no_heads": (TP, "tp: 3", "mine.yaml:2: tp: meta-llama/Llama-3.1-70B (64 heads, 8 KV heads"),
    "tp_too_large": (TP, "tp: 2048", "tp is 2048. It must be from 1 to 1024."),
    "tp_misspelt": (TP, "tpp: 4", "mine.yaml:5: deployment.tpp is not a field of deployment. Did you mean tp?"),
    "tp_by_another_name": (TP, "tensor_parallel_size: 4", "Known are engine, gpu, version, tp, pp, ep"),
    "pp_that_cuts_no_layers": (TP, "pp: 81", "the 80 layers of meta-llama/Llama-3.1-70B cannot be cut into 81"),
    "ep_without_experts": (TP, "tp: 4\n  ep: 4", "has no experts to divide. Leave out ep"),
    "groups_without_experts": (TP, "tp: 4\n  dp_attention: 2", "has no experts to divide"),
    "type_unknown": (
        FP8,
        "weights: fp9",
        "mine.yaml:6: deployment.weights is \"fp9\". Write 'bfloat16', 'float16', 'fp8'",
    ),
    "type_in_short": (FP8, "weights: bf16", "deployment.weights is \"bf16\". Write 'bfloat16'"),
    "type_as_bits": (FP8, "weights: 8", "mine.yaml:6: deployment.weights is 8. Write 'bfloat16'"),
    "type_of_no_experts": (FP8, "weights: fp8\n  moe: fp8", "has no experts of type fp8. Leave moe out."),
    "kv_in_short": (FP8, "kv: fp16", "deployment.kv is \"fp16\". Write 'bfloat16', 'float16', 'fp8'"),
    "kv_of_4_bits": (FP8, "kv: int4", 'deployment.kv is "int4"'),
    "activations_of_others": (FP8, f"{FP8}\n  activations: bfloat16", "kernels multiply fp8 weights in fp8"),
    "activations_alone": (FP8, "activations: fp8", "weights of which no type is stated in bfloat16"),
    "version_in_words": (FP8, f"{FP8}\n  version: latest", "version is 'latest'. Write the engine's, like 0.24"),
    "version_with_more": (FP8, f"{FP8}\n  version: 0.24-nightly", "version is '0.24-nightly'. Write the engine's"),
    "version_in_a_list": (FP8, f"{FP8}\n  version: [1]", "mine.yaml:7: deployment.version is [1]. Write a word."),
    "host_without_unit": (FP8, f"{FP8}\n  host: {{base: 1}}", "deployment.host.base: 1 is not a time."),
    "host_key_misspelt": (FP8, f"{FP8}\n  host: {{bases: 1ms}}", "deployment.host. Did you mean base?"),
    "host_as_a_time": (FP8, f"{FP8}\n  host: 1ms", 'deployment.host is "1ms". Write keys and values'),
    "anchor_of_a_half": (FP8, f"{FP8}\n  anchor: {{concurrency: 16}}", "deployment.anchor.tpot is missing."),
    "anchor_without_unit": (FP8, f"{FP8}\n  anchor: {{concurrency: 1, tpot: 12}}", "anchor.tpot: 12 is not a time."),
    "anchor_of_nobody": (FP8, f"{FP8}\n  anchor: {{concurrency: 0, tpot: 12ms}}", "concurrency is 0. It must be"),
    "kind_stated": (FP8, "kind: deployment", "mine.yaml:2: deployment.kind is not a field of deployment. Leave it out"),
    "drafter_unknown": (FP8, f"{FP8}\n  draft: {{eagle9: {{layers: 1}}}}", "Did you mean eagle?"),
    "with_a_cost": (WORKLOAD, "cost: h200\nworkload:", "mine.yaml:2: deployment and cost are both given"),
    "as_a_word": (BLOCK, "deployment: h100\n", "mine.yaml:2: deployment is 'h100'. Write its keys: {engine: vllm, gpu"),
    "misspelt": ("deployment:", "deploymnt:", "mine.yaml:2: deploymnt is not a field of a scenario. Did you mean dep"),
    "neither": (BLOCK, "", "cost is missing. Add deployment: {engine: vllm, gpu: h100_sxm}, or cost"),
    "model_in_other_letters": (
        "-70B",
        "-70b-instruct",
        "mine.yaml:1: model: meta-llama/Llama-3.1-70b-instruct is neither",
    ),
    "model_without_org": ("meta-llama/Llama-3.1-70B", "llama3", "mine.yaml:1: model: llama3 is neither in the catalog"),
    "model_within": (FP8, f"{FP8}\n  model: x", "mine.yaml:7: deployment.model is not a field of deployment."),
    "no_kernels": (
        FP8,
        "weights: int8",
        "mine.yaml:2: deployment: no profile of meta-llama/Llama-3.1-70B on h100, vllm",
    ),
    "varied_key_misspelt": (WORKLOAD, "vary: {deployment.tpp: [1]}\nworkload:", "deployment.tpp is not a field"),
    "varied_value": (WORKLOAD, "vary: {deployment.tp: [4, x]}\nworkload:", 'value x: deployment.tp is "x"'),
    "group_of_an_unknown_gpu": (WORKLOAD, GROUP % "deployment: {engine: vllm, gpu: h300}", "Did you mean h200?"),
    "group_key_misspelt": (WORKLOAD, GROUP % "deployment: {engine: vllm, gpu: h100, tpx: 2}", "tpx is not a field of"),
    "group_with_a_cost": (
        WORKLOAD,
        GROUP % "cost: h200, deployment: {engine: vllm}",
        "mine.yaml:7: deployment and cost",
    ),
    "offer_without_both": (WORKLOAD, PLAN % "price: 2/h", "mine.yaml:7: plan.gpus.x.cost is missing. Add deployment:"),
    "longer_than_the_model": (WORKLOAD, "max_model_len: 1000000\nworkload:", "above the 131072 positions"),
}


@pytest.mark.parametrize(("old", "new", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(old: str, new: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From file and line on, to what to do."""
    monkeypatch.setattr(find, "version", lambda: None)  # as where no kernel tables are installed
    assert old in TEXT
    with pytest.raises(BatchsimError, match=re.escape(says)) as caught:
        setup_of(TEXT.replace(old, new, 1))
    lines = str(caught.value).split("\n")
    assert all(line.startswith("mine.yaml:") and line.endswith((".", "?", ".)")) for line in lines), lines
    assert len(lines) == (2 if "gpu.bandwidth is missing" in says else 1), lines  # of a sheet two parts lack


def test_without_a_mistake_there_is_no_error() -> None:
    """So that each of these is of its own change."""
    assert setup_of(TEXT).num_gpus == 4

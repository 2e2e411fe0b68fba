"""KV budgets: each engine's own rule, what it keeps besides, and what its start-up log says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.deployment.catalog import GPUS, MODELS
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.layers import Split
from batchsim.deployment.memory import (
    COMMUNICATION_BYTES,
    CONTEXT_BYTES,
    ENGINES,
    SAMPLER_BYTES,
    activation_bytes,
)
from batchsim.deployment.model import ModelSpec
from batchsim.deployment.startup_log import Wanted, read_kv_log
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from tests.unit.deployment.test_deployment import DEEPSEEK, GPT_OSS, LLAMA_4, QWEN_235B
from tools.kv_memory import startups

LLAMA, H100 = MODELS["llama-3.1-8b"], GPUS["h100"]
BLOCK = 16 * 131_072


def test_vllm_takes_its_share_of_all_memory_and_keeps_its_needs_inside() -> None:
    """Up to 0.11 of the board's memory less a sampler of 47 bytes; later of what CUDA gives, less what was profiled."""
    old = Deployment(LLAMA, H100, engine="vllm", version="0.11").derive_kv(step_tokens=2048, step_requests=256)
    kept = 256 * 128_256 * SAMPLER_BYTES + CONTEXT_BYTES["vllm"]
    assert old.num_blocks == (int(H100.memory_bytes * 0.90) - LLAMA.weight_bytes - kept) // BLOCK
    assert old.terms == "85.5 GB × 0.90 − 16.1 weights − 1.5 activations − 0.3 engine"
    profiled = Deployment(LLAMA, H100, engine="vllm", version="0.19")
    kept = sum(size for _, size in profiled.reserve(profiled.stages()[0], 2048, 256).after)
    weights = LLAMA.weight_bytes + 131_072 * 128 * 2  # the table of rotations
    budget = profiled.derive_kv(step_tokens=2048, step_requests=256)
    assert budget.num_blocks == (int(81_091 * 2**20 * 0.90) - weights - kept) // BLOCK
    assert budget.terms == "85.0 GB × 0.90 − 16.1 weights − 0.6 activations − 0.3 engine"


def test_sglang_takes_its_share_of_what_is_free_before_the_weights() -> None:
    """Activations and graphs lie beside its share, which by default leaves at least 10 GiB of a GPU above 60 GiB."""
    one = Deployment(LLAMA, H100, engine="sglang")
    free = H100.memory_bytes - CONTEXT_BYTES["sglang"]
    assert one.derive_kv(utilisation=0.88).num_blocks == (int(free * 0.88) - LLAMA.weight_bytes) // BLOCK
    assert one.derive_kv().terms == "(85.5 GB − 0.8 engine) × 0.835 − 16.1 weights"
    share = ENGINES["sglang"].default_share
    assert share("", 80 * 2**30, 1) == round(1 - (512 + 12288 + 128 + 512) / 81920, 3)
    assert share("", 48 * 2**30, 8) == round(1 - (512 + 6144 + 1024 + 320) / 49152, 3)
    assert share("", 180 * 2**30, 8) == round(1 - (512 + 24576 + 1024 + 1024) / (180 * 1024), 3)


def test_vllm_takes_the_share_of_its_release() -> None:
    """0.92 from 0.22 on, and where no version is said; what follows the number of a release is no part of it."""
    share = ENGINES["vllm"].default_share
    shares = {each: share(each, 80 * 2**30, 1) for each in ("", "0.21.1rc0", "0.11rc1", "0.22", "0.22rc1", "1.0")}
    assert shares == {"": 0.92, "0.21.1rc0": 0.9, "0.11rc1": 0.9, "0.22": 0.92, "0.22rc1": 0.92, "1.0": 0.92}


def test_tensorrt_llm_takes_its_share_of_what_weights_and_activations_leave() -> None:
    """`free_gpu_memory_fraction` is of free memory: 90 % of less."""
    two = Deployment(MODELS["llama-3.1-70b"], H100, engine="tensorrt_llm", tp=4)
    activations = activation_bytes(two.model, two.split, 8192)
    kept = activations + COMMUNICATION_BYTES + CONTEXT_BYTES["tensorrt_llm"]
    room = int((H100.memory_bytes - kept - two.weight_bytes) * 0.9)
    assert two.derive_kv().num_blocks == room // (16 * 81_920)
    assert two.derive_kv().terms.endswith("− 0.8 engine − 35.3 weights) × 0.90, on each of 4 GPUs")


def test_activations_are_those_of_the_widest_layer() -> None:
    """Of 8192 tokens: three hidden rows and three of the MLP; of experts, for each of eight, rows in and between."""
    assert activation_bytes(LLAMA, Split(), 8192) == 8192 * 2 * (3 * 4096 + 3 * 14336)
    qwen = ModelSpec.from_config(QWEN_235B, "q")
    assert activation_bytes(qwen, Split(4, 1, 4), 8192) == 8192 * 2 * (3 * 4096 + 8 * (4096 + 384))
    latent = ModelSpec.from_config(DEEPSEEK, "d")
    assert activation_bytes(latent, Split(8, 8, 1), 1) == 2 * (3 * 7168 + 8 * (7168 + 2048) + 3 * 2048 // 8)


def test_windows_are_set_aside_for_the_most_requests_or_kept_as_the_rest() -> None:
    """Half of gpt-oss's layers keep 128 tokens of a request; whichever way gives more tokens counts."""
    spec = ModelSpec.from_config(GPT_OSS, "gpt-oss")
    few = Deployment(spec, GPUS["h200"], engine="vllm")
    half = 18 * 2 * 8 * 64 * 2
    room = few.derive_kv(block_size=1, step_requests=16).tokens * half
    stage = few.stages()[0]
    weights = few.rule.loaded_bytes(stage.weight_bytes, spec, "")
    free = few.rule.room(GPUS["h200"].program_bytes, 0.92, weights, few.reserve(stage, 8192, 16))
    assert free - (16 * 128 + 8192) * half - room == pytest.approx(0, abs=half)
    wide = Deployment(ModelSpec.from_config(LLAMA_4, "l"), GPUS["h200"], tp=8)
    stage = wide.stages()[0]
    assert (stage.full_bytes, stage.windowed_bytes, stage.window_bytes) == (12 * 512, 36 * 512, 36 * 512 * 8192)
    every = wide.derive_kv(block_size=1, step_requests=1024).tokens  # 1024 windows of 8192 tokens would not fit
    assert every == (int(GPUS["h200"].memory_bytes * 0.9) - wide.weight_bytes - 2_600_000_000) // (48 * 512)
    keeps = replace(few, engine="tensorrt_llm")
    free = GPUS["h200"].memory_bytes - keeps.weight_bytes - 10**9
    assert keeps.derive_kv(block_size=1, reserve_bytes=10**9).tokens == int(free * 0.9) // (2 * half)


def test_the_fullest_stage_decides() -> None:
    """Of two stages the last has one norm more; both have half of a token's KV."""
    two = Deployment(LLAMA, H100, pp=2).derive_kv()
    free = int(H100.memory_bytes * 0.9) - Deployment(LLAMA, H100, pp=2).weight_bytes - 2_600_000_000
    assert two.num_blocks == free // (BLOCK // 2)


def test_a_model_whose_layers_are_not_known_in_full_is_refused() -> None:
    """Gemma 2 has norms that are not counted here: its memory is not guessed."""
    other = replace(LLAMA, model_type="gemma2", name="gemma")
    with pytest.raises(ScenarioError, match=r"gemma: model_type 'gemma2' is none whose.*Add kv: tokens"):
        Deployment(other, H100).derive_kv()


SCENARIO = """\
model: llama-3.1-8b
cost: h100
kv: {log: start.log}
workload:
  arrivals: {kind: all_at_once}
  lengths: {prompt: {kind: fixed, tokens: 9}, output: {kind: fixed, tokens: 3}}
  requests: 4
  output_cap: 8
policies: {continuous: {max_num_seqs: 4, max_num_batched_tokens: 512}}
slo: ttft<1s @ 99%
"""
VLLM = "INFO 04-24 16:33:13 [kv_cache_utils.py:634] GPU KV cache size: {} tokens\n"
SGLANG = "[2026-06-28 15:16:45] max_total_num_tokens={}, chunked_prefill_size=8192, context_len=256000\n"
FULL = "INFO 04-24 16:33:13 [kv_cache_utils.py:639] Maximum concurrency for {} tokens per request: {}x\n"
CONFIG = "Initializing a V1 LLM engine (v0.19.0) with config: model='{}', max_seq_len=8192\n"
TRTLLM = "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 16.10 GiB for max tokens in paged KV cache ({}).\n"


@pytest.mark.parametrize(
    ("log", "tokens"),
    [
        (VLLM.format("158,656"), 158_656),
        (CONFIG.format("mine/unknown") + VLLM.format("158,656") + FULL.format("4,096", "38.73"), 158_656),
        ("x\n" + VLLM.format("107,824") + VLLM.format("107,312") + "y\n", 107_312),  # a line from each worker
        (SGLANG.format("2086558"), 2_086_558),
        (TRTLLM.format("2112") + TRTLLM.format("301472"), 301_472),  # the first cache is for trying
    ],
)
def test_an_engines_own_log_wins(tmp_path: Path, log: str, tokens: int) -> None:
    """The tokens that it says stand in the place of the derived ones, in whole blocks."""
    (tmp_path / "start.log").write_text(log)
    assert read_kv_log(tmp_path / "start.log", Wanted()).tokens == tokens
    (tmp_path / "s.yaml").write_text(SCENARIO)
    kv = Setup.of(load_scenario(str(tmp_path / "s.yaml"))).kv
    assert kv.num_blocks == tokens // 16 and kv.terms.startswith("from the log start.log: ")


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        (None, "start.log cannot be read"),
        ("no such line\n", "has no line that says how many tokens of KV fit"),
        (VLLM.format(","), "has no line that says how many tokens of KV fit"),
        (VLLM.format("9" * 4301), "has no line that says how many tokens of KV fit"),
        (SGLANG.format("9" * 310), "has no line that says how many tokens of KV fit"),
        (VLLM.format("1,000") + SGLANG.format("1000"), "has lines of vllm and sglang. Keep those of one engine"),
        (VLLM.format("158,656") + VLLM.format("107,312"), "says 2 times how many.*from 107,312 to 158,656"),
        (VLLM.format("0"), "says that 0 tokens of KV fit"),
        (
            VLLM.format("290,864") + FULL.format("32,768", "33.04"),
            "says 290,864 tokens, and that 33.04 requests of 32,768 fit, which are 1,082,655: of a model whose layers",
        ),
        (VLLM.format("32,000") + FULL.format("4,096", "1.02"), "says 32,000 tokens, and that 1.02 requests of 4,096"),
        (CONFIG.format("openai/gpt-oss-20b") + VLLM.format("1,000"), "is of openai/gpt-oss-20b, and the model is"),
        (CONFIG.format("/data/gpt-oss-20b/") + VLLM.format("1,000"), "is of /data/gpt-oss-20b/, and the model is"),
    ],
)
def test_a_log_that_does_not_say_is_one_line(tmp_path: Path, log: str | None, complaint: str) -> None:
    """With its place in the scenario; nothing is guessed of several engines."""
    if log is not None:
        (tmp_path / "start.log").write_text(log)
    (tmp_path / "s.yaml").write_text(SCENARIO)
    with pytest.raises(ScenarioError, match=rf"s\.yaml:3: kv\.log: .*{complaint}") as caught:
        load_scenario(str(tmp_path / "s.yaml"))
    assert "\n" not in str(caught.value)


def test_memory_is_stated_once(tmp_path: Path) -> None:
    """A log beside tokens is refused, as tokens beside a share are."""
    (tmp_path / "start.log").write_text(VLLM.format("158,656"))
    (tmp_path / "s.yaml").write_text(SCENARIO)
    for other, complaint in (
        ("kv.tokens=1600", "kv.tokens is not read beside kv.log"),
        ("kv.utilisation=80%", "kv.utilisation is not read beside kv.log"),
    ):
        with pytest.raises(ScenarioError, match=complaint):
            load_scenario(str(tmp_path / "s.yaml"), overrides=[other])


def test_a_share_of_memory_is_a_percentage_or_a_fraction() -> None:
    """0.85 is 85 %; 85 and 1 could be either, and are one line with both readings."""
    for text in ("85%", "0.85"):
        kv = load_scenario("bursty", overrides=[f"kv={{utilisation: {text}}}"]).file.kv
        assert kv is not None and kv.utilisation == 0.85
    for text, advice in (("85", "Write 85%, or 0.85."), ("1", "Write 1%, or 100%, whichever is meant.")):
        with pytest.raises(ScenarioError, match=rf"kv\.utilisation: {text} is not a share\. .*{advice}"):
            load_scenario("bursty", overrides=[f"kv={{utilisation: {text}}}"])


def test_derived_memory_is_near_what_engines_said_at_their_start() -> None:
    """Of nine start-ups KV memory is within 8 % or 0.1 GiB, weights of seven within 3 %; most constants are fitted to
    them, so that this tells a change and is no proof."""
    rows = list(startups())
    weights = [(each.weights, each.weights_said) for each in rows if each.weights and each.weights_said]
    kv = [(each.kv, each.kv_said) for each in rows if each.kv and each.kv_said]
    assert (len(weights), len(kv)) == (7, 9)
    assert all(abs(derived / said - 1) < 0.03 for derived, said in weights)
    assert all(abs(derived - said) < max(0.08 * said, 0.1 * 2**30) for derived, said in kv)


def test_a_log_of_another_deployment_is_refused(tmp_path: Path) -> None:
    """Of another engine, or of another number of GPUs where the log says that."""
    log, eight = tmp_path / "start.log", Wanted("vllm", tp=8)
    log.write_text("config: tensor_parallel_size=8, dtype\nGPU KV cache size: 1,600 tokens\n")
    assert read_kv_log(log, eight).tokens == read_kv_log(log, Wanted()).tokens == 1600
    with pytest.raises(ScenarioError, match="is of tp 8, and the deployment has tp 4"):
        read_kv_log(log, Wanted("vllm", tp=4))
    with pytest.raises(ScenarioError, match="is of vllm, and the deployment is of sglang"):
        read_kv_log(log, Wanted("sglang", tp=8))
    with pytest.raises(ScenarioError, match=r"is of KV in another type, and the deployment's is fp8\. Correct"):
        read_kv_log(log, replace(eight, kv="fp8"))
    log.write_text("config: kv_cache_dtype=fp8_e4m3, x\nGPU KV cache size: 1,600 tokens\n")
    assert read_kv_log(log, replace(eight, kv="fp8")).tokens == 1600
    with pytest.raises(ScenarioError, match=r"is of KV in fp8, and the deployment's is auto\. Correct"):
        read_kv_log(log, replace(eight, kv="auto"))

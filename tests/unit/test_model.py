"""Shapes from config.json files, parameter counts, and the KV budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sim.catalog import GPUS, MODEL_SOURCES, MODELS, load_gpu, load_model
from sim.deployment import Deployment
from sim.errors import ScenarioError
from sim.model import ModelSpec
from sim.point import Setup, simulate_point
from sim.scenario import Point, load_scenario

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("mistral-7b", 7_248_023_552),
    ],
)
def test_parameters_are_those_of_the_published_weights(name: str, parameters: int) -> None:
    """The count is exact: biases, norms and embeddings included."""
    assert MODELS[name].num_parameters == parameters


def test_a_config_json_gives_the_same_spec_as_the_catalog() -> None:
    """head_dim, tied embeddings and the KV heads take the defaults of the format."""
    assert ModelSpec.from_config(LLAMA, "llama-3.1-8b") == MODELS["llama-3.1-8b"]


def test_kv_bytes_and_flops_of_llama_8b() -> None:
    """128 KiB of KV a token; matmul FLOPs are twice the parameters of the layers' matrices."""
    model = MODELS["llama-3.1-8b"]
    assert model.kv_bytes_per_token == 131_072
    assert model.weight_bytes == 2 * model.num_parameters
    assert model.matmul_flops_per_token == 2 * 6_979_321_856


def test_tied_embeddings_are_counted_once() -> None:
    """Tying saves exactly one vocabulary matrix."""
    model = MODELS["qwen3-8b"]
    assert model.num_parameters - replace(model, tie_word_embeddings=True).num_parameters == model.head_parameters


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": None}, "model_type None"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 5}, "not a multiple of num_key_value_heads 5"),
        ({"hidden_size": 4097}, "not a multiple of num_attention_heads"),
        ({"torch_dtype": "int4"}, "torch_dtype is 'int4'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    ],
)
def test_what_is_not_modelled_is_refused(change: dict[str, object], complaint: str) -> None:
    """One line names the file and the key; nothing is guessed."""
    with pytest.raises(ScenarioError, match=complaint) as caught:
        ModelSpec.from_config(LLAMA | change, "my/config.json")
    assert str(caught.value).startswith("my/config.json: ")
    assert "\n" not in str(caught.value)


STATED = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_token: 20us}
kv: {tokens: 16000}
workload:
  arrivals: {kind: all_at_once}
  lengths: {prompt: {kind: fixed, tokens: 9}, output: {kind: fixed, tokens: 3}}
  requests: 4
  output_cap: 8
policies: {continuous: {max_num_seqs: 4, max_num_batched_tokens: 512}}
slo: ttft<1s @ 99%
"""


@pytest.mark.parametrize(
    ("change", "complaint", "copy"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts means a mixture of experts, ", ""),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "num_experts means a mixture of experts, ", ""),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 256, "quantization_config": {"quant_method": "fp8"}},
            "n_routed_experts means a mixture of experts and quantization_config means quantised weights, ",
            "",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "quantization_config means quantised weights, ",
            "Or remove quantization_config from a copy of the file: that is the model with 16-bit weights.",
        ),
        ({"model_type": "llama4", "text_config": {"num_local_experts": 16}}, "num_local_experts means a mixture", ""),
        ({"model_type": "gemma2"}, "model_type 'gemma2' is none of the known llama, ", ""),
        ({"sliding_window": 4096}, "sliding_window is 4096: ", ""),
    ],
)
def test_a_refused_model_is_told_why_and_the_ways_out(change: dict[str, object], complaint: str, copy: str) -> None:
    """What makes it unlike the known ones is named, not its type; stated times always do, a copy where a key can go."""
    with pytest.raises(ScenarioError) as caught:
        ModelSpec.from_config(LLAMA | change, "my/config.json")
    told = str(caught.value)
    assert told.startswith(f"my/config.json: {complaint}") and told.endswith(copy)
    assert "cost: {kind: linear, base: ..., per_token: ...} and kv: {tokens: ...}, and for model any name of" in told
    assert ("model_type" in told) is ("model_type" in complaint)


def test_the_ways_out_of_a_refused_model_work(tmp_path: Path) -> None:
    """A scenario with stated times runs, and at the same speed whichever model it names."""
    (tmp_path / "s.yaml").write_text(STATED)
    ends = []
    for model in ("llama-3.1-8b", "qwen3-14b"):
        scenario = load_scenario(str(tmp_path / "s.yaml"), overrides=[f"model={model}"])
        ends.append(simulate_point(Setup.of(scenario), Point(scenario.specs[0], 1.0, 0)).end_ns)
    assert ends[0] == ends[1] > 0


def test_a_window_that_is_switched_off_is_no_window() -> None:
    """Qwen2 configs name a window and a switch; without the switch the model is a full-attention one."""
    config = LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    assert ModelSpec.from_config(config, "q").model_type == "qwen2"
    with pytest.raises(ScenarioError, match="sliding_window is 4096"):
        ModelSpec.from_config(config | {"use_sliding_window": True}, "q")


def test_a_model_is_loaded_by_file_or_folder(tmp_path: Path) -> None:
    """Both the file's path and its folder's are understood."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(str(tmp_path)).num_parameters == load_model(str(tmp_path / "config.json")).num_parameters


TWICE = json.dumps(LLAMA)[:-1] + ', "hidden_size": 4096}'


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama"}', "\x00", "[" * 100_000, TWICE])
def test_a_broken_config_is_one_line(tmp_path: Path, text: str) -> None:
    """Whatever the file holds, the error is ours and names the file."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=r"config\.json") as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


def test_an_unknown_name_gets_a_suggestion() -> None:
    """Near misses of models and GPUs are named, else the whole list."""
    with pytest.raises(ScenarioError, match=r"Did you mean llama-3\.1-8b"):
        load_model("llama-3.1-8B")
    with pytest.raises(ScenarioError, match="Did you mean h200"):
        load_gpu("H200")
    with pytest.raises(ScenarioError, match="Known are h200, h100, a100, l40s"):
        load_gpu("tpu")


def test_the_budget_of_llama_8b_on_h200_is_55_8k_blocks() -> None:
    """The example everybody knows, and the sum it is printed with."""
    budget = Deployment(MODELS["llama-3.1-8b"], GPUS["h200"]).derive_kv()
    assert budget.num_blocks == 55_798
    assert str(budget) == ("KV 892,768 tokens (55,798 blocks of 16: 150.8 GB × 0.90 − 16.1 weights − 2.6 reserve)")


def test_the_budget_follows_its_terms() -> None:
    """Blocks are the free bytes over a block's bytes, for any reserve, utilisation and block size."""
    model, gpu = MODELS["qwen3-8b"], GPUS["h100"]
    budget = Deployment(model, gpu).derive_kv(utilisation=0.8, block_size=32, reserve_bytes=10**9)
    free = int(gpu.memory_bytes * 0.8) - model.weight_bytes - 10**9
    assert budget.num_blocks == free // (model.kv_bytes_per_token * 32)
    assert budget.tokens == 32 * budget.num_blocks


def test_a_model_that_does_not_fit_says_what_is_missing_and_what_would_fit() -> None:
    """70B in bf16 is 141 GB of weights: two H200 hold it."""
    with pytest.raises(ScenarioError, match=r"8\.0 GB short of one KV block.*It fits with tp: 2\."):
        Deployment(MODELS["llama-3.1-70b"], GPUS["h200"]).derive_kv()
    assert Deployment(MODELS["llama-3.1-70b"], GPUS["h200"], tp=2).derive_kv().num_blocks > 20_000


def test_a_model_no_degree_makes_fit_says_so() -> None:
    """Without a degree up to 8 that fits, the advice is another model or GPU."""
    huge = replace(MODELS["llama-3.1-70b"], num_hidden_layers=1000)
    with pytest.raises(ScenarioError, match="Use a smaller model or a GPU with more memory"):
        Deployment(huge, GPUS["l40s"]).derive_kv()


def test_tensor_parallelism_divides_kv_heads_until_there_are_none_left() -> None:
    """Eight KV heads over 16 GPUs are copied, not halved; heads that cannot be cut are an error."""
    model = MODELS["llama-3.1-70b"]
    assert [Deployment(model, tp=tp).kv_bytes_per_token for tp in (1, 2, 8, 16)] == [327_680, 163_840, 40_960, 40_960]
    with pytest.raises(ScenarioError, match=r"28 heads.*into 8 equal parts"):
        Deployment(MODELS["qwen2.5-7b"], tp=8)


def test_every_catalog_entry_has_a_source() -> None:
    """No number without where it is from."""
    assert MODEL_SOURCES.keys() == MODELS.keys()
    assert all(gpu.source and gpu.efficiencies.source and gpu.efficiencies.fitted_on for gpu in GPUS.values())

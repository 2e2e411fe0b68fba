"""What GPUs hold: weights and KV of published checkpoints by type and split, and which types a config.json states.

Shapes are those of the config.json of the Hugging Face repository named at each; parameters those of its model card or
of the sizes of its safetensors files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.work import WORK_COLUMNS, useful_flops_bytes
from batchsim.deployment.catalog import MODELS, read_model, sheet_gpu
from batchsim.deployment.deployment import Deployment, Types
from batchsim.deployment.model import ModelSpec
from batchsim.deployment.on_gpus import stage_layers
from batchsim.deployment.quantisation import Quantisation, read_quantisation

FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
LLAMA_70B = {  # nvidia/Llama-3.1-70B-Instruct-FP8, with its hf_quant_config.json
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "hf_quant_config": {
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    },
}
MIXTRAL = {  # mistralai/Mixtral-8x7B-v0.1
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
GPT_OSS = {  # openai/gpt-oss-120b
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
}
QWEN_235B = {  # Qwen/Qwen3-235B-A22B-FP8
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "quantization_config": FP8_BLOCK | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
}
DEEPSEEK = {  # deepseek-ai/DeepSeek-V3
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
    "quantization_config": FP8_BLOCK,
}
LLAMA_4 = {  # meta-llama/Llama-4-Maverick-17B-128E-Instruct, its text_config
    "model_type": "llama4",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 128,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8192,
        "vocab_size": 202048,
        "max_position_embeddings": 1048576,
    },
}
KIMI = DEEPSEEK | {  # moonshotai/Kimi-K2-Instruct
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
}
SPARSE = DEEPSEEK | {  # deepseek-ai/DeepSeek-V3.2
    "model_type": "deepseek_v32",
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
MINIMAX = {  # MiniMaxAI/MiniMax-M2.5
    "model_type": "minimax_m2",
    "hidden_size": 3072,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 1536,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "vocab_size": 200064,
    "max_position_embeddings": 196608,
    "quantization_config": FP8_BLOCK | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
}


def model(config: Mapping[str, object]) -> ModelSpec:
    return ModelSpec.from_config(config, "m")


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (MIXTRAL, 46_702_792_704),  # 46.7 B, mistral.ai/news/mixtral-of-experts
        (GPT_OSS, 116_829_156_672),  # 116.83 B, gpt-oss model card (arXiv 2508.10925), table 1
        (QWEN_235B, 235_093_634_560),  # 235.09 B, safetensors of Qwen/Qwen3-235B-A22B
        (DEEPSEEK, 671_026_419_200),  # 671 B, DeepSeek-V3 technical report
    ],
)
def test_parameters_of_mixtures_of_experts_are_those_published(config: Mapping[str, object], parameters: int) -> None:
    """Biases, sinks, norms and the router's corrections included; without DeepSeek's extra head."""
    assert model(config).num_parameters == parameters


@pytest.mark.parametrize(("config", "parameters"), [(KIMI, 1.03e12), (LLAMA_4, 400e9), (MINIMAX, 229e9)])
def test_parameters_of_further_families_are_those_of_their_cards(
    config: Mapping[str, object], parameters: float
) -> None:
    """To the digits of the model cards of Kimi-K2, Llama-4-Maverick (the part that writes), MiniMax-M2.5 and
    GLM-5."""
    assert model(config).num_parameters == pytest.approx(parameters, rel=0.005)
    assert read_model("zai-org/GLM-5").num_parameters == pytest.approx(744e9, rel=0.001)


@pytest.mark.parametrize(
    ("config", "kv_bytes"),
    [
        (LLAMA_70B, 163_840),  # 80 layers × 2 × 8 heads × 128 in FP8, which the checkpoint has scales for
        (MIXTRAL, 131_072),  # 32 × 2 × 8 × 128 × 2 bytes
        (GPT_OSS, 73_728),  # 36 × 2 × 8 × 64 × 2 bytes, while in the window
        (QWEN_235B, 192_512),  # 94 × 2 × 4 × 128 × 2 bytes
        (DEEPSEEK, 70_272),  # 61 × (512 + 64) × 2 bytes
    ],
)
def test_kv_of_a_token_is_what_the_layers_keep(config: Mapping[str, object], kv_bytes: int) -> None:
    """On one GPU, in the checkpoint's own type of KV."""
    assert Deployment(model(config)).kv_bytes_per_token == kv_bytes


def test_kv_heads_are_divided_then_replicated_and_latents_never_divided() -> None:
    """Four KV heads on eight GPUs: each has one; a latent vector is on all; a stated type halves it."""
    qwen, latent = model(QWEN_235B), model(DEEPSEEK)
    assert [Deployment(qwen, tp=tp, ep=tp).kv_bytes_per_token for tp in (2, 4, 8)] == [96_256, 48_128, 48_128]
    assert [Deployment(latent, tp=tp).kv_bytes_per_token for tp in (1, 8)] == [70_272, 70_272]
    assert Deployment(latent, tp=8, kv_dtype="fp8").kv_bytes_per_token == 35_136


def test_an_indexer_has_weights_and_a_key_of_its_own() -> None:
    """DeepSeek-V3.2 is V3 with 61 indexers; a token's index key is 128 bytes and a scale, its rotary key 16 bits."""
    plain, sparse = model(DEEPSEEK), model(SPARSE)
    assert sparse.num_parameters - plain.num_parameters == 61 * (1536 * 64 * 128 + 7168 * (128 + 64) + 256)
    assert Deployment(sparse, tp=8).kv_bytes_per_token == 61 * (576 * 2 + 132)
    assert Deployment(sparse, tp=8, kv_dtype="fp8").kv_bytes_per_token == 61 * (656 + 132)  # vLLM's fp8_ds_mla


def test_weights_of_an_fp8_checkpoint_are_one_byte_but_for_vocabulary_and_norms() -> None:
    """68.45 B weights of Llama-3.1-70B's layers in one byte, 2.1 B of the vocabulary in two: 72.7 GB."""
    spec = model(LLAMA_70B)
    layers, norms = 80 * (2 * 8192 * (64 + 8) * 128 + 3 * 8192 * 28672), (2 * 80 + 1) * 8192
    plain = 2 * 128256 * 8192
    assert Deployment(spec).weight_bytes == layers + 2 * (plain + norms) == 72_656_371_712
    assert Deployment(spec, tp=4).weight_bytes == layers // 4 + 2 * (plain // 4 + norms)
    assert Deployment(MODELS["llama-3.1-70b"], weight_dtype="fp8").weight_bytes == 72_656_371_712
    assert Deployment(spec, weight_dtype="bfloat16").weight_bytes == 2 * spec.num_parameters


def test_gpt_oss_keeps_attention_in_16_bits_and_experts_in_four() -> None:
    """114.7 B weights of experts in 17/32 bytes, the rest in two: 60.8 GiB, model card (arXiv 2508.10925, table 1)."""
    spec = model(GPT_OSS)
    experts = 36 * 128 * 3 * 2880 * 2880
    expected = experts * 17 / 32 + 2 * (spec.num_parameters - experts)
    assert Deployment(spec).weight_bytes == expected == 65_248_815_744
    assert round(expected / 2**30, 1) == 60.8
    on_vllm = Deployment(spec, engine="vllm").weight_bytes  # hidden rows are padded from 2880 to 3072
    assert on_vllm == pytest.approx(expected + experts * 17 / 32 / 15)
    assert Deployment(spec).types == Types("bfloat16", "bfloat16", "mxfp4", *("bfloat16",) * 4)


def test_experts_are_divided_whole_or_cut() -> None:
    """Both ways each of eight GPUs has an eighth of DeepSeek-V3's experts; what all heads share is on each."""
    spec = model(DEEPSEEK)
    whole, cut = Deployment(spec, tp=8, ep=8), Deployment(spec, tp=8)
    assert whole.weight_bytes == pytest.approx(cut.weight_bytes, rel=1e-6)
    down = 61 * 7168 * (512 + 64 + 1536)  # one byte each
    router, norms = 58 * 7168 * 256, 61 * (512 + 1536) + (2 * 61 + 1) * 7168  # two bytes each
    matrix, experts = 129280 * 7168, 58 * 256 * 3 * 7168 * 2048
    corrections = 58 * 256
    others = spec.num_parameters - 2 * matrix - experts - router - norms - down - corrections
    shared = (others + experts) // 8 + 2 * (2 * matrix + corrections) // 8
    assert whole.weight_bytes == shared + down + 2 * (router + norms)


def test_attention_groups_have_all_of_attention_each_and_share_the_experts() -> None:
    """Eight groups of one GPU: attention, shared experts and vocabulary on each, an eighth of the experts."""
    spec = model(DEEPSEEK)
    one, groups = Deployment(spec), Deployment(spec, dp_attention=8, ep=8)
    experts, corrections = 58 * 256 * 3 * 7168 * 2048, 58 * 256
    assert groups.num_gpus == 8 and groups.kv_bytes_per_token == 70_272
    assert one.weight_bytes - groups.weight_bytes == (experts + 2 * corrections) // 8 * 7
    with pytest.raises(ScenarioError, match=r"dp_attention 8: so many schedulers.*Use dp_attention: 1"):
        groups.check_one_scheduler()
    one.check_one_scheduler()


@pytest.mark.parametrize(
    ("layers", "stages", "parts"),
    [(22, 4, (5, 6, 6, 5)), (5, 3, (2, 2, 1)), (4, 3, (1, 2, 1)), (3, 2, (2, 1)), (61, 4, (15, 15, 16, 15))],
)
def test_layers_that_are_left_over_are_in_the_middle(layers: int, stages: int, parts: tuple[int, ...]) -> None:
    """vLLM's rule: one more from the last stage but one on, towards the first."""
    assert stage_layers(layers, stages) == parts
    held = Deployment(replace(model(GPT_OSS), num_hidden_layers=layers, layers=()), engine="vllm", pp=stages).stages()
    assert [sum(runs.count for runs in stage.layers) for stage in held] == list(parts)
    assert [stage.is_last for stage in held] == [False] * (stages - 1) + [True]


def test_a_stage_holds_its_own_layers() -> None:
    """DeepSeek's dense layers are in the first of two stages; the fullest counts."""
    spec = replace(model(DEEPSEEK), num_hidden_layers=60, layers=())
    with pytest.raises(ScenarioError, match=r"61 layers of m cannot be cut into 2 equal stages.*engine: vllm"):
        Deployment(model(DEEPSEEK), pp=2)
    with pytest.raises(ScenarioError, match="61 layers of m cannot be cut into 62 stages"):
        Deployment(model(DEEPSEEK), engine="vllm", pp=62)
    first, last = Deployment(model(GPT_OSS), pp=2).stages()
    assert last.weight_bytes - first.weight_bytes == 2 * 2880  # the last norm; either has one of two equal matrices
    tied = replace(spec, tie_word_embeddings=True)
    assert Deployment(tied, pp=2).weight_bytes == Deployment(spec, pp=2).weight_bytes
    assert Deployment(spec).weight_bytes - Deployment(tied).weight_bytes == 2 * spec.head_parameters


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"tp": 7}, r"tp: m \(64 heads, 4 KV heads\) cannot be cut into 7 equal parts"),
        ({"tp": 8, "ep": 3}, r"ep: 3 is not a divisor of the 8 GPUs of a stage \(tp 8 × dp_attention 1\)"),
        ({"tp": 64}, r"ep: m has 128 experts of width 1504, which 1 groups of 64 GPUs"),
        ({"tp": 8}, r"ep: experts of m would be 188 wide on each GPU, and fp8_block has a scale for every 128 columns"),
        ({"weight_dtype": "fp7"}, "weights: fp7 is not a known type. Write one of bfloat16, "),
        ({"kv_dtype": "e4m3"}, "kv: e4m3 is not a known type"),
    ],
)
def test_what_cannot_be_split_is_refused(knobs: dict[str, object], complaint: str) -> None:
    """One line names the knob and the numbers."""
    with pytest.raises(ScenarioError, match=complaint):
        Deployment(model(QWEN_235B | {"moe_intermediate_size": 1504}), **knobs)  # pyright: ignore[reportArgumentType]


def test_work_is_that_of_the_experts_a_token_goes_through() -> None:
    """The active parameters of the model cards: 22 B of Qwen3-235B-A22B, 37 B of DeepSeek-V3, the output matrix in."""
    for config, active in ((QWEN_235B, 22e9), (DEEPSEEK, 37e9), (GPT_OSS, 5.1e9), (MIXTRAL, 12.9e9)):
        spec = model(config)
        found = spec.matmul_flops_per_token / 2 + spec.head_parameters
        assert found == pytest.approx(active, rel=0.03), spec.model_type
    assert model(DEEPSEEK).attention_flops_per_pair == 2 * 61 * 128 * (128 + 64 + 128)
    assert MODELS["qwen3-8b"].attention_flops_per_pair == 4 * 36 * 32 * 128


def test_a_step_reads_the_experts_that_its_tokens_go_through() -> None:
    """One token reads 8 of 128 experts, many tokens nearly all; matrices in FP8 are one byte, the output's two."""
    its = Deployment(model(QWEN_235B), tp=4)
    experts, attention = 94 * 128 * 3 * 4096 * 1536, 94 * 2 * 4096 * (64 + 4) * 128
    every = attention + 2 * 151936 * 4096
    assert its.step_bytes() == (every, experts, 8 / 128)
    work = dict.fromkeys(WORK_COLUMNS, np.zeros(3, dtype=np.int64))
    work |= {"num_decode": np.array([0, 1, 256]), "num_decode_tokens": np.array([0, 1, 256])}
    read = useful_flops_bytes(its, work | {"context_tokens": np.array([0, 1000, 0])})[1]
    assert read.tolist() == pytest.approx([0, every + experts / 16 + 1000 * 192_512, every + experts])


def test_a_model_without_experts_has_none_to_divide() -> None:
    """Expert parallelism and attention groups of a dense model are refused."""
    for ep, groups in ((2, 1), (1, 2)):
        with pytest.raises(ScenarioError, match=r"ep: llama-3\.1-8b has no experts to divide"):
            Deployment(MODELS["llama-3.1-8b"], tp=2, ep=ep, dp_attention=groups)


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ({"quant_method": "fp8"}, Quantisation("fp8", "fp8", "fp8")),
        (FP8_BLOCK, Quantisation("fp8_block", "fp8_block", "fp8_block")),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["self_attn"]}, Quantisation("fp8", "", "fp8")),
        (GPT_OSS["quantization_config"], Quantisation("", "", "mxfp4")),
        ({"quant_method": "awq", "bits": 4}, Quantisation("int4", "int4", "int4")),
        ({"quant_method": "gptq", "bits": 8}, Quantisation("int8", "int8", "int8")),
        (
            {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["model.layers.*.self_attn*"]},
            Quantisation("nvfp4", "", "nvfp4", "fp8"),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
                "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
            Quantisation("", "", "int4", "fp8"),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}},
            },
            Quantisation("fp8_block", "fp8_block", "fp8_block"),
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": [f"model.layers.{i}.self_attn" for i in range(3)]},
            Quantisation("fp8", "", "fp8"),  # three of four layers
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn"]},
            Quantisation("fp8", "fp8", "fp8"),  # one of four
        ),
    ],
)
def test_a_checkpoint_says_in_which_types_its_matrices_are(stated: Mapping[str, object], found: Quantisation) -> None:
    """By the forms of fp8, mxfp4, awq, gptq, modelopt and compressed-tensors; what most layers leave out is kept."""
    assert read_quantisation({"num_hidden_layers": 4, "quantization_config": stated}, "m") == found


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes', which is not known; known are fp8"),
        ({"quant_algo": "MIXED_PRECISION"}, "quant_algo 'MIXED_PRECISION', which is not known"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"layers.0.mlp.down_proj": {"quant_algo": "W2"}}},
            "quant_algo 'W2', which is not known",
        ),
        ({"quant_method": "awq", "bits": 3}, "quant_method 'awq', which is not known"),
        ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 3}}, "KV cache's type is stated as"),
        ("fp8", "quantization_config is 'fp8'"),
    ],
)
def test_an_unknown_quantisation_is_refused(stated: object, complaint: str) -> None:
    """No type is guessed; the line says which are known and how to state types."""
    with pytest.raises(ScenarioError, match=complaint) as caught:
        model(LLAMA_70B | {"quantization_config": stated})
    assert str(caught.value).startswith("m: ")


def test_the_file_beside_a_modelopt_checkpoint_is_read(tmp_path: Path) -> None:
    """hf_quant_config.json says what config.json does not; where that says it, the file is not needed."""
    plain = {key: value for key, value in LLAMA_70B.items() if key != "hf_quant_config"}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert read_model(str(tmp_path)).quantised == Quantisation()
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(LLAMA_70B["hf_quant_config"]))
    assert read_model(str(tmp_path)).quantised == Quantisation("fp8", "fp8", "fp8", "fp8")
    (tmp_path / "config.json").write_text(json.dumps(plain | {"quantization_config": FP8_BLOCK}))
    assert read_model(str(tmp_path)).quantised.kv == ""


@pytest.mark.parametrize(
    ("memory_bandwidth", "peak_flops", "like"),
    [(1.008e12, 165e12, "l40s"), (3e12, 900e12, "h100"), (2e12, 300e12, "a100"), (8e12, 2e15, "h200")],
)
def test_a_sheet_is_taken_to_reach_the_shares_of_the_nearest_board(
    memory_bandwidth: float, peak_flops: float, like: str
) -> None:
    """Of those that a roofline was fitted to; its error stays unknown."""
    links = {"host_link": 32e9, "peer_link": 32e9}
    gpu = sheet_gpu("x", memory_bytes=24 * 10**9, memory_bandwidth=memory_bandwidth, peak_flops=peak_flops, **links)
    assert gpu.efficiencies.fitted_on == f"nothing of x, assumed to reach the same shares as {like}"
    assert gpu.efficiencies.error_p95 is None

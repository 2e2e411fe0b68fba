"""Layers of families whose attention is linear, windowed, sparse or compressed in ways of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.plain import from_plain, to_plain
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.kv_groups import States, group_layers
from batchsim.deployment.kv_room import check_derivable
from batchsim.deployment.layers import (
    BlockSparseAttention,
    CompressedAttention,
    DenseMlp,
    Experts,
    GroupedAttention,
    LatentAttention,
    Layers,
    LinearAttention,
)
from batchsim.deployment.model import ModelSpec
from batchsim.deployment.models import read_model
from batchsim.deployment.quantisation import Quantisation


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3.5-27B", 26.9),
        ("Qwen/Qwen3.5-35B-A3B", 34.7),
        ("Qwen/Qwen3.5-122B-A10B", 122.1),
        ("Qwen/Qwen3.5-397B-A17B", 396.4),
        ("moonshotai/Kimi-K3", 2779.5),
        ("deepseek-ai/DeepSeek-V4-Flash", 284.3),
        ("deepseek-ai/DeepSeek-V4-Pro", 1573.0),
        ("MiniMaxAI/MiniMax-M3", 426.2),
        ("google/gemma-4-31B-it", 30.7),
        ("google/gemma-4-26B-A4B", 25.2),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 120.7),
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 549.3),
        ("nvidia/Nemotron-H-56B-Base-8K", 56.3),
        ("XiaomiMiMo/MiMo-V2-Flash", 308.8),
        ("stepfun-ai/Step-3.7-Flash", 195.8),
        ("zai-org/GLM-5", 743.9),
        ("zai-org/GLM-5.2", 743.4),
    ],
)
def test_parameters_are_near_those_in_a_models_name(name: str, billions: float) -> None:
    """What sees, and heads that predict further tokens, are left out; the spec comes back from its plain value."""
    spec = read_model(name)
    assert spec.num_parameters / 1e9 == pytest.approx(billions, abs=0.06)
    assert from_plain(ModelSpec, to_plain(spec)) == spec
    assert "step times cannot be derived" in spec.untimed


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3.5-35B-A3B", 3),
        ("Qwen/Qwen3.5-397B-A17B", 17),
        ("google/gemma-4-26B-A4B", 4),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 3),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 12),
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 55),
    ],
)
def test_active_weights_are_near_those_in_a_models_name(name: str, billions: float) -> None:
    """The matrices that one token is multiplied with, the output matrix among them."""
    spec = read_model(name)
    assert (spec.matmul_flops_per_token / 2 + spec.head_parameters) / 1e9 == pytest.approx(billions, abs=0.85)


def kinds(name: str, part: Callable[[Layers], object]) -> dict[object, int]:
    """How many layers there are of each kind."""
    counts: Counter[object] = Counter()
    for each in read_model(name).kinds:
        counts[part(each)] += each.count
    return dict(counts)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("Qwen/Qwen3.5-27B", {"gdn": 48, "grouped": 16}),
        ("Qwen/Qwen3.5-397B-A17B", {"gdn": 45, "grouped": 15}),
        ("moonshotai/Kimi-K3", {"kda": 69, "latent": 24}),
        ("MiniMaxAI/MiniMax-M3", {"grouped": 3, "block_sparse": 57}),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"mamba2": 23, "none": 23, "grouped": 6}),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", {"mamba2": 40, "none": 40, "grouped": 8}),
    ],
)
def test_each_kind_of_attention_has_its_layers(name: str, counts: dict[str, int]) -> None:
    """By lists of types, of numbers from 1 on, by patterns of letters and lists of blocks."""
    assert kinds(name, lambda each: each.attention.kind) == counts


def test_compressed_layers_are_of_three_ratios() -> None:
    """Of DeepSeek-V4-Flash 21 of 4 tokens with an index, 20 of 128, and two with the window alone."""

    def ratio(each: Layers) -> int:
        assert isinstance(each.attention, CompressedAttention)
        return each.attention.ratio

    assert kinds("deepseek-ai/DeepSeek-V4-Flash", ratio) == {0: 2, 4: 21, 128: 20}
    assert kinds("deepseek-ai/DeepSeek-V4-Pro", ratio) == {4: 30, 128: 31}


def test_windows_have_heads_of_their_own() -> None:
    """Gemma 4's full layers cache keys and values of one matrix; MiMo's values are narrower than its keys."""
    gemma = [each.attention for each in read_model("google/gemma-4-31B-it").kinds[:2]]
    assert gemma[0] == GroupedAttention(32, 16, 256, 1024, vectors=512)
    assert gemma[1] == GroupedAttention(32, 4, 512, vectors=1024, one_matrix=True)
    assert [each.kv_bytes(1, 1) for each in gemma] == [8192, 4096]
    mimo = [each.attention for each in read_model("XiaomiMiMo/MiMo-V2-Flash").kinds[:2]]
    assert mimo[0] == GroupedAttention(64, 4, 192, value_dim=128)
    assert mimo[1] == GroupedAttention(64, 8, 192, 128, vectors=64, value_dim=128)
    assert [each.kv_bytes(1, 2) for each in mimo] == [4 * 320 * 2, 8 * 320 * 2]
    assert kinds("XiaomiMiMo/MiMo-V2-Flash", lambda each: each.attention.window) == {None: 9, 128: 39}
    assert kinds("stepfun-ai/Step-3.7-Flash", lambda each: each.attention.window) == {None: 12, 512: 33}


def test_experts_may_be_on_latent_rows_without_gates_and_beside_a_dense_mlp() -> None:
    """Kimi-K3's and Nemotron's, and Gemma 4's, whose MLP all tokens go through too."""
    k3 = read_model("moonshotai/Kimi-K3").kinds
    assert (k3[0].mlp, k3[-1].mlp) == (
        DenseMlp(33792),
        Experts(896, 16, 3072, 2 * 3072, vectors=1, latent_width=3584),
    )
    last = read_model("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8").kinds[-1]
    assert last == Layers(1, last.attention, Experts(512, 22, 2688, 5376, vectors=1, gated=False, latent_width=1024))
    assert last.mlp.weights(4096).experts == 512 * 2 * 1024 * 2688
    assert last.mlp.weights(4096).mlp == 2 * 4096 * 5376 + 2 * 4096 * 1024
    assert read_model("google/gemma-4-26B-A4B").kinds[0].mlp == Experts(128, 8, 704, 2112, vectors=1)
    assert read_model("Qwen/Qwen3.5-35B-A3B").kinds[0].mlp == Experts(256, 8, 512, 512, weighed_shared=True)


def test_layers_that_share_an_index_keep_none() -> None:
    """Of GLM-5.2's 78 layers 21 have an indexer: the first three, then every fourth; the list says the same."""
    glm = read_model("zai-org/GLM-5.2")

    def index(each: Layers) -> tuple[int, bool]:
        assert isinstance(each.attention, LatentAttention)
        return each.attention.index_heads, each.attention.shares_index

    assert kinds("zai-org/GLM-5.2", index) == {(32, False): 21, (0, True): 57}
    assert Deployment(glm).kv_bytes_per_token == 78 * 1152 + 21 * 132
    assert Deployment(glm, kv_dtype="fp8").kv_bytes_per_token == 78 * 656 + 21 * 132
    assert Deployment(read_model("zai-org/GLM-5")).kv_bytes_per_token == 78 * (1152 + 132)


def test_a_block_sparse_layer_keeps_one_index_key_on_every_gpu() -> None:
    """MiniMax-M3 on 8 GPUs, of which two share a KV head."""
    sparse = next(each.attention for each in read_model("MiniMaxAI/MiniMax-M3").kinds if each.attention.kind[0] == "b")
    assert sparse == BlockSparseAttention(64, 4, 128, 4, 128, 128, 17, vectors=256)
    assert sparse.kv_bytes(8, 2) == 2 * 128 * 2 + 128 * 2


def test_a_checkpoint_of_several_types_says_that_of_each_part() -> None:
    """By its list of quantised layers; Kimi-K3's and DeepSeek-V4's experts are in four bits, all else is not."""
    assert read_model("nvidia/Qwen3.6-27B-NVFP4").quantised == Quantisation(
        "w4a16_nvfp4", "fp8", "", "fp8", linear="fp8", head="w4a16_nvfp4"
    )
    assert read_model("nvidia/MiniMax-M3-NVFP4").quantised == Quantisation("mxfp8", "mxfp8", "nvfp4")
    assert read_model("deepseek-ai/DeepSeek-V4-Flash").quantised == Quantisation("fp8_block", "fp8_block", "mxfp4")
    assert read_model("nvidia/DeepSeek-V4-Pro-NVFP4").quantised == Quantisation("fp8_block", "fp8_block", "nvfp4")
    assert read_model("moonshotai/Kimi-K3").quantised == Quantisation("", "", "mxfp4")
    nano = read_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4").quantised
    assert nano == Quantisation("nvfp4", "", "nvfp4", "fp8", linear="nvfp4")
    weights = Deployment(read_model("nvidia/Qwen3.6-27B-NVFP4"))
    assert weights.types.head == "w4a16_nvfp4" and 20.1e9 < weights.weight_bytes < 20.3e9


@pytest.mark.parametrize(
    ("name", "tp", "complaint"),
    [
        ("Qwen/Qwen3.5-27B", 3, r"\(24 heads, 4 KV heads, linear heads 48|KV heads"),
        ("Qwen/Qwen3.5-35B-A3B", 32, "linear key heads 16"),
        ("deepseek-ai/DeepSeek-V4-Flash", 16, "output groups 8"),
    ],
)
def test_what_tp_cannot_cut_is_named(name: str, tp: int, complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        Deployment(read_model(name), tp=tp)


def test_global_heads_are_replicated_over_more_gpus() -> None:
    """Gemma-4-26B's two global KV heads on four GPUs."""
    four = Deployment(read_model("google/gemma-4-26B-A4B"), tp=4)
    assert four.kv_bytes_per_token == 25 * 2 * 2 * 256 * 2 + 5 * 2 * 512 * 2


QWEN = {
    "model_type": "qwen3_5",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def test_a_gated_delta_net_is_counted_matrix_by_matrix() -> None:
    """Queries, keys, values, gate and output; two rates a head, a convolution, a norm: as vLLM's class has them."""
    spec = ModelSpec.from_config(QWEN, "q")
    linear = LinearAttention("gdn", 8, 64, 4, 32, 4, vectors=64)
    assert [each.attention.kind for each in spec.kinds] == ["gdn", "grouped"] * 2
    assert spec.kinds[0].attention == linear
    keys, values = 4 * 32, 8 * 64
    small = 512 * 2 * 8 + 4 * (2 * keys + values) + 2 * 8 + 64
    assert linear.weights(512)._asdict() == {
        **dict.fromkeys(("attention", "mlp", "experts"), 0),
        "linear": 512 * (2 * keys + 2 * values) + values * 512,
        "plain": small,
    }
    full = spec.kinds[1].attention.weights(512)
    assert full.attention == 512 * (2 * 4 * 64 + 2 * 2 * 64) + 4 * 64 * 512  # with a gate as wide as the queries


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"layer_types": ["full_attention"] * 7}, "layer_types has 7 of 8 layers"),
        ({"layer_types": ["chunked"] * 8}, "layer_types has 'chunked'; known are linear_attention, full_attention"),
        ({"full_attention_interval": None}, "full_attention_interval is missing"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0"),
        ({"mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype is 'float8'. Write float32"),
        ({"num_experts": 4, "mlp_only_layers": [1]}, "mlp_only_layers means layers without experts"),
        ({"model_type": "nemotron_h"}, "hybrid_override_pattern is missing"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "hybrid_override_pattern is 'MX'"),
        (
            {"model_type": "nemotron_h", "layers_block_type": ["mlp"] * 3},
            "num_hidden_layers is 8, and 3 blocks are listed",
        ),
        ({"model_type": "kimi_linear"}, "linear_attn_config is missing. Write an object"),
        ({"model_type": "deepseek_v4", "compress_ratios": [8] * 8}, "compress_ratios has 8; known are 0, 4, 128"),
        ({"model_type": "deepseek_v4", "compress_ratios": [4] * 3}, "compress_ratios has 3 of 8 layers"),
        ({"model_type": "minimax_m3"}, "sparse_attention_config is missing"),
        ({"model_type": "mimo_v2_flash"}, "v_head_dim is missing"),
        ({"partial_rotary_factor": float("nan")}, "partial_rotary_factor is nan. Write a share from 0 to 1"),
        ({"rotary_dim": -1}, "rotary_dim is -1"),
        ({"layer_types": ["linear_attention"] * 8}, "no layer keeps keys and values of tokens"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000. .* from 1 to 10000"),
    ],
)
def test_what_a_family_lacks_is_one_line_with_the_way_out(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint) as caught:
        ModelSpec.from_config(QWEN | change, "q")
    message = str(caught.value)
    assert message.startswith("q: ") and "\n" not in message and "Or state step times and KV memory" in message


STEP = {
    **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 64},
    **{"sliding_window": 64, "moe_intermediate_size": 128, "share_expert_dim": 128, "moe_top_k": 2, "vocab_size": 999},
    **{"moe_num_experts": 8, "intermediate_size": 512, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"},
    **{"layer_types": ["full_attention", "sliding_attention"] * 2, "model_type": "step3p5", "moe_layers_enum": "1, 3"},
}


def test_experts_are_in_the_layers_that_are_listed() -> None:
    kinds = [each.mlp.kind for each in ModelSpec.from_config(STEP, "s").kinds]
    assert kinds == ["dense", "experts", "dense", "experts"]


@pytest.mark.parametrize("listed", ["1,4", "1;3", "", [1, 3], "-1"])
def test_a_list_of_layers_that_cannot_be_is_refused(listed: object) -> None:
    """Numbers are not passed over: of no layer, or between other signs than commas."""
    with pytest.raises(ScenarioError, match=r"s: moe_layers_enum is .* from 0 to 3, with commas"):
        ModelSpec.from_config(STEP | {"moe_layers_enum": listed}, "s")


E2B: dict[str, object] = {
    **{"model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35},
    **{
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "vocab_size": 262144,
    },
    **{"sliding_window": 512, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "torch_dtype": "bfloat16"},
    "max_position_embeddings": 131072,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}


def test_layers_that_share_kv_keep_none_and_an_embedding_of_layers_is_weights() -> None:
    """Gemma 4 E2B: 12 windowed and 3 full layers keep KV, the 20 behind read theirs and have MLPs twice as wide; every
    layer has a gate and a projection of its own input, whose embedding is half of all weights."""
    spec = ModelSpec.from_config(E2B, "e2b")
    assert [(each.count, each.attention.kv_elements()) for each in spec.kinds[:6]] == [
        *((4, 512), (1, 1024)) * 3,
    ]
    assert not any(each.attention.kv_elements() for each in spec.kinds[6:])
    assert {each.mlp.width for each in spec.kinds[6:]} == {12_288}
    assert spec.kv_bytes_per_token == (12 * 512 + 3 * 1024) * 2
    attention = 28 * 1536 * 256 * (8 + 8 + 2) + 7 * 1536 * 512 * (8 + 8 + 2)
    mlps, inputs = (15 + 2 * 20) * 3 * 1536 * 6144, 35 * 2 * 1536 * 256
    of_layers = 35 * 256 * (262_144 + 1536) + 256
    vectors = 35 * (5 * 1536 + 1) + 28 * 2 * 256 + 7 * 2 * 512 + 1536
    assert spec.num_parameters == attention + mlps + inputs + of_layers + vectors + 262_144 * 1536
    assert spec.num_parameters == pytest.approx(4.65e9, rel=0.01)
    one, two = (Deployment(spec, engine="vllm", tp=tp) for tp in (1, 2))
    assert one.weight_bytes == 2 * spec.num_parameters
    copies = inputs + vectors + 28 * 1536 * 512 + 7 * 1536 * 1024  # its only KV head is on both
    assert two.weight_bytes == pytest.approx(spec.num_parameters + copies, rel=1e-6)


def test_groups_of_kv_leave_out_layers_that_share_it() -> None:
    """A block of a full layer has 16 tokens, of a windowed one 32, and five groups of three layers."""
    grouped = group_layers(ModelSpec.from_config(E2B, "e2b"), 1, 2, States())
    assert sorted((group.window or 0, group.block_size) for group in grouped.layout.groups) == [
        (0, 16),
        *[(512, 32)] * 4,
    ]
    assert {len(layers) for layers in grouped.layers} == {3}
    assert max(max(layers) for layers in grouped.layers) == 14


def test_a_layer_without_one_to_share_with_is_refused() -> None:
    """All 35 would share, or none of the kind is left that keeps KV."""
    for shared in (35, 31, 99):
        with pytest.raises(ScenarioError, match=f"e2b: num_kv_shared_layers is {shared} of 35 layers"):
            ModelSpec.from_config(E2B | {"num_kv_shared_layers": shared}, "e2b")


def test_gemma_ties_its_embeddings_where_its_file_does_not_say() -> None:
    """As its configuration class does; a file may say otherwise."""
    gemma = {
        **{"model_type": "gemma4_text", "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 64, "sliding_window": 64, "intermediate_size": 512, "vocab_size": 999, "num_hidden_layers": 1},
        **{"layer_types": ["full_attention"], "max_position_embeddings": 4096, "torch_dtype": "bfloat16"},
    }
    unsaid, untied = (ModelSpec.from_config(gemma | more, "g") for more in ({}, {"tie_word_embeddings": False}))
    assert unsaid.tie_word_embeddings and not untied.tie_word_embeddings
    assert untied.num_parameters - unsaid.num_parameters == 999 * 512


def test_kimis_lists_of_layers_count_each_layer_once() -> None:
    kimi = {"num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4, "kda_layers": [1, 2], "full_attn_layers": [2]}
    latent = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    config = QWEN | latent | {"model_type": "kimi_linear", "num_hidden_layers": 3, "linear_attn_config": kimi}
    with pytest.raises(ScenarioError, match="2 kda_layers and 1 full_attn_layers, which are not each of 3 layers once"):
        ModelSpec.from_config(config, "k")


def test_without_an_embedding_of_each_layer_gemma_has_the_norms_of_its_class() -> None:
    """Four of the hidden size and a scale in a dense layer, seven and a scale where experts are beside."""
    dense, routed = (read_model(name).kinds[0] for name in ("google/gemma-4-31B-it", "google/gemma-4-26B-A4B"))
    assert (dense.vectors, routed.vectors) == (2 * 5376 + 1, 6 * 2816 + 1)
    assert replace(dense, vectors=0).weights(5376).plain == 2 * 5376 + 512


QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151_936, "head_dim": 256,
    "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 5120, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "partial_rotary_factor": 0.25, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "max_position_embeddings": 262_144, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip


def test_qwen3_next_has_the_parameters_of_its_checkpoint() -> None:
    """79,674,391,296, as its repositories say of the weights; KV in 12 of 48 layers; states in the model's type."""
    spec = ModelSpec.from_config(QWEN3_NEXT, "next")
    assert spec.num_parameters == 79_674_391_296
    assert spec.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2 and spec.rotary_dim == 64
    assert [(each.count, each.attention.kind) for each in spec.kinds[:2]] == [(3, "gdn"), (1, "grouped")]
    linear = ModelSpec.from_config({**QWEN3_NEXT, "mamba_ssm_dtype": "float32"}, "next").kinds[0].attention
    assert isinstance(linear, LinearAttention) and linear.state_type == "bfloat16"
    assert linear.state_bytes(2, 2) == 16 * 128 * 128 * 2 + (2 * 16 * 128 + 32 * 128) // 2 * 3 * 2


def test_what_is_not_sure_of_qwen3_next_is_refused() -> None:
    """Layers without experts, and the type of its states under SGLang."""
    with pytest.raises(
        ScenarioError, match=r"next: decoder_sparse_step is 2, and layers without experts are not known"
    ):
        ModelSpec.from_config({**QWEN3_NEXT, "decoder_sparse_step": 2}, "next")
    with pytest.raises(ScenarioError, match="num_experts is missing"):
        ModelSpec.from_config({key: value for key, value in QWEN3_NEXT.items() if key != "num_experts"}, "next")
    engine = Deployment(ModelSpec.from_config(QWEN3_NEXT, "next"), None, "sglang", tp=2)
    with pytest.raises(ScenarioError, match="in which type sglang keeps the states of qwen3_next is not known"):
        check_derivable(engine)

"""Groups of layers as vLLM makes them, held against what its logs say and its source computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_groups import KvGroup
from batchsim.deployment.catalog import GPUS
from batchsim.deployment.kv_groups import States, group_layers, in_groups, states_of
from batchsim.deployment.layers import LinearAttention
from batchsim.deployment.models import read_model
from tools.kv_memory import REFERENCE

NANO, SUPER = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8"
ALIGNED, CHECKPOINTS = States(aligned=True), States(aligned=True, checkpoint=True)


@pytest.mark.parametrize(
    ("name", "tp", "drafts", "size"),
    [
        ("Qwen/Qwen3.5-27B", 1, 0, 3_207_168),
        ("Qwen/Qwen3.5-27B", 2, 0, 1_603_584),
        ("Qwen/Qwen3.5-27B", 2, 3, 1_634_304),
        (NANO, 1, 0, 2_134_016),
        ("moonshotai/Kimi-K3", 8, 0, 814_080),
    ],
)
def test_a_state_and_the_last_tokens_of_its_convolution_have_a_size(name: str, tp: int, drafts: int, size: int) -> None:
    """In bytes of one layer on each GPU: the state in 32 bits, the convolution's tokens in the model's 16."""
    (linear,) = {each.attention for each in read_model(name).kinds if isinstance(each.attention, LinearAttention)}
    assert linear.state_bytes(tp, 2, drafts) == size


def test_sizes_of_which_no_block_can_be_are_one_line() -> None:
    """Each alone is in its range, and a state of them is not."""
    nano = read_model(NANO)
    wide = [
        replace(each, attention=replace(each.attention, conv_kernel=2**31 - 1))
        if isinstance(each.attention, LinearAttention)
        else each
        for each in nano.kinds
    ]
    with pytest.raises(ScenarioError, match=r"in groups of layers block_size is .* Correct the model's sizes\.$"):
        group_layers(replace(nano, layers=tuple(wide)), 1, 2, States())


def test_mamba_groups_that_gpus_cannot_share_are_replicated() -> None:
    """Eight groups on 16 GPUs: each convolves a group of its own, so that all have twice as many."""
    linear = LinearAttention("mamba2", 128, 64, 8, 128, 4)
    assert linear.conv_bytes(8, 2) == (128 * 64 + 2 * 8 * 128) // 8 * 3 * 2
    assert linear.conv_bytes(16, 2) == (128 * 64 + 2 * 16 * 128) // 16 * 3 * 2


@pytest.mark.parametrize(
    ("name", "tp", "block_size", "state_groups", "layers", "fixed"),
    [
        ("Qwen/Qwen3.5-27B", 1, 832, 3, 16, 9),
        ("Qwen/Qwen3.5-27B", 2, 832, 3, 16, 9),
        ("Qwen/Qwen3.5-27B", 4, 832, 3, 16, 9),
        ("Qwen/Qwen3.5-35B-A3B", 1, 1088, 3, 10, 9),
        ("Qwen/Qwen3.5-397B-A17B", 8, 576, 3, 15, 9),
        (NANO, 1, 2096, 4, 6, 12),
        (SUPER, 4, 2080, 5, 8, 15),
        ("moonshotai/Kimi-K3", 8, 768, 3, 24, 9),
    ],
)
def test_blocks_of_0_33_hold_one_state(
    name: str, tp: int, block_size: int, state_groups: int, layers: int, fixed: int
) -> None:
    """In bfloat16, with prefix caching and states kept within a prefill, as the source of 0.33.0 computes them."""
    grouped = group_layers(read_model(name), tp, 2, CHECKPOINTS)
    kinds = [group.kind for group in grouped.layout.groups]
    assert (kinds.count("state"), kinds.count("full")) == (state_groups, 1)
    assert {group.block_size for group in grouped.layout.groups} == {block_size}
    assert max(map(len, grouped.layers)) == layers
    assert grouped.layout.fixed_blocks == fixed


@pytest.mark.parametrize(
    ("name", "tp", "element", "states", "draft_layers", "length", "blocks"),
    [
        ("Qwen/Qwen3.5-27B", 1, 2, States(), 0, 32_768, 42 + 3),
        ("Qwen/Qwen3.5-27B", 2, 1, ALIGNED, 0, 131_072, 84 + 6),
        ("Qwen/Qwen3.5-27B", 2, 1, States(True, 3), 1, 262_144, 164 + 15),
        ("google/gemma-4-31B-it", 1, 2, States(), 0, 262_144, 8192 + 5 * 577),
    ],
)
def test_a_longest_request_has_the_blocks_that_logs_divide_by(
    name: str, tp: int, element: int, states: States, draft_layers: int, length: int, blocks: int
) -> None:
    """vllm-project/vllm issue 40691, talos pull request 1995, club-3090 issue 295, configiq issue 112."""
    grouped = group_layers(read_model(name), tp, element, states, draft_layers=draft_layers)
    assert grouped.request_blocks(length, 8192) == blocks


def test_layers_with_smaller_pages_have_more_tokens_in_a_block() -> None:
    """Gemma-4-31B: 2.5 MiB are 32 tokens of ten full layers, or 16 of ten with a window, which come five times."""
    layout = group_layers(read_model("google/gemma-4-31B-it"), 1, 2, States()).layout
    assert layout.block_bytes == 2.5 * 2**20
    assert layout.groups == (*[KvGroup("window", 16, 1024)] * 5, KvGroup("full", 32))
    assert layout.per_request == "81,920 B a token, and 10,400 tokens' worth a request"


@pytest.mark.parametrize(
    ("name", "tp", "windows", "length", "blocks"),
    [
        ("openai/gpt-oss-20b", 1, 1, 8192, 512 + 513),
        ("openai/gpt-oss-120b", 1, 1, 8192, 512 + 513),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 4, 3, 8192, 4 * 512),
        ("XiaomiMiMo/MiMo-V2-Flash", 8, 5, 8192, 512 + 5 * 513),
        ("stepfun-ai/Step-3.7-Flash", 8, 3, 8192, 512 + 3 * 513),
    ],
)
def test_windows_stand_in_groups_as_large_as_the_least_kind(
    name: str, tp: int, windows: int, length: int, blocks: int
) -> None:
    """A window has a block more than its tokens, of which some may lie in two; a chunk of Llama 4 has not."""
    grouped = group_layers(read_model(name), tp, 2, States())
    kinds = [group.kind for group in grouped.layout.groups]
    assert (kinds.count("window"), kinds.count("full")) == (windows, 1)
    assert grouped.request_blocks(length, 8192) == blocks


@pytest.mark.parametrize(("name", "groups"), [("google--gemma-2-2b-it", 2), ("google--gemma-3-12b-it", 6)])
def test_gemmas_of_before_have_the_groups_of_their_logs(name: str, groups: int) -> None:
    """Of 26 layers half have a window, of 48 five in six."""
    grouped = group_layers(read_model(str(REFERENCE / "models" / f"{name}.json")), 1, 2, States())
    assert len(grouped.layers) == groups


def test_where_all_layers_keep_all_tokens_there_is_one_group() -> None:
    """Latent attention with an index in some layers, and block-sparse attention, have one too."""
    for name in ("zai-org/GLM-5.2", "MiniMaxAI/MiniMax-M3", "deepseek-ai/DeepSeek-V3.2", "Qwen/Qwen3-32B"):
        assert not in_groups(read_model(name))
    assert in_groups(read_model("openai/gpt-oss-20b")) and in_groups(read_model(NANO))


def test_a_stage_has_its_layers_of_each_group() -> None:
    """Layers of a group are taken in turn, so that each half of Qwen3.5-27B has half of every group: 24 / 3 and 8."""
    grouped = group_layers(read_model("Qwen/Qwen3.5-27B"), 1, 2, ALIGNED)
    assert grouped.block_bytes(0, 64) == 16 * grouped.page_bytes == grouped.layout.block_bytes
    assert grouped.block_bytes(0, 32) == grouped.block_bytes(32, 64) == 8 * grouped.page_bytes


def test_versions_and_gpus_keep_their_states() -> None:
    """0.19 has no prefix caching of hybrids by default; from 0.33 on Hopper and newer keep a state within a prefill."""
    assert states_of("0.19.0") == States()
    assert states_of("0.19.0", prefix_cache=True) == ALIGNED == states_of("0.24.0")
    assert states_of("0.33.0", gpu=GPUS["h200"]) == CHECKPOINTS == states_of("", gpu=GPUS["b200_sxm"])
    assert states_of("0.33.0", gpu=GPUS["a100"]) == ALIGNED
    assert states_of("0.33.0", prefix_cache=False, drafts=2) == States(drafts=2)

"""KV memory of models whose layers are of several kinds, as blocks of groups."""

from __future__ import annotations

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.deployment.catalog import GPUS
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.draft_memory import draft_memory
from batchsim.deployment.models import read_model
from tools.kv_memory import REFERENCE

QWEN = read_model("Qwen/Qwen3.5-27B")
SCOUT, GEMMA_3 = "meta-llama/Llama-4-Scout-17B-16E-Instruct", str(REFERENCE / "models" / "google--gemma-3-12b-it.json")


def test_blocks_are_of_all_groups_and_one_is_the_null_block() -> None:
    """76.4 GB in blocks of 51,380,224 bytes are the 1,487 of vllm-project/vllm issue 40691, 1,486 to give out."""
    budget = Deployment(QWEN, engine="vllm", version="0.19.0").derive_kv(room_bytes=1487 * 51_380_224 + 9)
    assert budget.num_blocks == 1486 and budget.layout is not None
    assert budget.layout.per_request == "65,536 B a token, and 2,352 tokens' worth a request"
    assert str(budget) == (
        "KV 1,486 blocks for 4 groups of layers (3 × 1 state, 1 × full in blocks of 784; 76.4 GB of each GPU): 65,536 B"
        " a token, and 2,352 tokens' worth a request"
    )


def test_the_heading_of_0_33_has_three_states_in_each_group() -> None:
    """On an H200: nine blocks of 832 tokens a request."""
    budget = Deployment(QWEN, GPUS["h200"], "vllm", "0.33.0").derive_kv()
    assert str(budget).endswith(": 65,536 B a token, and 7,488 tokens' worth a request")
    off = Deployment(QWEN, GPUS["h200"], "vllm", "0.33.0").derive_kv(prefix_cache=False)
    assert off.layout is not None and off.layout.fixed_blocks == 3


def test_draft_layers_and_tokens_make_blocks_larger() -> None:
    """With MTP of three tokens a group has 17 layers, and each of three groups five states."""
    engine = Deployment(QWEN, GPUS["h200"], "vllm", "0.30.0", tp=2, kv_dtype="fp8")
    budget = engine.derive_kv(draft=draft_memory(engine, "mtp"), draft_tokens=3)
    assert budget.layout is not None and budget.layout.fixed_blocks == 15
    assert budget.layout.block_bytes == 17 * 1600 * 1024


def test_the_stage_with_the_fewest_blocks_decides() -> None:
    """Two stages have half of each group's layers, so that a block is half as large on each of them."""
    room = 100 * 25_690_112
    budget = Deployment(QWEN, engine="vllm", version="0.19.0", pp=2).derive_kv(room_bytes=room)
    assert budget.layout is not None
    assert (budget.num_blocks, budget.layout.block_bytes) == (99, 25_690_112)


@pytest.mark.parametrize("name", ["google/gemma-4-31B-it", "XiaomiMiMo/MiMo-V2-Flash", "stepfun-ai/Step-3.7-Flash"])
def test_new_families_with_windows_have_groups(name: str) -> None:
    budget = Deployment(read_model(name), engine="vllm", tp=8).derive_kv(room_bytes=10**9)
    assert budget.layout is not None and {group.kind for group in budget.layout.groups} == {"full", "window"}
    assert Deployment(read_model(name), engine="tensorrt_llm", tp=8).derive_kv(room_bytes=10**9).layout is None


@pytest.mark.parametrize("name", ["qwen3-8b", "zai-org/GLM-5.2", "MiniMaxAI/MiniMax-M3", SCOUT])
def test_models_of_one_pool_stay_so(name: str) -> None:
    """All layers alike, or chunks, which are no windows."""
    budget = Deployment(read_model(name), engine="vllm").derive_kv(room_bytes=10**10, windows_in_groups=True)
    assert budget.layout is None


@pytest.mark.parametrize(("name", "windows"), [("openai/gpt-oss-20b", 1), (GEMMA_3, 5)])
def test_windows_are_groups_where_that_is_asked_for(name: str, windows: int) -> None:
    """Under vLLM; else they are set aside for the running requests, or kept, in one pool."""
    engine = Deployment(read_model(name), engine="vllm")
    layout = engine.derive_kv(room_bytes=10**10, windows_in_groups=True).layout
    assert layout is not None
    assert [group.kind for group in layout.groups].count("window") == windows == len(layout.groups) - 1
    assert engine.derive_kv(room_bytes=10**10).layout is None
    other = Deployment(read_model(name), engine="tensorrt_llm")
    assert other.derive_kv(room_bytes=10**10, windows_in_groups=True).layout is None


@pytest.mark.parametrize(
    ("name", "engine", "complaint"),
    [
        (
            "deepseek-ai/DeepSeek-V4-Flash",
            "vllm",
            r"compressed attention.*: \{memory: \.\.\., per_token",
        ),
        ("Qwen/Qwen3.5-27B", "tensorrt_llm", "what tensorrt_llm keeps of linear layers is not known"),
    ],
)
def test_what_no_rule_says_is_refused_with_the_way_out(name: str, engine: str, complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        Deployment(read_model(name), GPUS["h200"], engine, tp=4).derive_kv()


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    with pytest.raises(ScenarioError, match=r"on h100: .* GB short of one KV block: 85\.0 GB .* fits with tp: 2\."):
        Deployment(read_model("Qwen/Qwen3.6-35B-A3B"), GPUS["h100"], "vllm", "0.33.0").derive_kv(utilisation=0.8)
